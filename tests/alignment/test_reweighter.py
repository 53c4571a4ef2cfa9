"""Weights of samples by length, margin, importance and a user's function."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fastrl.alignment.batch import Batch
from fastrl.alignment.reweighter import (
    ByFunction,
    ByImportance,
    ByLength,
    ByMargin,
    Uniform,
    make_reweighter,
)
from fastrl.data.examples import Example, Response


def batch(*lengths: tuple[int, ...], columns: dict[str, Sequence[Any]] | None = None) -> Batch:
    """A sample for each tuple of its responses' lengths."""
    samples = []
    for i, of_sample in enumerate(lengths):
        others = {name: values[i] for name, values in (columns or {}).items()}
        responses = tuple(Response("w5", tuple(range(5, 5 + n))) for n in of_sample)
        samples.append(Example("w3", (3,), responses, columns=others))
    return Batch(samples, 2)


def weights(made: Batch) -> list[list[float]]:
    return [made[f"generation{i}_weight"].tolist() for i in range(1, made.generations + 1)]


class Logprobs(NamedTuple):
    sums: torch.Tensor
    tokens: torch.Tensor


class Policy:
    """A policy that has fixed log-probs."""

    def __init__(self, *sums: list[float]):
        self.sums = sums

    def logprobs(self, made: Batch) -> tuple[Logprobs, ...]:
        assert not torch.is_grad_enabled()
        return tuple(
            Logprobs(torch.tensor(s), torch.tensor([len(r) for r in made.responses(i + 1)]))
            for i, s in enumerate(self.sums)
        )


def test_uniform_weights_are_one() -> None:
    made = batch((1, 2), (3, 4))
    made.weigh(2, [3.0, 5.0])
    Uniform()(made, None)
    assert weights(made) == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("reweighter", [Uniform(), ByLength(), ByFunction(lambda _: [2.0, 2.0])])
def test_pairs_without_an_opinion_stay_out(reweighter: Any) -> None:
    judged = Example("w3", (3,), (Response("w5", (5,)),) * 2, weights=(1.0, 1.0))
    made = Batch([judged, replace(judged, weights=(0.0, 0.0))], 2)
    reweighter(made, None)
    assert [[x > 0 for x in side] for side in weights(made)] == [[True, False]] * 2


def test_longer_responses_weigh_less() -> None:
    made = batch((1,), (2,), (4,))
    ByLength()(made)
    # 1, 1/2, 1/4 over their mean of 7/12.
    assert weights(made) == [pytest.approx([12 / 7, 6 / 7, 3 / 7])]
    ByLength(power=0.5)(made)
    one = weights(made)[0]
    assert one[0] / one[2] == pytest.approx(2.0)
    assert sum(one) == pytest.approx(3.0)
    ByLength(power=0)(made)
    assert weights(made) == [[1.0, 1.0, 1.0]]


def test_both_sides_of_pairs_weigh_by_their_own_lengths() -> None:
    made = batch((1, 4), (8, 2))
    ByLength()(made)
    first, second = weights(made)
    # Pairs weigh √(1·1/4) = 1/2 and √(1/8·1/2) = 1/4, over their mean of 3/8.
    assert made.weights().tolist() == pytest.approx([4 / 3, 2 / 3])
    assert first == pytest.approx([8 / 3, 1 / 3])
    assert second == pytest.approx([2 / 3, 4 / 3])


def test_empty_responses_weigh_as_those_of_a_token() -> None:
    made = batch((0,), (1,))
    ByLength()(made)
    assert weights(made) == [[1.0, 1.0]]


@pytest.mark.parametrize("columns", [
    {"margin": [1.0, -3.0, 0]},
    {"chosen_score": [2, 0.5, 1], "rejected_score": [1.0, 3.5, 1]},
    {"margin": [1.0, "3", 0], "chosen_score": [0, 0, 0], "rejected_score": [0, 0, 0]},
])  # fmt: skip
def test_pairs_weigh_by_their_margins(columns: dict[str, Any]) -> None:
    made = batch((1, 2), (3, 4), (5, 6), columns=columns)
    ByMargin()(made)
    assert weights(made) == [pytest.approx([0.75, 2.25, 0.0])] * 2
    ByMargin(power=2)(made)
    assert made.weights().tolist() == pytest.approx([0.3, 2.7, 0.0])


