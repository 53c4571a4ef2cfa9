"""``fastrl plan``: what a run needs of memory, from the model's configuration alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastrl.commands.flags import UsageError, parse, unknown_name
from fastrl.commands.job import DTYPES
from fastrl.config import PPOConfig, json_object, setting
from fastrl.plan.advice import Remedy, what_fits, what_to_change
from fastrl.plan.report import Plan, gib, usable
from fastrl.plan.skeleton import Skeleton
from fastrl.run.report import run_console

POLICY_GRADIENTS = ("ppo", "grpo")
_FLAGS = {
    "ppo": ("ppo", "PPOFlags"),
    "grpo": ("ppo", "GRPOFlags"),
    "sft": ("sft", "SFTFlags"),
    "reward": ("reward", "RewardFlags"),
}
LARGEST_GIB = 4096
_LORA_RANK = 16  # of the adapter that is suggested


def _losses() -> tuple[str, ...]:
    """Losses on pairs of responses."""
    from fastrl.alignment.losses import LOSSES

    return tuple(name for name, loss in LOSSES.items() if "offline-pairwise" in loss.tasks)


@dataclass(kw_only=True)
class PlanJob:
    """What to plan, and for which device.

    Raises:
        ValueError: an unknown method, precision or dtype; a size out of range.
    """

    command: ClassVar[str] = "plan"
    _argument_group_name: ClassVar[str] = "the plan"

    model: str = setting(
        "The model: a directory (a run's, or of an adapter) or a Hub id. Only its configuration is "
        "read."
    )
    method: str = setting(
        "ppo, grpo, sft, reward, or a loss of preference learning, such as dpo. Further flags are "
        "those of the method's command.",
        "ppo",
    )
    gpu_gib: float | None = setting(
        "Memory of the GPU: says whether the run fits, what more there is room for, or what to "
        "change.",
        None,
    )
    prompt_tokens: int = setting("Tokens of each prompt.", 256)
    response_tokens: int = setting(
        "Tokens of each response. Texts of sft and reward have as many as both.", 256
    )
    lora_r: int = setting("Train a LoRA adapter of this rank; 0 trains all weights.", 0)
    dtype: str = setting("Type of the model's weights, such as float32 or bfloat16.", "float32")
    precision: str = setting(
        "Precision of the computation: fp32, bf16 (by autocast), or auto: bf16 on a GPU.", "auto"
    )
    device: str = setting("cpu, cuda, or auto: cuda where there is one or --gpu-gib.", "auto")
    as_json: bool = setting("Print the plan as JSON.", False)

    def __post_init__(self) -> None:
        known = (*_FLAGS, *_losses())
        if self.method not in known:
            raise ValueError(f"method: {unknown_name('method', self.method, known)}")
        if self.gpu_gib is not None and not 0 < self.gpu_gib <= LARGEST_GIB:
            raise ValueError(
                f"gpu_gib must be above 0 and at most {LARGEST_GIB}, the GPU's memory in GiB, got "
                f"{self.gpu_gib:g}"
            )
        if self.gpu_gib is not None and usable(self.gpu_gib) <= 0:
            raise ValueError(f"gpu_gib={self.gpu_gib:g} is less than a GPU's driver itself takes")
        for name in ("prompt_tokens", "response_tokens"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be 2 or more, got {getattr(self, name)}")
        if self.lora_r < 0:
            raise ValueError(f"lora_r must be 0 or more, got {self.lora_r}")
        for name, choices in (
            ("dtype", DTYPES),
            ("precision", ("auto", "fp32", "bf16")),
            ("device", ("auto", "cpu", "cuda")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"unknown {name} {getattr(self, name)!r}: choose one of {', '.join(choices)}"
                )

    @property
    def kind_of_device(self) -> str:
        import torch

        if self.device != "auto":
            return self.device
        return "cuda" if self.gpu_gib is not None or torch.cuda.is_available() else "cpu"

    @property
    def mixed_precision(self) -> bool:
        """Whether bf16 autocast is on."""
        if self.precision == "auto":
            return self.kind_of_device == "cuda"
        return self.precision == "bf16"

    def skeleton(self) -> Skeleton:
        adapter = None if self.lora_r == 0 else lora(self.lora_r)
        return Skeleton.read(self.model, self.dtype, adapter)


def lora(rank: int) -> Any:
    """A LoRA adapter as the training commands put it on a model."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=32, task_type="CAUSAL_LM")


