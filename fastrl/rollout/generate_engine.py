"""Responses from the policy, through ``model.generate``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from fastrl.data.batch import need_pad_token
from fastrl.models.layout import layout_of
from fastrl.models.modes import evaluating
from fastrl.rollout.keywords import neutral_kwargs, unpacked
from fastrl.rollout.prompts import Prompt, check_prompts, checked_call, end_tokens
from fastrl.rollout.rescoring import Scorer
from fastrl.rollout.rules import Rules
from fastrl.rollout.sampling_params import RolloutOutput, SamplingParams
from fastrl.rollout.slots import FIELDS
from fastrl.rollout.stopping import RecordedNaN, beams_of, ends_with, stops_of

T = TypeVar("T")


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
        self._scorer = Scorer(model) if scores else None

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
        tokens, limits, ids = checked_call(prompts, params, sample_ids, self.model, self.tokenizer)
        n = params.n
        tokens, limits, ids = _repeated(tokens, n), _repeated(limits, n), _repeated(ids, n)
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

    def wake(self) -> None:
        """Nothing to bring back."""

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
        rules = Rules.of(params, ends, vocabulary, self.model.device)
        figures = self._scorer(prompts, output.sequences, rules)
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


def _repeated(items: list[T], times: int) -> list[T]:
    return [item for item in items for _ in range(times)]


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
