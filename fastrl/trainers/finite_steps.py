"""Leaves out optimizer steps of transformers' Trainer whose loss or gradient is not finite."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

ON_NONFINITE = ("skip", "raise")
MOST_IN_A_ROW = 20  # steps left out; with so many the weights, not the data, are the cause


@dataclass
class _Counts:
    """Numbers of optimizer steps."""

    taken: int = 0  # since the last log
    left_out: int = 0  # since the last log
    left_out_before: int = 0  # from the start of training to the last log
    in_a_row: int = 0  # left out one after the other, up to now


class FiniteSteps:
    """Keeps NaN and infinite numbers from the weights.

    A step whose loss or gradient norm is not finite is left out: weights and optimizer stay, the
    schedule goes on, the step counts. Logs have the mean loss of the other steps and, if steps were
    left out since the last log, their number as ``nonfinite_steps``. A gradient scaler (fp16)
    handles infinite gradients itself; DeepSpeed takes a step before it is seen here. Without this
    class transformers takes a step that is not finite, and by default does not log its loss.

    Args:
        on_nonfinite: "skip", or "raise" (FloatingPointError; the state before the step is saved
            where checkpoints are).

    Attributes:
        warns: whether to warn of the first step that is left out; False if the loss itself warns.
    """

    def __init__(self, on_nonfinite: str, accelerator: Accelerator):
        self.on_nonfinite, self.accelerator = on_nonfinite, accelerator
        self.warns = True
        self._counts = _Counts()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Begins to count, or continues from a :meth:`state`."""
        self._counts = _Counts(**(state or {}))

    def state(self) -> dict[str, Any]:
        return dataclasses.asdict(self._counts)

    def takes(self, step: int, loss: Tensor, norm: Any) -> bool:
        """Counts a step, and returns whether it may update the weights.

        Args:
            step: the step's number.
            loss: the sum of losses since the last log, [] on the device.
            norm: the gradient's norm before clipping.

        Raises:
            FloatingPointError: a step that is not finite, if on_nonfinite is "raise", DeepSpeed has
                taken it already, or MOST_IN_A_ROW were left out in a row.
        """
        scaled, counts = self.accelerator.scaler is not None, self._counts
        if self._is_finite(loss, None if scaled else norm):
            counts.taken += 1
            counts.in_a_row = 0
            return True
        what = f"step {step}: the loss or gradient is not finite (gradient norm {float(norm):g})"
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise FloatingPointError(f"{what}; DeepSpeed has taken the step")
        if self.on_nonfinite == "raise":
            raise FloatingPointError(f"{what}: the step was not taken")
        counts.in_a_row += 1
        if counts.in_a_row == MOST_IN_A_ROW:
            raise FloatingPointError(
                f"{what}, as in the {MOST_IN_A_ROW - 1} steps before it: the model is broken. Load "
                "a sound one; where training broke it, lower learning_rate"
            )
        if self.warns and not counts.left_out + counts.left_out_before:
            warnings.warn(
                f"{what}: the step is left out, as any later ones will be; nonfinite_steps counts "
                "them. Look for the examples that make it so, lower learning_rate, or compute in "
                "float32; on_nonfinite='raise' makes it an error",
                stacklevel=3,
            )
        counts.left_out += 1
        return False

    def _is_finite(self, loss: Tensor, norm: Any) -> bool:
        """Whether loss and norm are finite on all processes."""
        if norm is not None:
            loss = loss + (norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        finite = torch.isfinite(loss).all().float()
        if self.accelerator.num_processes > 1:
            finite = self.accelerator.reduce(finite, reduction="mean")
        return bool(finite == 1)

    def correct(self, logs: dict[str, float], done: int) -> None:
        """Makes the losses of a log means over the steps that were taken, and adds the number of
        steps that were left out; with a "loss" the counts since the last log begin anew.

        Args:
            done: the number of steps of this training so far, those left out too.
        """
        counts = self._counts
        if "loss" in logs:
            if counts.left_out:
                steps = counts.taken + counts.left_out
                logs["loss"] = logs["loss"] * steps / counts.taken if counts.taken else math.nan
                logs["nonfinite_steps"] = counts.left_out
            counts.left_out_before += counts.left_out
            counts.taken = counts.left_out = 0
        if "train_loss" in logs:
            taken = done - counts.left_out - counts.left_out_before
            if done and done != taken:
                logs["train_loss"] *= done / taken if taken else math.nan
