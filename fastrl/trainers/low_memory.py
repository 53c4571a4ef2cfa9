"""transformers' Trainer with float32 masters of low-precision weights, and with activations and
optimizer state in host memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm.auto import tqdm

from fastrl.eras import MASTERS
from fastrl.models.activation_offloading import activation_offloading
from fastrl.models.master_weights import MASTER, MasterWeights
from fastrl.models.optimizers import (
    class_and_keywords,
    keep_state,
    optimizer_name,
    steps_in_backward,
)
from fastrl.models.quantised import save_beside_adapter
from fastrl.models.utils import warn_of_fp16, warn_of_lost_updates
from fastrl.plan.passes import PassSize
from fastrl.run.precision import precision_for, refuse_fp16_twice, shared_precision
from fastrl.run.transformers_base import OpenTrainer
from fastrl.run.transformers_callbacks import LossProgress
from fastrl.run.transformers_settings import SCHEDULES_BY_METRIC

MIXED_PRECISION = "set bf16=True (commands: --dtype float32 --bf16 true)"


class LowMemoryTrainer(OpenTrainer):
    """transformers' Trainer that keeps float32 masters (``args.master_weights``), optimizer state
    in host memory (``args.offload_optimizer``) and activations there
    (``args.activation_offloading``), see :mod:`fastrl.models.master_weights` and
    :mod:`fastrl.models.activation_offloading`.

    Raises:
        ValueError: fp16 mixed precision of float16 weights; offload_optimizer for an optimizer that
            does not step in host memory; either with DeepSpeed, which has its own.
    """

    args: Any

    def __init__(self, *, args: Any, model: Any = None, **kwargs: Any):
        self._says_precision = args.bf16 is None and _choose_precision(args, model)
        if isinstance(model, nn.Module):
            refuse_fp16_twice(model, str(args.mixed_precision))
        super().__init__(args=args, model=model, **kwargs)
        self._offloading = activation_offloading(
            self.args.activation_offloading, self.args.device, self.is_fsdp_enabled
        )

    def limit_passes(self, passes: PassSize) -> None:
        """Limits how much is computed at a time, as ``micro_batch_tokens`` and
        ``gradient_checkpointing`` do; to be called before training begins."""
        passes.set_in(self.args)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self._says_precision and self.is_world_process_zero():
            tqdm.write(
                "training computes in bf16 by autocast, as weights are float32 and the device can; "
                "bf16=False (--bf16 false) turns that off"
            )
        self._says_precision = False
        return super().train(*args, **kwargs)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        with self._offloading(self.accelerator.unwrap_model(model)):
            return super().training_step(model, *args, **kwargs)

    @property
    def of_a_command(self) -> bool:
        """Whether a command of fastrl's shows the run: nobody wrote its settings for TRL."""
        return any(isinstance(x, LossProgress) for x in self.callback_handler.callbacks)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        return class_and_keywords(args, model)

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = super().create_optimizer(model)
        if not self._keeps_its_own:
            # An earlier train() has kept the optimizer, wrapped by accelerate.
            bare = getattr(self.optimizer, "optimizer", self.optimizer)
            kept = keep_state(
                bare,
                master_weights=self.args.master_weights,
                on_host=self.args.offload_optimizer,
                device=self.args.device,
                spread=self.is_fsdp_enabled,
            )
            if kept is not bare:
                self.optimizer = kept
                told = self.args.offload_optimizer or self.of_a_command
                if not told and self.is_world_process_zero():
                    tqdm.write(MASTERS, file=sys.stderr)
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        # transformers makes all schedules that read a metric as if it should fall.
        own = self.args.lr_scheduler_kwargs
        if self.args.lr_scheduler_type in SCHEDULES_BY_METRIC and self.args.greater_is_better:
            self.args.lr_scheduler_kwargs = {"mode": "max", **(own or {})}
        try:
            return super().create_scheduler(*args, **kwargs)
        finally:
            self.args.lr_scheduler_kwargs = own

    def write_model(self, folder: Path) -> None:
        super().write_model(folder)
        if self.args.should_save:
            save_beside_adapter(self.accelerator.unwrap_model(self.model), folder)

    def load_optimizer(self, checkpoint: Path) -> None:
        super().load_optimizer(checkpoint)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, MasterWeights):
            for kept in optimizer.state.values():  # the checkpoint may be of a run with masters
                kept.pop(MASTER, None)

    def warn_of_lost_updates(self, model: nn.Module, stacklevel: int) -> None:
        """Warns where steps of low-precision weights are rounded away, or their gradients become
        0; called at construction."""
        warn_of_fp16(model, stacklevel + 1)
        if not self.args.master_weights or steps_in_backward(optimizer_name(self.args)):
            warn_of_lost_updates(model, MIXED_PRECISION, stacklevel + 1)

    @property
    def _keeps_its_own(self) -> bool:
        """Whether DeepSpeed has masters of its own, or weights are stepped by no optimizer."""
        return self.is_deepspeed_enabled or steps_in_backward(optimizer_name(self.args))


def _choose_precision(args: Any, model: Any) -> bool:
    """Sets ``bf16`` where the arguments leave it open; returns whether that is bf16 by default.

    Where an earlier trainer of the process has an Accelerator, its precision is shared: the
    arguments, which may have been made before it, take it.
    """
    device = args.device.type  # may begin the process's Accelerators anew
    shared = shared_precision()
    if shared is not None and not args.fp16 and not args.deepspeed:
        args.bf16, args.fp16, args.mixed_precision = shared == "bf16", shared == "fp16", shared
        return False
    said = next((x for x in ("fp16", "bf16_full_eval", "deepspeed") if getattr(args, x)), None)
    known = isinstance(model, nn.Module)  # a model's name is loaded later
    chosen = precision_for(model, device, said) if known else None
    args.bf16 = chosen is not None
    if args.bf16:
        args.mixed_precision = chosen
    return args.bf16
