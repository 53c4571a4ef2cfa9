"""The prompts of a training run, and the order in which they are used."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastrl.data.chat import TextOrMessages, is_chat, templates_of
from fastrl.data.columns import check_reserved
from fastrl.data.encoded_prompts import TokenRows, encode_prompts
from fastrl.data.tables import ROW, list_as_dataset
from fastrl.models.layout import Layout
from fastrl.run.fingerprint import hash_of
from fastrl.samples import Samples

_PROMPT_COLUMNS = ("prompt", "query")


@dataclass
class Prompts:
    """The prompts of a run, encoded.

    Attributes:
        samples: a sample for each prompt, without a response. A prompt that was passed as token ids
            also has their text; ``prompt_rows`` are rows of a data set, or indices in a list.
        name_of: returns the name of a row's prompt, for errors and warnings.
    """

    samples: Samples
    name_of: Callable[[int], str]

    @classmethod
    def from_list(
        cls,
        prompts: Sequence[TextOrMessages | Tensor],
        tokenizer: Any,
        name_of: Callable[[int], str] = "prompts[{}]".format,
        rows: list[int] | None = None,
        templates: Sequence[Mapping[str, Any]] = (),
        *,
        closed: bool = False,
    ) -> Prompts:
        """Makes prompts from texts, chat messages or 1-D token ids.

        A chat goes through the tokenizer's chat template, up to where the assistant's answer
        begins; the template has the special tokens. A text gets the special tokens that the
        tokenizer puts in front, unless it begins with BOS.

        Args:
            rows: the prompts' rows, by which ``name_of`` names them; None: their indices.
            templates: further arguments of the chat template for each prompt; none by default.
            closed: add the special tokens at the end, too, for models whose encoder reads prompts.

        Raises:
            ValueError: a single text or chat, or none; a prompt without a token or of another type;
                messages that lack a role or a text, are all blank, or end with the assistant's; a
                tokenizer without a chat template. The error names the prompt.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts must be a list of texts, got the text {prompts!r}")
        if not hasattr(prompts, "__len__"):
            raise ValueError(f"prompts must be a list of texts, got {prompts!r:.80}")
        if not len(prompts):
            name = name_of(0).partition("[")[0]
            raise ValueError(f"{name} is empty: pass at least one")
        if isinstance(prompts[0], Mapping):
            raise ValueError(
                "prompts must be a list of chats, got the messages of one: pass [messages]"
            )
        rows = list(range(len(prompts))) if rows is None else rows
        chats: list[Any] = list(prompts)
        texts, places = [""] * len(chats), range(len(chats))
        ready = {
            i: _token_ids(x, name_of(rows[i])) for i, x in enumerate(chats) if not _is_plain_text(x)
        }
        to_encode = [i for i in places if i not in ready]
        written, ids = encode_prompts(
            [chats[i] for i in to_encode],
            lambda i: name_of(rows[to_encode[i]]),
            tokenizer,
            [templates[i] for i in to_encode] if templates else (),
            closed=closed,
        )
        for i, text in zip(to_encode, written, strict=True):
            texts[i] = text
        if ready:
            for i, tokens in ready.items():
                chats[i] = texts[i] = tokenizer.decode(tokens)
            encoded = iter(ids)
            ids = TokenRows.of([ready[i] if i in ready else next(encoded).tolist() for i in places])
        for row, length in zip(rows, ids.lengths, strict=True):
            if not length:
                raise ValueError(f"{name_of(row)} is empty: every prompt needs at least one token")
        samples = Samples(
            prompts=chats, prompt_texts=texts, prompt_ids=ids, prompt_rows=rows, columns={}
        )
        return cls(samples, name_of)

    @classmethod
    def from_dataset(
        cls, dataset: Any, column: str | None, tokenizer: Any, of: str = "", *, closed: bool = False
    ) -> Prompts:
        """Makes prompts from a column of texts, chats or token ids. The columns ``tools`` and
        ``chat_template_kwargs`` go to the chat template.

        Args:
            column: None: the first of ``prompt``, ``query`` and ``input_ids`` that there is.
            of: what errors put before "the dataset", such as "eval_prompts's ".
            closed: see :meth:`from_list`.

        Raises:
            ValueError: the data set lacks the column (the message lists its columns), has no rows,
                or columns that :func:`check_reserved` refuses; also as :meth:`from_list`.
        """
        dataset = list_as_dataset(dataset)
        if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"a {type(dataset).__name__} has no columns and rows to take prompts from: pass a "
                "datasets.Dataset, or a list of rows"
            )
        names = list(dataset.column_names)
        candidates = [c for c in (*_PROMPT_COLUMNS, "input_ids") if c in names]
        if column is None and candidates:
            column = candidates[0]
        if column not in names:
            wanted = repr(column) if column else "prompt, query or input_ids"
            raise ValueError(
                f"{of}the dataset has no column {wanted}; its columns are {', '.join(names)}: name "
                "the prompts' column with prompt_column"
            )
        check_reserved([c for c in names if c != column], f"{of}the dataset")
        if not len(dataset):
            raise ValueError(f"{of}the dataset has no rows: bring some")
        columns = {c: _whole(dataset, c) for c in names if c not in (column, "input_ids", ROW)}
        rows = _whole(dataset, ROW) if ROW in names else list(range(len(dataset)))
        entries = _whole(dataset, column)
        prompts = cls.from_list(
            entries,
            tokenizer,
            lambda row: f"row {row} of {of}column {column!r}",
            rows,
            templates_of(entries, columns, rows),
            closed=closed,
        )
        prompts.samples.columns = columns
        return prompts

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each prompt."""
        return self._rows_of_ids.lengths

    @property
    def largest_id(self) -> int:
        return int(self._rows_of_ids.flat.max())

    @property
    def _rows_of_ids(self) -> TokenRows:
        ids = self.samples.prompt_ids
        return ids if isinstance(ids, TokenRows) else TokenRows.of([x.tolist() for x in ids])

    def fitting(self, layout: Layout, new_tokens: int, long_prompts: str) -> Prompts:
        """The prompts that leave room for ``new_tokens`` in the model's context.

        Args:
            long_prompts: "refuse" raises an error for a longer prompt; "drop" leaves such prompts
                out, and counts them in a warning.

        Raises:
            ValueError: a prompt that is too long, named; with "drop", no prompt left.
        """
        limits = [layout.exceeded(length, new_tokens) for length in self.lengths]
        kept = [i for i, limit in enumerate(limits) if limit is None]
        if len(kept) == len(self):
            return self
        first = next(i for i, limit in enumerate(limits) if limit is not None)
        what = (
            f"{self.name_of(self.samples.prompt_rows[first])} has {self.lengths[first]} tokens; "
            f"with {new_tokens} new ones it exceeds the {limits[first]}"
        )
        count = len(self) - len(kept)
        if long_prompts == "refuse":
            others = f", and so do {count - 1} others" if count > 1 else ""
            raise ValueError(
                f"{what}{others}: shorten the prompt or max_new_tokens, or leave such prompts out "
                "with long_prompts='drop' (--long-prompts drop)"
            )
        if not kept:
            raise ValueError(f"no prompt is left: {what}, and so does every other prompt")
        warnings.warn(
            f"long_prompts='drop' leaves out {count} of {len(self)} prompts: {what}", stacklevel=4
        )
        return dataclasses.replace(self, samples=self.samples.select(kept))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the prompts' token ids and of the data's other columns, row by row."""
        rows_of_ids = self._rows_of_ids
        digest = hashlib.sha256(rows_of_ids.ends.numpy().tobytes())
        digest.update(rows_of_ids.flat.numpy().tobytes())
        columns = self.samples.columns
        names = sorted(columns)
        rows = zip(*(columns[name] for name in names), strict=True)
        return f"{digest.hexdigest()} {hash_of(itertools.chain([names], rows))}"


