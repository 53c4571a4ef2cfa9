"""Launchers, such as torchrun and ``accelerate launch``, and what they tell their processes."""

from __future__ import annotations

import functools
import gc
import os
import sys
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

# Variables set by launchers (torchrun, accelerate launch, mpirun); accelerate reads the same.
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def is_main_process() -> bool:
    """Whether this process is the main or only one, by the launcher's variables alone."""
    return process_index() == 0


def process_index() -> int:
    """The number that a launcher gave this process; 0 without one."""
    return max(int(os.environ.get(name) or 0) for name in _RANKS)


def process_count() -> int:
    """How many processes a launcher has started; 1 without one."""
    return max(int(os.environ.get(name) or 1) for name in _COUNTS)


def check_one_process(what: str) -> None:
    """Raises ValueError where a launcher has started several processes."""
    count = process_count()
    if count > 1:
        raise ValueError(
            f"{what} runs as one process, and was started as {count}: start it without torchrun or "
            "accelerate launch"
        )


def connect_cpus() -> None:
    """Has accelerate connect several processes on a machine without GPUs, where it would take each
    for a run of its own. Call it before the first Accelerator is made."""
    if process_count() == 1:
        return
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def wait_at_most(args: Any) -> None:
    """Lets processes wait for each other for ``ddp_timeout`` of transformers' TrainingArguments,
    unless that is the default. transformers does so only on GPUs, if it makes the group itself."""
    import torch

    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        return
    if args.ddp_timeout != type(args).ddp_timeout:
        group.distributed_c10d._set_pg_timeout(timedelta(seconds=args.ddp_timeout))


def leave_group() -> None:
    """Leaves the group of processes that accelerate has joined, if any: threads of torch's gloo
    that still run as the interpreter ends may abort a process whose work is done and saved."""
    torch = sys.modules.get("torch")
    group = None if torch is None else torch.distributed
    if group is None or not (group.is_available() and group.is_initialized()):
        return
    group.destroy_process_group()
    gc.collect()  # models in DDP hold it, too


@functools.cache
def _warn_of_a_single_process() -> None:
    """Warns, once for all trainers of a program, that several processes became one."""
    warnings.warn(
        "accelerate launch was told to start several processes, and has started one, as it does "
        "with --cpu or without GPUs: give --multi_gpu in place of --cpu, which starts them on "
        "CPUs, too, or use torchrun --nproc-per-node",
        stacklevel=4,
    )


def check_found(accelerator: Accelerator) -> None:
    """Compares what accelerate has found with what a launcher was told; warns of a launcher that
    has started a single process in place of several.

    Raises:
        ValueError: a launcher has started several processes, and accelerate takes each for a single
            one; or it was told to use FSDP, and accelerate shards no weights; or accelerate would
            cut sequences or layers.
    """
    from accelerate.utils import DistributedType

    count = process_count()
    # accelerate launch sets these for several processes, and leaves WORLD_SIZE to torchrun.
    by_accelerate = {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= os.environ.keys()
    if by_accelerate and count == 1 and "WORLD_SIZE" not in os.environ:
        _warn_of_a_single_process()
    if accelerator.num_processes == 1 < count:
        raise ValueError(
            f"{count} processes were started, and accelerate takes each for a run of its own: each "
            "would do the same work and save its own model. Start them with torchrun "
            "--nproc-per-node or accelerate launch; without GPUs, with ACCELERATE_USE_CPU=true"
        )
    wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if wants_fsdp and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            "FSDP was asked for, and accelerate shards no weights here: that takes GPUs, and "
            "processes that torchrun or accelerate launch has started. Start so, or without "
            "--use_fsdp"
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise ValueError(
            f"parallelism_config spreads each sequence or layer over "
            f"{parallelism.non_data_parallel_size} processes, and the losses are of whole ones: "
            "leave out its tp_size, cp_size and sp_size"
        )


def launched_accelerator(*, timeout: float | None = None, **settings: Any) -> Accelerator:
    """Returns an Accelerator of the launched processes, which talk by gloo without GPUs.

    Args:
        timeout: seconds that a process waits for the others; None: torch's. The first Accelerator
            of a program decides it.
        settings: keyword arguments of the Accelerator.

    Raises:
        ValueError: DeepSpeed was asked for; :func:`check_found` refuses the processes.
    """
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DistributedType

    connect_cpus()
    handlers = list(settings.pop("kwargs_handlers", None) or [])
    if timeout is not None and not any(isinstance(x, InitProcessGroupKwargs) for x in handlers):
        handlers.append(InitProcessGroupKwargs(timeout=timedelta(seconds=timeout)))
    settings["kwargs_handlers"] = handlers
    accelerator = Accelerator(**settings)
    check_found(accelerator)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "DeepSpeed steps the optimizer within backward(), so that mini-batches whose ratio is "
            "too large cannot be left out of a step, and early stopping comes too late: use DDP "
            "(accelerate launch --multi_gpu, or torchrun)"
        )
    return accelerator
