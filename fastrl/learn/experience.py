"""The numbers that an update learns from: log-probs, values, advantages and weights of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastrl_kernels
from fastrl.data.token_batch import TokenBatch, known_columns
from fastrl.models.host_memory import to_device
from fastrl.models.scoring import PassLimit

TOKENS, SAMPLES = {"kind": "tokens"}, {"kind": "samples"}  # what a column has a number for


@dataclass(frozen=True)
class Experience:
    """What is known of a batch when it is learned from. A column of tokens is [B, T-1] fp32, zero
    where masked, or [N], of the response tokens alone; one of samples is [B]. What is not known is
    None.

    Attributes:
        tokens: the prompts and responses.
        logprobs: the policy's before the update; None: the current ones, so that ratios are 1.
        ref_logprobs: the reference's.
        values, returns: V, and its targets; without a value function zeros, and sums of rewards.
        kls: the KL over the vocabulary, where it is not estimated from samples.
        sampler_weights: importance weights of the policy's loss; None: 1.
        chosen: 1 or 0, which tokens the policy learns from; None: all, or those that the
            objective's ``top_entropy`` chooses.
        sampled: the sampler's log-probs, where the loss reads them.
        teacher_logprobs: the teachers', where rewards or a ledger have them.
        weights: weights of each sample's tokens; None: 1.
        of_samples: how often each sample counts; None: once.
        of_responses: each sample's advantage, where all its tokens have the same.
        kl_coef: β of the KL to the reference in the loss; None: there is none.
        teacher_tokens: the responses behind their teachers' prompts; None: teachers, if any, read
            ``tokens``.
    """

    tokens: TokenBatch = None  # type: ignore[assignment]
    logprobs: Any = field(default=None, metadata=TOKENS)
    ref_logprobs: Any = field(default=None, metadata=TOKENS)
    values: Any = field(default=None, metadata=TOKENS)
    kls: Tensor | None = field(default=None, metadata=TOKENS)
    advantages: Any = field(default=None, metadata=TOKENS)
    returns: Any = field(default=None, metadata=TOKENS)
    sampler_weights: Tensor | None = field(default=None, metadata=TOKENS)
    chosen: Tensor | None = field(default=None, metadata=TOKENS)
    sampled: Tensor | None = field(default=None, metadata=TOKENS)
    teacher_logprobs: Tensor | None = field(default=None, metadata=TOKENS)
    weights: Tensor | None = field(default=None, metadata=SAMPLES)
    of_samples: Tensor | None = field(default=None, metadata=SAMPLES)
    of_responses: Tensor | None = field(default=None, metadata=SAMPLES)
    kl_coef: float | None = None
    teacher_tokens: TokenBatch | None = None

    @property
    def kl(self) -> fastrl_kernels.KLTerm | None:
        """The KL term of the loss; None without ``kl_coef``."""
        if self.kl_coef is None:
            return None
        return fastrl_kernels.KLTerm(self.ref_logprobs, self.kl_coef, "k3")

    @property
    def kl_operands(self) -> tuple[Tensor, Tensor]:
        """Log-probs for ``KLPenalty.rewards``: the two models', or the KL itself and zeros."""
        if self.kls is None:
            return self.logprobs, self.ref_logprobs
        return self.kls, torch.zeros_like(self.kls)

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.tokens)

    @property
    def counts(self) -> Tensor:
        """The number of tokens of each sample that count, [B] int64."""
        return self.tokens.mask.sum(-1)

    def at_tokens(self, of_samples: Tensor) -> Tensor:
        """A number of each sample, [B], repeated at each of its tokens, [N]."""
        return repeated_at_tokens(of_samples, self.counts, len(self.advantages))

    def sums(self, x: Tensor) -> Tensor:
        """Sums a number of each token, [N], over the tokens of each sample, [B]."""
        sample_of_token = self.at_tokens(torch.arange(self.size, device=x.device))
        return x.new_zeros(self.size).index_add(0, sample_of_token, x)

    def means(self, x: Tensor) -> Tensor:
        """Means of tokens' numbers, [N], over the tokens of each sample, [B]; 0 without tokens."""
        return self.sums(x) / self.counts.clamp(min=1)

    def differences(self, logprobs: Tensor) -> Tensor:
        """log π - log π_old, [N]."""
        return logprobs - (logprobs.detach() if self.logprobs is None else self.logprobs)

    def counted(self) -> Experience:
        """The experience with columns of tokens [N], made from columns [B, T-1]."""
        places = self.tokens.response_mask.flatten().nonzero()[:, 0]
        where = to_device(places, self.advantages.device)
        of_tokens = (x for x in known_columns(self) if x[2] == TOKENS["kind"])
        some: Any = {name: x.flatten()[where] for name, x, _ in of_tokens}
        return replace(self, **some)

    def select(self, chosen: Sequence[int]) -> Experience:
        """Returns the samples at the places ``chosen``, in that order, without padding that none
        of them needs; columns of tokens must be [N]."""
        counts = np.count_nonzero(self.tokens.response_mask.numpy(), axis=-1)
        ends, device = counts.cumsum(), self.advantages.device
        places = np.concatenate([np.arange(ends[i] - counts[i], ends[i]) for i in chosen])
        picks = {TOKENS["kind"]: to_device(torch.from_numpy(places), device)}
        picks[SAMPLES["kind"]] = to_device(torch.as_tensor(list(chosen)), device)
        some: Any = {name: x[picks[kind]] for name, x, kind in known_columns(self)}
        if self.teacher_tokens is not None:
            some["teacher_tokens"] = self.teacher_tokens.select(chosen)
        return replace(self, tokens=self.tokens.select(chosen), **some)

    def split(self, limit: PassLimit) -> list[Experience]:
        """Splits the samples into parts, each of which fits in a pass of at most ``limit``."""
        parts = self.tokens.parts(range(self.size), limit)
        return [self] if len(parts) == 1 else list(map(self.select, parts))


def repeated_at_tokens(of_samples: Tensor, counts: Tensor, total: int) -> Tensor:
    """A number of each sample, [B], repeated at each of its tokens, [N].

    Args:
        counts: tokens of each sample, [B] int64.
        total: N, so that the host need not wait for the device to count.
    """
    return of_samples.repeat_interleave(counts, output_size=total)
