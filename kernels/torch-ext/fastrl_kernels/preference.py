"""Preference and reward losses: log-probs or rewards of responses in, one loss per example out.

They work on [B] numbers, a few kilobytes, so they are plain PyTorch on every device, and autograd
differentiates them. All arithmetic is fp32 from the first load, results are fp32, and nothing waits
for the device. The mean over the batch, and any weights, are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .argument_types import explains_types
from .checks import (
    check_choice,
    check_constant,
    check_device,
    check_float,
    check_mask,
    check_positive,
    check_same_shape,
)

# The public losses, for the package and for tests of every op.
__all__ = [
    "dpo_loss",
    "f_divergence_scores",
    "ipo_loss",
    "kto_loss",
    "orpo_loss",
    "pair_loss",
    "reward_loss",
    "simpo_loss",
    "slic_loss",
]

DPO_KINDS = ("sigmoid", "hinge", "robust")
F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# An fp32 log-prob is made of numbers next to 1, which are 2**-24 apart: closer to 0 is noise.
CERTAIN = -(2.0**-24)


def _checked(**tensors: Tensor | None) -> list[Tensor]:
    """The given tensors in fp32, checked to be [B] and on one device."""
    tensors_given = {name: x for name, x in tensors.items() if x is not None}
    first = next(iter(tensors_given))
    like = tensors_given[first]
    for name, x in tensors_given.items():
        check_float(name, x)
        if x.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: pass one number per example, [B]")
        check_same_shape(name, x, first, like)
        check_device(name, x, first, like)
    return [x.float() for x in tensors_given.values()]


def _check_label_smoothing(label_smoothing: float, kind: str) -> None:
    if isinstance(label_smoothing, Tensor):
        raise TypeError("label_smoothing must be a Python number: reading a tensor would wait")
    if kind == "hinge" and label_smoothing != 0:
        raise ValueError(
            f"label_smoothing must be 0 for the hinge, got {label_smoothing}: "
            "use kind='sigmoid' or 'robust' for noisy labels"
        )
    below = label_smoothing < 0.5 or (label_smoothing == 0.5 and kind == "sigmoid")
    if not (label_smoothing >= 0 and below):
        allowed = "[0, 0.5]" if kind == "sigmoid" else "[0, 0.5)"
        raise ValueError(
            f"label_smoothing must be in {allowed} for {kind}, got {label_smoothing}: "
            "it is the share of swapped labels"
        )


def _log_odds(logprobs: Tensor) -> Tensor:
    """log p - log(1 - p), with p held at ``CERTAIN`` in the value; the gradient is that there."""
    held = CERTAIN + (logprobs - logprobs.detach())
    logprobs = torch.where(logprobs > CERTAIN, held, logprobs)
    return logprobs - torch.log(-torch.expm1(logprobs))


def _sigmoid(x: Tensor) -> Tensor:
    """σ(x); autograd's own slope σ·(1 - σ) has no correct digit where σ is close to 1."""
    return torch.where(x > 0, 1.0 - torch.sigmoid(-x), torch.sigmoid(x))


@explains_types
def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
) -> Tensor:
    """Direct preference optimisation on h = r_w - r_l, r = log π - log ref of a whole response.

    With ℓ(h) = -log σ(βh) and ε = ``label_smoothing``:

    "sigmoid": (1-ε)·ℓ(h) + ε·ℓ(-h); DPO, or with ε > 0 conservative DPO.
    "robust": [(1-ε)·ℓ(h) - ε·ℓ(-h)]/(1-2ε), whose expectation over labels of which a share ε is
    swapped is ℓ of the right labels; unbounded below.
    "hinge": max(0, 1 - βh), with slope 0 where it is 0.

    Args:
        policy_chosen: [B] summed log π of the preferred responses' tokens; fp32, bf16 or fp16.
        policy_rejected: [B] of the others.
        ref_chosen: [B] summed log ref of the preferred responses.
        ref_rejected: [B] of the others. All four are differentiable: detach what is constant.
        beta: β > 0, the strength of the KL constraint.
        label_smoothing: ε, in [0, 0.5] for "sigmoid", [0, 0.5) for "robust", 0 for "hinge".
        kind: "sigmoid", "hinge" or "robust".

    Returns:
        [B] fp32.

    Raises:
        TypeError: tensors that are not fp32, bf16 or fp16; a coefficient that is a tensor.
        ValueError: shapes that differ or are not [B], devices that differ, β ≤ 0, an ε out of
            range, an unknown kind.

    Source: Rafailov et al., "Direct preference optimization", 2023, equation 7; Mitchell, "A note
    on DPO with noisy preferences", 2023; Chowdhury et al., "Provably robust DPO", 2024; the hinge
    is that of Liu et al., "Statistical rejection sampling improves preference optimization", 2023.
    """
    check_choice("kind", kind, DPO_KINDS)
    sides = policy_chosen, policy_rejected, ref_chosen, ref_rejected
    return pair_loss(*sides, kind=kind, beta=beta, label_smoothing=label_smoothing)


