"""Texts to learn from: from a data set's columns to token ids, and which of them are learned."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fastrl.data.chat import as_messages, checked, encode, ended, join
from fastrl.trainers.supervised import as_dataset

IGNORED = -100
_SHOWN = 40  # tokens of a text in a warning


class DataCollatorForCompletionOnlyLM:
    """Says which tokens of a text are learned: those behind its last response template; or, with an
    instruction template, those behind every response template up to the next instruction. Of a text
    in which a template does not occur nothing is learned, and a warning says so.

    Templates are found as tokens. Where a tokenizer joins a template's ends with what is around it,
    pass the template's token ids as they are inside a text. EOS is learned like any other token,
    also where it is the pad token.

    Args:
        response_template: text or token ids in front of what is learned.
        instruction_template: text or token ids in front of what is not; for dialogues.
        tokenizer: of the texts.
        mlm: only False.
        ignore_index: label of tokens that are not learned, where this is called as a collator.
        padding_free: a batch is one row, in which the texts stand one after the other and
            ``position_ids`` begin anew with each; there is no attention_mask.

    Raises:
        ValueError: an empty template, ``mlm=True``.
    """

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        *,
        tokenizer: Any,
        mlm: bool = False,
        ignore_index: int = IGNORED,
        padding_free: bool = False,
    ):
        if mlm:
            raise ValueError("mlm=True is not for causal language models: leave it False")
        self.tokenizer, self.ignore_index = tokenizer, ignore_index
        self.padding_free = padding_free
        self.response_template = response_template
        self.instruction_template = instruction_template
        self._response = self._ids("response_template", response_template)
        self._instruction = (
            None
            if instruction_template is None
            else self._ids("instruction_template", instruction_template)
        )

    def _ids(self, name: str, template: str | Sequence[int]) -> list[int]:
        if isinstance(template, str):
            template = self.tokenizer.encode(template, add_special_tokens=False)
        if not len(template):
            raise ValueError(f"{name} is empty: pass the text in front of the responses")
        return [int(token) for token in template]

    def learned(self, input_ids: Sequence[int]) -> list[bool]:
        """Which tokens of a text are learned."""
        ids = list(input_ids)
        starts = [at + len(self._response) for at in _places(ids, self._response)]
        if self._instruction is None:
            spans = [(start, len(ids)) for start in starts[-1:]]  # the prompt may quote it
        else:
            instructions = _places(ids, self._instruction)
            turns = [*instructions, len(ids)]
            spans = [(start, min(t for t in turns if t >= start)) for start in starts]
            if not instructions:  # where the answers end is not known
                spans = []
        return [any(start <= i < stop for start, stop in spans) for i in range(len(ids))]

    def __call__(self, features: Sequence[Any]) -> dict[str, torch.Tensor]:
        """A padded batch with labels, for loops of one's own; features are dicts with ``input_ids``
        or token ids. With ``padding_free`` one row [1, T] and its ``position_ids``."""
        rows = [f["input_ids"] if isinstance(f, Mapping) else f for f in features]
        rows = [[int(token) for token in row] for row in rows]
        self._warn_of_missing_templates(rows)
        learned = [
            [
                t if counts else self.ignore_index
                for t, counts in zip(row, self.learned(row), strict=True)
            ]
            for row in rows
        ]
        if self.padding_free:
            labels = [(self.ignore_index, *row[1:]) for row in learned]
            positions = [range(len(row)) for row in rows]
            return {
                name: torch.tensor([[x for row in parts for x in row]])
                for name, parts in (
                    ("input_ids", rows),
                    ("labels", labels),
                    ("position_ids", positions),
                )
            }
        return _batch(rows, learned, self.tokenizer.pad_token_id, self.ignore_index)

    torch_call = __call__  # its name in transformers' collators

    def templates(self) -> dict[str, tuple[Any, list[int]]]:
        """By name those that were given: as they were given, and as token ids."""
        given: dict[str, tuple[Any, list[int]]] = {
            "response_template": (self.response_template, self._response)
        }
        if self._instruction is not None:
            given["instruction_template"] = (self.instruction_template, self._instruction)
        return given

    def _warn_of_missing_templates(self, rows: Sequence[list[int]]) -> None:
        for name, (template, ids) in self.templates().items():
            without = [row for row in rows if not _places(row, ids)]
            if without:
                warnings.warn(
                    f"{name} {template!r} does not occur in {len(without)} of {len(rows)} texts as "
                    f"the tokens {ids}: nothing of them is learned (pass token ids as they are "
                    "inside a text, or cut texts at more tokens); one begins "
                    f"{self.tokenizer.decode(without[0][:_SHOWN])!r}",
                    stacklevel=3,
                )


@dataclass
class TextCollator:
    """Pads ``input_ids`` and ``labels`` on the right; says on the host which tokens are learned.

    ``rows`` [N] are the flat positions b·T + t whose next token ``targets`` [N] counts.
    """

    tokenizer: Any

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids, labels = ([f[name] for f in features] for name in ("input_ids", "labels"))
        batch = _batch(ids, labels, self.tokenizer.pad_token_id)
        batch["labels"][:, 0] = IGNORED  # nothing predicts it
        return batch | targets_of(batch["labels"])


def _batch(
    ids: Sequence[Any], labels: Sequence[Any], pad: int | None, ignored: int = IGNORED
) -> dict[str, torch.Tensor]:
    if pad is None:
        if len({len(row) for row in ids}) > 1:
            raise ValueError(
                "the texts differ in length, and the tokenizer has no pad token: set "
                "tokenizer.pad_token = tokenizer.eos_token, say"
            )
        pad = 0  # is not needed
    return {
        "input_ids": _padded(ids, pad),
        "attention_mask": _padded([[1] * len(row) for row in ids], 0),
        "labels": _padded(labels, ignored),
    }


def targets_of(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """``rows`` and ``targets`` of labels [B, T]."""
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    rows = (shifted != IGNORED).nonzero().squeeze(1)
    return {"rows": rows, "targets": shifted[rows]}


class Ways(NamedTuple):
    """How texts are read from a data set's columns."""

    text_field: str = "text"
    formatting_func: Callable | None = None
    completions: DataCollatorForCompletionOnlyLM | None = None
    append_eos: bool = True
    completion_only: bool = True
    assistant_only: bool = False


