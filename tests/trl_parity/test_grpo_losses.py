"""Each policy loss has the value and the gradient of TRL 1.16's GRPOTrainer, on one batch.

TRL's own lines run in float64, on a stand-in for its trainer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastrl.learn.correction import sampler_weights
from fastrl_kernels import KLTerm, PolicyLoss, linear_logprobs, linear_ppo_loss, ppo_loss

grpo = pytest.importorskip("trl.trainer.grpo_trainer")

LENGTHS = torch.tensor([12, 3, 7, 0, 9, 1])
B, T, H, V = 6, 12, 7, 40
LONGEST = 15  # max_completion_length
TOP = 0.23
LEAST, MOST = 0.5, 1.5  # of the sampler's weights
# Of the same log-probs: sums of 32 terms of about 1 in fp32.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
# Of the same hidden states: a response's ratio multiplies 12, whose log-probs are known to 4e-7.
FUSED = {"rtol": 1e-5, "atol": 2e-6}


class Batch(NamedTuple):
    """Two groups of three responses, the fourth without a token."""

    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    labels: Tensor  # [B, T]
    old: Tensor  # [B, T] log-probs
    ref: Tensor
    sampled: Tensor
    advantages: Tensor  # [B]
    mask: Tensor  # [B, T]

    def double(self) -> Batch:
        return Batch(*(x.double() if x.is_floating_point() else x for x in self))


def make_batch(spread: float = 0.4) -> Batch:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(B, T, H, generator=g), torch.randn(V, H, generator=g)
    labels = torch.randint(V, (B, T), generator=g)
    logprobs = linear_logprobs(hidden, weight, labels)

    def near(by: float) -> Tensor:
        return logprobs + by * torch.randn(B, T, generator=g)

    old = near(spread)
    return Batch(
        hidden, weight, labels, old, near(0.3), old + 0.3 * torch.randn(B, T, generator=g),
        torch.randn(B, generator=g), torch.arange(T) < LENGTHS[:, None],
    )  # fmt: skip


def scores(batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, T], in the batch's precision."""
    every = (batch.hidden @ batch.weight.T).log_softmax(-1)
    return every.gather(-1, batch.labels[..., None])[..., 0], -(every.exp() * every).sum(-1)


SETTINGS: dict[str, Any] = {
    "loss_type": "dapo", "importance_sampling_level": "token", "beta": 0.0, "delta": None,
    "epsilon_low": 0.2, "epsilon_high": 0.28, "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "use_bias_correction_kl": False, "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0, "steps_per_generation": 1, "off_policy_mask_threshold": None,
}  # fmt: skip


def trls_loss(
    batch: Batch, logprobs: Tensor, entropies: Tensor, correction: Tensor | None, **settings: Any
) -> Tensor:
    """Of GRPOTrainer's own method."""
    settings = {**SETTINGS, **settings}
    trainer = SimpleNamespace(
        **settings,
        args=SimpleNamespace(**settings),
        model=SimpleNamespace(training=True),
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            pad_across_processes=lambda x, **_: x,
            reduce=lambda x, reduction: x,
        ),
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=settings["entropy_coef"] != 0,
        _metrics=defaultdict(partial(defaultdict, list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        get_gamma_weights=grpo.GRPOTrainer.get_gamma_weights,
    )
    trainer.get_high_entropy_mask = partial(grpo.GRPOTrainer.get_high_entropy_mask, trainer)
    nothing = torch.zeros(B, 0, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": batch.labels,
        "completion_mask": batch.mask.long(), "advantages": batch.advantages,
        "old_per_token_logps": batch.old, "ref_per_token_logps": batch.ref,
        "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip
    if correction is not None:
        inputs["importance_sampling_ratio"] = correction
    return grpo.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def trls_correction(batch: Batch, kind: str) -> Tensor:
    """As GRPOTrainer computes it where it samples by vLLM."""
    difference = (batch.old - batch.sampled) * batch.mask
    if kind.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if kind.endswith("truncate"):
        return ratio.clamp(LEAST, MOST)
    return ratio.masked_fill((ratio < LEAST) | (ratio > MOST), 0.0)


def cispo(level: str) -> dict[str, Any]:
    return {"objective": PolicyLoss("cispo", level), "cliprange": (math.inf, 5.0 - 1)}


MEAN, SUM = ({"aggregate": f"seq-mean-token-{how}", "denominator": 6.0} for how in ("mean", "sum"))
CONSTANT = {"aggregate": "seq-mean-token-sum-norm", "denominator": float(B * LONGEST)}
SEQUENCE = PolicyLoss(ratio_level="sequence")
# TRL's settings, and the arguments of ppo_loss.
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, MEAN),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, CONSTANT),
    "dapo": ({"loss_type": "dapo"}, {}),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"objective": SEQUENCE, **SUM},
    ),
    "luspo of tokens": ({"loss_type": "luspo"}, SUM),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, cispo("token")),
    "cispo of sequences": (
        {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_level": "sequence"},
        cispo("sequence"),
    ),
    "sapo": ({"loss_type": "sapo"}, {"objective": PolicyLoss("sapo"), **MEAN}),
    "sapo, temperatures": (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.9},
        {"objective": PolicyLoss("sapo", sapo_temperatures=(0.7, 1.9)), **MEAN},
    ),
    "sapo of sequences": (
        {"loss_type": "sapo", "importance_sampling_level": "sequence"},
        {"objective": PolicyLoss("sapo", "sequence"), **MEAN},
    ),
    "vespo": ({"loss_type": "vespo"}, {"objective": PolicyLoss("vespo")}),
    "vespo, shapes": (
        {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5},
        {"objective": PolicyLoss("vespo", vespo_powers=(1.5, 3.0), vespo_decays=(3.0, 2.5))},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.03},
        {"objective": SEQUENCE, "cliprange": (0.2, 0.03), **MEAN},
    ),
    "dapo of sequences": ({"importance_sampling_level": "sequence"}, {"objective": SEQUENCE}),
    "delta": ({"delta": 1.4}, {"objective": PolicyLoss(delta=1.4)}),
    "delta of sequences": (
        {"delta": 1.05, "epsilon_high": 0.02, "importance_sampling_level": "sequence"},
        {"objective": PolicyLoss("clip", "sequence", 1.05), "cliprange": (0.2, 0.02)},
    ),
    "KL": ({"beta": 0.2}, {}),
    "KL of sequences": (
        {"beta": 0.2, "loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"objective": SEQUENCE, **SUM},
    ),
    "KL, vespo": ({"beta": 0.2, "loss_type": "vespo"}, {"objective": PolicyLoss("vespo")}),
}  # fmt: skip
ENTROPIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top entropy": ({"top_entropy_quantile": TOP}, {"top_entropy": TOP}),
    "top entropy, grpo, KL": ({"top_entropy_quantile": TOP, "loss_type": "grpo", "beta": 0.2},
     {"top_entropy": TOP, **MEAN}),
    "top entropy, vespo": ({"top_entropy_quantile": TOP, "loss_type": "vespo"},
     {"top_entropy": TOP, "objective": PolicyLoss("vespo")}),
    "entropy bonus": ({"entropy_coef": 0.3}, {"entropy_coef": 0.3}),
}  # fmt: skip
CORRECTED = ("grpo", "dr_grpo", "dapo", "luspo of tokens", "cispo", "sapo", "delta", "gspo")
KINDS = ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask")


