"""Importance weights of responses that another engine sampled than the one that learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.data.token_batch import TokenBatch
from fastrl.learn.experience import Experience
from fastrl.models.host_memory import to_device
from fastrl.samples import Samples
from fastrl_kernels.policy_losses import at_tokens, sequence_sums
from fastrl_kernels.types import LOG_RATIO_LIMIT

_ROUNDING = 1e-2  # how far log-probs in half precision may lie above 0


class SamplerStats(NamedTuple):
    """Statistics of :func:`sampler_weights`, [] fp32 each; NaN where no token counts."""

    weight_mean: Tensor  # mean of the weights as they are used, over tokens, or over sequences
    weight_min: Tensor
    weight_max: Tensor
    cut_share: Tensor  # share of weights that a bound has changed
    difference_mean: Tensor  # |log π_old - log π_sampler| of tokens, nats
    difference_max: Tensor
    unknown_share: Tensor  # share of tokens without a log-prob of the sampler


@torch.no_grad()
def sampler_weights(
    logprobs: Tensor,
    sampled: Tensor,
    mask: Tensor,
    kind: str,
    least: float | None = None,
    most: float | None = 3.0,
    lengths: Tensor | None = None,
) -> tuple[Tensor, SamplerStats]:
    """w = π_old/π_sampler of each token, or its product over each sequence, kept within bounds.

    "token-truncate": w_t = clip(π_old(y_t)/π_sampler(y_t), least, most). "token-mask": the same
    ratio, and 0 outside of [least, most]. "sequence-truncate" and "sequence-mask": each token has
    its sequence's Π_t π_old(y_t)/π_sampler(y_t), over the counted tokens, bounded in the same way.

    Log-ratios are held within ±20 before they are exponentiated. A log-prob of NaN is one that the
    sampler did not give: such a token has the ratio 1.

    Args:
        logprobs: [..., T] fp32, the policy's before its update, as the trainer computes them.
        sampled: [..., T] fp32, log-probs by the engine that sampled, at the same temperature.
        mask: [..., T] bool, True = counts.
        kind: one of ``SAMPLER_CORRECTIONS`` but "off".
        least, most: the bounds; None: no bound.
        lengths: [S] int64, of sequences that lie one after the other; None: each row is one.

    Returns:
        the weights [..., T], without a gradient, and their statistics.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025 (truncated); TRL 1.16's GRPOTrainer (the four kinds).
    """
    level, limit = kind.split("-")
    unknown = mask & sampled.isnan()
    difference = torch.where(mask & ~unknown, logprobs.float() - sampled.float(), 0.0)
    if level == "sequence":
        ones = torch.ones_like(difference)
        counted = sequence_sums(ones, mask, lengths) > 0
        log_ratio = sequence_sums(difference, mask, lengths)
    else:
        counted, log_ratio = mask, difference
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    low = torch.zeros_like(counted) if least is None else ratio < least
    high = torch.zeros_like(counted) if most is None else ratio > most
    if limit == "truncate":
        weights = ratio.clamp(least, most) if (least, most) != (None, None) else ratio
    else:
        weights = torch.where(low | high, 0.0, ratio)
    tokens = mask.sum()
    stats = SamplerStats(
        *_moments(weights, counted),
        _share(low | high, counted),
        difference.abs().sum() / (tokens - unknown.sum()),
        _moments(difference.abs(), mask)[2],
        _share(unknown, mask),
    )
    return at_tokens(weights, difference, lengths) if level == "sequence" else weights, stats


def on_policy(part: Experience, logprobs: Tensor, most: float) -> Tensor:
    """1 for tokens whose advantage is not negative, or whose response has a mean_t(log π_sampler -
    log π) of at most ``most`` nats, else 0, [N] (DeepSeek-V3.2, 2025).

    Args:
        part: has the sampler's log-probs, where these are known; else π_old's are taken.
        logprobs: [N], the policy's as it is now.
    """
    apart = part.differences(logprobs.detach())
    if part.sampled is not None:
        apart = logprobs.detach() - part.sampled
    mean = part.means(-apart.nan_to_num(nan=0.0))
    return ((part.advantages >= 0) | part.at_tokens(mean <= most)).float()


def _moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, least and greatest of x where the mask is True; NaN if it never is, or x is NaN."""
    x, mask = (
        torch.cat([x.flatten(), x.new_zeros(1)]),
        torch.cat([mask.flatten(), mask.new_zeros(1)]),
    )
    mean = torch.where(mask, x, 0.0).sum() / mask.sum()
    nothing = mean * 0
    least, most = (torch.where(mask, x, far) for far in (torch.inf, -torch.inf))
    return (
        mean,
        torch.where(mask.any(), least.amin(), nothing),
        torch.where(mask.any(), most.amax(), nothing),
    )


def _share(chosen: Tensor, mask: Tensor) -> Tensor:
    return (chosen & mask).sum() / mask.sum().float()


def sampler_logprobs(
    rollout: Samples | None, logprobs_known: list[Tensor] | None, temperature: float
) -> list[Tensor] | None:
    """The sampler's log-probs of each response, [L]; None where they are not known.

    Args:
        rollout: the rollout that the responses come from, where it was passed.
        logprobs_known: log-probs that the trainer's own rollouts noted, returned without a rollout.
        temperature: the policy's.

    Raises:
        ValueError: a number of a rollout lies above 0, beyond rounding, and is no log-prob.
    """
    if rollout is None:
        return logprobs_known
    logprobs = rollout.logprobs_at(temperature)
    if logprobs is None:
        return None
    logprobs = [torch.as_tensor(x, dtype=torch.float32).cpu() for x in logprobs]
    for i, x in enumerate(logprobs):
        if (x > _ROUNDING).any():
            raise ValueError(
                f"the rollout's log-probs of sequence {i} reach {float(x.nan_to_num().max())}, but "
                "log-probs are at most 0: give log-probs, not their negatives or probabilities"
            )
    return logprobs


class ImportanceWeights:
    """Weights of the policy's loss, by :func:`sampler_weights`.

    Args:
        kind, least, most: see :func:`sampler_weights`.
        temperature: the policy's.
    """

    def __init__(self, kind: str, least: float | None, most: float | None, temperature: float):
        self.kind, self.least, self.most = kind, least, most
        self.temperature = temperature

    def check(self, sampled: Sequence[Tensor] | None) -> None:
        """Raises ValueError where the sampler's log-probs are not known."""
        if sampled is None:
            raise ValueError(
                f"sampler_correction={self.kind!r} needs the log-probs with which the responses "
                f"were sampled, at temperature {self.temperature}: pass step() a rollout= with "
                "logprobs and temperature, or set sampler_correction='off'"
            )

    def __call__(
        self, batch: TokenBatch, logprobs: Tensor, sampled: Sequence[Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weights [B, T-1], and statistics, [] each.

        Args:
            logprobs: [B, T-1], the policy's before its update.
            sampled: the sampler's log-probs of each response, [L].
        """
        assert sampled is not None
        on_host = torch.cat([x.cpu() for x in sampled]).float()[batch.mask_of_responses()]
        of_sampler = batch.scatter(to_device(on_host, logprobs.device), batch.rows())
        mask = batch.mask.bool()
        weights, stats = sampler_weights(
            logprobs, of_sampler, mask, self.kind, self.least, self.most
        )
        return weights, {f"sampler/{name}": x for name, x in stats._asdict().items()}
