"""One decode step of all slots, on static buffers, so that a GPU can run it as a CUDA graph."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastrl_kernels
from fastrl.config import SAMPLED
from fastrl.models.host_memory import to_device
from fastrl.rollout.attention import DecodeAttention, choose_decode_kernel
from fastrl.rollout.grammars import GrammarMasks
from fastrl.rollout.kv_cache import DEAD_END, KVCache, Slots, SlotState
from fastrl.rollout.model_runner import ModelRunner
from fastrl.rollout.sampling_params import SamplingParams
from fastrl_kernels.advance_slots import advance
from fastrl_kernels.logprob import figures_of
from fastrl_kernels.rng import token_keys
from fastrl_kernels.token_sets import unpacked
from fastrl_kernels.types import EOS, RUNNING, STOP

_CUTS = ("temperature", "top_k", "top_p", "min_p")


class LogitsProcessors(NamedTuple):
    """Penalties, truncation, temperature and end tokens of a call of ``generate``. A captured step
    contains the numbers as constants, and the addresses of the tensors."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    min_new_tokens: int
    repetition_penalty: float
    over_support: bool  # whether log-probs are over the sets that tokens are drawn from
    constrained: bool  # whether grammars say which tokens are allowed
    barred: Tensor | None  # [n] ids not to draw: suppressed ones, and ends before min_new_tokens
    always: Tensor | None  # [n] bool, which of the barred ids are suppressed throughout
    ends: Tensor  # [n] ids of tokens that end a response
    stops: Tensor | None  # [n, W] ids, -1 in front of shorter sequences

    @classmethod
    def of(cls, params: SamplingParams, ends: Tensor, vocabulary: int) -> LogitsProcessors:
        """The processors for parameters; end tokens outside the vocabulary are dropped."""
        constrained = params.response_format is not None
        ends = ends[ends < vocabulary]
        barred = always = stops = None
        if params.min_new_tokens or params.suppress_tokens:
            suppressed = torch.tensor(sorted(set(params.suppress_tokens)), dtype=torch.long)
            barred = torch.cat([suppressed, ends]).unique() if params.min_new_tokens else suppressed
            always = torch.isin(barred, suppressed)
            barred, always = (x if len(barred) else None for x in (barred, always))
        if params.stop:
            width = max(map(len, params.stop))
            padded = [[-1] * (width - len(s)) + [int(t) for t in s] for s in params.stop]
            stops = torch.tensor(padded)
        return cls(
            temperature=float(params.temperature),
            top_k=params.top_k,
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            min_new_tokens=params.min_new_tokens,
            repetition_penalty=float(params.repetition_penalty),
            over_support=params.policy_support == SAMPLED
            and (constrained or bool(params.changes_of_the_draw())),
            constrained=constrained,
            barred=barred,
            always=always,
            ends=ends,
            stops=stops,
        )

    def numbers(self) -> tuple[float, ...]:
        """The fields that are numbers, in their order."""
        return self[:8]

    def as_numbers(self) -> tuple:
        """All values of processors on the host as a tuple, which is equal for equal processors."""
        lists = [None if x is None else str(x.tolist()) for x in self[8:]]  # type: ignore[attr-defined]
        return *self.numbers(), *lists

    def to(self, device: torch.device) -> LogitsProcessors:
        moved = (None if x is None else to_device(x, device) for x in self[8:])  # type: ignore[arg-type]
        return LogitsProcessors(*self.numbers(), *moved)  # type: ignore[arg-type]

    def are_plain(self) -> bool:
        """Whether tokens are drawn from the softmax of all logits, changed by temperature alone."""
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        penalised = self.repetition_penalty != 1 or self.barred is not None
        return not (cuts or penalised or self.constrained)

    def penalised(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Logits [b, V] with the repetition penalty; seen [b, V] bool, which tokens occurred."""
        penalty = self.repetition_penalty
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(seen, penalised, logits)

    def bar_(self, logits: Tensor, num_generated: Tensor) -> Tensor | None:
        """Sets logits [b, V] of tokens that are not to be drawn to -inf, in place.

        Args:
            num_generated: [b] tokens generated so far.

        Returns:
            The earlier logits [b, n] of barred ids, -inf where one may be drawn; None without any.
        """
        if self.barred is None or self.always is None:
            return None
        now = self.always | (num_generated < self.min_new_tokens).unsqueeze(1)
        before = logits.index_select(1, self.barred)
        logits.index_copy_(1, self.barred, before.masked_fill(now, -torch.inf))
        return before.masked_fill(~now, -torch.inf)

    def stopped(self, tail: Tensor) -> Tensor:
        """Which rows [b] end with one of the stop sequences; tail [b, W], their last tokens."""
        assert self.stops is not None
        same = (tail.unsqueeze(1) == self.stops) | (self.stops < 0)
        return same.all(-1).any(-1)


class StepDraw(NamedTuple):
    """What a decode step draws."""

    sampled: fastrl_kernels.SampledTokens
    values: Tensor | None  # [b] of the tokens that the step runs, with a value head
    support: Tensor | None = None  # [b, ⌈V/32⌉] what tokens were drawn from, where it is recorded
    dead: Tensor | None = None  # [b] bool, whether a grammar allows no token


class DrawFromLogits:
    """Draws after logits processors, from all logits, or from those that grammars allow."""

    def __init__(
        self,
        model_runner: ModelRunner,
        processors: LogitsProcessors,
        backend: str,
        masks: GrammarMasks | None = None,
    ):
        self.model_runner, self.processors, self.masks = model_runner, processors, masks
        self.backend = backend

    def __call__(
        self, state: SlotState, seen: Tensor | None, attention: DecodeAttention, keys: Tensor
    ) -> StepDraw:
        """Draws the slots' next tokens."""
        processors = self.processors
        logits, values = self.model_runner.decode(state.token, state.position, attention)
        # Begun before the forward, which it runs beside.
        allowed = None if self.masks is None else self.masks.allowed(len(logits))
        drawn_from = logits if seen is None else processors.penalised(logits, seen)
        if allowed is not None and processors.barred is not None:
            drawn_from = drawn_from.clone()  # figures are made from all logits
        barred = processors.bar_(drawn_from, state.num_generated)
        cuts = {name: getattr(processors, name) for name in _CUTS}
        if processors.over_support or allowed is not None:
            draw, support = fastrl_kernels.sample_with_support(
                drawn_from, keys, allowed=allowed, **cuts
            )
            dead = None if allowed is None else _dead(draw.tokens, drawn_from, allowed)
            if processors.over_support:
                return StepDraw(draw, values, support, dead)
        else:
            draw, dead = fastrl_kernels.sample_tokens(drawn_from, keys, **cuts), None
        if seen is not None or allowed is not None:
            draw = _of_the_model(draw, logits, processors.temperature, self.backend)
        elif barred is not None:
            draw = _with_barred(draw, logits, barred, processors.temperature)
        return StepDraw(draw, values, dead=dead)


class DrawFromHead:
    """Draws while the head's product is computed, where no logits processor needs all logits, see
    :class:`fastrl.rollout.fused_draw.FusedDraw`."""

    def __init__(self, model_runner: ModelRunner, processors: LogitsProcessors):
        self.model_runner, self.temperature = model_runner, processors.temperature
        self.possible = model_runner.fused_draw.active and processors.are_plain()

    def takes(self, rows: int) -> bool:
        """Whether this draw is possible, and faster than from logits for so many rows."""
        return self.possible and self.model_runner.fused_draw.pays(rows)

    def __call__(
        self, state: SlotState, _seen: Tensor | None, attention: DecodeAttention, keys: Tensor
    ) -> StepDraw:
        runner = self.model_runner
        hidden, values = runner.decode_hidden(state.token, state.position, attention)
        return StepDraw(runner.fused_draw.draw(hidden, keys, self.temperature), values)


class DecodeStep:
    """Generates one more token in each of the first slots."""

    def __init__(
        self,
        model_runner: ModelRunner,
        kv_cache: KVCache,
        slots: Slots,
        processors: LogitsProcessors,
        masks: GrammarMasks | None = None,
    ):
        self.model_runner, self.kv_cache, self.slots = model_runner, kv_cache, slots
        self.processors = processors
        self.attention_kernel = choose_decode_kernel(kv_cache, model_runner.attends_by_flash)
        # Chosen once, so that the ops around a step's forward need not choose again.
        self.backend = fastrl_kernels.explain(model_runner.device).backend
        self.from_logits = DrawFromLogits(model_runner, processors, self.backend, masks)
        self.from_head = DrawFromHead(model_runner, processors)

    def __call__(self, bucket: int, span: int) -> None:
        """Generates a token in the first ``bucket`` slots, each then of at most ``span`` tokens."""
        slots, processors = self.slots, self.processors
        state = slots.state.first(bucket)
        seen, tail = (None if x is None else x[:bucket] for x in (slots.seen, slots.tail))

        attention = DecodeAttention(self.attention_kernel, self.kv_cache, state.position, span)
        keys = token_keys(state.sample, state.num_generated, self.backend)
        drawer = self.from_head if self.from_head.takes(bucket) else self.from_logits
        draw, values, support, dead = drawer(state, seen, attention, keys)
        if slots.support is not None and support is not None:
            place = state.num_generated % slots.support.shape[1]
            slots.support[torch.arange(bucket, device=place.device), place] = support

        dead = None if dead is None else dead & (state.reason == RUNNING)
        goes_on = None if tail is None else (state.reason == RUNNING) & (draw.tokens >= 0)
        advance(slots.buffers(state), draw, processors.ends, values, self.backend)
        if dead is not None:
            state.reason.masked_fill_(dead, DEAD_END)
        if seen is not None:
            seen.scatter_(1, state.token.unsqueeze(1), True)
        if tail is not None and goes_on is not None:
            longer = torch.cat([tail[:, 1:], state.token[:, None]], dim=1)
            tail.copy_(torch.where(goes_on[:, None], longer, tail))
            stopped = goes_on & processors.stopped(tail) & (state.reason != EOS)
            state.reason.masked_fill_(stopped, STOP)


def _dead(tokens: Tensor, logits: Tensor, allowed: Tensor) -> Tensor:
    """Which rows [b] have no token since a grammar allows none, and not by logits that are NaN."""
    dead = tokens < 0
    if (rows := dead.nonzero()[:, 0]).numel():
        found = unpacked(allowed[rows], logits.shape[1])
        dead[rows] = logits[rows].masked_fill(~found, -torch.inf).amax(-1) == -torch.inf
    return dead


def _of_the_model(
    draw: fastrl_kernels.SampledTokens, logits: Tensor, temperature: float, backend: str
) -> fastrl_kernels.SampledTokens:
    """Replaces log-probs and entropies by the model's, from the logits before any processor."""
    tokens, temperature = draw.tokens.clamp(min=0), temperature or 1.0
    logprobs, entropies = at_one, _ = figures_of(logits, tokens, temperature, backend)
    if temperature != 1:
        at_one, _ = figures_of(logits, tokens, 1.0, backend)
    return draw._replace(logprobs=logprobs, logprobs_t1=at_one, entropies=entropies)


def _with_barred(
    draw: fastrl_kernels.SampledTokens, logits: Tensor, barred: Tensor, temperature: float
) -> fastrl_kernels.SampledTokens:
    """Replaces log-probs and entropies without barred tokens by those of the model's distribution.

    With the odds r = q / (1 - q) of the barred tokens, q their probability together,

        log p = log p' - log(1 + r),   H = (1 - q)·H' + q·H_b + h(q)

    for p' and H' without them, H_b among them alone, and h(q) = -q·log q - (1 - q)·log(1 - q).

    Args:
        barred: the barred tokens' logits [b, n], -inf for tokens that were not barred.
    """
    drawn = logits.gather(1, draw.tokens.clamp(min=0).unsqueeze(1)).float()
    barred = barred.float()

    def log_odds(temperature: float, logprobs: Tensor) -> Tensor:
        return ((barred - drawn) / temperature).logsumexp(1) + logprobs

    temperature = temperature or 1.0
    odds = log_odds(temperature, draw.logprobs)
    kept, lost = F.logsigmoid(-odds), F.logsigmoid(odds)  # log(1 - q), log q
    kept_t1 = kept if temperature == 1 else F.logsigmoid(-log_odds(1.0, draw.logprobs_t1))
    shares = (barred / temperature).softmax(1).nan_to_num(0.0)  # NaN where nothing was barred
    kept_share, lost_share = kept.exp(), lost.exp()
    among = torch.special.entr(shares).sum(1)
    return draw._replace(
        logprobs=draw.logprobs + kept,
        logprobs_t1=draw.logprobs_t1 + kept_t1,
        entropies=kept_share * (draw.entropies - kept)
        + lost_share * among
        + torch.special.entr(lost_share),
    )
