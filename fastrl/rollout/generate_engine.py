"""Rollouts through ``model.generate``: any model, any of its keywords."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from fastrl.data.prompt_ids import Prompt, check_prompts, need_pad_token
from fastrl.models.layout import layout_of
from fastrl.models.modes import evaluating
from fastrl.rollout.decode_step import LogitsProcessors
from fastrl.rollout.generation_kwargs import neutral_kwargs, unpacked
from fastrl.rollout.kv_cache import FIELDS
from fastrl.rollout.rescoring import Rescorer
from fastrl.rollout.sampling_params import (
    RolloutOutput,
    RolloutRequest,
    SamplingParams,
    check_stop,
    end_tokens,
)

_STOPPING = ("stop", "stop_strings", "stopping_criteria", "max_time")


class GenerateEngine:
    """Samples responses with the trained model's own ``generate``: any model, any keyword.

    Args:
        model: a language model, causal or encoder–decoder, or a value-head model around one.
        tokenizer: gives the pad and EOS tokens.
        batch_size: prompts per call of ``generate``.
        autocast: makes the context in which ``generate`` runs.
        scores: let :meth:`generate` return log-probs, entropies and values, as
            :class:`RolloutEngine` does; one more forward, without padding.

    Raises:
        ValueError: a batch_size below 1; an encoder–decoder that names no start token.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        batch_size: int = 64,
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        *,
        scores: bool = False,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model = model
        self.autocast = autocast
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self._layout = layout_of(model)
        self._scorer = Rescorer(model) if scores else None

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        sample_ids: Sequence[int] | None = None,
    ) -> RolloutOutput:
        """``params.n`` responses per prompt. The model's generation_config says where they end, if
        ``params`` does not, and nothing else.

        Args:
            prompts: texts, chats (lists of messages with a role and a content, put through the
                tokenizer's chat template) or 1-D token ids.
            params: how to sample.
            sample_ids: one per prompt. They are returned, but here they key no draws: these come
                from torch's own generator, and depend on the batch.

        Raises:
            ValueError: an empty prompt, token ids outside the vocabulary, a prompt that with its
                new tokens exceeds the model's context, named by its index.
        """
        params = params or SamplingParams()
        request = RolloutRequest.of(prompts, params, sample_ids, self.model, self.tokenizer)
        request = request.repeated(params.n)
        tokens, limits, ids = request.prompts, request.limits, request.sample_ids
        parts = self._parts(tokens, limits)
        ends = end_tokens(self.model, self.tokenizer, params.eos_token_ids)
        kwargs = self._kwargs(params, ends)
        for part in parts:
            need_pad_token([len(tokens[i]) for i in part], kwargs["pad_token_id"], self.tokenizer)

        output = RolloutOutput([], [], sample_ids=ids, temperature=params.temperature or 1.0)
        begin = time.perf_counter()
        with evaluating(self.model), self.autocast():
            with _seeded(params.seed):
                for part in parts:
                    batch, most = [tokens[i] for i in part], [limits[i] for i in part]
                    rows = self._continued(batch, kwargs | self._stopping(batch, most, params))
                    for i, row in zip(part, rows, strict=True):
                        length, reason = _end(row[: limits[i]].tolist(), ends.tolist(), params.stop)
                        output.sequences.append(row[:length])
                        output.finish_reasons.append(reason)
            if self._scorer is not None:
                self._score(output, tokens, params, ends)
        _time(output, begin)
        return output

    def generate_with(
        self, prompts: Sequence[Tensor], generation_kwargs: dict[str, Any]
    ) -> RolloutOutput:
        """One response per prompt, with keyword arguments of ``model.generate`` as they are, and
        without scores: what these arguments do to the distribution is not known here.

        ``stop`` is beside them: token sequences, as in :class:`SamplingParams`. A response ends at
        the first EOS, or where ``stop``, ``stop_strings``, ``stopping_criteria`` or ``max_time``
        stopped it, or in front of the first token whose logits are NaN.

        Raises:
            ValueError: as :meth:`generate`; what stops responses, with several beams.
        """
        kwargs = {"pad_token_id": self.tokenizer.pad_token_id, **unpacked(generation_kwargs)}
        for name in ("num_return_sequences", "return_dict_in_generate"):
            if kwargs.pop(name, None) not in (None, 1, False):
                raise ValueError(f"{name} is not supported here: repeat the prompts instead")
        self._layout.check_generation(kwargs)
        make_stops = stops_of(kwargs, self.model, self.tokenizer)
        beams = beams_of(kwargs, self.model)
        check_prompts(prompts, self.model, kwargs.get("max_new_tokens"))
        parts = [prompts[i : i + self.batch_size] for i in range(0, len(prompts), self.batch_size)]
        for part in parts:
            need_pad_token([len(p) for p in part], kwargs["pad_token_id"], self.tokenizer)
        output = RolloutOutput(sequences=[], finish_reasons=[])
        ends = end_tokens(self.model, self.tokenizer, kwargs.get("eos_token_id")).tolist()
        begin = time.perf_counter()
        with evaluating(self.model), self.autocast():
            for part in parts:
                front = self._layout.in_front(max(map(len, part)))
                stops = make_stops(front, len(part), self.model.device)
                nans = RecordedNaN(front, len(part), self.model.device)
                recorded = stops.kwargs()
                if beams == 1:  # else a row is not a prompt's
                    given = kwargs.get("logits_processor") or ()
                    recorded["logits_processor"] = LogitsProcessorList([*given, nans])
                rows = self._continued(part, kwargs | recorded)
                cuts = zip(rows, stops.lengths(), nans.lengths(), strict=True)
                for row, stopped, lost in cuts:
                    length, reason = _end(row[:stopped][:lost].tolist(), ends)
                    if reason == "length" and length == stopped:
                        reason = "stop"
                    elif reason == "length" and length == lost:
                        reason = "nan"
                    output.sequences.append(row[:length])
                    output.finish_reasons.append(reason)
        _time(output, begin)
        return output

    def sleep(self) -> None:
        """Nothing to free: here to serve in the place of :class:`RolloutEngine`."""

    def _kwargs(self, params: SamplingParams, ends: Tensor) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"pad_token_id": self.tokenizer.pad_token_id}
        kwargs |= neutral_kwargs(self.model) | params.generation_kwargs()
        kwargs["eos_token_id"] = ends.tolist() or None
        if self._scorer is not None:
            # So that a NaN in one sample stops no other; the scores then say where it was.
            kwargs["remove_invalid_values"] = True
        return kwargs

    def _stopping(
        self, prompts: Sequence[Tensor], limits: Sequence[int], params: SamplingParams
    ) -> dict[str, Any]:
        """Arguments by which ``generate`` ends as soon as all rows of a batch have."""
        kwargs: dict[str, Any] = {"max_new_tokens": max(limits)}
        if params.stop or min(limits) < max(limits):
            width = max(len(prompt) for prompt in prompts)
            ended = _Ended(self._layout.in_front(width), limits, params.stop, self.model.device)
            kwargs["stopping_criteria"] = StoppingCriteriaList([ended])
        return kwargs

    def _parts(self, prompts: Sequence[Tensor], limits: Sequence[int]) -> list[list[int]]:
        """Indices of samples that one call of ``generate`` continues: its longest prompt with its
        highest limit stays within the context."""
        parts: list[list[int]] = []
        longest = most = 0
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            longest, most = max(longest, len(prompt)), max(most, limit)
            exceeds = self._layout.exceeded(longest, most) is not None
            if not parts or len(parts[-1]) == self.batch_size or exceeds:
                parts.append([])
                longest, most = len(prompt), limit
            parts[-1].append(i)
        return parts

    @torch.no_grad()
    def _continued(self, prompts: Sequence[Tensor], kwargs: dict[str, Any]) -> Iterable[Tensor]:
        """What ``generate`` appends to each prompt, padding at its end included."""
        device = self.model.device
        width = max(len(p) for p in prompts)
        input_ids = torch.full((len(prompts), width), kwargs["pad_token_id"] or 0)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            first = width - len(prompt) if self._layout.prompts_padded == "left" else 0
            input_ids[row, first : first + len(prompt)] = prompt
            attention_mask[row, first : first + len(prompt)] = 1
        generated = self.model.generate(
            input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), **kwargs
        )
        return generated[:, self._layout.in_front(width) :].cpu()

    def _score(
        self,
        output: RolloutOutput,
        prompts: Sequence[Tensor],
        params: SamplingParams,
        ends: Tensor,
    ) -> None:
        """Fills in what the model says of every token; a sample ends in front of the first that was
        drawn from no distribution."""
        assert self._scorer is not None
        vocabulary = self.model.config.get_text_config().vocab_size
        processors = LogitsProcessors.of(params, ends, vocabulary, self.model.device)
        figures = self._scorer(prompts, output.sequences, processors)
        for name in FIELDS:
            columns = [x for x in (sample[name] for sample in figures) if x is not None]
            setattr(output, name, columns or None)
        assert output.logprobs is not None
        for i, (sequence, scored) in enumerate(zip(output.sequences, output.logprobs, strict=True)):
            if len(scored) < len(sequence):
                output.sequences[i] = sequence[: len(scored)]
                output.finish_reasons[i] = "nan"


