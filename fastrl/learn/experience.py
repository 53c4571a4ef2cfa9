"""The numbers that an update learns from: log-probs, values, advantages and weights of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fastrl_kernels
from fastrl.data.token_batch import TokenBatch
from fastrl.models.host_memory import to_device
from fastrl.models.scoring import PassLimit


@dataclass(frozen=True)
class Scored:
    """A batch's log-probs by policy and reference, and values, [B, T-1] fp32, zero where masked."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Any = None  # None where they were not requested
    kls: Tensor | None = None  # KL over the vocabulary; None where it is estimated from samples

    @property
    def kl_operands(self) -> tuple[Tensor, Tensor]:
        """Log-probs for ``KLPenalty.rewards``: the two models', or the KL itself and zeros."""
        if self.kls is None:
            return self.logprobs, self.ref_logprobs
        return self.kls, torch.zeros_like(self.kls)


@dataclass(frozen=True)
class Experience:
    """The numbers that an update reads: columns of tokens are [B, T-1] fp32, zero where masked, or
    [N], of the response tokens alone."""

    logprobs: Any  # the policy's before the update; None: those of the scoring pass itself
    values: Any  # None where no values are learned, as are returns
    advantages: Tensor
    returns: Any
    kl: fastrl_kernels.KLTerm | None = None  # the KL in the loss
    weights: Tensor | None = None  # [B], weights of each sample's tokens; None: 1
    sampler_weights: Tensor | None = None  # importance weights of the policy's loss; None: 1
    of_samples: Tensor | None = None  # [B], how often each sample counts; None: once
    chosen: Tensor | None = None  # [N] 1 or 0, which tokens the policy learns from; None: not known
    sampled: Tensor | None = None  # log-probs of another sampler, where the loss reads them
    of_responses: Tensor | None = None  # [B], advantages, where all tokens of a sample have one

    def of_tokens(self, samples: Sequence[int], columns: slice, mask: Tensor) -> Experience:
        """Returns the experience of some samples; columns of tokens are [N], the response tokens'.

        Args:
            columns: the columns of [B, T-1] that the samples need.
            mask: [b, t] bool on the CPU, which of the samples' tokens in these columns count.
        """
        device = self.advantages.device
        index = to_device(torch.as_tensor(list(samples)), device)
        where = to_device(mask.flatten().nonzero()[:, 0], device)
        return self._of(index, lambda x: x[index, columns].flatten()[where])

    def at(self, samples: Sequence[int], tokens: Tensor) -> Experience:
        """Returns the experience of some samples; columns of tokens, [N] already, become [n].

        Args:
            tokens: [n] int64 on the CPU, the tokens' indices among the N.
        """
        device = self.advantages.device
        where = to_device(tokens, device)
        return self._of(to_device(torch.as_tensor(list(samples)), device), lambda x: x[where])

    def _of(self, samples: Tensor, pick: Callable[[Tensor], Tensor]) -> Experience:
        of_tokens = (
            *("logprobs", "values", "advantages", "returns"),
            *("sampler_weights", "chosen", "sampled"),
        )
        of_samples = ("weights", "of_samples", "of_responses")
        columns: dict[str, Any] = {}
        for names, some in ((of_tokens, pick), (of_samples, lambda x: x[samples])):
            for name in names:
                column = getattr(self, name)
                columns[name] = None if column is None else some(column)
        if self.kl is not None:
            columns["kl"] = self.kl._replace(ref_logprobs=pick(self.kl.ref_logprobs))
        return Experience(**columns)


class LastExperience(NamedTuple):
    """The experience that an update has read, and its mask."""

    mask: Tensor  # [B, T-1] bool on the CPU, True where a response token counts
    experience: Experience

    def advantages(self) -> tuple[np.ndarray, np.ndarray]:
        """Advantages of the tokens that count, [N] fp32, sample after sample; and the number of
        such tokens in each sample, [B]."""
        advantages = self.experience.advantages.float().cpu()[self.mask]
        return advantages.numpy(), self.mask.sum(-1).numpy()


class Minibatch(NamedTuple):
    """A part of a batch's samples, without padding that none of them needs."""

    tokens: TokenBatch
    old: Experience  # the experience of the samples' response tokens, [N]
    samples: Sequence[int] = ()  # the samples' indices in the batch, where they are known

    @classmethod
    def of(cls, batch: TokenBatch, experience: Experience, indices: Sequence[int]) -> Minibatch:
        """Samples ``indices`` of a batch with their experience [B, T-1]."""
        columns = batch.columns(indices)
        shifted = slice(columns.start, columns.stop - 1)
        tokens = batch.select(indices)
        old = experience.of_tokens(indices, shifted, tokens.response_mask)
        return cls(tokens, old, indices)

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.tokens)

    @property
    def counts(self) -> Tensor:
        """The number of tokens of each sample that count, [B] int64."""
        return self.tokens.mask.sum(-1)

    def at_tokens(self, of_samples: Tensor) -> Tensor:
        """Numbers of samples, [B], repeated at each of their tokens, [N]."""
        return repeated_at_tokens(of_samples, self.counts, len(self.old.advantages))

    def sums(self, x: Tensor) -> Tensor:
        """Sums numbers of tokens, [N], over the tokens of each sample, [B]."""
        sample_of_token = self.at_tokens(torch.arange(self.size, device=x.device))
        return x.new_zeros(self.size).index_add(0, sample_of_token, x)

    def means(self, x: Tensor) -> Tensor:
        """Means of tokens' numbers, [N], over the tokens of each sample, [B]; 0 without tokens."""
        return self.sums(x) / self.counts.clamp(min=1)

    def differences(self, logprobs: Tensor) -> Tensor:
        """log π - log π_old, [N]."""
        old = self.old.logprobs
        return logprobs - (logprobs.detach() if old is None else old)

    def select(self, chosen: Sequence[int]) -> Minibatch:
        """Returns the part with the samples ``chosen``, ascending indices in this mini-batch."""
        picked = torch.zeros(self.size, dtype=torch.bool)
        picked[list(chosen)] = True
        of_picked = picked.repeat_interleave(self.tokens.response_mask.sum(-1))
        old = self.old.at(chosen, of_picked.nonzero()[:, 0])
        samples = [self.samples[i] for i in chosen] if self.samples else ()
        return Minibatch(self.tokens.select(chosen), old, samples)

    def split(self, limit: PassLimit) -> list[Minibatch]:
        """Parts of this mini-batch that fit in a forward pass each."""
        parts = self.tokens.parts(range(self.size), limit)
        return [self] if len(parts) == 1 else list(map(self.select, parts))


def repeated_at_tokens(of_samples: Tensor, counts: Tensor, total: int) -> Tensor:
    """Numbers of samples, [B], repeated at each of their tokens, [N].

    Args:
        counts: tokens of each sample, [B] int64.
        total: N, so that the host need not wait for the device to count.
    """
    return of_samples.repeat_interleave(counts, output_size=total)
