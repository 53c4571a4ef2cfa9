"""The token ids of many prompts: encoded in batches, kept in one tensor, and on disk."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from fastrl.data.cache_key import own_code, user_code
from fastrl.data.chat import TextOrMessages
from fastrl.data.encode import Encoder
from fastrl.run.files import cache_file
from fastrl.run.fingerprint import hash_of

KEPT_FROM = 10_000  # prompts; fewer are encoded in a second
_AT_A_TIME = 1 << 12  # prompts


class TokenRows(Sequence[Tensor]):
    """A sequence of 1-D int64 tensors of token ids, kept in one tensor of int32.

    Args:
        flat: all ids one after the other, int32 [N].
        ends: the place at which each row ends, int64 [B].
    """

    def __init__(self, flat: Tensor, ends: Tensor):
        self.flat, self.ends = flat, ends

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TokenRows:
        """Makes the sequence from lists of token ids."""
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        tokens = itertools.chain.from_iterable(rows)
        flat = np.fromiter(tokens, np.int32, int(ends[-1]) if len(ends) else 0)
        return cls(torch.from_numpy(flat), torch.from_numpy(ends))

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each row."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)).tolist()

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        begin = int(self.ends[index - 1]) if index else 0
        return self.flat[begin : int(self.ends[index])].long()


def encode_prompts(
    prompts: Sequence[TextOrMessages],
    name_of: Callable[[int], str],
    tokenizer: Any,
    templates: Sequence[Mapping[str, Any]] = (),
    *,
    closed: bool = False,
) -> tuple[list[str], TokenRows]:
    """Prompts as texts, chats by the tokenizer's template; and their token ids, see
    :meth:`fastrl.data.encode.Encoder.prompts`.

    The result for 10,000 prompts or more is kept in the cache of ``datasets``, under a hash of the
    inputs, if the tokenizer is fast and its template writes no date; other processes read it.

    Args:
        name_of: names a prompt by its index, for errors.
        templates: further arguments of the chat template for each prompt; none by default.
        closed: add the special tokens at the end, too, for models whose encoder reads prompts.

    Raises:
        ValueError: see :func:`fastrl.data.chat.prompt_text`.
    """
    place = _place(prompts, tokenizer, templates, closed) if len(prompts) >= KEPT_FROM else None
    saved = None if place is None else _read(place)
    if saved is not None:
        texts, rows = saved
        return texts or list(prompts), rows  # type: ignore[arg-type]
    from tqdm.auto import tqdm

    few = len(prompts) < KEPT_FROM
    with tqdm(total=len(prompts), desc="encoding prompts", unit="", disable=few) as bar:
        texts, parts, encoder = [], [], Encoder(tokenizer)
        for i in range(0, len(prompts), _AT_A_TIME):
            part = slice(i, i + _AT_A_TIME)
            names = functools.partial(_named, name_of, i)
            written, ids = encoder.prompts(prompts[part], names, templates[part], closed=closed)
            texts += written
            parts.append(TokenRows.of(ids))
            bar.update(len(ids))
    rows = _joined(parts)
    if place is not None:
        all_texts = all(isinstance(prompt, str) for prompt in prompts)
        _keep(place, [] if all_texts else texts, rows)
    return texts, rows


def _named(name_of: Callable[[int], str], first: int, i: int) -> str:
    return name_of(first + i)


def _joined(parts: Sequence[TokenRows]) -> TokenRows:
    lengths = [n for part in parts for n in part.lengths]
    flat = torch.cat([torch.zeros(0, dtype=torch.int32), *(part.flat for part in parts)])
    return TokenRows(flat, torch.tensor(lengths, dtype=torch.int64).cumsum(0))


def _place(
    prompts: Sequence[Any], tokenizer: Any, templates: Sequence[Any], closed: bool
) -> Path | None:
    """The file that keeps prompts' ids; None for a slow tokenizer, or a template with a date."""
    import datasets

    template = repr(tokenizer.chat_template)
    if not getattr(tokenizer, "is_fast", False) or "strftime" in template:  # the date is in texts
        return None
    parts = [
        hash_of(prompts),
        hash_of(templates),
        tokenizer.backend_tokenizer.to_str(),
        type(tokenizer).__name__,
        template,
        repr(tokenizer.special_tokens_map),
        own_code(),
        user_code(tokenizer),
        repr(closed),
    ]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return Path(datasets.config.HF_DATASETS_CACHE) / "fastrl-prompts" / f"{key}.safetensors"


def _read(place: Path) -> tuple[list[str], TokenRows] | None:
    """The texts and token ids in a file; None where there is no such file, or a broken one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(place)
    except (OSError, SafetensorError):
        return None
    letters, ends = tensors["letters"].numpy().tobytes(), tensors["text ends"].tolist()
    texts = [letters[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]
    return texts, TokenRows(tensors["ids"], tensors["ends"])


def _keep(place: Path, texts: list[str], rows: TokenRows) -> None:
    from safetensors.torch import save

    letters = [text.encode() for text in texts]
    tensors = {
        "ids": rows.flat,
        "ends": rows.ends,
        "letters": torch.from_numpy(np.frombuffer(b"".join(letters), np.uint8).copy()),
        "text ends": torch.tensor([len(x) for x in letters], dtype=torch.int64).cumsum(0),
    }
    cache_file(place, save(tensors))