class _Ended(StoppingCriteria):
    """Which rows are at a stop sequence or at a limit of their own, so that ``generate``, which
    knows EOS and remembers who has ended, goes on no longer than a row of the batch does.

    Args:
        width: tokens in front of the new ones.
        limits: new tokens, at most, of each row.
    """

    def __init__(
        self,
        width: int,
        limits: Sequence[int],
        stops: Sequence[Sequence[int]],
        device: torch.device,
    ):
        self.width = width
        self.limits = torch.tensor(limits).to(device)
        self.stops = [torch.tensor([int(t) for t in stop]).to(device) for stop in stops]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        new = input_ids[:, self.width :]
        return (self.limits <= new.shape[1]) | ends_with(new, self.stops)


def _end(
    tokens: list[int], ends: list[int], stops: Sequence[Sequence[int]] = ()
) -> tuple[int, str]:
    """How many tokens of a response are its own, and why it ends there."""
    for length, token in enumerate(tokens, start=1):
        if token in ends:
            return length, "eos"
        if any(tokens[max(0, length - len(s)) : length] == [int(t) for t in s] for s in stops):
            return length, "stop"
    return len(tokens), "length"


def _time(output: RolloutOutput, begin: float) -> None:
    seconds = time.perf_counter() - begin
    tokens = sum(len(s) for s in output.sequences)
    output.stats = {"time/rollout": seconds, "perf/rollout_tokens_per_second": tokens / seconds}


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class NoStops:
    """Of a call in which nothing else ends a response."""

    def __init__(self, rows: int):
        self.rows = rows

    def kwargs(self) -> dict[str, Any]:
        """What ``generate`` is given."""
        return {}

    def lengths(self) -> list[int | None]:
        """After how many new tokens each row was stopped; None where it was not."""
        return [None] * self.rows


