"""Records with a reward model whether it reads EOS behind a response.

A reward model must read the same token ids as it was trained on. fastrl records this in a
key of the model's config.json, which ``save_pretrained`` and ``push_to_hub`` write and
``from_pretrained`` reads; an adapter, which has no config.json, gets another file. A classifier
without the record was trained elsewhere, or on token ids that fastrl did not make: it gets prompt
and response as one text, as its tokenizer encodes a text.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fastrl.models.model_files import find_file, model_folder

KEY = "fastrl_reads_eos"
ADAPTER_FILE = "fastrl.json"


def record(model: Any, reads_eos: bool | None) -> None:
    """Writes the record to the model's configuration; None (not known) removes it."""
    config = getattr(model, "config", None)
    if config is None:
        return
    if reads_eos is None:
        config.__dict__.pop(KEY, None)
    else:
        setattr(config, KEY, reads_eos)


def recorded(model: Any) -> bool | None:
    """The record in the model's configuration; None if there is none."""
    return getattr(getattr(model, "config", None), KEY, None)


def save_beside_adapter(model: Any, folder: str | Path) -> None:
    """Writes an adapter's record to its folder; does nothing for a model with a config.json."""
    if hasattr(model, "peft_config"):
        Path(folder, ADAPTER_FILE).write_text(json.dumps({KEY: recorded(model)}) + "\n")


def load_from_adapter(model: Any, path: str | os.PathLike) -> None:
    """Copies an adapter's record, or the lack of one, to the configuration of its base model."""
    if not hasattr(model, "peft_config"):
        return
    file = find_file(model_folder(path), ADAPTER_FILE, {})
    record(model, None if file is None else json.loads(Path(file).read_text()).get(KEY))
