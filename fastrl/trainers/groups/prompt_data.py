"""The prompts of GRPOTrainer and RLOOTrainer: checks of their data sets."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from fastrl.data.chat import TEMPLATE_COLUMNS, check_prompt, is_blank, template_arguments
from fastrl.data.columns import REWARD_ARGUMENTS, check_reserved
from fastrl.data.prompt_ids import ids_of_prompts
from fastrl.data.prompts import PromptStream
from fastrl.data.tables import each_row, is_stream
from fastrl.models.layout import layout_of
from fastrl.run.random_state import seed_at

_OF_TRAINERS = ("trainer_state", "log_extra", "log_metric")
_AT_A_TIME = 1 << 10  # prompts that are tokenized together


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
    named = named_data(train, evaluation)
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


class PromptRoom:
    """The room that a model's context leaves for prompts, beside responses of full length.

    Args:
        most: the most tokens of a response; None: as many as there is room for, but 1 at least.
        template: further arguments of the chat template.
        most_of_a_pass: ``micro_batch_tokens``, the most tokens of a prompt with its response; None:
            no limit but the context.
        longest: tokens that prompts are cut to; None: they are not.
    """

    def __init__(
        self,
        model: Any,
        most: int | None,
        tokenizer: Any,
        template: Mapping[str, Any],
        most_of_a_pass: int | None = None,
        longest: int | None = None,
    ):
        self._layout, self._most, self._most_of_a_pass = layout_of(model), most, most_of_a_pass
        self._tokenizer, self._template, self._longest = tokenizer, template, longest

    def check_data(self, train: Any, evaluation: Any) -> None:
        """Checks the first row, blank rows, and rows whose texts have more bytes than there is room
        for tokens. Rows of streams, and rows that only a chat template makes too long, are checked
        as they are learned from.

        Raises:
            ValueError: a prompt too long, or blank and without a token; the message names its row.
        """
        for name, data in named_data(train, evaluation).items():
            doubtful = (
                (f"the prompt of row {i} of {name}", row["prompt"], self._template_of(row, i))
                for i, row in _rows(data)
                if not i
                or is_blank(row["prompt"])
                or self._exceeded(_bytes_of(row["prompt"])) is not None
            )
            while chunk := list(itertools.islice(doubtful, _AT_A_TIME)):
                names, prompts, templates = zip(*chunk, strict=True)
                rows = ids_of_prompts(prompts, self._tokenizer, templates, names, self._longest)
                for where, ids in zip(names, rows, strict=True):
                    self.check(ids, where)

    def _template_of(self, row: Mapping[str, Any], i: int) -> dict[str, Any]:
        if isinstance(row["prompt"], str):
            return {}
        return {**self._template, **template_arguments(row, i)}

    def check(self, ids: Any, name: str) -> None:
        """Raises ValueError where the prompt ``name`` has too many token ids."""
        limit = self._exceeded(len(ids))
        if limit is not None:
            raise ValueError(
                f"{name} has {len(ids)} tokens; with {self._most or 1} of its response "
                f"(max_completion_length) it exceeds the {limit}: leave such prompts out of the "
                "data set, or lower max_completion_length"
            )

    def _exceeded(self, tokens: int) -> str | None:
        """The limit, in words, that a prompt of so many tokens exceeds; None: it fits."""
        most, whole = self._most_of_a_pass, tokens + (self._most or 1)
        if most is not None and whole > most:
            return f"micro_batch_tokens of {most}"
        return self._layout.exceeded(tokens, self._most or 1)


def named_data(train: Any, evaluation: Any) -> dict[str, Any]:
    """Data sets by the names of their arguments."""
    held_out = evaluation if isinstance(evaluation, dict) else {"": evaluation}
    named = {f"eval_dataset[{x!r}]" if x else "eval_dataset": y for x, y in held_out.items()}
    return {"train_dataset": train, **named}


def _check_prompts(data: Any, name: str) -> None:
    """Checks that a data set has a column prompt, and unless it is a stream, each prompt."""
    columns = getattr(data, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise ValueError(f"{name} needs a column prompt, it has {', '.join(columns)}")
    for i, row in _rows(data):
        check_prompt(row["prompt"], f"the prompt of row {i} of {name}")


def _rows(data: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Numbers of rows, and rows with their prompt and columns for the chat template; none for a
    stream, or where a function makes the rows as they are read."""
    if getattr(data, "column_names", None) is None or is_stream(data):
        return
    if data.format["type"] != "custom":
        read = ("prompt", *TEMPLATE_COLUMNS)
        columns = [name for name in data.column_names if name in read]
        yield from enumerate(each_row(data.with_format(None).select_columns(columns)))


def _bytes_of(prompt: Any) -> int:
    """Bytes of a text, or of the contents of messages."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    return sum(len(str(message.get("content")).encode()) for message in prompt)
