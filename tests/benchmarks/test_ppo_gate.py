"""What the PPO benchmark's gate lets pass."""

from __future__ import annotations

import math

import pytest

from benchmarks.before import ppo_cases, ppo_gate


def test_agreement_is_within_the_tolerance() -> None:
    theirs = [{"objective/kl": 2.0, "ppo/policy/policykl": 0.0}]
    assert not list(
        ppo_gate.disagreements([{"objective/kl": 2.001, "ppo/policy/policykl": 9e-6}], theirs)
    )


@pytest.mark.parametrize(
    "ours", [{}, {"objective/kl": 2.003}, {"objective/kl": float("nan")}], ids=str
)
def test_a_statistic_that_is_missing_or_off_is_named(ours: dict) -> None:
    (line,) = ppo_gate.disagreements([ours], [{"objective/kl": 2.0}])
    assert "objective/kl" in line


@pytest.mark.parametrize(("share", "red"), [(0.3404, False), (0.341, True)])
@pytest.mark.parametrize("key", ["ppo/policy/clipfrac", "ppo/val/clipfrac"])
def test_a_few_tokens_may_fall_on_either_side_of_the_clip(
    key: str, share: float, red: bool
) -> None:
    assert bool(list(ppo_gate.disagreements([{key: share}], [{key: 0.34}]))) == red


@pytest.mark.parametrize(("kl", "red"), [(float("nan"), False), (0.0, True)])
def test_what_cannot_be_known_must_not_be_there(kl: float, red: bool) -> None:
    lines = list(
        ppo_gate.disagreements(
            [{"objective/kl": kl}], [{"objective/kl": 2.0}], ppo_cases.UNKNOWN["none"]
        )
    )
    assert bool(lines) == red


@pytest.mark.parametrize(
    "theirs", [{"head": 6}, {"head": 6, "wte": 8}, {"head": 5, "wte": 9}], ids=str
)
def test_both_must_train_the_same_parameters(theirs: dict) -> None:
    (line,) = ppo_gate.trained_otherwise({"head": 6, "wte": 9}, theirs)
    name = "head" if theirs["head"] == 5 else "wte"
    assert line.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"objective/kl": math.nan}, {"objective/kl": 1.0}, "objective/kl is nan"),
        ({"objective/kl": 1.0}, {"objective/kl": math.inf}, "objective/kl is inf, the peer's"),
        ({}, {"objective/kl": 1.0}, "objective/kl is missing"),
    ],
)
def test_in_bf16_a_statistic_that_is_no_number_is_named(
    ours: dict, theirs: dict, said: str
) -> None:
    (line,) = ppo_gate.not_finite([ours], [theirs])
    assert said in line
    assert not list(ppo_gate.not_finite([{"objective/kl": 5.0}], [{"objective/kl": -1.0}]))


def test_in_bf16_what_cannot_be_known_must_be_a_number_of_the_peers_alone() -> None:
    ours, unknown = {"objective/kl": math.nan}, ppo_cases.UNKNOWN["none"]
    assert not list(ppo_gate.not_finite([ours], [{"objective/kl": 1.0}], unknown))
    assert list(ppo_gate.not_finite([ours], [{"objective/kl": math.nan}], unknown))


def test_what_is_told_is_the_mean_distance_over_the_steps() -> None:
    ours = [
        {"objective/kl": 1.0, "ppo/loss/total": 2.0},
        {"objective/kl": 4.0, "ppo/loss/total": 2},
    ]
    theirs = [
        {"objective/kl": 2.0, "ppo/loss/total": -2.0},
        {"objective/kl": 1.0, "ppo/loss/total": 2.0},
    ]
    found = ppo_gate.differences(ours, theirs)
    assert found["objective/kl"] == {"difference": 2.0, "of": 1.5}
    assert found["ppo/loss/total"] == {"difference": 2.0, "of": 2.0}
    assert ppo_gate.differences(ours, theirs, {"objective/kl"}).keys() == {"ppo/loss/total"}


@pytest.mark.parametrize(
    ("mine", "exact", "stands"),
    [
        (1.0, 1.0005, True),  # rounding
        (1.0, 1.4, True),  # nearer than the peer
        (1.0, 1.6, False),
        (1.0, math.nan, False),
        (math.nan, 1.0, False),
    ],
)
def test_of_two_numbers_float64_decides(mine: float, exact: float, stands: bool) -> None:
    sides = [{"objective/kl": mine}], [{"objective/kl": 2.0}]
    assert list(ppo_gate.disagreements(*sides))
    assert (not list(ppo_gate.disagreements(*sides, exact=[{"objective/kl": exact}]))) == stands


def test_float64_excuses_nothing_that_is_missing() -> None:
    theirs = [{"objective/kl": 2.0}]
    assert list(ppo_gate.disagreements([{}], theirs, exact=theirs))
    assert list(ppo_gate.disagreements([{"objective/kl": 1.0}], theirs, exact=[{}]))


def test_a_shape_is_compared_in_fp32_on_a_smaller_batch() -> None:
    for case in [*ppo_cases.cases("cpu"), *ppo_cases.cases("cuda")]:
        shape = ppo_cases.exact(case.shape)
        assert (shape.dtype, shape.batch, shape.mini_batch) == ("fp32", 8, 4)
        assert shape.layers == case.shape.layers
