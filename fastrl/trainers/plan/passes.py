"""Chooses passes that a device holds, for a run whose settings do not give their size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from fastrl.run.launcher import process_count
from fastrl.trainers.plan.memory import ACTIVATIONS
from fastrl.trainers.plan.rehearsal import SCORING, UPDATE
from fastrl.trainers.plan.report import GIB, Plan, usable

Settings = TypeVar("Settings")

# Tokens of a pass: with _MOST a GPU is busy, and more would not make it faster; passes of fewer
# than _ENOUGH cost more than computing activations again.
_MOST, _ENOUGH = 16384, 2048


class PassSize(NamedTuple):
    """How much of a mini-batch is computed at a time.

    Attributes:
        tokens: the most tokens of a pass; None: a whole mini-batch.
        recomputed: whether the backward pass computes activations again, layer by layer.
    """

    tokens: int | None = None
    recomputed: bool = False

    def set_in(self, settings: Any) -> None:
        """Changes settings so that a run has these passes."""
        settings.micro_batch_tokens = self.tokens
        if self.recomputed:
            for name in ("gradient_checkpointing", "activation_checkpointing"):
                if hasattr(settings, name):  # transformers has two names, by its version
                    setattr(settings, name, True)

    def of(self, settings: Settings) -> Settings:
        """A copy of settings, with these passes."""
        changed = copy.copy(settings)
        self.set_in(changed)
        return changed

    def __str__(self) -> str:
        again = ["activations are computed again in the backward pass"] * self.recomputed
        few = [] if self.tokens is None else [f"passes have {self.tokens} tokens at most"]
        return ", and ".join(few + again) or "passes are whole mini-batches"


def fit_passes(
    trainer: Any, *lengths: int, gpu_gib: float | None = None
) -> tuple[PassSize, Plan | None]:
    """Limits a trainer's passes to what its GPU holds, without a change of the gradient: it lowers
    their tokens, and where that is not enough, has activations computed again in the backward pass.

    Call it before training begins. With several processes passes get 16384 tokens at most, or those
    of a longer example, and nothing is planned, because a plan is for a single process.

    Args:
        trainer: a trainer whose ``micro_batch_tokens`` nobody has set.
        lengths: arguments of ``trainer.plan``: tokens of the longest prompt and response, or text.
        gpu_gib: the GPU's memory in GiB; by default that of the current device.

    Returns:
        the passes, and their plan, which may need more memory than the GPU has; with several
        processes None in place of the plan.

    Raises:
        ValueError: a machine without a GPU, and no ``gpu_gib``; lengths that ``plan`` refuses.
    """
    whole, example = trainer.tokens_of(*lengths)
    if process_count() > 1:
        most = max(_MOST, example)
        passes = PassSize(most if most < whole else None)
        trainer.limit_passes(passes)
        return passes, None
    if gpu_gib is None:
        if not torch.cuda.is_available():
            raise ValueError("no GPU here: say how much memory the run will have, by gpu_gib")
        gpu_gib = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB
    passes, plan = choose_passes(
        lambda passes: trainer.plan(*lengths, passes=passes, device="cuda"), whole, example, gpu_gib
    )
    trainer.limit_passes(passes)
    return passes, plan


def choose_passes(
    plan_with: Callable[[PassSize], Plan], whole: int, example: int, gpu_gib: float
) -> tuple[PassSize, Plan]:
    """The first passes that fit: large ones, smaller ones, then those that compute activations
    again. If none fit, the passes that need the least memory.

    Args:
        plan_with: plans the run with the passes that it gets.
        whole, example: tokens of a mini-batch, and of an example, which no pass splits.

    Returns:
        the passes and their plan.
    """
    limit, most = usable(gpu_gib), min(whole, max(_MOST, example))

    def planned(tokens: int, recomputed: bool) -> tuple[PassSize, Plan]:
        passes = PassSize(tokens if tokens < whole else None, recomputed)
        return passes, plan_with(passes)

    for recomputed, least in ((False, max(example, _ENOUGH)), (True, example)):
        tokens, room = most, float(most)
        while room >= least:
            candidate = planned(tokens, recomputed)
            if candidate[1].peak <= limit:
                return candidate
            room = min(_room(candidate[1], tokens, limit), tokens - 1)
            while tokens > max(room, least):
                tokens = max(tokens // 2, least)
        if room <= 0:
            break  # the memory that does not depend on passes is too much
    return planned(example, True)


def _room(plan: Plan, tokens: int, limit: int) -> float:
    """Tokens of a pass that fits, if activations are proportional to tokens (they grow less); 0 if
    the rest alone does not fit."""
    room = float("inf")
    for name, phase in plan.phases.items():
        scales = phase.by_kind.get(ACTIVATIONS, 0) if name in (SCORING, UPDATE) else 0
        left = limit - (phase.total - scales)
        if left <= 0:
            return 0.0
        if scales:
            room = min(room, tokens * left / scales)
    return room
