"""Responses of a rollout_func's own engine: their importance weights in GRPOTrainer."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import GRPOConfig, GRPOTrainer
from fastrl.trainers.groups.rollout_correction import of_all_or_none
from tests import tiny_models
from tests.golden import tiny
from tests.resuming import assert_resumes
from tests.trl.test_online import (
    GRADIENT_STEP,
    SETTINGS,
    advantages,
    logprobs,
    make,
    prompts,
    small_tokens,
)

PROMPT = [3, 4]
RESPONSES = [[5, 6, 7, 2], [8, 9, 10], [11, 12], [13, 14, 15, 16, 17]]
LEARNED = [[1, 0, 1, 1], [1, 1, 1], [1, 1], [1, 1, 0, 1, 1]]
# log π_old - log π_sampler of the tokens; the last of the first response is not known.
APART = [[0.4, 5.0, -0.3, 0.0], [1.5, 0.2, -0.1], [-1.2, 0.3], [0.1, 0.1, 9.0, -0.2, 0.3]]
OFF: dict[str, Any] = {"vllm_importance_sampling_correction": False}


class Engine:
    """A ``rollout_func`` whose log-probs lie APART from the policy's."""

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        every = [torch.tensor(x) for x in RESPONSES]
        one = SimpleNamespace(prompt_ids=[torch.tensor(PROMPT)] * 4, sequences=every)
        with torch.no_grad():
            own = [logprobs(model, one, i) for i in range(4)]  # type: ignore[arg-type]
        given = [(x - torch.tensor(d)).tolist() for x, d in zip(own, APART, strict=True)]
        given[0][3] = None
        count = len(prompts) // 4
        return {
            "prompt_ids": [PROMPT] * 4 * count,
            "completion_ids": RESPONSES * count,
            "logprobs": given * count,
            "env_mask": LEARNED * count,
        }


def apart(i: int) -> Tensor:
    """APART of a response's learned tokens."""
    return torch.tensor(APART[i]).double()[torch.tensor(LEARNED[i]).bool()]


def weights_of(mode: str, least: float | None, most: float | None) -> list[Tensor]:
    """As TRL's documentation has them, one response after the other."""
    level, limit = mode.split("_")
    found = []
    for x in map(apart, range(4)):
        ratio = (x.sum().expand_as(x) if level == "sequence" else x).exp()
        low, high = least or 0.0, math.inf if most is None else most
        kept = (ratio >= low) & (ratio <= high)
        found.append(ratio.clamp(low, high) if limit == "truncate" else ratio * kept)
    return found


def corrected(model: Any, start: Any, name: str, weights: list[Tensor], **own: Any) -> Tensor:
    """The loss of one step, in float64."""
    rewards = torch.tensor(small_tokens(RESPONSES)).double()
    a = advantages(rewards, "grpo")
    every = [torch.tensor(x) for x in RESPONSES]
    one: Any = SimpleNamespace(prompt_ids=[torch.tensor(PROMPT)] * 4, sequences=every)
    losses = []
    for i, u in enumerate(weights):
        at = torch.tensor(LEARNED[i]).bool()
        new, old = logprobs(model, one, i)[at], logprobs(start, one, i)[at].detach()
        if name == "vespo":
            k, decay = (2.0, 3.0) if a[i] >= 0 else (3.0, 2.0)
            w = u.clamp(min=1e-8).prod().clamp(min=1e-8)
            each = -(w**k * (decay * (1 - w)).exp()) * a[i] * new
        else:
            each = -(new - old).exp() * a[i] * u
        r = old - new
        losses.append(each + own.get("beta", 0.0) * (r.exp() - r - 1) * (new - old).exp())
    if name == "grpo":
        return torch.stack([x.mean() for x in losses]).mean()
    return torch.cat(losses).sum() / sum(map(len, losses))


