"""Steps of transformers' Trainer whose loss or gradient is not finite."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from fastrl.run.transformers_checkpoints import ResumableTrainer

ON_NONFINITE = ("skip", "raise")
MOST_IN_A_ROW = 20  # steps; after so many the weights, not the data, are the cause


class FiniteStepsTrainer(ResumableTrainer):
    """A trainer whose weights no NaN or infinite number reaches.

    An optimizer step whose loss or gradient norm is not finite is left out: weights and optimizer
    stay, the schedule goes on, the step counts. Logs have the mean loss of the other steps, and
    ``nonfinite_steps``, how many were left out since the log before. A gradient scaler (fp16)
    treats infinite gradients itself.

    Transformers alone takes such a step, and logs a loss in which such numbers are left out.

    ``args.on_nonfinite``: "skip", or "raise" (FloatingPointError; the state before the step is
    saved where checkpoints are).

    Attributes:
        warns_of_steps: False where the loss itself says what it leaves out.
    """

    args: Any

    def __init__(self, *args: Any, **kwargs: Any):
        self.warns_of_steps = True
        self._steps = _Steps()
        super().__init__(*args, **kwargs)
        # transformers' filter of NaN losses waits for the device in each pass, and hides what we
        # count.
        self.args.logging_nan_inf_filter = False

    def begin_training(self, resumed: Mapping[str, Any] | None) -> None:
        super().begin_training(resumed)
        self._steps = _Steps() if resumed is None else _Steps(**resumed["own"]["steps"])

    def own_state(self) -> dict[str, Any]:
        return {**super().own_state(), "steps": dataclasses.asdict(self._steps)}

    def before_update(self, model: nn.Module, norm: Any) -> None:
        super().before_update(model, norm)
        scaled, steps = self.accelerator.scaler is not None, self._steps
        if self._is_finite(self.loss_since_log, None if scaled else norm):
            steps.taken += 1
            steps.in_a_row = 0
            return
        number = self.state.global_step + 1
        what = f"step {number}: the loss or gradient is not finite (gradient norm {float(norm):g})"
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise FloatingPointError(f"{what}; DeepSpeed has taken the step")
        if self.args.on_nonfinite == "raise":
            raise FloatingPointError(f"{what}: the step was not taken")
        steps.in_a_row += 1
        if steps.in_a_row == MOST_IN_A_ROW:
            raise FloatingPointError(
                f"{what}, as in the {MOST_IN_A_ROW - 1} steps before it: the model is broken. Load "
                "a sound one; where training broke it, lower learning_rate"
            )
        if self.warns_of_steps and not steps.left_out + steps.left_out_before:
            warnings.warn(
                f"{what}: the step is left out, as any later ones will be; nonfinite_steps counts "
                "them. Look for the examples that make it so, lower learning_rate, or compute in "
                "float32; on_nonfinite='raise' makes it an error",
                stacklevel=2,
            )
        steps.left_out += 1
        assert self._run.loss is not None
        self.loss_since_log.copy_(self._run.loss)
        if not scaled:  # a scaler needs gradients, and leaves the step out itself
            for parameter in model.parameters():
                parameter.grad = None  # the optimizer passes over such weights

    def _is_finite(self, loss: Tensor, norm: Any) -> bool:
        """Whether loss and norm are finite on all processes."""
        if norm is not None:
            loss = loss + (norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        finite = torch.isfinite(loss).all().float()
        if self.args.world_size > 1:
            finite = self.accelerator.reduce(finite, reduction="mean")
        return bool(finite == 1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs means over the steps that were taken."""
        steps = self._steps
        if "loss" in logs:
            if steps.left_out:
                done = steps.taken + steps.left_out
                logs["loss"] = logs["loss"] * done / steps.taken if steps.taken else math.nan
                logs["nonfinite_steps"] = steps.left_out
            steps.left_out_before += steps.left_out
            steps.taken = steps.left_out = 0
        if "train_loss" in logs:
            done = self.state.global_step - self.begun_at_step
            taken = done - steps.left_out - steps.left_out_before
            if done and done != taken:
                logs["train_loss"] *= done / taken if taken else math.nan
        super().log(logs, start_time)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        found = super().train(*args, **kwargs)
        loss = found.metrics.get("train_loss", found.training_loss)
        return found._replace(training_loss=loss)


@dataclass
class _Steps:
    """Optimizer steps, counted since the last log."""

    taken: int = 0
    left_out: int = 0
    left_out_before: int = 0  # up to the last log
    in_a_row: int = 0  # left out one after the other