def prepare_texts(
    dataset: Any,
    tokenizer: Any,
    ways: Ways,
    max_length: int | None = None,
    num_proc: int | None = None,
) -> Any:
    """A data set with ``input_ids`` and ``labels``. Longer texts are cut; those in which nothing is
    left to learn are dropped, and counted in a warning.

    Raises:
        TypeError: no data set, see :func:`fastrl.trainers.supervised.as_dataset`.
        ValueError: columns that are missing, no text left.
    """
    dataset = as_dataset(dataset)
    if ways.formatting_func is not None:
        dataset = _formatted(dataset, ways.formatting_func)
    encode = _encoder(dataset.column_names, tokenizer, ways)

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        ids, labels = encode(row)
        ids, labels = ids[:max_length], labels[:max_length]
        if ways.completions is not None:
            learned = ways.completions.learned(ids)
            labels = [t if counts else IGNORED for t, counts in zip(ids, learned, strict=True)]
        # The first token is predicted by nothing.
        useful = any(label != IGNORED for label in labels[1:])
        return {"input_ids": ids, "labels": labels, _USEFUL: useful}

    prepared = dataset.map(
        prepare, num_proc=num_proc, remove_columns=dataset.column_names, desc="tokenising"
    )
    kept = [i for i, useful in enumerate(prepared[_USEFUL]) if useful]
    whole, prepared = len(prepared), prepared.remove_columns(_USEFUL)
    if len(kept) == whole:
        return prepared
    why = "nothing is learned from them: they are empty"
    if max_length is not None:
        why += f", or what would be learned lies behind max_length={max_length}"
    if ways.completions is not None:
        named = " or ".join(
            f"{k} {given!r}" for k, (given, _) in ways.completions.templates().items()
        )
        why += (
            f", or {named} does not occur in them as these tokens (pass token ids as they are "
            "inside a text)"
        )
    if not kept:
        raise ValueError(f"no text is left of {whole}; {why}")
    warnings.warn(f"{whole - len(kept)} of {whole} texts dropped; {why}", stacklevel=2)
    return prepared.select(kept)


