"""The rollout engine: continuous batching on the model that is trained, with packed prefill and
one decode step for all slots."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.config import SAMPLED
from fastrl.data.grouping import passes_by_size
from fastrl.data.prompt_ids import Prompt
from fastrl.models.host_memory import to_device
from fastrl.models.routing import UNKNOWN, routers_of
from fastrl.models.utils import context_length
from fastrl.rollout import bandwidth
from fastrl.rollout.attention import PrefillAttention
from fastrl.rollout.cuda_graphs import KINDS, GraphRunner, StepRunner
from fastrl.rollout.decode_step import DecodeStep, LogitsProcessors
from fastrl.rollout.grammars import Drawing, GrammarMasks, Grammars
from fastrl.rollout.kv_cache import KVCache, LayerShape, Moves, PromptCopy, Slots
from fastrl.rollout.model_runner import Autocast, ModelRunner
from fastrl.rollout.sampling_params import (
    RolloutRequest,
    SamplingParams,
    draw_seed,
    end_tokens,
)
from fastrl.rollout.scheduler import (
    PASS_STEPS,
    POLL_STEPS,
    Results,
    RolloutSample,
    Scheduler,
    make_finish_poll,
)
from fastrl.rollout.self_check import check_numbers, check_weights_and_kind
from fastrl.rollout.supports import SupportLog, whole_supports
from fastrl.samples import Room, Samples
from fastrl.timing import start_clock
from fastrl_kernels.rng import sample_states
from fastrl_kernels.types import RUNNING

PREFILL_TOKENS = 8192  # most of one forward; a longer prompt is run alone
_ROUND = 64  # without max_length, slots grow to multiples of it, within the model's context


class RolloutEngine:
    """Generates with the model's own weights, and returns log-probs, entropies and values.

    Each running sample has a slot and its own length in it: prompts are never padded, a prompt's
    samples share its prefill, and the next waiting sample takes the slot of one that ends. Draws
    are keyed by (seed, sample id, token index), so that a sample does not depend on slots, order
    or other samples.

    Args:
        model: a causal LM whose layers attend through transformers' attention interface, or a
            value-head model around one.
        tokenizer: gives the EOS token, and the ids of texts and chats. None where prompts are token
            ids, and the model's generation_config or the sampling parameters say what ends a
            response.
        max_slots: samples that run at a time.
        max_length: tokens of a slot, prompt and response; None grows slots as needed, up to the
            model's context.
        kv_cache_bytes: most bytes of keys and values, kept by making fewer slots; None: no limit.
        autocast: makes the context in which the model runs.
        cuda_graphs: capture decode steps; only on CUDA devices.
        keep_experts: return the choices of a mixture's routers, too.

    Raises:
        ValueError: a number below 1; a model on several devices; routers whose choices cannot be
            kept.
        UnsupportedModel: a ValueError: an encoder–decoder, a model with attention or positions of
            its own (GPT-J, BLOOM, dynamic RoPE), sharded weights, results that differ from those of
            the model's forward passes. :class:`fastrl.GenerateEngine` runs it.
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
        keep_experts: bool = False,
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
        self.model_runner = ModelRunner(model, autocast)
        self.max_slots, self.max_length, self.kv_cache_bytes = max_slots, max_length, kv_cache_bytes
        self._routers = routers_of(self.model_runner.language_model) if keep_experts else []
        self._layers: list[LayerShape] | None = None
        self._autocast_dtype: torch.dtype | None = None  # when _layers were computed
        self._kv_cache: KVCache | None = None
        self._reserved = Room()  # for a KV cache that is yet to be made
        self._expected = 0  # the most tokens that :meth:`expect` announced
        self._slots: Slots | None = None
        self._grammars: tuple[tuple[int, ...], Grammars] | None = None  # with their end tokens
        # The latest KINDS logits processors, by settings: captured steps hold their addresses.
        self._processors: dict[tuple, LogitsProcessors] = {}
        device = self.model_runner.device
        captures = cuda_graphs and device.type == "cuda"
        self._runner = GraphRunner(device) if captures else StepRunner()
        self._check()
        self.model_runner.fuse_layers(self._shapes())
        self.model_runner.fuse_draw(self._shapes())

    def _check(self) -> None:
        """Raises UnsupportedModel where results differ from the model's forward passes."""
        check_numbers(self._trial())

    def _trial(self) -> RolloutEngine:
        """A copy of this engine with two slots of any length and captured steps of its own."""
        trial = copy.copy(self)
        trial.max_slots, trial.max_length, trial.kv_cache_bytes = 2, None, None
        trial._runner = self._runner.another()
        return trial

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        sample_ids: Sequence[int] | None = None,
    ) -> Samples:
        """Returns ``params.n`` samples of each prompt, one after the other, with their log-probs.

        Args:
            prompts: texts, chats (lists of messages with a role and a content, put through the
                tokenizer's chat template) or 1-D token ids.
            params: how to sample.
            sample_ids: one per prompt: with the seed they key the draws. By default the prompts'
                indices.

        Raises:
            ValueError: no prompts; an empty prompt, or one that with new tokens exceeds the context
                or ``max_length``; ids outside the vocabulary; a list without an entry per prompt;
                no tokenizer for texts or for end tokens; too low ``kv_cache_bytes``.
            RuntimeError: with ``keep_experts``, a router's choices that were not kept.
        """
        params = params or SamplingParams()
        request = RolloutRequest.of(prompts, params, sample_ids, self.model, self.tokenizer)
        self._check_room(request)
        formats = params.formats(len(prompts))
        ends = end_tokens(self.model, self.tokenizer, params.eos_token_ids)
        seed = draw_seed() if params.seed is None else params.seed
        samples = _samples(request, params.n, seed)
        kv_cache, slots = self._make_room(request, len(samples))
        if params.n > 1 and len(samples) > kv_cache.slots:
            kv_cache.keep_prompts()
        scheduler, device = self._scheduler(samples, kv_cache), self.model_runner.device
        poll = make_finish_poll(slots, scheduler)
        results = Results(len(samples), max(request.limits), device)
        routes, over_support = bool(kv_cache.experts), params.policy_support == SAMPLED
        supports, masks = SupportLog(self.vocabulary), None
        if any(formats):
            each = [given for given in formats for _ in range(params.n)]
            masks = GrammarMasks(self._grammars_of(ends), each, kv_cache.slots, device)
        # A captured step has no place where the host is waited for.
        runner = self._runner if masks is None else StepRunner()
        chosen: dict[int, Tensor] = {}  # experts, by the sample's index
        with self.model_runner.opened():
            step = DecodeStep(
                self.model_runner, kv_cache, slots, self._begin_call(params, ends, slots), masks
            )
            runner.begin(step)
            clock = start_clock(device)
            prefilled = 0
            while scheduler.waiting or scheduler.running:
                with clock("prefill"):
                    prefilled += self._admit(request, step, scheduler)
                with clock("decode"):
                    packed = scheduler.pack()
                    if packed:
                        moves = Moves.of([move[:2] for move in packed], device)
                        kv_cache.move(moves, max(tokens for *_, tokens in packed))
                        slots.move(moves)
                    steps = scheduler.steps(poll.due if masks is None else 1)
                    if masks is not None:
                        masks.begin(_drawing(slots, scheduler))
                    runner.run(step, scheduler.bucket, scheduler.span(steps), steps)
                    if step.processors.over_support:
                        ran = enumerate(scheduler.samples)
                        supports.take(slots, {i: x.index for i, x in ran if x is not None}, steps)
                    ended = sorted({*scheduler.advance(steps), *poll.after(steps)})
                    if ended:
                        released = scheduler.release(ended)
                        results.take(slots, released)
                        chosen |= {x.index: kv_cache.chosen(slot) for slot, x in released if routes}
                        slots.empty(ended)
            output = results.output(values=self.model_runner.v_head is not None)
            per_sample = request.repeated(params.n)
            if step.processors.over_support:
                output.supports = supports.of_samples(output.sequences)
            elif over_support:
                output.supports = whole_supports(output.sequences, supports.vocabulary)
            if routes:
                output.experts = _of_responses(chosen, per_sample.prompts, output.sequences)
            output.seed, output.room = seed, self.room()
            output.sample_ids = per_sample.sample_ids
            output.numbers = list(range(params.n)) * len(request.prompts)
            output.temperature = params.temperature or 1.0
            lengths = [len(prompt) for prompt in per_sample.prompts]
            seconds = clock.seconds()
            output.stats = self._stats(output, lengths, kv_cache, scheduler, seconds, prefilled)
            output.stats |= {f"perf/graph_{name}": x for name, x in runner.stats.items()}
            if masks is not None:
                output.stats |= masks.statistics(scheduler.decode_steps)
                dead = output.finish_reasons.count("grammar")
                output.stats["perf/grammar_dead_ends"] = float(dead)
        return output

    def sleep(self) -> None:
        """Frees keys, values and captured steps, and what :meth:`reserve` reserved."""
        self._free()
        self._reserved = Room()

    @property
    def vocabulary(self) -> int:
        """The number of the model's logits."""
        return self.model.config.get_text_config().vocab_size

    def room(self) -> Room:
        """The room that the next ``generate`` finds: the KV cache's, or else the reserved one."""
        kv_cache = self._kv_cache
        return self._reserved if kv_cache is None else Room(kv_cache.slots, kv_cache.length)

    def reserve(self, slots: int, length: int) -> None:
        """Gives the engine another one's :meth:`room`, so that it computes with the same shapes,
        and hence to the same bits; at most ``max_slots`` and ``max_length``. Zeros reserve nothing.

        Raises:
            ValueError: a number below 0.
        """
        for name, x in (("slots", slots), ("length", length)):
            if x < 0:
                raise ValueError(f"{name} must be 0 or more, got {x}")
        self._free()
        longest = length if self.max_length is None else min(length, self.max_length)
        self._reserved = Room(min(slots, self.max_slots), longest)

    def expect(self, tokens: int) -> None:
        """Announces that samples with their prompts will have up to so many tokens. From the next
        ``generate`` on, a slot has room for them, so that keys, values and captured steps need not
        be made anew where a prompt is longer than those before."""
        self._expected = max(self._expected, tokens)

    def _free(self) -> None:
        self._kv_cache = self._slots = None
        self.model_runner.free()
        self._runner.free()

    def _scheduler(self, samples: list[RolloutSample], kv_cache: KVCache) -> Scheduler:
        """A call's scheduler: prompts wait for each other where decode steps are graph replays."""
        return Scheduler(
            samples,
            kv_cache.slots,
            keeps_prompts=kv_cache.keeps_prompts,
            patience=PASS_STEPS if isinstance(self._runner, GraphRunner) else 0,
        )

    def _admit(self, request: RolloutRequest, step: DecodeStep, scheduler: Scheduler) -> int:
        """Fills free slots with waiting samples. A prompt lies in a slot without its last token,
        which the decode step takes; it is copied from a slot that has it, or else run once for all
        of its slots. Returns the number of tokens that were run."""
        kv_cache, slots = step.kv_cache, step.slots
        admitted, held = scheduler.admit([len(prompt) for prompt in request.prompts])
        if not admitted:
            return 0
        by_prompt: dict[int, list[int]] = {}
        for slot, sample in admitted:
            by_prompt.setdefault(sample.prompt, []).append(slot)
        lengths = [len(prompt) - 1 for prompt in request.prompts]
        copied = [i for i in by_prompt if i in held]
        kv_cache.copy([PromptCopy(held[i], by_prompt.pop(i), lengths[i]) for i in copied])
        if by_prompt:
            kv_cache.clear([slot for targets in by_prompt.values() for slot in targets])
        tokens = 0
        filled = [i for i in by_prompt if lengths[i]]
        for part in passes_by_size(filled, lengths.__getitem__, PREFILL_TOKENS):
            targets = [by_prompt[i] for i in part]
            attention = PrefillAttention(kv_cache, [lengths[i] for i in part], targets)
            packed = torch.cat([request.prompts[i][:-1] for i in part])
            packed = to_device(packed, self.model_runner.device)
            self.model_runner.prefill(packed, attention.layout.positions, attention)
            tokens += len(packed)
        prompts = [request.prompts[sample.prompt] for _, sample in admitted]
        filled_slots = [slot for slot, _ in admitted]
        slots.fill(
            filled_slots,
            token=[int(prompt[-1]) for prompt in prompts],
            position=[len(prompt) - 1 for prompt in prompts],
            num_generated=[0] * len(filled_slots),
            limit=[sample.limit for _, sample in admitted],
            sample=[sample.state for _, sample in admitted],
            reason=[RUNNING] * len(filled_slots),
        )
        slots.remember(filled_slots, prompts)
        return tokens

    def _grammars_of(self, ends: Tensor) -> Grammars:
        """The tokenizer's grammars, which are kept for the next call with the same end tokens."""
        if self.tokenizer is None:
            raise ValueError("response_format needs a tokenizer: pass the engine one")
        ids = tuple(ends[ends < self.vocabulary].tolist())
        if self._grammars is None or self._grammars[0] != ids:
            self._grammars = ids, Grammars(self.tokenizer, self.vocabulary, ids)
        return self._grammars[1]

    def _begin_call(self, params: SamplingParams, ends: Tensor, slots: Slots) -> LogitsProcessors:
        """Prepares the slots for a call and returns its logits processors: those of an earlier call
        where they are equal, since captured steps contain the addresses of their tensors."""
        on_host = LogitsProcessors.of(params, ends, self.vocabulary)
        settings = on_host.as_numbers()
        earlier = self._processors.pop(settings, None)
        processors = on_host.to(self.model_runner.device) if earlier is None else earlier
        self._processors[settings] = processors
        if len(self._processors) > KINDS:
            del self._processors[next(iter(self._processors))]
        slots.begin(
            vocabulary=self.vocabulary if processors.repetition_penalty != 1 else None,
            tail=None if processors.stops is None else processors.stops.shape[1],
            support=(POLL_STEPS, -(-self.vocabulary // 32)) if processors.over_support else None,
        )
        return processors

    def _stats(
        self,
        output: Samples,
        prompt_lengths: list[int],
        kv_cache: KVCache,
        scheduler: Scheduler,
        seconds: dict[str, float],
        prefilled: int,
    ) -> dict[str, float]:
        lengths = [len(sequence) for sequence in output.sequences]
        nbytes = scheduler.decode_steps * bandwidth.weight_bytes(self.model_runner.language_model)
        nbytes += bandwidth.kv_bytes(kv_cache, zip(prompt_lengths, lengths, strict=True))
        prefill, decode = (max(seconds.get(x, 0.0), 1e-9) for x in ("prefill", "decode"))
        return {
            "time/rollout": seconds["total"],
            "time/rollout/prefill": prefill,
            "time/rollout/decode": decode,
            "perf/rollout_tokens_per_second": sum(lengths) / seconds["total"],
            "perf/prefill_tokens_per_second": prefilled / prefill,
            "perf/decode_tokens_per_second": sum(lengths) / decode,
            "perf/bandwidth_share": nbytes / decode / bandwidth.bandwidth(self.model_runner.device),
            "perf/slot_utilisation": sum(lengths) / scheduler.rows_run,
            "perf/decode_steps": float(scheduler.decode_steps),
            "perf/nan_samples": float(output.finish_reasons.count("nan")),
        }

    def _check_room(self, request: RolloutRequest) -> None:
        if self.max_length is None:
            return
        for i, (prompt, limit) in enumerate(zip(request.prompts, request.limits, strict=True)):
            if len(prompt) + limit > self.max_length:
                raise ValueError(
                    f"prompts[{i}] has {len(prompt)} tokens; with {limit} new ones it exceeds the "
                    f"engine's max_length of {self.max_length}: raise that, or shorten one of them"
                )

    def _make_room(self, request: RolloutRequest, samples: int) -> tuple[KVCache, Slots]:
        """The KV cache and slots of a call, which grow where its samples do not fit."""
        if self.model_runner.autocast_dtype() != self._autocast_dtype:
            self._free()  # keys and values have another type now
            self._layers, self._autocast_dtype = None, self.model_runner.autocast_dtype()
        needed = max(len(p) + n for p, n in zip(request.prompts, request.limits, strict=True))
        needed = max(needed, min(self._expected, self.max_length or self._expected))
        kv_cache, room = self._kv_cache, self.room()
        length = room.length
        if length < needed:
            whole = -(-needed // _ROUND) * _ROUND
            context = context_length(self.model) or whole
            length = self.max_length or max(needed, min(whole, context))
        count = min(self.max_slots, samples, self._affordable(length))
        if kv_cache is not None and kv_cache.length >= length and kv_cache.slots >= count:
            assert self._slots is not None
            return kv_cache, self._slots
        # No fewer slots than before, as far as kv_cache_bytes allows.
        count = max(count, min(room.slots, self._affordable(length)))
        self.sleep()
        layers, device = self._shapes(), self.model_runner.device
        self._kv_cache = KVCache(layers, count, length, self.model_runner.dtype, device)
        self._kv_cache.keep_experts([router.top_k for router in self._routers])
        self._slots = Slots(count, length, device)
        return self._kv_cache, self._slots

    def _shapes(self) -> list[LayerShape]:
        if self._layers is None:
            self._layers = self.model_runner.layer_shapes()
        return self._layers

    def _affordable(self, length: int) -> int:
        """The number of slots of ``length`` tokens that the budget allows."""
        if self.kv_cache_bytes is None:
            return self.max_slots
        each = KVCache.bytes_per_slot(self._shapes(), length, self.model_runner.dtype)
        if each > self.kv_cache_bytes:
            raise ValueError(
                f"kv_cache_bytes={self.kv_cache_bytes} leaves no room for a slot of {length} "
                f"tokens, which takes {each}: raise it, or lower max_length"
            )
        return self.kv_cache_bytes // each


def _drawing(slots: Slots, scheduler: Scheduler) -> list[Drawing]:
    """The samples whose next tokens are drawn, with those that were drawn before."""
    state = slots.state
    table = torch.stack([state.reason, state.num_generated, state.token]).t().tolist()
    return [
        Drawing(slot, sample.index, token if generated else None)
        for slot, (sample, (reason, generated, token)) in enumerate(
            zip(scheduler.samples, table, strict=True)
        )
        if sample is not None and reason == RUNNING
    ]


def _samples(request: RolloutRequest, n: int, seed: int) -> list[RolloutSample]:
    """``n`` samples of each prompt, one after the other. A sample's id, which keys its draws with
    the seed, is a hash of its prompt's id and its number among that prompt's samples."""
    prompts = len(request.prompts)
    ids = torch.tensor(request.sample_ids).repeat_interleave(n)
    ids = fastrl_kernels.sample_keys(0, ids, torch.arange(n).repeat(prompts), backend="torch")
    states = sample_states(seed, ids).tolist()
    return [RolloutSample(i, i // n, request.limits[i // n], states[i]) for i in range(n * prompts)]


def _of_responses(
    experts: dict[int, Tensor], prompts: list[Tensor], sequences: list[Tensor]
) -> list[Tensor]:
    """The choices of experts of each prompt with its response, as ``Samples.experts`` has them, on
    the host: the last token was not run.

    Raises:
        RuntimeError: a router's choices for a token that was run were not kept.
    """
    choices = []
    for i, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        chosen = experts[i][: len(prompt) + len(sequence) - 1].cpu()
        if (chosen[len(prompt) - 1 :] == UNKNOWN).any() or (chosen[:, :-1] == UNKNOWN).any():
            raise RuntimeError(
                "a router's choices were not kept, as its layer does not call it: leave out "
                "replay_routing"
            )
        choices.append(chosen)
    return choices
