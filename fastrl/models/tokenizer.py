"""The tokenizer beside a model's weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastrl.models.checkpoints import find_file
from fastrl.models.load import base_folder, is_adapter, model_folder

_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_ON_THE_HUB = ("tokenizer_config.json", "tokenizer.json")


def load_tokenizer(path: str | os.PathLike) -> Any:
    """The tokenizer of a model's folder, a run's folder or a Hub id, whose EOS pads where it has no
    pad token; that of the base where an adapter came without one.

    Raises:
        FileNotFoundError: a folder without a model or without a tokenizer.
        ValueError: one that cannot be read, or an id that leads nowhere.
    """
    from transformers import AutoTokenizer

    model = model_folder(path)
    if is_adapter(model) and not _holds_a_tokenizer(model):
        model = base_folder(model)
    folder = Path(model)
    missing = (
        f"{model} has no tokenizer: save one there with tokenizer.save_pretrained({model!r}), or "
        "copy tokenizer.json and tokenizer_config.json from the model that it was made of"
    )
    if folder.is_dir() and not _holds_a_tokenizer(model):
        raise FileNotFoundError(missing)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # tokenizers raises bare Exceptions for files that it cannot read
        said = " ".join(str(error).split())
        what = model if folder.is_dir() else f"{model!r}, which is no folder here,"
        raise ValueError(f"the tokenizer of {what} cannot be loaded: {said}") from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # made of a configuration alone
        raise FileNotFoundError(missing)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _holds_a_tokenizer(model: str) -> bool:
    folder = Path(model)
    if folder.is_dir():
        return any(any(folder.glob(pattern)) for pattern in _FILES)
    return any(find_file(model, name, {}) for name in _ON_THE_HUB)