def samples_of_rows(rows: Sequence[Mapping[str, Any]], prompts: Sequence[Any]) -> Samples:
    """A sample for each row, with the columns that the first row has, and with the row's prompt of
    ``prompts``, a text or chat messages, not encoded yet."""
    names = [name for name in (rows[0] if rows else ()) if name != _PROMPT_COLUMNS[0]]
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Samples(prompts=list(prompts), prompt_rows=list(range(len(rows))), columns=columns)


def with_prompt_ids(samples: Samples, ids: Sequence[Tensor], tokenizer: Any) -> Samples:
    """The samples with token ids of their prompts, and the prompts' texts."""
    texts = [
        prompt if isinstance(prompt, str) else tokenizer.decode(row)
        for prompt, row in zip(samples.prompts, ids, strict=True)
    ]
    return dataclasses.replace(samples, prompt_texts=texts, prompt_ids=ids)


class PromptStream:
    """An endless stream of whole batches of indices, in another order every epoch.

    The order of epoch e (from 0) is permutation e+1 that ``np.random.RandomState(seed)`` draws; an
    epoch's last indices that fill no batch are dropped. ``epoch`` and ``index`` are the stream's
    position.

    Args:
        count: number of prompts.
    """

    def __init__(self, count: int, seed: int):
        self.count, self.seed = count, seed
        self.epoch = self.index = 0
        self._go_to(0, 0)

    def take(self, size: int) -> list[int]:
        """The next ``size`` indices, all of one epoch.

        Raises:
            ValueError: ``size`` is larger than the number of prompts.
        """
        if size > self.count:
            raise ValueError(f"a batch of {size} cannot be taken from {self.count} prompts")
        if self.index + size > self.count:
            self.epoch, self.index = self.epoch + 1, 0
            self._order = self._draws.permutation(self.count)
        chosen = self._order[self.index : self.index + size]
        self.index += size
        return chosen.tolist()

    @contextlib.contextmanager
    def kept_on_error(self) -> Iterator[None]:
        """Restores the stream's position if the block raises an exception."""
        epoch, index = self.epoch, self.index
        try:
            yield
        except BaseException:
            self._go_to(epoch, index)
            raise

    def state_dict(self) -> dict[str, int]:
        """Number of prompts, seed and position, as numbers that JSON can hold."""
        return {name: getattr(self, name) for name in ("count", "seed", "epoch", "index")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores a position; raises ValueError for another number of prompts or another seed."""
        for name, ours in (("count", self.count), ("seed", self.seed)):
            if state[name] != ours:
                raise ValueError(
                    f"the stream's state has {name} {state[name]}, this one {ours}: it belongs to "
                    "another run"
                )
        self._go_to(state["epoch"], state["index"])

    def _go_to(self, epoch: int, index: int) -> None:
        self._draws = np.random.RandomState(self.seed)
        for _ in range(epoch + 1):
            self._order = self._draws.permutation(self.count)
        self.epoch, self.index = epoch, index


def read_eval_prompts(
    source: Any, column: str | None, tokenizer: Any, *, closed: bool = False
) -> Prompts:
    """Makes evaluation prompts by :meth:`Prompts.from_dataset`, or ``from_list`` for a list."""
    if hasattr(source, "column_names"):
        return Prompts.from_dataset(source, column, tokenizer, "eval_prompts's ", closed=closed)
    return Prompts.from_list(source, tokenizer, "eval_prompts[{}]".format, closed=closed)


def _is_plain_text(prompt: Any) -> bool:
    """Whether a prompt is a text, or chat messages, and not token ids."""
    return isinstance(prompt, str) or is_chat(prompt)


def _token_ids(prompt: Any, name: str) -> list[int]:
    """Token ids of a prompt, as a list; raises ValueError unless they are 1-D integers from 0."""
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.tensor(torch.nan)
    dtypes = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    if ids.dim() != 1 or (len(ids) and (ids.dtype not in dtypes or ids.min() < 0)):
        raise ValueError(
            f"{name} is {prompt!r:.80}: a prompt is a text, a list of chat messages, or the token "
            "ids of one text, integers from 0"
        )
    return ids.tolist()


def _whole(dataset: Any, column: Any) -> list[Any]:
    """A whole column, read at once, which is many times faster than row by row."""
    values = dataset[column]
    return list(values if isinstance(values, list) else values[:])
