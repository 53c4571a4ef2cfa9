"""What a reward function is, as a hash."""

import functools
import importlib.util
import itertools

import pytest
import torch
from torch import nn

from fastrl.rewards.identity import identity_of
from fastrl.user_code import named
from tests.golden import tiny

_NUMBERS = itertools.count()
SCORE = """
BONUS = {bonus}

def of_one(text):
    return len(text) * {factor} + BONUS

class Judge:
    def __init__(self, weight):
        self.weight = weight
        self._calls = 0

    def __call__(self, completions, **_):
        self._calls += 1
        return [self.weight * of_one(x) for x in completions]
{comment}
def score(completions, **_):
    return [of_one(x) for x in completions]
"""


@pytest.fixture
def written(tmp_path):
    """Makes a module of the text above."""

    def write(bonus=1, factor=2, comment=""):
        path = tmp_path / f"m{next(_NUMBERS)}.py"
        path.write_text(SCORE.format(bonus=bonus, factor=factor, comment=comment))
        spec = importlib.util.spec_from_file_location("scores", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return write


def test_a_function_is_its_code_and_what_that_reads_of_its_module(written):
    one = identity_of(written().score)
    assert identity_of(written(comment="\n# a remark\n").score) == one
    module = written()
    for path in (module.__file__, f"./{module.__file__}"):  # by whichever name it was loaded
        assert identity_of(named(f"{path}:score", module.score)) == one
    assert identity_of(written(bonus=3).score) != one  # a constant
    assert identity_of(written(factor=3).score) != one  # a function that it calls


def test_an_object_is_its_class_and_what_it_holds(written):
    judge = written().Judge(1.0)
    one = identity_of(judge)
    judge(["a"])  # what it has done is not what it is
    assert identity_of(judge) == one
    assert identity_of(written().Judge(2.0)) != one
    judge.tokenizer = tiny.tokenizer()  # of a library, whose state calls change
    one = identity_of(judge)
    judge.tokenizer.padding_side = "left"
    assert identity_of(judge) == one


@pytest.mark.parametrize("module", ["fastrl.rewards.of_ours", "of_users"])
def test_words_and_the_place_of_our_own_code_are_not_what_it_does(module, tmp_path):
    """A run that is resumed with a later version, or another copy, has the same reward."""
    remarks = '    """Counts rows."""\n    # Nothing else.\n'
    ids = []
    for i, lines in enumerate(("", remarks, "    1 + 1\n")):
        path = tmp_path / f"{i}.py"
        path.write_text(f"def score(rows):\n{lines}    return module.__file__ and len(rows)\n")
        names = {"__file__": str(path), "__name__": module}
        exec(compile(path.read_text(), path, "exec"), names)
        ids.append(identity_of(names["score"]))
    assert (ids[0] == ids[1]) == module.startswith("fastrl")
    assert ids[0] != ids[2]


def test_a_lambda_of_ours_is_its_line_though_that_is_no_statement(tmp_path):
    path = tmp_path / "m.py"
    path.write_text("pairs = [('a',\n    lambda rows: len(rows))]\n")
    names = {"__name__": "fastrl.rewards.of_ours"}
    exec(compile(path.read_text(), path, "exec"), names)
    assert len(identity_of(names["pairs"][0][1])) == 12


def test_a_partial_is_its_arguments_too(written):
    score = written().score
    assert identity_of(functools.partial(score, a=1)) != identity_of(functools.partial(score, a=2))


def test_a_model_is_its_weights():
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    before = identity_of(one)
    assert identity_of(other) != before
    other.load_state_dict(one.state_dict())
    assert identity_of(other) == before
    with torch.no_grad():
        one.weight[0, 0] += 1
    assert identity_of(one) != before
