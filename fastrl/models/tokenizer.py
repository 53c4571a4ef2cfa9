"""The tokenizer beside a model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model's folder or Hub id, whose EOS pads where it has no pad token.

    Raises:
        FileNotFoundError: a folder without a tokenizer.
        ValueError: one that cannot be read, or an id that leads nowhere.
    """
    from transformers import AutoTokenizer

    folder = Path(model)
    missing = (
        f"{model} has no tokenizer: save one there with tokenizer.save_pretrained({model!r}), or "
        "copy tokenizer.json and tokenizer_config.json from the model that it was made of"
    )
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _FILES):
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