@dataclass(frozen=True)
class PlannedRun:
    """A run that is planned: see :class:`fastrl.plan.advice.Planned`."""

    job: PlanJob
    skeleton: Skeleton
    flags: Any  # of the method's command

    @property
    def _policy_gradient(self) -> bool:
        return self.job.method in POLICY_GRADIENTS

    def plan(self) -> Plan:
        """Rehearses the method's trainer."""
        job, device = self.job, self.job.kind_of_device
        lengths = job.prompt_tokens, job.response_tokens
        if self._policy_gradient:
            from fastrl.ppo import PPOTrainer
            from fastrl.ppo.planning import plan_ppo

            return plan_ppo(PPOTrainer, self.skeleton, self.flags, *lengths, device)
        if job.method == "sft":
            from fastrl.trainers.planning import plan_sft

            return plan_sft(self.skeleton, self.flags, sum(lengths), device)
        if job.method == "reward":
            from fastrl.trainers.planning import plan_reward

            return plan_reward(self.skeleton, self.flags, sum(lengths), device)
        from fastrl.alignment.planning import plan_alignment

        return plan_alignment(self.skeleton, self.flags, *lengths, job.method, device)

    def _with(self, **fields: Any) -> PlannedRun:
        if isinstance(self.flags, PPOConfig):
            return dataclasses.replace(self, flags=dataclasses.replace(self.flags, **fields))
        flags = copy.copy(self.flags)  # transformers' arguments cannot be replaced
        for name, value in fields.items():
            setattr(flags, name, value)
        return dataclasses.replace(self, flags=flags)

    @property
    def _sizes(self) -> tuple[str, int]:
        """The flag of a micro-batch's size, and its value."""
        name = "mini_batch_size" if self._policy_gradient else "per_device_train_batch_size"
        return name, getattr(self.flags, name)

    def larger(self) -> tuple[str, PlannedRun] | None:
        """Twice as many samples at a time."""
        name, size = self._sizes
        steps = self.flags.gradient_accumulation_steps
        if self._policy_gradient and self.flags.batch_size % (2 * size * max(1, steps // 2)):
            return None
        fewer = max(1, steps // 2)
        changed = self._with(**{name: 2 * size, "gradient_accumulation_steps": fewer})
        return _flag(name, 2 * size), changed

    def changes(self) -> list[Remedy]:
        """From the cheapest: those that cost no time, then time, then precision, then what is
        learned."""
        found = []
        if self._policy_gradient:
            found.append(Remedy("--rollout-sleep true", "slower rollouts", PlannedRun._asleep))
            now = min(self.flags.rollout_slots, self.flags.batch_size)
            for slots in (x for x in (now // 2, now // 4) if x):
                found.append(
                    Remedy(
                        f"--rollout-slots {slots}",
                        "slower rollouts",
                        functools.partial(PlannedRun._with, rollout_slots=slots),
                    )
                )
        name, size = self._sizes
        while size > 1:
            size = math.ceil(size / 2) if size % 2 else size // 2
            found.append(
                Remedy(
                    _flag(name, size),
                    "the same gradient accumulated in more passes",
                    functools.partial(PlannedRun._in_passes_of, size=size),
                )
            )
        found.append(
            Remedy(
                "--gradient-checkpointing true",
                "about a third more time in the update",
                PlannedRun._checkpointed,
            )
        )
        if self._policy_gradient:
            found.append(Remedy("--reference offload", "a slower reference", PlannedRun._offloaded))
        found.append(
            Remedy(
                f"--lora-r {_LORA_RANK}",
                "an adapter is trained, not the weights",
                PlannedRun._as_adapter,
                learns_other=True,
            )
        )
        found.append(
            Remedy(
                f"--lora-r {_LORA_RANK} --dtype bfloat16",
                "an adapter on a base in bf16",
                PlannedRun._as_adapter_on_bf16,
                learns_other=True,
            )
        )
        return found

    def _asleep(self) -> PlannedRun | None:
        return None if self.flags.rollout_sleep else self._with(rollout_sleep=True)

    def _in_passes_of(self, size: int) -> PlannedRun | None:
        name, now = self._sizes
        if size >= now or now % size:
            return None
        steps = self.flags.gradient_accumulation_steps * (now // size)
        return self._with(**{name: size, "gradient_accumulation_steps": steps})

    def _checkpointed(self) -> PlannedRun | None:
        if self.flags.gradient_checkpointing:
            return None
        return self._with(gradient_checkpointing=True)

    def _offloaded(self) -> PlannedRun | None:
        flags = self.flags
        copied = flags.reference == "copy" or (
            flags.reference == "auto"
            and flags.init_kl_coef
            and flags.num_shared_layers is None
            and self.skeleton.adapter is None
        )
        return self._with(reference="offload") if copied else None

    def _as_adapter(self) -> PlannedRun | None:
        if self.skeleton.adapter is not None:
            return None
        skeleton = dataclasses.replace(self.skeleton, adapter=lora(_LORA_RANK))
        changed = self
        if getattr(self.flags, "reference", "auto") in ("copy", "offload", "trunk"):
            changed = self._with(reference="auto", num_shared_layers=None)
        return dataclasses.replace(changed, skeleton=skeleton)

    def _as_adapter_on_bf16(self) -> PlannedRun | None:
        import torch

        if self.skeleton.dtype != torch.float32:
            return None
        changed = self._as_adapter() or self
        skeleton = dataclasses.replace(changed.skeleton, dtype=torch.bfloat16)
        return dataclasses.replace(changed, skeleton=skeleton)


def _flag(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {value}"


def run_plan(arguments: Sequence[str]) -> None:
    """Prints the plan.

    Raises:
        UsageError: no model, an unknown flag or value.
        FileNotFoundError: a folder without a model's configuration.
        ValueError: settings that the method's trainer refuses.
    """
    run = planned_run(arguments)
    plan, gpu = run.plan(), run.job.gpu_gib
    advice = []
    if gpu is not None:
        fits = plan.fits(gpu)
        room = f"{gib(usable(gpu))} of {gpu:g} GiB can be used"
        advice.append(f"{'fits' if fits else 'does not fit'}: {gib(plan.peak)}; {room}")
        if fits:
            advice += what_fits(run, gpu)
        else:
            advice.append(f"cheapest change: {what_to_change(run, plan, gpu)}")
    if run.job.as_json:
        print(json.dumps({**plan.as_json(), "advice": advice}, indent=1))
        return
    console = run_console()
    console.print(plan.table())
    for name, value in plan.settings.items():
        console.print(f"{name.replace('_', ' ')}: {value}", highlight=False)
    for line in (*advice, *(f"a guess: {guess}" for guess in plan.guesses)):
        console.print(line, highlight=False)


def planned_run(arguments: Sequence[str]) -> PlannedRun:
    """The run that "MODEL [--flag value ...]" describes.

    Raises:
        UsageError: no model, an unknown flag or value.
        FileNotFoundError, ValueError: as :meth:`fastrl.plan.skeleton.Skeleton.read`.
    """
    job, flags = parse_plan(arguments)
    return PlannedRun(job, job.skeleton(), flags)


def parse_plan(arguments: Sequence[str]) -> tuple[PlanJob, Any]:
    """What to plan, and the flags of the method's command.

    Raises:
        UsageError: no model, an unknown flag or value.
    """
    given = list(arguments)
    if given and not given[0].startswith("-") and not given[0].endswith((".yaml", ".yml")):
        given = ["--model", *given]
    kind = _flags_of(_method(given))
    job, flags = parse("plan", [PlanJob, kind], given)
    if job.mixed_precision:
        if isinstance(flags, PPOConfig):
            given_to_accelerate = json_object(flags.accelerator_kwargs)
            flags.accelerator_kwargs = {"mixed_precision": "bf16", **given_to_accelerate}
        else:
            flags.bf16 = True
    return job, flags


def _method(arguments: Sequence[str]) -> str:
    """The method that is asked for, before the flags are parsed, which it determines."""
    for i, argument in enumerate(arguments):
        if argument.startswith("--method="):
            return argument.partition("=")[2]
        if argument == "--method" and i + 1 < len(arguments):
            return arguments[i + 1]
    return PlanJob.method


def _flags_of(method: str) -> Any:
    """The dataclass of a method's flags.

    Raises:
        UsageError: an unknown method.
    """
    import importlib

    if method not in _FLAGS and method not in _losses():
        raise UsageError(unknown_name("method", method, (*_FLAGS, *_losses())))
    module, name = _FLAGS.get(method, ("align", "AlignFlags"))
    return getattr(importlib.import_module(f"fastrl.commands.{module}"), name)