@explains_types
def ipo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Identity preference optimisation: (h - 1/(2β))², with h = r_w - r_l.

    Arguments, result and errors are those of :func:`dpo_loss`. The paper sums log-probs over a
    response's tokens; means over its tokens, which others use, give length-free margins: pass
    either.

    Source: Azar et al., "A general theoretical paradigm to understand learning from human
    preferences", 2023, equation 17.
    """
    sides = policy_chosen, policy_rejected, ref_chosen, ref_rejected
    return pair_loss(*sides, kind="ipo", beta=beta)


class _Ratios(NamedTuple):
    """What the rows of ``PAIR_KINDS`` read, [B] fp32 each."""

    chosen: Tensor  # r_w = log π_w - log ref_w
    rejected: Tensor  # r_l
    policy_margin: Tensor  # log π_w - log π_l
    ref_margin: Tensor  # log ref_w - log ref_l

    @property
    def margin(self) -> Tensor:
        """h = r_w - r_l; r first, as a policy is close to its reference: no digits are lost."""
        return self.chosen - self.rejected


class _Settings(NamedTuple):
    beta: float
    label_smoothing: float
    tau: float


def _smoothed(x: Tensor, label_smoothing: float) -> Tensor:
    """(1-ε)·ℓ(x) + ε·ℓ(-x), with ℓ = -log σ."""
    if label_smoothing == 0:
        return -F.logsigmoid(x)
    right, swapped = -F.logsigmoid(x), -F.logsigmoid(-x)
    return (1.0 - label_smoothing) * right + label_smoothing * swapped


def _robust(r: _Ratios, s: _Settings) -> Tensor:
    x, eps = s.beta * r.margin, s.label_smoothing
    right, swapped = -F.logsigmoid(x), -F.logsigmoid(-x)
    return 1.0 / (1.0 - 2.0 * eps) * ((1.0 - eps) * right - eps * swapped)


def _exo_pair(r: _Ratios, s: _Settings) -> Tensor:
    x, eps = s.beta * r.margin, s.label_smoothing
    right = _sigmoid(x) * (F.logsigmoid(x) - math.log1p(-eps))
    return right + _sigmoid(-x) * (F.logsigmoid(-x) - math.log(eps))


def _nca_pair(r: _Ratios, s: _Settings) -> Tensor:
    w, l = s.beta * r.chosen, s.beta * r.rejected  # noqa: E741 - as the papers name it
    return -F.logsigmoid(w) - 0.5 * F.logsigmoid(-w) - 0.5 * F.logsigmoid(-l)


def _bco_pair(r: _Ratios, s: _Settings) -> Tensor:
    return -F.logsigmoid(s.beta * r.chosen) - F.logsigmoid(-s.beta * r.rejected)


def _sppo_hard(r: _Ratios, s: _Settings) -> Tensor:
    goal = 0.5 / s.beta
    return (r.chosen - goal).square() + (r.rejected + goal).square()


def _aot(r: _Ratios, s: _Settings) -> Tensor:
    gap = r.policy_margin.sort().values - r.ref_margin.sort().values
    return _smoothed(s.beta * gap, s.label_smoothing)


def _aot_unpaired(r: _Ratios, s: _Settings) -> Tensor:
    gap = r.chosen.sort().values - r.rejected.sort().values
    return _smoothed(s.beta * gap, s.label_smoothing)


def _apo_zero(r: _Ratios, s: _Settings) -> Tensor:
    return _sigmoid(-s.beta * r.chosen) + _sigmoid(s.beta * r.rejected)


def _apo_down(r: _Ratios, s: _Settings) -> Tensor:
    return _sigmoid(s.beta * r.chosen) + _sigmoid(-s.beta * r.margin)


def _discopop(r: _Ratios, s: _Settings) -> Tensor:
    x = s.beta * r.margin
    # exp(-x) alone overflows where its share of the mixture is 0.
    exponential = torch.exp(F.logsigmoid(x / s.tau) - x)
    return -F.logsigmoid(x) * _sigmoid(-x / s.tau) + exponential


PAIR_KINDS: dict[str, Callable[[_Ratios, _Settings], Tensor]] = {
    "sigmoid": lambda r, s: _smoothed(s.beta * r.margin, s.label_smoothing),
    "hinge": lambda r, s: torch.relu(1.0 - s.beta * r.margin),
    "ipo": lambda r, s: (r.margin - 1.0 / (2.0 * s.beta)).square(),
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}


@explains_types
def pair_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    tau: float = 0.05,
) -> Tensor:
    """A loss of preference pairs by its name, with r = log π - log ref, h = r_w - r_l, ℓ = -log σ,
    ε = ``label_smoothing``:

    "sigmoid": (1-ε)·ℓ(βh) + ε·ℓ(-βh); "hinge", "robust": see :func:`dpo_loss`; "ipo": see
    :func:`ipo_loss`.
    "exo_pair": the KL from (1-ε, ε) to (σ(βh), σ(-βh)).
    "nca_pair": ℓ(βr_w) + ½·ℓ(-βr_w) + ½·ℓ(-βr_l).
    "bco_pair": ℓ(βr_w) + ℓ(-βr_l).
    "sppo_hard": (r_w - 1/(2β))² + (r_l + 1/(2β))².
    "aot": "sigmoid" of the batch's sorted log π_w - log π_l, less its sorted log ref_w - log ref_l.
    "aot_unpaired": "sigmoid" of the batch's sorted r_w, less its sorted r_l.
    "apo_zero": σ(-βr_w) + σ(βr_l). "apo_down": σ(βr_w) + σ(-βh).
    "discopop": m·exp(-βh) + (1-m)·ℓ(βh), with m = σ(βh/τ).

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected: [B], see :func:`dpo_loss`.
        kind: one of those names.
        beta: β > 0.
        label_smoothing: ε in [0, 0.5] for "sigmoid", "aot", "aot_unpaired"; [0, 0.5) for "robust";
            (0, 1) for "exo_pair"; 0 for the others.
        tau: τ > 0, for "discopop".

    Returns:
        [B] fp32; of "aot" and "aot_unpaired" in sorted order.

    Raises:
        TypeError, ValueError: see :func:`dpo_loss`.

    Source: EXO is Ji et al., 2024 (arXiv:2402.00856), equation 16; NCA Chen et al., 2024
    (arXiv:2402.05369); BCO Jung et al., 2024 (arXiv:2404.04656); SPPO Wu et al., 2024
    (arXiv:2405.00675), with hard labels; AOT Melnyk et al., 2024 (arXiv:2406.05882); APO
    D'Oosterlinck et al., 2024 (arXiv:2408.06266), equations 7 and 8; DiscoPOP Lu et al., 2024
    (arXiv:2406.08414), equation 5.
    """
    check_choice("kind", kind, tuple(PAIR_KINDS))
    check_positive("beta", beta)
    check_positive("tau", tau)
    _check_share(label_smoothing, kind)
    policy_w, policy_l, ref_w, ref_l = _checked(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    ratios = _Ratios(policy_w - ref_w, policy_l - ref_l, policy_w - policy_l, ref_w - ref_l)
    return PAIR_KINDS[kind](ratios, _Settings(beta, label_smoothing, tau))


def _check_share(label_smoothing: float, kind: str) -> None:
    """``label_smoothing`` of :func:`pair_loss`."""
    if kind in ("aot", "aot_unpaired"):
        _check_label_smoothing(label_smoothing, "sigmoid")
    elif kind in DPO_KINDS:
        _check_label_smoothing(label_smoothing, kind)
    elif isinstance(label_smoothing, Tensor):
        raise TypeError("label_smoothing must be a Python number: reading a tensor would wait")
    elif kind == "exo_pair":
        if not 0 < label_smoothing < 1:
            raise ValueError(
                f"label_smoothing must be in (0, 1) for exo_pair, got {label_smoothing}: 1e-3 is "
                "usual"
            )
    elif label_smoothing != 0:
        raise ValueError(f"label_smoothing must be 0 for {kind}, got {label_smoothing}")


@explains_types
def f_divergence_scores(
    log_ratios: Tensor, *, divergence: str = "reverse_kl", alpha: float = 0.5
) -> Tensor:
    """f'(t) at t = π/ref, up to a constant: what takes the place of log t in a loss of differences
    when the divergence from the reference is another one.

    "reverse_kl": log t. "forward_kl": 1 - 1/t. "js_divergence": log(2t/(1+t)).
    "alpha_divergence": (t^(α-1) - 1)/(α-1), which is log t at α = 1.

    Args:
        log_ratios: [B] log t = log π - log ref; fp32, bf16 or fp16, differentiable.
        divergence: one of those names.
        alpha: α.

    Returns:
        [B] fp32. Powers are those of e^80 at most, with slope 0 above, which fp32 can hold.

    Raises:
        TypeError: a tensor that is not fp32, bf16 or fp16; a coefficient that is a tensor.
        ValueError: a shape that is not [B], an unknown name, an α that is not finite.

    Source: Wang et al., "Beyond reverse KL: generalizing direct preference optimization with
    diverse divergence constraints", 2023 (arXiv:2309.16240).
    """
    check_choice("divergence", divergence, F_DIVERGENCES)
    if isinstance(alpha, Tensor):
        raise TypeError("alpha must be a Python number: reading a tensor would wait")
    if not abs(alpha) < math.inf:
        raise ValueError(f"alpha must be finite, got {alpha}")
    (x,) = _checked(log_ratios=log_ratios)
    if divergence == "forward_kl":
        return -torch.expm1((-x).clamp(max=80.0))
    if divergence == "js_divergence":
        return math.log(2.0) + F.logsigmoid(x)
    if divergence == "alpha_divergence" and abs(alpha - 1.0) >= 1e-6:
        return torch.expm1(((alpha - 1.0) * x).clamp(max=80.0)) / (alpha - 1.0)
    return x.clone()


@explains_types
def simpo_loss(
    mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float = 10.0, gamma: float = 3.0
) -> Tensor:
    """Simple preference optimisation, without a reference: -log σ(β·(p̄_w - p̄_l) - γ).

    Args:
        mean_chosen: [B] log π of the preferred responses, mean over their tokens; fp32, bf16, fp16.
        mean_rejected: [B] of the others.
        beta: β > 0.
        gamma: γ ≥ 0, the margin wanted between the scaled means; γ/β between the means.

    Returns:
        [B] fp32, differentiable with respect to both.

    Raises:
        TypeError: tensors that are not fp32, bf16 or fp16; a coefficient that is a tensor.
        ValueError: shapes that differ or are not [B], devices that differ, β ≤ 0, γ < 0.

    Source: Meng et al., "SimPO: simple preference optimization with a reference-free reward", 2024,
    equation 6.
    """
    check_positive("beta", beta)
    check_positive("gamma", gamma, or_zero=True)
    mean_w, mean_l = _checked(mean_chosen=mean_chosen, mean_rejected=mean_rejected)
    return -F.logsigmoid(beta * (mean_w - mean_l) - gamma)


@explains_types
def orpo_loss(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """The odds-ratio term -β·log σ(logit p_w - logit p_l), with logit p = log p - log(1 - p).

    The whole objective adds the negative log-likelihood of the preferred response: the caller's.

    Args:
        mean_chosen: [B] log p_w, the log-prob of a preferred response as the mean over its tokens;
            fp32, bf16 or fp16. At most 0, which is not checked: above -2⁻²⁴, where fp32 log-probs
            are noise, the value is that of -2⁻²⁴ and so is the slope, finite and never 0.
        mean_rejected: [B] log p_l.
        beta: β > 0, the weight beside the likelihood.

    Returns:
        [B] fp32, differentiable with respect to both.

    Raises:
        TypeError: tensors that are not fp32, bf16 or fp16; a coefficient that is a tensor.
        ValueError: shapes that differ or are not [B], devices that differ, β ≤ 0.

    Source: Hong et al., "ORPO: monolithic preference optimization without reference model", 2024,
    equation 7.
    """
    check_positive("beta", beta)
    mean_w, mean_l = _checked(mean_chosen=mean_chosen, mean_rejected=mean_rejected)
    return -beta * F.logsigmoid(_log_odds(mean_w) - _log_odds(mean_l))


@explains_types
def slic_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, *, beta: float = 1.0, lam: float = 0.1
) -> Tensor:
    """Sequence likelihood calibration: max(0, β - log p_w + log p_l) - λ·log p_w.

    Args:
        policy_chosen: [B] summed log π of the preferred responses' tokens; fp32, bf16 or fp16.
        policy_rejected: [B] of the others.
        beta: β > 0, the margin in nats.
        lam: λ ≥ 0, the weight of the likelihood that keeps the policy from drifting.

    Returns:
        [B] fp32, differentiable with respect to both.

    Raises:
        TypeError: tensors that are not fp32, bf16 or fp16; a coefficient that is a tensor.
        ValueError: shapes that differ or are not [B], devices that differ, β ≤ 0, λ < 0.

    Source: Zhao et al., "SLiC-HF: sequence likelihood calibration with human feedback", 2023, with
    the preferred response as the target of the likelihood.
    """
    check_positive("beta", beta)
    check_positive("lam", lam, or_zero=True)
    chosen, rejected = _checked(policy_chosen=policy_chosen, policy_rejected=policy_rejected)
    return torch.relu(beta - (chosen - rejected)) - lam * chosen


@explains_types
def kto_loss(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman–Tversky optimisation, from single responses: with r = log π - log ref,

        λ_D·(1 - σ(β(r - z))) where desirable, λ_U·(1 - σ(β(z - r))) elsewhere; z = max(0, KL).

    Args:
        policy: [B] summed log π of the responses' tokens; fp32, bf16 or fp16.
        reference: [B] summed log ref.
        desirable: [B] bool.
        kl: an estimate of KL(π || ref), such as the mean r of mismatched pairs (prompt i with
            response i+1), averaged over all processes; a float or a 0-d tensor on the same device.
            It is a constant of the loss, and clamped at 0 here: average first.
        beta: β > 0.
        desirable_weight: λ_D ≥ 0.
        undesirable_weight: λ_U ≥ 0. Where one kind of example is rarer, raise its weight, until
            λ_D·(number of desirable) and λ_U·(number of undesirable) are about the same.

    Returns:
        [B] fp32, differentiable with respect to policy and reference.

    Raises:
        TypeError: log-probs or a KL that are not fp32, bf16 or fp16; a ``desirable`` that is not
            boolean; a coefficient that is a tensor.
        ValueError: shapes that differ or are not [B], a KL that is not a scalar or requires grad,
            devices that differ, β ≤ 0, a negative weight.

    Source: Ethayarajh et al., "KTO: model alignment as prospect theoretic optimization", 2024.
    """
    check_positive("beta", beta)
    check_positive("desirable_weight", desirable_weight, or_zero=True)
    check_positive("undesirable_weight", undesirable_weight, or_zero=True)
    policy, reference = _checked(policy=policy, reference=reference)
    check_mask(desirable, "policy", policy, "desirable")
    check_device("desirable", desirable, "policy", policy)
    gain = (policy - reference) - _baseline(kl, policy)
    x = beta * torch.where(desirable, -gain, gain)
    missed = _sigmoid(x)
    return torch.where(desirable, desirable_weight * missed, undesirable_weight * missed)


