"""Rollouts through ``model.generate``, which the models of transformers have."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from fastrl.config import SAMPLED
from fastrl.data.batch import pad, padding_token
from fastrl.data.grouping import passes_that_fit
from fastrl.data.prompt_ids import Prompt, check_prompts
from fastrl.models.layout import layout_of
from fastrl.models.products import Products
from fastrl.models.sharding import is_spread_unit, wrapped_by_fsdp
from fastrl.models.utils import evaluating
from fastrl.rollout.generation_check import together
from fastrl.rollout.generation_kwargs import neutral_kwargs, unpacked
from fastrl.rollout.rescoring import Rescorer
from fastrl.rollout.sampling_params import RolloutRequest, SamplingParams, check_stop, end_tokens
from fastrl.samples import Samples


class GenerateEngine:
    """Samples responses with ``model.generate``, by sampling parameters or by its keywords.

    Args:
        model: a language model, causal or encoder–decoder, or a value-head model around one.
        tokenizer: gives the pad and EOS tokens, and the ids of texts and chats.
        batch_size: most prompts per call of ``generate``.
        autocast: makes the context in which ``generate`` runs.
        scores: let :meth:`generate` return log-probs, entropies and values, as
            :class:`RolloutEngine` does, by further forward passes without padding.

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
        self._rescorer = Rescorer(model) if scores else None

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        sample_ids: Sequence[int] | None = None,
    ) -> Samples:
        """Returns ``params.n`` responses per prompt; arguments: see :meth:`RolloutEngine.generate`.

        Of the model's generation_config only the tokens that end a response are used, where
        ``params`` names none. ``sample_ids`` are returned with the samples, but do not key the
        draws: these depend on ``params.seed``, or else torch's own generator, and on the batch.

        Raises:
            ValueError: see :meth:`RolloutEngine.generate`; no token to pad prompts of several
                lengths with; a model whose ``generate`` does not run.
        """
        params = params or SamplingParams()
        for name, asked in (
            ("policy_support='sampled'", params.policy_support == SAMPLED),
            ("response_format", params.response_format is not None),
        ):
            if asked:
                raise ValueError(
                    f"{name} needs a RolloutEngine, and model.generate samples here: leave it out"
                )
        request = RolloutRequest.of(prompts, params, sample_ids, self.model, self.tokenizer)
        request = request.repeated(params.n)
        self._check(request.prompts)
        kwargs: dict[str, Any] = {"pad_token_id": self._padding(request.prompts)}
        kwargs |= neutral_kwargs(self.model) | params.generation_kwargs()
        ends = end_tokens(self.model, self.tokenizer, params.eos_token_ids).tolist()
        kwargs["eos_token_id"] = ends or None
        stopping = _Stopping(stop=params.stop)
        parts = [request.select(part) for part in self._parts(request.prompts, request.limits)]
        temperature = params.temperature or 1.0
        output = Samples(
            [],
            [],
            seed=params.seed,
            sample_ids=request.sample_ids,
            numbers=list(range(params.n)) * len(prompts),
            temperature=temperature,
        )
        begin = time.perf_counter()
        with evaluating(self.model), self.autocast(), Products().on(self.model):
            with _seeded(params.seed):
                for part in parts:
                    self._extend(output, part.prompts, kwargs, ends, stopping, part.limits)
            if self._rescorer is not None:
                scores = self._rescorer(request.prompts, output.sequences, temperature)
                for name, column in scores.items():
                    setattr(output, name, column)
        _time(output, begin)
        return output

    def generate_with(
        self,
        prompts: Sequence[Tensor],
        generation_kwargs: dict[str, Any],
        limits: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> Samples:
        """Returns one response per prompt, by keyword arguments of ``model.generate`` as they are,
        and without scores, since the arguments may change the distribution.

        ``stop`` is a further argument: token sequences, as in :class:`SamplingParams`. A response
        ends at the first EOS, or where ``stop``, ``stop_strings`` or ``stopping_criteria`` stopped
        it, or before the first token whose logits are NaN; ``max_time`` cuts it, as a length does.

        Args:
            limits: max_new_tokens of each prompt, in place of the keyword.
            seed: seeds the draws and leaves torch's own generator as it is; None draws from that.

        Raises:
            ValueError: see :meth:`generate`; a bad ``stop``; several beams with a stop other than
                EOS and length; an argument that asks for several responses or a dict, or that
                sets where a decoder begins.
        """
        kwargs = unpacked(generation_kwargs)
        if "pad_token_id" not in kwargs:
            kwargs = {"pad_token_id": self._padding(prompts), **kwargs}
        for name in ("num_return_sequences", "return_dict_in_generate"):
            if kwargs.pop(name, None) not in (None, 1, False):
                raise ValueError(f"{name} is not supported here: repeat the prompts instead")
        self._layout.check_generation(kwargs)
        stopping = _Stopping.taken_from(kwargs, self.model, self.tokenizer)
        check_prompts(prompts, self.model, limits or kwargs.get("max_new_tokens"))
        self._check(prompts)
        size = self.batch_size
        parts = [slice(start, start + size) for start in range(0, len(prompts), size)]
        output = Samples(sequences=[], finish_reasons=[], seed=seed)
        ends = end_tokens(self.model, self.tokenizer, kwargs.get("eos_token_id")).tolist()
        begin = time.perf_counter()
        with evaluating(self.model), self.autocast(), Products().on(self.model), _seeded(seed):
            for part in parts:
                part_limits = None if limits is None else limits[part]
                self._extend(output, prompts[part], kwargs, ends, stopping, part_limits)
        _time(output, begin)
        return output

    def _check(self, prompts: Sequence[Tensor]) -> None:
        """Makes prompts run one at a time where a batch changes what the model draws."""
        with evaluating(self.model), self.autocast():
            self.batch_size = together(self.model, prompts, self.batch_size)

    def sleep(self) -> None:
        """Does nothing; :class:`RolloutEngine` frees memory here."""

    def _padding(self, prompts: Sequence[Tensor]) -> int | None:
        if self.tokenizer is None:
            return 0  # any token: masks leave it out
        lengths = [len(p) for p in prompts] if self.batch_size > 1 else []
        return padding_token(
            lengths, self.tokenizer, self.model.config.get_text_config().vocab_size
        )

    def _extend(
        self,
        output: Samples,
        prompts: Sequence[Tensor],
        kwargs: dict[str, Any],
        ends: Sequence[int],
        stopping: _Stopping,
        limits: Sequence[int] | None = None,
    ) -> None:
        rows, device = len(prompts), self.model.device
        front = self._layout.in_front(max(map(len, prompts)))
        stops = _RecordedStops(stopping.criteria(front, device), front, rows, device)
        nans = _RecordedNaN(front, rows, device)
        criteria: list[StoppingCriteria] = [stops] if stops.criteria else []
        if stopping.max_time:
            criteria.append(MaxTimeCriteria(max_time=stopping.max_time))
        kwargs = dict(kwargs)
        if limits is not None:
            kwargs["max_new_tokens"] = max(limits)
            if min(limits) < max(limits):
                criteria.append(_Limits(limits, front, device))
        if criteria:
            kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
        if _num_beams(kwargs, self.model) == 1:  # with beams, rows are not those of prompts
            processors = kwargs.get("logits_processor") or ()
            kwargs["logits_processor"] = LogitsProcessorList([*processors, nans])
        generated = self._continued(prompts, kwargs)
        row_limits: Sequence[int | None] = limits or [None] * rows
        cuts = zip(row_limits, stops.lengths(), nans.lengths(), strict=True)
        for row, (limit, stopped, lost) in zip(generated, cuts, strict=True):
            length, reason = _end(row[:limit].tolist(), ends, stopped, lost)
            output.sequences.append(row[:length])
            output.finish_reasons.append(reason)

    def _parts(self, prompts: Sequence[Tensor], limits: Sequence[int]) -> list[list[int]]:
        """Indices of the samples of each call of ``generate``, whose longest prompt and highest
        limit fit in the context together."""

        def joined(part: tuple[int, int, int] | None, i: int) -> tuple[int, int, int]:
            """Returns the number of prompts, the length of the longest and the highest limit."""
            count, longest, most = part or (0, 0, 0)
            return count + 1, max(longest, len(prompts[i])), max(most, limits[i])

        def fits(part: tuple[int, int, int]) -> bool:
            count, longest, most = part
            return count <= self.batch_size and self._layout.exceeded(longest, most) is None

        return passes_that_fit(range(len(prompts)), joined, fits)

    @torch.no_grad()
    def _continued(self, prompts: Sequence[Tensor], kwargs: dict[str, Any]) -> Iterable[Tensor]:
        padded = pad(prompts, kwargs["pad_token_id"], self._layout.prompts_padded)
        inputs = {name: x.to(self.model.device) for name, x in padded.items()}
        generate = self.model.generate
        if wrapped_by_fsdp(generate) and not is_spread_unit(self.model):
            # With whole weights no process waits for another's call, nor for its tokens.
            generate = MethodType(type(self.model).generate, self.model)
            kwargs = {"synced_gpus": False, **kwargs}
        generated = generate(**inputs, **kwargs)
        return generated[:, self._layout.in_front(inputs["input_ids"].shape[1]) :].cpu()


def _end(
    tokens: list[int], ends: Sequence[int], stopped: int | None, lost: int | None
) -> tuple[int, str]:
    """The length and finish reason of a response of ``tokens``. ``stopped`` and ``lost`` are the
    numbers of tokens before it was stopped, and before its logits were NaN; None: never."""
    length = min(x for x in (len(tokens), stopped, lost) if x is not None)
    for i, token in enumerate(tokens[:length], start=1):
        if token in ends:
            return i, "eos"
    if length == stopped:
        return length, "stop"
    return length, "length" if length == len(tokens) else "nan"


def _time(output: Samples, begin: float) -> None:
    seconds = time.perf_counter() - begin
    tokens = sum(len(s) for s in output.sequences)
    output.stats = {"time/rollout": seconds, "perf/rollout_tokens_per_second": tokens / seconds}


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    # All devices, since a model may lie on several; fork_rng would warn if they were not named.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


class _Stopping(NamedTuple):
    """Conditions that end responses besides EOS and length; all but ``stop`` are generate's."""

    stop: Sequence[Sequence[int]] | None = None  # token sequences
    stop_strings: Any = None
    stopping_criteria: Any = None
    max_time: float | None = None
    tokenizer: Any = None  # reads stop_strings

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any], model: Any, tokenizer: Any) -> _Stopping:
        """Takes the conditions out of keyword arguments, or from the model's generation_config.

        Raises:
            ValueError: a condition with several beams, whose rows are not the prompts'; a bad stop.
        """
        config = _generation_config(model)
        settings = {
            name: kwargs.pop(name) if name in kwargs else getattr(config, name, None)
            for name in cls._fields[:4]
        }
        for name in ("stop_strings", "max_time"):  # the model's generation_config may have them
            if getattr(config, name, None) is not None:
                kwargs[name] = None
        check_stop(settings["stop"] or ())
        reader = kwargs.pop("tokenizer", None) or tokenizer
        asked = [name for name, value in settings.items() if value]
        beams = _num_beams(kwargs, model)
        if asked and beams > 1:
            raise ValueError(
                f"{asked[0]} with num_beams={beams} is not supported: where a beam was stopped is "
                "not known; leave one of the two out"
            )
        return cls(**settings, tokenizer=reader)

    def criteria(self, front: int, device: torch.device) -> StoppingCriteriaList:
        """Criteria of one call of ``generate`` with ``front`` tokens before the new ones."""
        criteria = StoppingCriteriaList(self.stopping_criteria or [])
        if self.stop:
            criteria.append(_StopTokens(self.stop, front, device))
        if self.stop_strings:
            criteria.append(StopStringCriteria(self.tokenizer, self.stop_strings))
        return criteria


