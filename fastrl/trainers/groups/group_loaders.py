"""The loaders of trainers whose batches hold the prompts of whole generations: each prompt as often
as it has responses, and each batch as often as it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastrl.trainers.groups.group_sampler import GroupSampler, in_groups
from fastrl.trainers.groups.prompt_data import refuse_dispatch


def train_loader(
    args: Any, data: Any, group: int, uses: int, load: Callable[..., Any], sampler: Any
) -> Any:
    """The loader of training.

    Args:
        args: an :class:`fastrl.trainers.groups.online_config.OnlineConfig`.
        data: the rows of prompts, a ``Dataset`` or a stream.
        group: number of responses to a prompt.
        uses: batches learned per generation; one that is learned from twice counts as two.
        load: makes a loader from data, a batch size and ``sampler``.
        sampler: makes the order of a data set's rows; it is not called for a stream.
    """
    if not hasattr(data, "__len__"):
        if args.shuffle_dataset:
            data = data.shuffle(seed=args.seed)
        data = in_groups(data, group, args.generation_batch_size // group, uses)
    return load(data, args.train_batch_size * args.steps_per_generation, sampler, training=True)


def train_sampler(args: Any, data: Any, group: int, uses: int) -> GroupSampler:
    """The order of a data set's rows: each comes as often as it has responses, and again for each
    of the ``uses`` batches that are learned from the generation."""
    prompts = args.generation_batch_size // group
    return GroupSampler(data, group, prompts, uses, bool(args.shuffle_dataset), args.seed)


def eval_loader(
    args: Any, data: Any, group: int, accelerator: Any, load: Callable[..., Any]
) -> Any:
    """The loader of an evaluation, in an order by ``args.seed``, see :func:`train_loader`; raises
    ValueError where one process is to read a stream for the others."""
    workers = args.dataloader_num_workers

    def of_groups(rows: Any) -> GroupSampler:
        return GroupSampler(rows, group, seed=args.seed)

    try:
        if not hasattr(data, "__len__"):
            refuse_dispatch(args)
            accelerator.dataloader_config.dispatch_batches = False
            data = in_groups(data.shuffle(seed=args.seed), group)
            args.dataloader_num_workers = 0
        return load(data, args.eval_batch_size, of_groups)
    finally:
        args.dataloader_num_workers = workers
