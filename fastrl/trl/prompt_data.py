"""The prompts of GRPOTrainer and RLOOTrainer: checks of their data sets."""

from __future__ import annotations

import warnings
from typing import Any

from fastrl.data.chat_prompts import check_prompt
from fastrl.data.tables import each_row, is_stream


def refuse_dispatch(args: Any) -> None:
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
        TypeError: training data of another kind.
        ValueError: no column prompt; a prompt that is neither a text nor a chat, or messages that
            :func:`fastrl.data.chat.check_messages` refuses; a stream whose batches one process is
            to send to the others.
    """
    from datasets import Dataset, IterableDataset

    if not isinstance(train, Dataset | IterableDataset):
        raise TypeError(
            f"`train_dataset` must be a `Dataset` or `IterableDataset`, got "
            f"{type(train).__name__}: Dataset.from_list makes one of rows"
        )
    held_out = {"": evaluation} if not isinstance(evaluation, dict) else evaluation
    named = {f"eval_dataset[{x!r}]" if x else "eval_dataset": y for x, y in held_out.items()}
    named = {"train_dataset": train, **named}
    if asked:
        for name, data in named.items():
            _check_prompts(data, name)
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


def _check_prompts(data: Any, name: str) -> None:
    """Checks the prompts of a data set; of a stream only that it has any."""
    columns = getattr(data, "column_names", None)
    if columns is None:
        return
    if "prompt" not in columns:
        raise ValueError(f"{name} needs a column prompt, it has {', '.join(columns)}")
    if is_stream(data) or data.format["type"] == "custom":  # whose rows a function makes
        return
    column = data.with_format(None).select_columns(["prompt"])
    for i, row in enumerate(each_row(column)):
        check_prompt(row["prompt"], f"the prompt of row {i} of {name}")
