"""Preference and reward losses: log-probs or rewards of responses in, one loss per example out.

They work on [B] numbers, a few kilobytes, so they are plain PyTorch on every device, and autograd
differentiates them. All arithmetic is fp32 from the first load, results are fp32, and nothing waits
for the device. The mean over the batch, and any weights, are the caller's.
"""

from __future__ import annotations

import math

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
    "ipo_loss",
    "kto_loss",
    "orpo_loss",
    "reward_loss",
    "simpo_loss",
    "slic_loss",
]

DPO_KINDS = ("sigmoid", "hinge", "robust")
# An fp32 log-prob is made of numbers next to 1, which are 2**-24 apart: closer to 0 is noise.
CERTAIN = -(2.0**-24)


def _checked(**tensors: Tensor | None) -> list[Tensor]:
    """The given tensors in fp32, checked to be [B] and on one device."""
    given = {name: x for name, x in tensors.items() if x is not None}
    first = next(iter(given))
    like = given[first]
    for name, x in given.items():
        check_float(name, x)
        if x.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: pass one number per example, [B]")
        check_same_shape(name, x, first, like)
        check_device(name, x, first, like)
    return [x.float() for x in given.values()]


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


def _margins(
    policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> Tensor:
    """h = r_w - r_l. r first: a policy is close to its reference, so that no digits are lost."""
    policy_w, policy_l, ref_w, ref_l = _checked(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    return (policy_w - ref_w) - (policy_l - ref_l)


def _log_odds(logprobs: Tensor) -> Tensor:
    """log p - log(1 - p), with p held at ``CERTAIN`` in the value; the gradient is that there."""
    held = CERTAIN + (logprobs - logprobs.detach())
    logprobs = torch.where(logprobs > CERTAIN, held, logprobs)
    return logprobs - torch.log(-torch.expm1(logprobs))


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
    check_positive("beta", beta)
    _check_label_smoothing(label_smoothing, kind)
    logits = beta * _margins(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    if kind == "hinge":
        return torch.relu(1.0 - logits)
    loss = -F.logsigmoid(logits)
    if label_smoothing == 0:
        return loss
    flipped = -F.logsigmoid(-logits)
    if kind == "robust":
        scale = 1.0 / (1.0 - 2.0 * label_smoothing)
        return scale * ((1.0 - label_smoothing) * loss - label_smoothing * flipped)
    return (1.0 - label_smoothing) * loss + label_smoothing * flipped


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
    check_positive("beta", beta)
    margins = _margins(policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    return (margins - 1.0 / (2.0 * beta)).square()


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
    # Autograd's slope σ·(1 - σ) has no correct digit where σ is close to 1.
    missed = torch.where(x > 0, 1.0 - torch.sigmoid(-x), torch.sigmoid(x))
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
