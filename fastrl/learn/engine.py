"""Gradients and optimizer steps of a model and its optimizer, as accelerate has prepared them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastrl.run.processes import OneProcess, Processes


class Engine:
    """Adds up gradients of a model, clips them and steps along them.

    Args:
        model, optimizer: as accelerate has wrapped them.
        max_norm: the norm to which gradients are clipped; None: they are not clipped here.
        processes: the run's processes, each of which computes its share of every mini-batch.

    Attributes:
        steps: the number of optimizer steps begun so far.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None = None,
        processes: Processes | None = None,
    ):
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.max_norm, self.processes = max_norm, processes or OneProcess()
        self.steps = 0

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def unwrapped(self) -> Any:
        """The model without accelerate's wrappers."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def is_scaled(self) -> bool:
        """Whether a GradScaler scales the loss, and leaves out steps whose gradients overflow."""
        return self.accelerator.scaler is not None

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Context of a forward and backward; in the ``last`` of an optimizer step processes
        exchange gradients.

        accelerate's own ``accumulate()`` counts mini-batches, wrongly after an exception and where
        an optimizer step has fewer than ``gradient_accumulation_steps``.
        """
        self.accelerator.sync_gradients = last
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            yield

    def add(self, loss: Tensor, of: int) -> None:
        """Adds the gradient of L / of, where ``loss`` is this process's part of L. Accelerate's
        division by a fixed number of mini-batches, and by that of processes, is undone."""
        scale = self.accelerator.gradient_accumulation_steps * self.processes.count / of
        self.accelerator.backward(loss if scale == 1 else loss * scale)

    def norm(self) -> Tensor:
        """Clips the gradient to ``max_norm``, and returns its norm before that, [] fp32; 0 without
        gradients. Where :attr:`is_scaled` holds, returns 0: :meth:`step` clips."""
        zero = torch.zeros((), device=self.device)
        if self.is_scaled:
            return zero
        if self.max_norm is not None:
            clipped = self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
            return zero if clipped is None else clipped.float()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            return zero
        gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        # On CPUs foreach takes twice as long as one norm after the other.
        foreach = False if zero.device.type == "cpu" else None
        norm: Any = torch.nn.utils.get_total_norm(gradients, foreach=foreach)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # if sharded
        return norm.float().to(zero.device)

    def step(self) -> bool:
        """Takes an optimizer step; returns False where a GradScaler left it out."""
        if self.is_scaled and self.max_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.steps += 1
        self.optimizer.step()
        taken = not getattr(self.optimizer, "step_was_skipped", False)
        self.zero()
        return taken

    def zero(self) -> None:
        """Zeroes the optimizer's gradients, and those of weights that a user's own optimizer leaves
        out: they would add up, and NaN would stay."""
        self.optimizer.zero_grad()
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in self.model.parameters():
            if id(parameter) not in trained:
                parameter.grad = None

    def discard(self) -> None:
        """Drops the gradient after an error, and a GradScaler's record that it was unscaled."""
        self.accelerator.sync_gradients = True
        self.zero()
        scaler = self.accelerator.scaler
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.device))  # makes the scale at first use
            scaler.update(scaler.get_scale())