class _StopTokens(StoppingCriteria):
    """Stops rows that end with one of some token sequences."""

    def __init__(self, stops: Sequence[Sequence[int]], front: int, device: torch.device):
        self.stops = [torch.tensor([int(t) for t in stop]).to(device) for stop in stops]
        self.front = front

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        new = input_ids[:, self.front :]
        done = torch.zeros(len(new), dtype=torch.bool, device=new.device)
        for stop in self.stops:
            if len(stop) <= new.shape[1]:
                done = done | (new[:, -len(stop) :] == stop).all(1)
        return done


class _Limits(StoppingCriteria):
    """Stops each row at a number of new tokens of its own."""

    def __init__(self, limits: Sequence[int], front: int, device: torch.device):
        self.limits, self.front = torch.tensor(limits).to(device), front

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return self.limits <= input_ids.shape[1] - self.front


class _RecordedStops(StoppingCriteria):
    """Several criteria, with a record of where each of ``rows`` prompts was stopped: ``generate``
    pads the row from there on, perhaps with EOS. ``front`` tokens precede the new ones."""

    def __init__(self, criteria: StoppingCriteriaList, front: int, rows: int, device: torch.device):
        self.criteria, self.front = criteria, front
        self.stopped = torch.zeros(rows, dtype=torch.long, device=device)  # 0: not yet

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = self.criteria(input_ids, scores, **kwargs)
        first = done & (self.stopped == 0)
        self.stopped = torch.where(first, input_ids.shape[1] - self.front, self.stopped)
        return done

    def lengths(self) -> list[int | None]:
        """The number of new tokens after which each row was stopped; None where it was not."""
        return [length or None for length in self.stopped.tolist()]


class _RecordedNaN(LogitsProcessor):
    """Replaces logits that are no distribution (a NaN or inf among them, or all -inf), at which
    ``generate`` would fail for all rows, and records where, so that later tokens can be cut off.
    ``front`` tokens stand in front of the new ones."""

    def __init__(self, front: int, rows: int, device: torch.device):
        self.front = front
        self.at = torch.full((rows,), -1, dtype=torch.long, device=device)  # -1: not yet

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        highest = scores.amax(-1)
        bad = ~((highest > -torch.inf) & (highest < torch.inf))  # as in the kernel sample_tokens
        self.at = torch.where(bad & (self.at < 0), input_ids.shape[1] - self.front, self.at)
        return torch.where(bad[:, None], 0.0, scores)

    def lengths(self) -> list[int | None]:
        """The number of new tokens before each row's first bad logits; None where it had none."""
        return [None if at < 0 else at for at in self.at.tolist()]


def _num_beams(kwargs: Mapping[str, Any], model: Any) -> int:
    return kwargs.get("num_beams") or getattr(_generation_config(model), "num_beams", None) or 1


def _generation_config(model: Any) -> Any:
    return getattr(model, "pretrained_model", model).generation_config