def test_scores_of_an_annotator_come_before_columns() -> None:
    made = batch((1, 1), (1, 1), columns={"margin": [1.0, 1.0]})
    made.scores = [[0.0, 5.0], [1.0, 2.0]]
    ByMargin()(made)
    assert weights(made) == [pytest.approx([0.5, 1.5])] * 2


def test_pairs_without_a_margin_weigh_the_same() -> None:
    made = batch((1, 1), (1, 1), columns={"margin": [0.0, 0.0]})
    ByMargin()(made)
    assert weights(made) == [[1.0, 1.0]] * 2


def test_columns_of_margins_may_have_any_name() -> None:
    made = batch((1, 1), (1, 1), columns={"a": [3.0, 1.0], "b": [2.0, 4.0]})
    ByMargin(score_columns=("a", "b"))(made)
    assert made.weights().tolist() == pytest.approx([0.5, 1.5])
    ByMargin(margin_column="a")(made)
    assert made.weights().tolist() == pytest.approx([1.5, 0.5])


@pytest.mark.parametrize(("columns", "said"), [
    ({}, r"needs an annotator that scores, or the data's column 'margin'.* columns are none"),
    ({"chosen_score": [1, 2]}, "columns are chosen_score"),
    ({"margin": [1.0, None]}, r"ByMargin: margin\[1\] is None: it must be a finite number"),
    ({"margin": [math.nan, 1.0]}, r"ByMargin: margin\[0\] is nan"),
    ({"chosen_score": [1, "x"], "rejected_score": [1, 2]}, r"chosen_score\[1\] is 'x'"),
])  # fmt: skip
def test_margins_that_are_not_there_are_refused(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ByMargin()(batch((1, 1), (1, 1), columns=columns))


def test_margins_are_for_pairs() -> None:
    with pytest.raises(ValueError, match="this batch has one response per prompt"):
        ByMargin()(batch((1,), columns={"margin": [1.0]}))


def known(made: Batch, *sides: list[list[float]]) -> Batch:
    made.rollout_logprobs = [[torch.tensor(x) for x in side] for side in sides]
    return made


def test_responses_weigh_by_their_truncated_ratio() -> None:
    made = known(batch((2,), (1,), (2,)), [[-1.0, -2.0], [-1.0], [-4.0, -1.0]])
    policy = Policy([-4.0, -0.5, -5.0])
    ByImportance()(made, policy)
    assert weights(made) == [pytest.approx([math.exp(-1), 1.0, 1.0])]
    ByImportance(cap=1.5)(made, policy)
    assert weights(made) == [pytest.approx([math.exp(-1), 1.5, 1.0])]
    ByImportance(cap=math.inf)(made, policy)
    assert weights(made) == [pytest.approx([math.exp(-1), math.exp(0.5), 1.0])]
    ByImportance(cap=5, length_normalised=True)(made, policy)
    assert weights(made) == [pytest.approx([math.exp(-0.5), math.exp(0.5), 1.0])]


def test_pairs_weigh_by_their_joint_ratio() -> None:
    made = known(batch((2, 1), (1, 3)), [[-1.0, -1.0], [-2.0]], [[-3.0], [-1.0, -1.0, -1.0]])
    policy = Policy([-2.5, -1.0], [-3.25, -3.25])
    ByImportance(cap=2)(made, policy)
    joint = [math.exp(-0.75), 2.0]  # e^0.75 is more than 2
    assert weights(made) == [pytest.approx(joint)] * 2
    ByImportance(cap=2, length_normalised=True)(made, policy)
    assert made.weights().tolist() == pytest.approx([math.exp(-0.25), math.exp(0.75 / 4)])


def test_ratios_that_no_float_holds_are_capped() -> None:
    made = known(batch((1,), (1,)), [[-2e4], [-1.0]])
    ByImportance(cap=3)(made, Policy([-1.0, -2e4]))
    assert weights(made) == [pytest.approx([3.0, 0.0])]


def test_log_probs_come_from_columns_where_none_are_known() -> None:
    policy = Policy([-4.0, -2.0])
    for column in ([-3.0, -1.0], [[-1.0, -2.0], [-1.0]]):
        made = batch((2,), (1,), columns={"logps": column})
        ByImportance(columns="logps")(made, policy)
        assert weights(made) == [pytest.approx([math.exp(-1)] * 2)]
    made = batch((2, 1), columns={"a": [-3.0], "b": [[-1.0]]})
    ByImportance(columns=["a", "b"])(made, Policy([-4.0], [-2.0]))
    assert made.weights().tolist() == pytest.approx([math.exp(-2)])


@pytest.mark.parametrize(("columns", "named", "said"), [
    ({}, None, r"choose an online task, or name.* 1 here.* none"),
    ({"a": [1.0], "b": [1.0]}, "c", "the columns are a, b"),
    ({"a": [1.0], "b": [1.0]}, ("a", "b"), "1 here"),
    ({"a": [None]}, "a", r"ByImportance: a\[0\] is None"),
    ({"a": ["x"]}, "a", r"ByImportance: a\[0\] is 'x'"),
    ({"a": [math.nan]}, "a", r"ByImportance: a\[0\] is nan"),
    ({"a": [[-1.0, -math.inf]]}, "a", r"ByImportance: a\[0\] is tensor\(-inf"),
    ({"a": [[-1.0] * 3]}, "a", r"a\[0\] has 3 numbers for 2 tokens: one per token is needed"),
])  # fmt: skip
def test_log_probs_that_are_not_there_are_refused(
    columns: dict[str, Any], named: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ByImportance(columns=named)(batch((2,), columns=columns), Policy([-1.0]))


def test_a_policy_that_says_nan_is_refused() -> None:
    made = known(batch((1,), (1,)), [[-1.0], [-1.0]])
    with pytest.raises(ValueError, match=r"ByImportance: weights\[1\] is nan"):
        ByImportance()(made, Policy([-1.0, math.nan]))


def test_a_function_weighs_all_generations_or_each() -> None:
    made = batch((1, 1), (1, 1), columns={"w": [1.0, 4.0]})
    for returned in ([1.0, 4.0], (1.0, 4.0), torch.tensor([1.0, 4.0], requires_grad=True)):
        ByFunction(lambda _, x=returned: x)(made)
        assert weights(made) == [[1.0, 4.0]] * 2
    ByFunction(lambda b: b.columns["w"])(made)
    assert made.weights().tolist() == [1.0, 4.0]
    ByFunction(lambda _: ([1.0, 2.0], torch.tensor([3.0, 4.0])))(made)
    assert weights(made) == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(("returned", "said"), [
    ([1.0], r"ByFunction\(mine\): weights has shape \(1,\): pass one number per sample, \[2\]"),
    ([1.0, -1.0], r"ByFunction\(mine\): weights\[1\] is -1\.0"),
    ([math.nan, 1.0], r"ByFunction\(mine\): weights\[0\] is nan"),
    ([math.inf, 1.0], r"ByFunction\(mine\): weights\[0\] is inf"),
    (None, r"ByFunction\(mine\): "),
    ([None, 1.0], r"ByFunction\(mine\): "),
    (([1.0, 1.0],), r"ByFunction\(mine\): 1 lists of weights for 2 responses"),
])  # fmt: skip
def test_weights_that_cannot_be_are_refused_by_name(returned: Any, said: str) -> None:
    def mine(_: Batch) -> Any:
        return returned

    with pytest.raises(ValueError, match=said):
        ByFunction(mine)(batch((1, 1), (1, 1)))


def test_reweighters_from_names(tmp_path: Path) -> None:
    assert isinstance(make_reweighter("uniform"), Uniform)
    by_length = make_reweighter("length", power=2.0)
    assert isinstance(by_length, ByLength)
    assert by_length.power == 2.0
    assert isinstance(make_reweighter("margin"), ByMargin)
    assert isinstance(make_reweighter("importance", cap=3, columns="a"), ByImportance)
    (tmp_path / "mine.py").write_text("def twice(batch):\n    return [2.0] * batch.size\n")
    made = batch((1,), (1,))
    make_reweighter(f"{tmp_path}/mine.py:twice")(made, None)
    assert weights(made) == [[2.0, 2.0]]


@pytest.mark.parametrize(("name", "options", "said"), [
    ("size", {}, "unknown reweighter 'size': choose one of uniform, length, margin, import"),
    ("length", {"cap": 1}, "reweighter 'length': got an unexpected .* 'cap'; it takes power"),
    ("uniform", {"cap": 1}, "it takes no options"),
    ("length", {"power": -1}, "power must be a number of 0 or more, got -1"),
    ("margin", {"power": 0}, "power must be a positive number, got 0"),
    ("margin", {"score_columns": "ab"}, "must name two columns, got 'ab'"),
    ("importance", {"cap": 0}, "cap must be positive, got 0"),
    ("importance", {"cap": math.nan}, "cap must be positive, got nan"),
])  # fmt: skip
def test_names_and_options_that_are_none_are_refused(
    name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make_reweighter(name, **options)
