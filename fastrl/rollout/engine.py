"""Rollouts on the very model that is trained: slots, packed prefill, one decode step for all."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.models.utils import context_length
from fastrl.rollout import bandwidth
from fastrl.rollout.cuda_graphs import EagerRunner, GraphRunner, Graphs
from fastrl.rollout.decode_step import DecodeStep
from fastrl.rollout.kv_cache import Arena, LayerShape, PrefillAttention
from fastrl.rollout.model_runner import Autocast, Policy
from fastrl.rollout.polls import make_poll
from fastrl.rollout.prompts import Prompt, checked_call, end_tokens
from fastrl.rollout.results import Results
from fastrl.rollout.rules import Rules
from fastrl.rollout.sampling_params import RolloutOutput, SamplingParams
from fastrl.rollout.scheduler import Sample, Schedule
from fastrl.rollout.self_check import check_numbers, check_weights_and_kind
from fastrl.rollout.slots import RUNNING, Slots
from fastrl.timing import start_clock

PREFILL_TOKENS = 8192  # in one pass
_ROUND = 64  # slots hold a multiple of as many tokens


class RolloutEngine:
    """Generates with the model's own weights, and says how likely every token was.

    A fixed number of slots, each with a length of its own: prompts are never padded, a prompt's
    samples share its prefill, and the next waiting sample takes the slot of one that ends. Draws
    are keyed by (seed, sample id, token index), so that a sample does not depend on slots, order
    or company.

    Args:
        model: a causal LM whose layers attend through transformers' attention interface, or a
            value-head model around one.
        tokenizer: gives the EOS token.
        max_slots: samples that run at a time.
        max_length: tokens that a slot holds, prompt and response; None makes room as it is needed,
            up to the model's context.
        kv_cache_bytes: for keys and values; fewer slots where they do not fit. None: no limit.
        autocast: makes the context in which the model runs.
        cuda_graphs: capture decode steps; only where the model lies on a CUDA device.

    Raises:
        ValueError: a number below 1; a model on several devices; a budget without room for a slot.
        UnsupportedModel: a ValueError: an encoder–decoder, a model with attention or positions of
            its own (GPT-J, BLOOM, dynamic RoPE), sharded weights, numbers that differ from those of
            plain forwards. :class:`fastrl.GenerateEngine` runs it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_slots: int = 64,
        max_length: int | None = None,
        *,
        kv_cache_bytes: int | None = None,
        autocast: Autocast = contextlib.nullcontext,
        cuda_graphs: bool = True,
    ):
        for name, x in (
            ("max_slots", max_slots),
            ("max_length", max_length),
            ("kv_cache_bytes", kv_cache_bytes),
        ):
            if x is not None and x < 1:
                raise ValueError(f"{name} must be at least 1, got {x}")
        check_weights_and_kind(model)
        devices = {p.device for p in model.parameters()}
        if len(devices) > 1:
            raise ValueError(
                f"the model lies on several devices ({', '.join(sorted(map(str, devices)))}): "
                "rollouts need it on one; load it without device_map"
            )
        self.model, self.tokenizer = model, tokenizer
        self.policy = Policy(model, autocast)
        self.max_slots, self.max_length, self.kv_cache_bytes = max_slots, max_length, kv_cache_bytes
        self._layers: list[LayerShape] | None = None
        self._autocast_dtype: torch.dtype | None = None  # in which they were looked at
        self._arena: Arena | None = None
        self._slots: Slots | None = None
        self._last_rules: Rules | None = None
        graphs = cuda_graphs and self.policy.device.type == "cuda"
        self._graphs = Graphs() if graphs else None
        check_numbers(self._trial())

    def _trial(self) -> RolloutEngine:
        """This engine with two slots, as much room as it needs, and captured steps of its own."""
        trial = copy.copy(self)
        trial.max_slots, trial.max_length, trial.kv_cache_bytes = 2, None, None
        trial._graphs = None if self._graphs is None else Graphs()
        return trial

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        sample_ids: Sequence[int] | None = None,
    ) -> RolloutOutput:
        """``params.n`` responses per prompt.

        Args:
            prompts: texts, chats (lists of messages with a role and a content, put through the
                tokenizer's chat template) or 1-D token ids.
            params: how to sample.
            sample_ids: one per prompt: with the seed they key the draws. By default the prompts'
                indices.

        Raises:
            ValueError: an empty prompt, token ids outside the vocabulary, a prompt that with its
                new tokens exceeds the model's context or ``max_length``; named by its index.
        """
        params = params or SamplingParams()
        tokens, limits, ids = checked_call(prompts, params, sample_ids, self.model, self.tokenizer)
        self._check_room(tokens, limits)
        job = _Job(tokens, limits, ids, params)
        arena, slots = self._room(job)
        with self.policy.opened():
            return self._run(job, arena, slots)

    def sleep(self) -> None:
        """Frees keys, values and captured steps; the next call of ``generate`` makes them anew."""
        self._arena = self._slots = None
        self.policy.shadow.free()
        if self._graphs is not None:
            self._graphs = Graphs()

    def wake(self) -> None:
        """Nothing to do: memory comes back when it is needed."""

    def _run(self, job: _Job, arena: Arena, slots: Slots) -> RolloutOutput:
        step = DecodeStep(self.policy, arena, slots, self._rules(job, slots))
        runner = EagerRunner(step) if self._graphs is None else GraphRunner(step, self._graphs)
        schedule = Schedule(job.samples(), arena.slots)
        poll = make_poll(slots, schedule)
        results = Results(len(schedule.waiting), max(job.limits), self.policy.device)
        slots.empty(range(arena.slots))
        keys = job.keys().tolist()
        clock = start_clock(self.policy.device)
        prefilled = 0
        while schedule.waiting or schedule.running:
            with clock("prefill"):
                prefilled += self._admit(job, step, schedule, keys)
            with clock("decode"):
                for source, target, tokens in schedule.pack():
                    arena.move(source, target, tokens)
                    slots.move(source, target)
                steps = schedule.steps(poll.due)
                runner.run(schedule.bucket, schedule.span(steps), steps)
                ended = sorted({*schedule.advance(steps), *poll.after(steps)})
                if ended:
                    results.take(slots, schedule.release(ended))
                    slots.empty(ended)
        output = results.output(
            truncated=step.rules.cuts or step.rules.bends,
            values=self.policy.v_head is not None,
        )
        output.sample_ids = [i for i in job.ids for _ in range(job.params.n)]
        output.temperature = job.params.temperature or 1.0
        output.stats = self._stats(output, job, arena, schedule, clock.seconds(), prefilled)
        output.stats |= {f"perf/graph_{name}": value for name, value in runner.stats.items()}
        return output

    def _stats(
        self,
        output: RolloutOutput,
        job: _Job,
        arena: Arena,
        schedule: Schedule,
        seconds: dict[str, float],
        prefilled: int,
    ) -> dict[str, float]:
        lengths = [len(sequence) for sequence in output.sequences]
        prompts = [len(prompt) for prompt in job.prompts for _ in range(job.params.n)]
        read = schedule.decode_steps * bandwidth.weight_bytes(self.policy.language_model)
        read += bandwidth.kv_bytes(arena, zip(prompts, lengths, strict=True))
        prefill, decode = (max(seconds.get(x, 0.0), 1e-9) for x in ("prefill", "decode"))
        return {
            "time/rollout": seconds["total"],
            "time/rollout/prefill": prefill,
            "time/rollout/decode": decode,
            "perf/rollout_tokens_per_second": sum(lengths) / seconds["total"],
            "perf/prefill_tokens_per_second": prefilled / prefill,
            "perf/decode_tokens_per_second": sum(lengths) / decode,
            "perf/bandwidth_share": read / decode / bandwidth.bandwidth(self.policy.device),
            "perf/slot_utilisation": sum(lengths) / schedule.rows_run,
            "perf/decode_steps": float(schedule.decode_steps),
            "perf/nan_samples": float(output.finish_reasons.count("nan")),
        }

    def _admit(self, job: _Job, step: DecodeStep, schedule: Schedule, keys: list[int]) -> int:
        """Fills free slots, and runs each new prompt once but for its last token, which is left to
        the decode step. Returns how many tokens were run."""
        arena, slots = step.arena, step.slots
        admitted = schedule.admit([len(prompt) for prompt in job.prompts])
        if not admitted:
            return 0
        arena.clear([slot for slot, _ in admitted])
        by_prompt: dict[int, list[int]] = {}
        for slot, sample in admitted:
            by_prompt.setdefault(sample.prompt, []).append(slot)
        tokens = 0
        for part in _parts(by_prompt, [len(prompt) - 1 for prompt in job.prompts]):
            lengths = [len(job.prompts[i]) - 1 for i in part]
            attention = PrefillAttention(arena, lengths, [by_prompt[i] for i in part])
            packed = torch.cat([job.prompts[i][:-1] for i in part]).to(self.policy.device)
            positions = torch.cat([torch.arange(length) for length in lengths])
            self.policy.prefill(packed, positions.to(packed.device), attention)
            tokens += len(packed)
        prompts = [job.prompts[sample.prompt] for _, sample in admitted]
        at = [slot for slot, _ in admitted]
        slots.fill(
            at,
            token=[int(prompt[-1]) for prompt in prompts],
            position=[len(prompt) - 1 for prompt in prompts],
            made=[0] * len(at),
            limit=[sample.limit for _, sample in admitted],
            sample=[keys[sample.index] for _, sample in admitted],
            reason=[RUNNING] * len(at),
        )
        slots.remember(at, prompts)
        return tokens

    def _rules(self, job: _Job, slots: Slots) -> Rules:
        vocabulary = self.model.config.get_text_config().vocab_size
        ends = end_tokens(self.model, self.tokenizer, job.params.eos_token_ids)
        rules = Rules.of(job.params, ends, vocabulary, self.policy.device)
        if self._last_rules is None or not rules.same(self._last_rules):
            self._last_rules = rules
        slots.begin(
            seed=job.seed,
            vocabulary=vocabulary if rules.repetition_penalty != 1 else None,
            tail=None if rules.stops is None else rules.stops.shape[1],
        )
        return self._last_rules  # the same tensors, whose addresses captured steps hold

    def _check_room(self, prompts: list[Tensor], limits: list[int]) -> None:
        if self.max_length is None:
            return
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            if len(prompt) + limit > self.max_length:
                raise ValueError(
                    f"prompts[{i}] has {len(prompt)} tokens; with {limit} new ones it exceeds the "
                    f"engine's max_length of {self.max_length}: raise that, or shorten one of them"
                )

    def _room(self, job: _Job) -> tuple[Arena, Slots]:
        """Memory that the job fits in: what there is, or more."""
        if self.policy.autocast_dtype() != self._autocast_dtype:
            self.sleep()  # keys and values have another type now
            self._layers, self._autocast_dtype = None, self.policy.autocast_dtype()
        needed = max(len(p) + n for p, n in zip(job.prompts, job.limits, strict=True))
        arena = self._arena
        length = arena.length if arena is not None else 0
        if length < needed:
            whole = -(-needed // _ROUND) * _ROUND
            context = context_length(self.model) or whole
            length = self.max_length or max(needed, min(whole, context))
        count = min(self.max_slots, len(job.prompts) * job.params.n, self._affordable(length))
        if arena is not None and arena.length >= length and arena.slots >= count:
            assert self._slots is not None
            return arena, self._slots
        if arena is not None:  # what is made anew is not made smaller
            count = max(count, min(arena.slots, self._affordable(length)))
        self.sleep()
        self._arena = Arena(self._shapes(), count, length, self.policy.dtype, self.policy.device)
        self._slots = Slots(count, length, self.policy.device)
        return self._arena, self._slots

    def _shapes(self) -> list[LayerShape]:
        if self._layers is None:
            self._layers = self.policy.layer_shapes()
        return self._layers

    def _affordable(self, length: int) -> int:
        """Slots of so many tokens that the budget allows."""
        if self.kv_cache_bytes is None:
            return self.max_slots
        each = Arena.bytes_per_slot(self._shapes(), length, self.policy.dtype)
        if each > self.kv_cache_bytes:
            raise ValueError(
                f"kv_cache_bytes={self.kv_cache_bytes} leaves no room for a slot of {length} "
                f"tokens, which takes {each}: raise it, or lower max_length"
            )
        return self.kv_cache_bytes // each


class _Job:
    """One call of ``generate``."""

    def __init__(
        self, prompts: list[Tensor], limits: list[int], ids: list[int], params: SamplingParams
    ):
        self.prompts, self.limits, self.ids, self.params = prompts, limits, ids, params
        seed = params.seed
        self.seed = int(torch.randint(1 << 62, ())) if seed is None else seed

    def samples(self) -> list[Sample]:
        n = self.params.n
        return [
            Sample(i * n + j, i, limit) for i, limit in enumerate(self.limits) for j in range(n)
        ]

    def keys(self) -> Tensor:
        """Of each sample, a hash of its prompt's id and its number among that prompt's samples."""
        n = self.params.n
        ids = torch.tensor(self.ids).repeat_interleave(n)
        return fastrl_kernels.sample_keys(0, ids, torch.arange(n).repeat(len(self.ids)))


def _parts(by_prompt: dict[int, list[int]], lengths: list[int]) -> list[list[int]]:
    """Prompts in passes of a bounded number of tokens; those without a token need none."""
    parts: list[list[int]] = []
    room = 0
    for prompt in by_prompt:
        if lengths[prompt] == 0:
            continue
        if not parts or lengths[prompt] > room:
            parts.append([])
            room = PREFILL_TOKENS
        parts[-1].append(prompt)
        room -= lengths[prompt]
    return parts