class RecordedStops(NoStops, StoppingCriteria):
    """Criteria in one, which remembers where each row was stopped: behind that ``generate`` pads
    the row, with a token that may well be its EOS.

    Args:
        criteria: that stop a row.
        front: tokens in front of the new ones.
        rows: prompts of the call.
        device: of the model.
    """

    def __init__(self, criteria: StoppingCriteriaList, front: int, rows: int, device: torch.device):
        super().__init__(rows)
        self.criteria, self.front = criteria, front
        self.stopped = torch.zeros(rows, dtype=torch.long, device=device)  # 0: not yet

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = self.criteria(input_ids, scores, **kwargs)
        first = done & (self.stopped == 0)
        self.stopped = torch.where(first, input_ids.shape[1] - self.front, self.stopped)
        return done

    def kwargs(self) -> dict[str, Any]:
        return {"stopping_criteria": StoppingCriteriaList([self])}

    def lengths(self) -> list[int | None]:
        return [length or None for length in self.stopped.tolist()]


class RecordedNaN(LogitsProcessor):
    """Remembers after how many new tokens the logits of each row became NaN, from which nothing can
    be drawn: ``generate`` would end the call for all rows. What it draws there is to be cut off.

    Args:
        front: tokens in front of the new ones.
        rows: prompts of the call.
        device: of the model.
    """

    def __init__(self, front: int, rows: int, device: torch.device):
        self.front = front
        self.at = torch.full((rows,), -1, dtype=torch.long, device=device)  # -1: not yet

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bad = scores.isnan().any(-1)
        self.at = torch.where(bad & (self.at < 0), input_ids.shape[1] - self.front, self.at)
        return torch.where(bad[:, None], 0.0, scores)

    def lengths(self) -> list[int | None]:
        """New tokens in front of the first NaN of each row; None where there is none."""
        return [None if at < 0 else at for at in self.at.tolist()]


