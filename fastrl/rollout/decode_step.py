"""One decode step for all slots: forward, logits processors, draw, record, finish reasons; a
function of static buffers, eager on a CPU, captured on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.rollout.attention import DecodeAttention, choose_decode_kernel
from fastrl.rollout.kv_cache import EOS, FIELDS, LENGTH, NAN, RUNNING, STOP, KVCache, Slots
from fastrl.rollout.model_runner import ModelRunner
from fastrl.rollout.sampling_params import SamplingParams


class LogitsProcessors(NamedTuple):
    """Penalties, truncation, temperature and end tokens of a call: numbers are constants of a
    captured step, tensors are buffers whose addresses it contains."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_new_tokens: int
    repetition_penalty: float
    suppressed: Tensor | None  # [n] ids
    ends: Tensor  # [n] ids of tokens that end a response
    stops: Tensor | None  # [n, W] ids, -1 in front of shorter sequences

    @classmethod
    def of(
        cls, params: SamplingParams, ends: Tensor, vocabulary: int, device: torch.device
    ) -> LogitsProcessors:
        """Those of sampling parameters. End tokens outside the vocabulary never match."""
        suppressed = stops = None
        if params.suppress_tokens:
            suppressed = torch.tensor(sorted(set(params.suppress_tokens))).to(device)
        if params.stop:
            width = max(map(len, params.stop))
            padded = [[-1] * (width - len(s)) + [int(t) for t in s] for s in params.stop]
            stops = torch.tensor(padded).to(device)
        return cls(
            temperature=float(params.temperature),
            top_k=params.top_k,
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            min_new_tokens=params.min_new_tokens,
            repetition_penalty=float(params.repetition_penalty),
            suppressed=suppressed,
            ends=ends[ends < vocabulary].to(device),
            stops=stops,
        )

    def numbers(self) -> tuple[float, ...]:
        return self[:6]

    def same(self, other: LogitsProcessors) -> bool:
        """Whether both have the same values."""
        if self.numbers() != other.numbers():
            return False
        pairs = zip(self[6:], other[6:], strict=True)
        return all(
            a is b if a is None or b is None else torch.equal(a, b)
            for a, b in pairs  # type: ignore[arg-type]
        )

    @property
    def processes(self) -> bool:
        """Whether :meth:`process` changes logits."""
        return bool(
            self.min_new_tokens or self.repetition_penalty != 1 or self.suppressed is not None
        )

    def process(self, logits: Tensor, num_generated: Tensor, seen: Tensor | None) -> Tensor:
        """Applies penalties and suppression to logits [b, V], in the order of ``model.generate``.

        Args:
            num_generated: [b] tokens generated so far.
            seen: [b, V] bool, which tokens have occurred.
        """
        if seen is not None:
            penalty = self.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(seen, penalised, logits)
        if self.min_new_tokens:
            early = (num_generated < self.min_new_tokens).unsqueeze(1)
            barred = logits.index_fill(1, self.ends, -torch.inf)
            logits = torch.where(early, barred, logits)
        if self.suppressed is not None:
            logits = logits.index_fill(1, self.suppressed, -torch.inf)
        return logits

    def stopped(self, tail: Tensor) -> Tensor:
        """Which rows [b] end with one of the stop sequences; tail [b, W]."""
        assert self.stops is not None
        same = (tail.unsqueeze(1) == self.stops) | (self.stops < 0)
        return same.all(-1).any(-1)


class DecodeStep:
    """Generates one more token in each of the first slots."""

    def __init__(
        self,
        model_runner: ModelRunner,
        kv_cache: KVCache,
        slots: Slots,
        processors: LogitsProcessors,
    ):
        self.model_runner, self.kv_cache, self.slots = model_runner, kv_cache, slots
        self.processors = processors
        self.attention_kernel = choose_decode_kernel(kv_cache)

    def __call__(self, bucket: int, span: int) -> None:
        """
        Args:
            bucket: how many slots.
            span: bounds the tokens per slot, the new one included.
        """
        slots, processors = self.slots, self.processors
        state = slots.state.first(bucket)
        seen, tail = (None if x is None else x[:bucket] for x in (slots.seen, slots.tail))

        attention = DecodeAttention(self.attention_kernel, self.kv_cache, state.position, span)
        logits, values = self.model_runner.decode(state.token, state.position, attention)
        draw = fastrl_kernels.sample_tokens(
            processors.process(logits, state.num_generated, seen),
            fastrl_kernels.sample_keys(slots.seed, state.sample, state.num_generated),
            temperature=processors.temperature,
            top_k=processors.top_k,
            top_p=processors.top_p,
            min_p=processors.min_p,
        )
        if processors.processes:
            draw = _of_the_model(draw, logits, processors.temperature)

        running = state.reason == RUNNING
        lost = draw.tokens < 0  # no distribution: a NaN among the logits, or no token left to draw
        goes_on = running & ~lost
        token = torch.where(goes_on, draw.tokens, state.token)
        self._record(bucket, state.num_generated, token, draw, values)
        if seen is not None:
            seen.scatter_(1, token.unsqueeze(1), True)
        if tail is not None:
            longer = torch.cat([tail[:, 1:], token[:, None]], dim=1)
            tail.copy_(torch.where(goes_on[:, None], longer, tail))

        count = state.num_generated + goes_on
        reason = torch.where(count >= state.limit, LENGTH, RUNNING)
        if tail is not None:
            reason = torch.where(processors.stopped(tail), STOP, reason)
        reason = torch.where((token.unsqueeze(1) == processors.ends).any(1), EOS, reason)
        reason = torch.where(lost, NAN, reason)
        state.reason.copy_(torch.where(running, reason, state.reason))
        state.num_generated.copy_(count)
        state.position.add_(goes_on)
        state.token.copy_(token)

    def _record(
        self,
        bucket: int,
        column: Tensor,
        token: Tensor,
        draw: fastrl_kernels.SampledTokens,
        values: Tensor | None,
    ) -> None:
        """Stores tokens with their log-probs, entropies and values; rows that have ended write
        behind their last token."""
        at = column.unsqueeze(1)
        self.slots.tokens[:bucket].scatter_(1, at, token.unsqueeze(1))
        by_name = draw._asdict() | {"values": values}
        for field, stored in zip(FIELDS, self.slots.per_token, strict=True):
            if by_name[field] is not None:
                stored[:bucket].scatter_(1, at, by_name[field].float().unsqueeze(1))


def _of_the_model(
    draw: fastrl_kernels.SampledTokens, logits: Tensor, temperature: float
) -> fastrl_kernels.SampledTokens:
    """Replaces log-probs and entropies by those of the model's own distribution, from logits before
    they were processed."""
    at = draw.tokens.clamp(min=0).unsqueeze(1)
    at_one = logits.float().log_softmax(-1)
    tempered = at_one
    if temperature not in (0.0, 1.0):
        tempered = (logits.float() / temperature).log_softmax(-1)
    information = torch.where(tempered == -torch.inf, 0.0, tempered)
    return draw._replace(
        logprobs=tempered.gather(1, at).squeeze(1),
        logprobs_t1=at_one.gather(1, at).squeeze(1),
        entropies=-(tempered.exp() * information).sum(-1),
    )
