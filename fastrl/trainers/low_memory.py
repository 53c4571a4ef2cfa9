"""Precision of transformers' Trainer, and float32 masters of low-precision weights."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from fastrl.eras import MASTERS
from fastrl.models.master_weights import MASTER, MasterWeights
from fastrl.models.optimizers import keep_state, optimizer_name, steps_in_backward
from fastrl.models.utils import warn_of_fp16, warn_of_lost_updates
from fastrl.run.precision import precision_for, shared_precision
from fastrl.run.transformers_settings import SCHEDULES_BY_METRIC

MIXED_PRECISION = "set bf16=True (commands: --dtype float32 --bf16 true)"
BY_DEFAULT = (
    "training computes in bf16 by autocast, as weights are float32 and the device can; "
    "bf16=False (--bf16 false) turns that off"
)


def settle_precision(args: Any, model: Any) -> bool:
    """Sets ``bf16`` where it is None; returns whether it chose bf16 from the model and the device.

    Where an earlier trainer of the process has made an Accelerator, the arguments take its
    precision, unless they ask for fp16 or DeepSpeed.
    """
    if args.bf16 is not None:
        return False
    device = args.device.type  # reading it may reset accelerate's state, read below
    shared = shared_precision()
    if shared is not None and not args.fp16 and not args.deepspeed:
        args.bf16, args.fp16, args.mixed_precision = shared == "bf16", shared == "fp16", shared
        return False
    setting = next((x for x in ("fp16", "bf16_full_eval", "deepspeed") if getattr(args, x)), None)
    is_loaded = isinstance(model, nn.Module)  # a model's name is loaded later
    chosen = precision_for(model, device, setting) if is_loaded else None
    args.bf16 = chosen is not None
    if args.bf16:
        args.mixed_precision = chosen
    return args.bf16


def with_kept_state(optimizer: Any, args: Any, *, spread: bool, says: bool) -> Any:
    """The optimizer, with float32 masters if ``args.master_weights``, and with its state in host
    memory if ``args.offload_optimizer``, see :mod:`fastrl.models.master_weights`.

    Args:
        spread: whether FSDP2 spreads the weights.
        says: whether to print that masters are kept by default.
    """
    # In a second train() the optimizer is that of the first, wrapped by accelerate.
    bare = getattr(optimizer, "optimizer", optimizer)
    kept = keep_state(
        bare,
        master_weights=args.master_weights,
        on_host=args.offload_optimizer,
        device=args.device,
        spread=spread,
    )
    if kept is bare:
        return optimizer
    if says and not args.offload_optimizer:
        tqdm.write(MASTERS, file=sys.stderr)
    return kept


def drop_masters(optimizer: Any) -> None:
    """Takes masters out of an optimizer's loaded state where it keeps none: the checkpoint may be
    of a run with masters."""
    bare: Any = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(bare, MasterWeights):
        for of_weight in bare.state.values():
            of_weight.pop(MASTER, None)


@contextlib.contextmanager
def schedule_by_metric(args: Any) -> Iterator[None]:
    """Context in which a schedule that reads a metric is made for a rising one where
    ``greater_is_better``; transformers makes all of these schedules for a falling metric."""
    kwargs = args.lr_scheduler_kwargs
    if args.lr_scheduler_type in SCHEDULES_BY_METRIC and args.greater_is_better:
        args.lr_scheduler_kwargs = {"mode": "max", **(kwargs or {})}
    try:
        yield
    finally:
        args.lr_scheduler_kwargs = kwargs


def warn_of_lost_steps(args: Any, model: nn.Module, stacklevel: int) -> None:
    """Warns where steps of low-precision weights are rounded away, or their gradients become 0;
    called at construction."""
    warn_of_fp16(model, stacklevel + 1)
    if not args.master_weights or steps_in_backward(optimizer_name(args)):
        warn_of_lost_updates(model, MIXED_PRECISION, stacklevel + 1)
