"""A run that is planned for a command's flags, and what can be changed of it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from fastrl.config import PPOConfig, parse_json
from fastrl.models import quantised
from fastrl.models.model_files import is_adapter
from fastrl.models.optimizers import optimizer_name
from fastrl.tools.commands.plan_job import PREFERENCES, PlanJob, new_adapter
from fastrl.trainers.plan.advice import Dial, Remedy
from fastrl.trainers.plan.memory import (
    ACTIVATIONS,
    CASTS,
    GRADIENTS,
    KV_CACHE,
    OPTIMIZER,
    PARAMETERS,
    REFERENCE,
)
from fastrl.trainers.plan.passes import PassSize, choose_passes
from fastrl.trainers.plan.report import Plan
from fastrl.trainers.plan.skeleton import Skeleton

_LORA_RANK = 16  # the rank of the adapter that a plan suggests
_EIGHT_BITS = "adamw_bnb_8bit"
# Optimizers that can step in host memory, and have two moments.
_ADAMS = ("adam", "adamw_torch", "adamw_torch_fused")
_SMALLEST_POSITIONS = 256  # tokens of the smallest micro-batch that a plan suggests


@dataclass(frozen=True)
class PlannedRun:
    """A run that is planned: see :class:`fastrl.trainers.plan.advice.Planned`."""

    job: PlanJob
    skeleton: Skeleton
    flags: Any  # the flags of the method's command

    @property
    def samples_responses(self) -> bool:
        return self.job.samples_responses

    @property
    def kv_cache_flag(self) -> str | None:
        return "--rollout-kv-cache-gib" if hasattr(self.flags, "rollout_kv_cache_gib") else None

    def plan(self) -> Plan:
        """Rehearses the method's trainer; raises ValueError for lengths or settings it refuses."""
        from fastrl.trainers.rehearse import plan_memory

        job = self.job
        lengths: tuple[int, ...] = (job.prompt_tokens, job.response_tokens)
        self._check_lengths()
        module, name = job.row.trainer
        trainer_class = getattr(import_module(module), name)
        parts: dict[str, Any] = self._teachers() if job.row.taught else {}
        if job.row is PREFERENCES:
            parts = {"loss": job.method, "task": job.task}
        if job.row.whole_texts:
            lengths = (sum(lengths),)
        return plan_memory(
            trainer_class, self.skeleton, self.flags, *lengths, device=job.kind_of_device, **parts
        )

    def _teachers(self) -> dict[str, Any]:
        """What the rehearsal is to know of teachers; only their configurations are read."""
        from fastrl.trainers.rehearse import ADAPTER

        named = {"": self.flags.teacher_model_name_or_path}
        if self.flags.teacher_column is not None:
            named = parse_json("teacher", named[""])
        options = parse_json("teacher_model_init_kwargs", self.flags.teacher_model_init_kwargs)
        dtype = str(options.get("dtype", self.skeleton.dtype)).removeprefix("torch.")

        def planned(path: str | None) -> Skeleton | str | None:
            if path is None:
                return None
            own = self.skeleton.adapter is not None and is_adapter(path)
            return ADAPTER if own else Skeleton.read(path, dtype)

        return {
            "teachers": {name: planned(path) for name, path in named.items()},
            "teacher_prompt_tokens": self.job.teacher_prompt_tokens,
        }

    def fitted(self, gpu_gib: float) -> tuple[PlannedRun, Plan]:
        """The run as its command begins it on a GPU, with passes that fit unless their size is set;
        and its plan."""
        if self.flags.micro_batch_tokens is not None:
            return self, self.plan()
        passes, plan = choose_passes(
            lambda passes: self._with_passes(passes).plan(), self._tokens, self._unsplit, gpu_gib
        )
        plan.settings["chosen_for_this_GPU"] = str(passes)
        return self._with_passes(passes), plan

    def _with_passes(self, passes: PassSize) -> PlannedRun:
        return dataclasses.replace(self, flags=passes.of(self.flags))

    def _check_lengths(self) -> None:
        """Raises ValueError, by the flags' names, for lengths that no sample can have, or at which
        the run would refuse or cut samples."""
        job = self.job
        lengths = {"--prompt-tokens": job.prompt_tokens, "--response-tokens": job.response_tokens}
        self.skeleton.check_tokens(**lengths)
        whole = f"{' + '.join(lengths)} = {self._sample}"
        most = getattr(self.flags, "max_length", None)
        if most is not None and self._sample > most:
            raise ValueError(
                f"{whole} are more than --max-length={most}, to which the run cuts: raise that, or "
                "lower them"
            )
        most = getattr(self.flags, "max_completion_length", None)
        if most is not None and job.response_tokens > most:
            raise ValueError(
                f"--response-tokens {job.response_tokens} are more than --max-completion-length="
                f"{most}: raise that, or lower them"
            )
        texts = 2 if job.learns_pairs and job.learns_a_reward_model else 1
        of_a_pass = self.flags.micro_batch_tokens
        if of_a_pass is not None and texts * self._sample > of_a_pass:
            pair = f", and a pair has {texts * self._sample}" if texts == 2 else ""
            raise ValueError(
                f"{whole}{pair}: more than --micro-batch-tokens={of_a_pass}, which a pass may "
                "have. Raise that, or lower them"
            )

    def dials(self) -> list[Dial]:
        """Sizes that can grow: samples that are generated at a time, a pass's samples or tokens."""
        dials = []
        if self.samples_responses:
            slots = self.flags.rollout_slots
            dials.append(Dial(KV_CACHE, self._samples_at_once / slots, self._with_slots))
        dials.append(Dial(ACTIVATIONS, *self._passes()))
        return dials

    def changes(self) -> list[Remedy]:
        """Changes that save memory, the cheapest first: smaller rollouts and passes, then other
        costs of time, then of precision, then of what is learned."""
        return [
            *self._smaller_rollouts(),
            *self._smaller_passes(),
            *self._slower(),
            *self._less_precise(),
            *self._adapters(),
        ]

    # Sizes

    @property
    def _samples_at_once(self) -> int:
        """Samples that would be generated at a time if there were slots for all."""
        if self.job.row.generation is not None:
            return self.job.row.generation(self.flags)
        return (1 + self.job.learns_pairs) * int(self.flags.per_device_train_batch_size)

    @property
    def _size(self) -> str:
        """The name of the setting that is the number of samples, or pairs, in a mini-batch."""
        return self.job.row.size

    @property
    def _sample(self) -> int:
        return self.job.prompt_tokens + self.job.response_tokens

    @property
    def _example(self) -> int:
        """Tokens of an example, at most: of a sample, or of both texts of a pair."""
        return (1 + self.job.learns_pairs) * self._sample

    @property
    def _unsplit(self) -> int:
        """Tokens of the smallest pass: of a sample, or of all that a reward model reads at once."""
        return self._example if self.job.learns_a_reward_model else self._sample

    @property
    def _tokens(self) -> int:
        """Tokens of a mini-batch, at most."""
        return int(getattr(self.flags, self._size)) * self._example

    @property
    def _keeps_batches(self) -> bool:
        """Whether smaller batches would be other generations, or another update: passes of few
        tokens are not."""
        return self.job.row.generation is not None

    def _with_slots(self, factor: int) -> tuple[str, PlannedRun]:
        slots = self.flags.rollout_slots * factor
        return f"--rollout-slots {slots}", self._with(rollout_slots=slots)

    def _passes(self) -> tuple[float, Callable[[int], tuple[str, PlannedRun]]]:
        """The factor by which passes can grow, and the function that makes them grow: by the limit
        of their tokens where there is one, which changes no result; else by larger mini-batches."""
        most = self.flags.micro_batch_tokens
        if most is not None:
            return self._tokens / most, self._with_tokens
        return self.job.row.growth(self.flags), self._with_larger_batches

    def _with_tokens(self, factor: int) -> tuple[str, PlannedRun]:
        most = self.flags.micro_batch_tokens * factor
        return f"--micro-batch-tokens {most}", self._with(micro_batch_tokens=most)

    def _with_larger_batches(self, factor: int) -> tuple[str, PlannedRun]:
        size = getattr(self.flags, self._size) * factor
        before = self.flags.gradient_accumulation_steps
        steps = -(-before // factor)
        larger = {self._size: size}
        if steps != before:
            larger["gradient_accumulation_steps"] = steps
        return _flags(larger), self._with(**larger)

    # Remedies

    def _smaller_rollouts(self) -> Iterator[Remedy]:
        if not self.samples_responses:
            return
        if hasattr(self.flags, "rollout_sleep"):
            yield _switch("rollout_sleep", "slower rollouts", {KV_CACHE: 0.0, CASTS: 0.0})
        slots = min(self.flags.rollout_slots, self._samples_at_once)
        for part in (2, 4, 8):
            if slots >= part:
                leaves = {KV_CACHE: 1 / part, ACTIVATIONS: 1 / part}
                yield _set("slower rollouts", leaves, rollout_slots=slots // part)

    def _smaller_passes(self) -> Iterator[Remedy]:
        cost = "the same gradient in more passes"
        if self._keeps_batches or self.flags.micro_batch_tokens is not None:
            size = self.flags.micro_batch_tokens or self._tokens
            tokens, part = size // 2, 2
            least = max(self._example, _SMALLEST_POSITIONS)
            while tokens >= least:
                yield _set(cost, {ACTIVATIONS: 1 / part}, micro_batch_tokens=tokens)
                tokens, part = tokens // 2, part * 2
            return
        size, steps = getattr(self.flags, self._size), self.flags.gradient_accumulation_steps
        for passes in (2, 4, 8, 16, 32, size):
            if size % passes or passes == 1:
                continue
            smaller = {self._size: size // passes, "gradient_accumulation_steps": steps * passes}
            yield _set(cost, {ACTIVATIONS: 1 / passes}, **smaller)

    def _slower(self) -> Iterator[Remedy]:
        yield Remedy(
            "--gradient-checkpointing true",
            "about a third more time in the update",
            {ACTIVATIONS: 0.0},
            PlannedRun._checkpointed,
        )
        if self.job.kind_of_device == "cpu":
            return  # a CPU's memory is the host's
        if self.job.row.taught:
            yield Remedy(
                "--teacher-placement host",
                "a slower teacher",
                {REFERENCE: 0.0},
                PlannedRun._teacher_offloaded,
            )
        elif hasattr(self.flags, "reference"):
            yield Remedy(
                "--reference offload", "a slower reference", {REFERENCE: 0.0}, PlannedRun._offloaded
            )
        yield _switch("activation_offloading", "copies to host memory and back", {ACTIVATIONS: 0.0})
        yield Remedy(
            "--offload-optimizer true",
            "the optimizer steps in host memory",
            {OPTIMIZER: 0.0},
            PlannedRun._optimizer_offloaded,
        )

    def _less_precise(self) -> Iterator[Remedy]:
        if not self.job.row.taught and hasattr(self.flags, "reference_dtype"):
            yield Remedy(
                "--reference-dtype bfloat16",
                "log-probs of the reference in bf16",
                {REFERENCE: 0.5},
                PlannedRun._with_half_a_reference,
            )
        if quantised.is_installed():
            yield Remedy(
                f"--optim {_EIGHT_BITS}",
                "moments in 8 bits",
                {OPTIMIZER: 0.25},
                PlannedRun._in_eight_bits,
            )
        yield Remedy(
            _flags("--dtype bfloat16", self._not_of_bf16),
            "weights in bf16, with fp32 masters",
            {PARAMETERS: 0.5, GRADIENTS: 0.5, REFERENCE: 0.5, CASTS: 0.0},
            PlannedRun._in_bf16,
        )

    def _adapters(self) -> Iterator[Remedy]:
        of_adapters = {GRADIENTS: 0.0, OPTIMIZER: 0.0, REFERENCE: 0.0}
        new = "" if self.skeleton.adapter is not None else f"--lora-r {_LORA_RANK}"
        other = self._not_of_adapters
        without = ", without num_shared_layers" if "num_shared_layers" in other else ""
        if new:
            yield Remedy(
                _flags(new, other),
                f"an adapter is trained, not the weights{without}",
                of_adapters,
                PlannedRun._as_adapter,
                learns_other=True,
            )
        yield Remedy(
            _flags(new, "--dtype bfloat16", other),
            f"an adapter on a base in bf16{without}",
            {**of_adapters, PARAMETERS: 0.5, CASTS: 0.0},
            PlannedRun._as_adapter_on_bf16,
            learns_other=bool(new),
        )
        if quantised.is_installed():
            yield Remedy(
                _flags(new, "--dtype bfloat16 --load-in-4bit true", other),
                f"an adapter on a base in four bits{without}",
                {**of_adapters, PARAMETERS: 0.12, CASTS: 0.0},
                PlannedRun._as_adapter_on_four_bits,
                learns_other=bool(new),
            )

    # The changed runs

    def _with(self, **fields: Any) -> PlannedRun:
        if isinstance(self.flags, PPOConfig):
            return dataclasses.replace(self, flags=dataclasses.replace(self.flags, **fields))
        flags = copy.copy(self.flags)  # transformers' arguments cannot be replaced
        steps = "gradient_accumulation_steps"
        if getattr(flags, "steps_per_generation", None) == getattr(flags, steps):  # by default
            fields = {**fields, "steps_per_generation": fields.get(steps, getattr(flags, steps))}
        for name, value in fields.items():
            setattr(flags, name, value)
        return dataclasses.replace(self, flags=flags)

    def _switched(self, name: str) -> PlannedRun | None:
        return None if getattr(self.flags, name) else self._with(**{name: True})

    def _checkpointed(self) -> PlannedRun | None:
        """The run with activation checkpointing, by each of its flags; None where it is on."""
        if self.flags.gradient_checkpointing:
            return None
        names = ("gradient_checkpointing", "activation_checkpointing")
        return self._with(**{name: True for name in names if hasattr(self.flags, name)})

    @property
    def _copies_the_reference(self) -> bool:
        """Whether the reference is a frozen copy of the whole model."""
        flags = self.flags
        return flags.reference in ("copy", "offload") or (
            flags.reference == "auto"
            and bool(getattr(flags, "init_kl_coef", True))
            and getattr(flags, "num_shared_layers", None) is None
            and self.skeleton.adapter is None
        )

    def _offloaded(self) -> PlannedRun | None:
        if not self._copies_the_reference or self.flags.reference == "offload":
            return None
        return self._with(reference="offload")

    def _teacher_offloaded(self) -> PlannedRun | None:
        """The run with its teacher in host memory; None where that is not a model of its own."""
        given, kind = self.flags.teacher_model_name_or_path, self.flags.teacher_model_kind
        if self.flags.teacher_placement == "host":
            return None
        if given is None and (kind == "live" or self.skeleton.adapter is not None):
            return None
        return self._with(teacher_placement="host")

    def _optimizer_offloaded(self) -> PlannedRun | None:
        if optimizer_name(self.flags) not in _ADAMS:
            return None
        return self._switched("offload_optimizer")

    def _with_half_a_reference(self) -> PlannedRun | None:
        is_fp32 = self.flags.reference_dtype == "auto" and self.skeleton.dtype == torch.float32
        if not is_fp32 or not self._copies_the_reference or self._follows_slowly:
            return None
        return self._with(reference_dtype="bfloat16")

    @property
    def _follows_slowly(self) -> bool:
        """Whether the reference moves by steps that bf16 would lose."""
        names = ("sync_ref_every", "ref_ema"), ("sync_ref_model", "ref_model_mixup_alpha")
        return any(
            bool(getattr(self.flags, follows, False)) and getattr(self.flags, weight) < 1
            for follows, weight in names
        )

    def _in_eight_bits(self) -> PlannedRun | None:
        if optimizer_name(self.flags) not in _ADAMS:
            return None
        if self.flags.offload_optimizer or self.flags.optim_args:
            return None
        return self._with(optim=_EIGHT_BITS)

    def _in_bf16(self) -> PlannedRun | None:
        if self.skeleton.dtype != torch.float32 or self.skeleton.adapter is not None:
            return None
        skeleton = dataclasses.replace(self.skeleton, dtype=torch.bfloat16)
        return dataclasses.replace(self._with(**self._not_of_bf16), skeleton=skeleton)

    @property
    def _not_of_bf16(self) -> dict[str, Any]:
        """The setting of the reference's dtype, where bf16 weights need another than is set."""
        dtype = getattr(self.flags, "reference_dtype", "auto")
        wanted = "float32" if self._follows_slowly else "auto" if dtype == "float32" else dtype
        return {"reference_dtype": wanted} if wanted != dtype else {}

    @property
    def _not_of_adapters(self) -> dict[str, Any]:
        """Other values for settings that a run with an adapter refuses; None leaves one out."""
        settings: dict[str, Any] = {}
        if getattr(self.flags, "reference", "auto") in ("copy", "offload", "trunk", "cached"):
            settings["reference"] = "auto"
        if getattr(self.flags, "reference_dtype", "auto") != "auto":
            settings["reference_dtype"] = "auto"
        if getattr(self.flags, "num_shared_layers", None) is not None:
            settings["num_shared_layers"] = None
        return settings

    def _as_adapter(self, **of_base: Any) -> PlannedRun | None:
        if self.skeleton.adapter is not None and not of_base:
            return None  # the run has an adapter already
        adapter = self.skeleton.adapter or new_adapter(_LORA_RANK)
        skeleton = dataclasses.replace(self.skeleton, adapter=adapter, **of_base)
        return dataclasses.replace(self._with(**self._not_of_adapters), skeleton=skeleton)

    def _as_adapter_on_bf16(self) -> PlannedRun | None:
        if self.skeleton.dtype != torch.float32 or self.skeleton.four_bits is not None:
            return None
        return self._as_adapter(dtype=torch.bfloat16)

    def _as_adapter_on_four_bits(self) -> PlannedRun | None:
        if self.skeleton.four_bits is not None:
            return None
        return self._as_adapter(
            dtype=torch.bfloat16, four_bits=quantised.four_bit_config(torch.bfloat16)
        )


def _set(cost: str, leaves: dict[str, float], **settings: Any) -> Remedy:
    """A remedy that gives settings these values."""
    return Remedy(_flags(settings), cost, leaves, partial(PlannedRun._with, **settings))


def _switch(name: str, cost: str, leaves: dict[str, float]) -> Remedy:
    """A remedy that turns a setting on, where it is off."""
    change = partial(PlannedRun._switched, name=name)
    return Remedy(f"--{name.replace('_', '-')} true", cost, leaves, change)


def _flags(*parts: str | dict[str, Any]) -> str:
    """A text of flags, from flags and from settings by name; a setting that is None has no flag."""
    flags: list[str] = []
    for part in parts:
        settings = part.items() if isinstance(part, dict) else ()
        flags += [f"--{name.replace('_', '-')} {x}" for name, x in settings if x is not None]
        flags += [part] if isinstance(part, str) and part else []
    return " ".join(flags)