def arguments(batch: Batch, ours: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    beta = settings.get("beta", 0.0)
    return {
        "old_logprobs": batch.old,
        "advantages": batch.advantages[:, None].expand(B, T).contiguous(),
        "mask": batch.mask,
        "kl": KLTerm(batch.ref, beta, "k3") if beta else None,
        "cliprange": (0.2, 0.28),
        **ours,
    }


def compare(
    batch: Batch,
    settings: dict[str, Any],
    ours: dict[str, Any],
    kind: str | None = None,
    fused: bool = False,
) -> None:
    correction = weights = None
    if kind is not None:
        weights, _ = sampler_weights(batch.old, batch.sampled, batch.mask, kind, LEAST, MOST)
        correction = trls_correction(batch.double(), kind)
    given = arguments(batch, ours, settings)
    if kind is not None and settings.get("loss_type") == "vespo":
        given["old_logprobs"] = given["old_logprobs"] - weights.clamp(min=1e-8).log()
    elif kind is not None:
        given["weights"] = weights.contiguous()
    theirs = batch.double()
    if fused:
        mine = batch.hidden.clone().requires_grad_()
        exact = theirs.hidden.requires_grad_()
        expected = trls_loss(theirs, *scores(theirs), correction, **settings)
        loss, _ = linear_ppo_loss(mine, batch.weight, batch.labels, **given)
    else:
        mine = linear_logprobs(batch.hidden, batch.weight, batch.labels).requires_grad_()
        exact = mine.detach().double().requires_grad_()
        expected = trls_loss(theirs, exact, scores(theirs)[1], correction, **settings)
        loss, _ = ppo_loss(mine, **given)
    tolerance = FUSED if fused else CLOSE
    torch.testing.assert_close(loss.double(), expected.detach(), **tolerance)
    expected.backward()
    loss.backward()
    assert exact.grad.abs().max() > 1e-2
    torch.testing.assert_close(mine.grad.double(), exact.grad, **tolerance)


@pytest.mark.parametrize("fused", [False, True], ids=["ppo_loss", "linear_ppo_loss"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_trls(name: str, fused: bool) -> None:
    compare(make_batch(), *LOSSES[name], fused=fused)


@pytest.mark.parametrize("name", ENTROPIES)
def test_what_entropies_decide_is_trls(name: str) -> None:
    compare(make_batch(), *ENTROPIES[name], fused=True)


@pytest.mark.parametrize(("name", "kind"), [*product(CORRECTED, KINDS)])
def test_a_loss_with_the_samplers_weights_is_trls(name: str, kind: str) -> None:
    compare(make_batch(), *LOSSES[name], kind)


@pytest.mark.parametrize("kind", KINDS[:2])  # TRL refuses the others with it, as PPOConfig does
def test_vespo_with_the_samplers_weights_is_trls(kind: str) -> None:
    compare(make_batch(), *LOSSES["vespo"], kind)