Encoder = Callable[[dict[str, Any]], tuple[list[int], list[int]]]
_FORMATTED, _USEFUL = "_text", "_useful"
_DEFAULT_FIELD = Ways().text_field


def _formatted(dataset: Any, formatting_func: Callable) -> Any:
    """One column of texts: of a function of a row, or of a batch of rows, that returns texts."""
    errors = []
    for batched, rows in ((False, dataset[0]), (True, dataset[:1])):
        try:
            made = formatting_func(rows)
        except Exception as error:  # the other convention's arguments
            errors.append(error)
            continue
        fits = _are_texts(made) if batched else isinstance(made, str)
        if fits:
            return dataset.map(
                lambda rows: {_FORMATTED: formatting_func(rows)},
                batched=batched,
                remove_columns=dataset.column_names,
                desc="formatting",
            )
    raise ValueError(
        "formatting_func must return a text for a row, or a list of texts for a batch of rows (a "
        f"dict of lists); the data set has columns {', '.join(dataset.column_names)}"
    ) from (errors[0] if errors else None)


def _are_texts(made: Any) -> bool:
    return isinstance(made, list) and all(isinstance(text, str) for text in made)


def _encoder(columns: Sequence[str], tokenizer: Any, ways: Ways) -> Encoder:
    """By the columns that there are: from a row, token ids and labels."""

    def closed(ids: list[int]) -> list[int]:
        return ended(ids, tokenizer) if ways.append_eos and ids else ids

    def whole(row: dict[str, Any], column: str) -> tuple[list[int], list[int]]:
        text = row[column]
        if not (text is None or isinstance(text, str)):
            raise TypeError(
                f"column {column!r} must hold text, but some row holds {str(text)[:60]!r}, "
                f"{type(text).__name__}"
            )
        ids = closed(encode(text, tokenizer)) if text else []
        return ids, ids

    def messages(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        options = {"return_dict": True, "return_assistant_tokens_mask": ways.assistant_only}
        made = tokenizer.apply_chat_template(checked(row, "messages"), tokenize=True, **options)
        ids = list(made["input_ids"])
        if not ways.assistant_only:
            return ids, ids
        learned = made["assistant_masks"]
        return ids, [t if counts else IGNORED for t, counts in zip(ids, learned, strict=True)]

    def completion(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        if not checked(row, "completion"):
            return [], []
        checked(row, "prompt")
        chat = not (isinstance(row["prompt"], str) and isinstance(row["completion"], str))
        ids = encode(join(row["prompt"], row["completion"], tokenizer), tokenizer, chat)
        if isinstance(row["completion"], str):  # chat templates end their texts themselves
            ids = closed(ids)
        if not ways.completion_only:
            return ids, ids
        # With a text for an answer, a chat's prompt ends where the answer begins.
        said = as_messages(row["prompt"]) if chat else row["prompt"]
        prompt = encode(join(said, "", tokenizer), tokenizer, chat)
        same = zip(prompt, ids, strict=False)
        # A token that spans the border belongs to the completion.
        border = next((i for i, (a, b) in enumerate(same) if a != b), len(prompt))
        return ids, [IGNORED] * border + ids[border:]

    if ways.assistant_only and "messages" not in columns:
        raise ValueError(
            f"assistant_only_loss needs messages, the data set has columns {', '.join(columns)}"
        )
    if ways.formatting_func is not None:
        return lambda row: whole(row, _FORMATTED)
    field = ways.text_field
    if field in columns and field != _DEFAULT_FIELD:
        return lambda row: whole(row, field)
    if field == _DEFAULT_FIELD:
        if "input_ids" in columns:
            return lambda row: (row["input_ids"], row.get("labels") or row["input_ids"])
        if "messages" in columns:
            return messages
        if {"prompt", "completion"} <= set(columns):
            return completion
        if field in columns:
            return lambda row: whole(row, field)
    raise ValueError(
        f"the data set has columns {', '.join(columns)}: it needs {field} (dataset_text_field), "
        "prompt and completion, messages, or input_ids; or pass formatting_func"
    )


def _places(ids: list[int], template: list[int]) -> list[int]:
    width = len(template)
    return [i for i in range(len(ids) - width + 1) if ids[i : i + width] == template]


def _padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(list(row), dtype=torch.long) for row in rows],
        batch_first=True,
        padding_value=value,
    )