def _baseline(kl: float | Tensor, policy: Tensor) -> float | Tensor:
    """KTO's point of reference, max(0, KL)."""
    if not isinstance(kl, Tensor):
        if not abs(kl) < math.inf:
            raise ValueError(f"kl must be finite, got {kl}")
        return max(0.0, kl)
    check_float("kl", kl)
    if kl.dim() != 0:
        raise ValueError(f"kl has shape {tuple(kl.shape)}: pass a float or a 0-d tensor")
    check_device("kl", kl, "policy", policy)
    check_constant("kl", kl)
    return kl.detach().float().clamp(min=0.0)


@explains_types
def reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | None = None,
    *,
    center_coef: float = 0.0,
) -> Tensor:
    """Bradley–Terry on rewards: -log σ(r_c - r_r - margin) + center_coef·(r_c + r_r)².

    Args:
        chosen: [B] rewards of the preferred responses; fp32, bf16 or fp16.
        rejected: [B] of the others.
        margin: [B] floating point, how far apart they should be; 0 where None.
        center_coef: weight ≥ 0 of the term that keeps rewards around 0, 0.01 is usual.

    Returns:
        [B] fp32, differentiable with respect to all tensors.

    Raises:
        TypeError: tensors that are not fp32, bf16 or fp16; a coefficient that is a tensor.
        ValueError: shapes that differ or are not [B], devices that differ, center_coef < 0.

    Source: Ouyang et al., "Training language models to follow instructions with human feedback",
    2022, equation 1; the margin is Touvron et al.'s (Llama 2, 2023, equation 2), the centring
    Eisenstein et al.'s ("Helping or herding?", 2023).
    """
    check_positive("center_coef", center_coef, or_zero=True)
    chosen, rejected, *margins = _checked(chosen=chosen, rejected=rejected, margin=margin)
    loss = -F.logsigmoid(chosen - rejected - (margins[0] if margins else 0.0))
    return loss if center_coef == 0 else loss + center_coef * (chosen + rejected).square()