def assert_stepped_by(start: Any, model: Any, exact: Any) -> None:
    """A step of gradient descent at a rate of 1 by the gradients of a model in float64."""
    moved = 0.0
    for before, after, leaf in zip(
        start.parameters(), model.parameters(), exact.parameters(), strict=True
    ):
        gradient = (before - after).detach().double()
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-4, atol=2e-6)
        moved = max(moved, float(leaf.grad.abs().max()))
    assert moved > 1e-3


@pytest.mark.parametrize(
    ("name", "mode", "bounds", "own"),
    [
        ("dapo", "sequence_mask", (None, 3.0), {}),  # TRL's default
        ("grpo", "sequence_truncate", (0.5, 2.0), {"beta": 0.1}),
        ("dapo", "token_mask", (0.5, 2.0), {"beta": 0.1, "use_bias_correction_kl": True}),
        ("grpo", "token_truncate", (None, 1.2), {}),
        ("vespo", "token_truncate", (0.5, 2.0), {}),
        ("vespo", "token_mask", (None, 3.0), {}),
    ],
)
def test_a_step_weighs_what_another_engine_sampled(
    name: str, mode: str, bounds: tuple, own: dict, tmp_path: Path
) -> None:
    """The gradient, to float32's rounding of log-ratios and of weights that differ by it; the logs
    are those of the importance weights."""
    least, most = bounds
    given = {"clip_min": least, "clip_max": most, "mode": mode}
    given = {f"vllm_importance_sampling_{key}": value for key, value in given.items()}
    trainer = make(tmp_path, rollout_func=Engine(), loss_type=name, **given, **own, **GRADIENT_STEP)
    start = copy.deepcopy(trainer.model)
    trainer.train()
    exact = copy.deepcopy(start).double().eval()
    weights = weights_of(mode, least, most)
    corrected(exact, copy.deepcopy(exact), name, weights, **own).backward()
    assert_stepped_by(start, trainer.model, exact)
    log = trainer.state.log_history[0]
    known = torch.cat([apart(0)[:2], *map(apart, (1, 2, 3))]).abs()
    units = torch.stack([x[0] for x in weights]) if mode[0] == "s" else torch.cat(weights)
    expected = {
        "sampling_logp_difference/mean": known.mean(),
        "sampling_logp_difference/max": known.max(),
        "importance_sampling_ratio/min": units.min(),
        "importance_sampling_ratio/mean": units.mean(),
        "importance_sampling_ratio/max": units.max(),
    }
    assert {key: log[f"sampling/{key}"] for key in expected} == pytest.approx(
        {key: float(x) for key, x in expected.items()}, rel=1e-5, abs=1e-6
    )


