"""Reward functions by name."""

import importlib
import pickle
import sys

import numpy as np
import pytest

from fastrl.rewards.functions import (
    check_preferences,
    check_rewards,
    load_reward,
    read_rewards,
    read_token_rewards,
)


def test_function_from_a_file_and_from_a_module(tmp_path, monkeypatch):
    code = "def length(prompts, completions, completion_ids, **columns):\n"
    code += "    return [float(len(c)) for c in completions]\n"
    (tmp_path / "my_rewards.py").write_text(code + "SCALE = 2\n")
    from_file = load_reward(f"{tmp_path / 'my_rewards.py'}:length")
    assert from_file(["a"], ["bcd"], [[1]]) == [3.0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards")
    assert load_reward("my_rewards:length")(["a"], ["bc"], [[1]]) == [2.0]
    assert load_reward("operator:add") is not None

    with pytest.raises(ImportError, match="my_rewards has no function 'gone'"):
        load_reward("my_rewards:gone")
    with pytest.raises(TypeError, match="my_rewards:SCALE is not a function but int"):
        load_reward("my_rewards:SCALE")


def test_reward_names_that_lead_nowhere(tmp_path):
    with pytest.raises(ImportError, match="no module 'no_such_module'"):
        load_reward("no_such_module:f")
    with pytest.raises(FileNotFoundError, match=r"no file .*gone\.py"):
        load_reward(f"{tmp_path}/gone.py:f")
    with pytest.raises(ValueError, match=r"as rewards\.py:function"):
        load_reward("rewards.py")


def test_an_id_that_leads_nowhere_is_named():
    with pytest.raises(OSError, match="'nobodys/reward' is neither a folder here nor a function"):
        load_reward("nobodys/reward")


@pytest.mark.parametrize("text", ["1", "2e3", b"1", np.str_("0.5"), "nan", ""])
def test_a_text_is_no_reward_though_it_reads_like_a_number(text):
    """A parser that forgot to convert what it found: the next answer may be "1 point"."""
    returned = [1.0, text]
    for read in (
        lambda: read_rewards(returned, [4, 5], "judge"),
        lambda: read_token_rewards(returned, [4, 5], [1, 2], "judge"),
        lambda: read_token_rewards([[1.0], text], [4, 5], [1, 2], "judge"),
        lambda: read_token_rewards([[1.0], [1.0, text]], [4, 5], [1, 2], "judge"),
    ):
        with pytest.raises(ValueError, match=r"judge returned .* for completion 5: .*must be"):
            read()
    with pytest.raises(ValueError, match=r"judge returned .* for completion 1: rewards must be"):
        check_rewards(returned, 2, "judge")
    with pytest.raises(ValueError, match=r"judge returned .* for pair 1"):
        check_preferences(returned, 2, "judge")


CODE = """
class Kept:
    pass

def f(completions, **_):
    return [{number}] * len(completions)
"""


@pytest.mark.parametrize("name", ["json", "sys", "colorsys"])
def test_a_file_named_as_another_module_does_not_replace_it(name, tmp_path):
    path = tmp_path / f"{name}.py"
    path.write_text(CODE.format(number=1.0))
    known = sys.modules.get(name)
    reward = load_reward(f"{path}:f")
    assert reward(["w5"]) == [1.0]
    assert sys.modules.get(name) is known
    assert importlib.import_module(name).__dict__.get("Kept") is None


def test_files_of_one_name_stay_apart_and_what_they_define_is_pickled(tmp_path):
    kept = []
    for number in (1.0, 2.0):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "my_own_rewards.py").write_text(CODE.format(number=number))
        reward = load_reward(f"{folder}/my_own_rewards.py:f")
        kept.append((reward, reward.__wrapped__.__globals__["Kept"]))
    assert [reward(["w5"]) for reward, _ in kept] == [[1.0], [2.0]]
    assert [type(pickle.loads(pickle.dumps(kind()))) for _, kind in kept] == [k for _, k in kept]
    assert kept[0][1].__module__ == "my_own_rewards"  # other processes import it by that name


def test_a_whole_number_beyond_floats_is_no_reward():
    with pytest.raises(ValueError, match=r"f returned 10000.* for completion 1: rewards must be"):
        read_rewards([1, 10**400], range(2), "f")
    with pytest.raises(ValueError, match=r"f returned 10000.* for pair 0: it must be 1\.0"):
        check_preferences([10**400], 1, "f")
