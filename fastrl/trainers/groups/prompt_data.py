"""The prompts of GRPOTrainer and RLOOTrainer: checks of their data sets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.data.chat import check_prompt
from fastrl.data.columns import REWARD_ARGUMENTS, check_reserved
from fastrl.data.prompts import PromptStream, samples_of_rows
from fastrl.data.tables import columns_of
from fastrl.run.random_state import seed_at
from fastrl.samples import Samples
from fastrl.trainers.prompt_room import data_by_name, rows_of

_OF_TRAINERS = ("trainer_state", "log_extra", "log_metric")


def refuse_dispatch(args: Any) -> None:
    """Raises ValueError where one process is to read a stream and send its rows to the others."""
    if args.accelerator_config.dispatch_batches:
        raise ValueError(
            "Iterable datasets require `dispatch_batches=False`, as rows hold texts: leave it out "
            "of accelerator_config"
        )


def check_data(train: Any, evaluation: Any, args: Any, asked: bool = True) -> None:
    """Checks the prompts of data sets, and settles the loader's settings for streams, whose rows
    are checked as they are learned from.

    Args:
        asked: whether each row needs a prompt.

    Raises:
        TypeError: ``train`` is no ``Dataset`` or ``IterableDataset``.
        ValueError: no column prompt; a column named as an argument of reward functions; a prompt
            that is neither a text nor a chat, or messages that
            :func:`fastrl.data.chat.check_messages` refuses; fewer prompts than a generation needs;
            a stream whose batches one process is to send to the others.
    """
    from datasets import Dataset, IterableDataset

    if not isinstance(train, Dataset | IterableDataset):
        raise TypeError(
            f"`train_dataset` must be a `Dataset` or `IterableDataset`, got "
            f"{type(train).__name__}: pass one of these, or a list of rows"
        )
    named = data_by_name(train, evaluation)
    for name, data in named.items():
        check_reserved(getattr(data, "column_names", None) or (), name, reserved_of(not asked))
        if asked:
            _check_prompts(data, name)
    if isinstance(train, Dataset):
        check_enough(len(train), args)
    if any(isinstance(data, IterableDataset) for data in named.values()):
        refuse_dispatch(args)
        args.accelerator_config.dispatch_batches = False
    if isinstance(train, IterableDataset) and args.dataloader_num_workers:
        warnings.warn(
            "dataloader_num_workers is set to 0, as several workers would break the groups of "
            "a stream",
            stacklevel=4,
        )
        args.dataloader_num_workers = 0


def reserved_of(environments: bool) -> tuple[str, ...]:
    """Names of reward functions' keyword arguments, which no column may have."""
    return (*REWARD_ARGUMENTS, *_OF_TRAINERS, *(("environments",) if environments else ()))


def check_enough(count: int, args: Any) -> None:
    """Raises ValueError where ``count`` prompts are too few for a generation."""
    needed = args.generation_batch_size // args.num_generations
    if count < needed:
        raise ValueError(
            f"train_dataset has {count} prompts, fewer than the {needed} that are generated for "
            f"at a time (generation_batch_size={args.generation_batch_size} / num_generations="
            f"{args.num_generations}), so that no step would be taken: lower "
            "per_device_train_batch_size, gradient_accumulation_steps, steps_per_generation or "
            "generation_batch_size, or bring more prompts"
        )


def check_resampling(args: Any, data: Any, rollout_func: Any) -> None:
    """Raises ValueError for dynamic sampling where single prompts cannot be drawn anew."""
    if not args.dynamic_sampling_rounds:
        return
    where = {
        "a stream of prompts": not hasattr(data, "__len__"),
        "a rollout_func in several processes": rollout_func is not None and args.world_size > 1,
    }
    for what in (what for what, applies in where.items() if applies):
        raise ValueError(
            f"dynamic_sampling_rounds draws single prompts anew, which goes not with {what}: leave "
            "dynamic_sampling_rounds at 0"
        )


def further_prompts(args: Any, data: Any) -> PromptStream | None:
    """The order of the prompts that dynamic sampling draws anew; None without it."""
    if not args.dynamic_sampling_rounds:
        return None
    return PromptStream(len(data), seed_at(args.seed, "further prompts") % 2**32)


def as_it_is(rows: list[Any]) -> list[Any]:
    """The rows: a loader's batch."""
    return rows


def asked_of(rows: Sequence[Mapping[str, Any]]) -> Samples:
    """The prompts of rows, whose other columns go to environments and reward functions."""
    return samples_of_rows(rows, [row.get("prompt") for row in rows])


def _check_prompts(data: Any, name: str) -> None:
    """Checks that a data set has a column prompt, and unless it is a stream, each prompt."""
    columns = getattr(data, "column_names", None)
    if columns is not None and "prompt" not in columns:
        has = ", ".join(columns_of(data))
        raise ValueError(
            f"{name} needs a column prompt, it has {has}: rename the one with the texts or chats "
            "to answer"
        )
    for i, row in rows_of(data):
        check_prompt(row["prompt"], f"the prompt of row {i} of {name}")