def test_the_ratio_of_vespo_is_logged(tmp_path: Path) -> None:
    settings = {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}
    trainer = make(tmp_path, rollout_func=Engine(), **settings)
    trainer.train()
    a = advantages(torch.tensor(small_tokens(RESPONSES)), "grpo")
    gammas = []
    for i, u in enumerate(weights_of("token_truncate", None, 3.0)):
        k, decay = (2.0, 3.0) if a[i] >= 0 else (3.0, 2.0)
        gammas.append(float(u.prod() ** k * (decay * (1 - u.prod())).exp()))
    found = trainer.state.log_history[0]["vespo/phi_seq_mean"]
    assert found == pytest.approx(sum(gammas) / 4, rel=1e-5)
    own = make(tmp_path, loss_type="vespo")
    own.train()
    assert own.state.log_history[0]["vespo/phi_seq_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize("turned_off", [False, True])
def test_nothing_is_corrected_where_there_is_nothing_to_correct(
    turned_off: bool, tmp_path: Path
) -> None:
    """Of our own rollouts, and where the setting says so."""
    given: dict[str, Any] = {"rollout_func": Engine(), **OFF} if turned_off else {}
    trainer = make(tmp_path, **given)
    trainer.train()
    assert trainer._generations.buffer[0].sampler_weights is None
    assert trainer._generations.buffer[0].old_logprobs is None
    assert not any(name.startswith("sampling/") for name in trainer.state.log_history[0])


def test_the_off_policy_mask_is_by_the_engine_that_sampled(tmp_path: Path) -> None:
    """The mean of log π_sampler - log π: of responses of negative advantage the third's is above
    the threshold, 0.45 nats."""
    trainer = make(
        tmp_path, rollout_func=Engine(), off_policy_mask_threshold=0.4, **OFF, **GRADIENT_STEP
    )
    start = copy.deepcopy(trainer.model)
    a = advantages(torch.tensor(small_tokens(RESPONSES)), "grpo")
    kept = [float(a[i] >= 0 or -apart(i).mean() <= 0.4) for i in range(4)]
    assert kept == [1.0, 1.0, 0.0, 1.0]
    trainer.train()
    exact = copy.deepcopy(start).double().eval()
    ones = [torch.full_like(apart(i), keep) for i, keep in enumerate(kept)]
    corrected(exact, copy.deepcopy(exact), "dapo", ones).backward()
    assert_stepped_by(start, trainer.model, exact)


def test_a_run_resumes_in_the_midst_of_weighted_responses(tmp_path: Path) -> None:
    def again(folder: Path) -> Any:
        return make(
            folder, rollout_func=Engine(), num_iterations=2, max_steps=4, save_strategy="steps",
            save_steps=1, learning_rate=1e-2, off_policy_mask_threshold=0.4,
            vllm_importance_sampling_mode="token_truncate",
        )  # fmt: skip

    assert_resumes(again, tmp_path, (1,))


@pytest.mark.parametrize(("own", "named"), [
    ({"mode": "whole"}, "unknown vllm_importance_sampling_mode 'whole': choose one of token_"),
    ({"clip_min": 3.0}, "clip_min .3.0. must be less than .*clip_max .3.0."),
    ({"clip_max": 0.0}, "clip_max must be positive, got 0.0"),
    ({"clip_max": None, "mode": "token_truncate"}, "'token_truncate' without a bound"),
])  # fmt: skip
def test_bounds_that_cannot_be_are_named(own: dict, named: str, tmp_path: Path) -> None:
    given = {f"vllm_importance_sampling_{key}": value for key, value in own.items()}
    with pytest.raises(ValueError, match=named):
        GRPOConfig(str(tmp_path), **SETTINGS, **given)
    args = GRPOConfig(str(tmp_path), **SETTINGS)  # as scripts set what they have parsed
    for name, value in given.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=named):
        GRPOTrainer(
            tiny_models.language_model(),
            small_tokens,
            args,
            prompts(),
            processing_class=tiny.tokenizer(),
            rollout_func=Engine(),
        )


def test_weights_of_whole_responses_are_refused_with_vespo(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose token_truncate or token_mask"):
        make(tmp_path, rollout_func=Engine(), loss_type="vespo").train()
    make(tmp_path, rollout_func=Engine(), loss_type="vespo", **OFF)


def test_zeros_in_the_place_of_log_probs_are_warned_of_once(tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = Engine()(prompts, trainer)
        return {**found, "logprobs": [[0.0] * len(x) for x in found["completion_ids"]]}

    trainer = make(tmp_path, rollout_func=rollout, max_steps=2)
    with pytest.warns(UserWarning, match="logprobs that are all 0") as found:
        trainer.train()
    assert len(found) == 1


def test_log_probs_of_some_processes_alone_are_refused() -> None:
    several: Any = SimpleNamespace(any=lambda own: True)
    with pytest.raises(ValueError, match="return them in all, or in none"):
        of_all_or_none(None, several)


def test_the_old_name_of_the_bound_is_the_bound(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="use vllm_importance_sampling_clip_max"):
        args = GRPOConfig(str(tmp_path), **SETTINGS, vllm_importance_sampling_cap=2.0)
    assert args.vllm_importance_sampling_clip_max == 2.0