class _StopTokens(StoppingCriteria):
    """Token sequences that end a response."""

    def __init__(self, stops: Sequence[Sequence[int]], front: int, device: torch.device):
        self.stops = [torch.tensor([int(t) for t in stop]).to(device) for stop in stops]
        self.front = front

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return ends_with(input_ids[:, self.front :], self.stops)


def ends_with(new: Tensor, stops: Sequence[Tensor]) -> Tensor:
    """Which rows of [b, T] end with one of the sequences, [b] bool."""
    done = torch.zeros(len(new), dtype=torch.bool, device=new.device)
    for stop in stops:
        if len(stop) <= new.shape[1]:
            done = done | (new[:, -len(stop) :] == stop).all(1)
    return done


def beams_of(kwargs: Mapping[str, Any], model: Any) -> int:
    """Of a call of ``generate``."""
    config = getattr(model, "pretrained_model", model).generation_config
    return kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1


def stops_of(
    kwargs: dict[str, Any], model: Any, tokenizer: Any
) -> Callable[[int, int, torch.device], NoStops]:
    """What makes the stops of a call of ``generate`` from (tokens in front of the new ones, rows,
    device). What they do themselves is taken out of ``kwargs``.

    Raises:
        ValueError: several beams, whose rows are not those of the prompts; ``stop`` is not a list
            of token sequences.
    """
    config = getattr(model, "pretrained_model", model).generation_config
    found = {
        name: kwargs.pop(name) if name in kwargs else getattr(config, name, None)
        for name in _STOPPING
    }
    for name in ("stop_strings", "max_time"):  # of the model's generation_config
        if getattr(config, name, None) is not None:
            kwargs[name] = None
    check_stop(found["stop"] or ())
    reader = kwargs.pop("tokenizer", None) or tokenizer
    asked = [name for name, value in found.items() if value]
    if not asked:
        return lambda front, rows, device: NoStops(rows)
    beams = beams_of(kwargs, model)
    if beams > 1:
        raise ValueError(
            f"{asked[0]} with num_beams={beams} is not supported: where a beam was stopped is not "
            "known; leave one of the two out"
        )

    def make(front: int, rows: int, device: torch.device) -> NoStops:
        criteria = StoppingCriteriaList(found["stopping_criteria"] or [])
        if found["stop"]:
            criteria.append(_StopTokens(found["stop"], front, device))
        if found["stop_strings"]:
            criteria.append(
                StopStringCriteria(tokenizer=reader, stop_strings=found["stop_strings"])
            )
        if found["max_time"]:
            criteria.append(MaxTimeCriteria(max_time=found["max_time"]))
        return RecordedStops(criteria, front, rows, device)

    return make
