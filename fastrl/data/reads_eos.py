"""Whether a reward model reads EOS behind a response, saved beside it.

A reward model has to be scored on the token ids that it was trained on. Those that are trained here
say so by a key in their config.json, which ``save_pretrained`` and ``push_to_hub`` write and
``from_pretrained`` reads; an adapter, which has no config.json, by a file of its own. A classifier
without that record was trained elsewhere: it is scored on prompt and response as one text, as its
tokenizer writes a text.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fastrl.models.load import find_file, model_folder

KEY = "fastrl_reads_eos"
ADAPTER_FILE = "fastrl.json"


def record(model: Any, reads_eos: bool | None) -> None:
    """Puts it into the model's configuration; None: not known, which takes it away."""
    config = getattr(model, "config", None)
    if config is None:
        return
    if reads_eos is None:
        config.__dict__.pop(KEY, None)
    else:
        setattr(config, KEY, reads_eos)


def recorded(model: Any) -> bool | None:
    """What the model's configuration says; None where it says nothing."""
    return getattr(getattr(model, "config", None), KEY, None)


def save_beside_adapter(model: Any, folder: str | Path) -> None:
    """Writes the record where an adapter was saved; a whole model's config.json has it already."""
    if hasattr(model, "peft_config"):
        Path(folder, ADAPTER_FILE).write_text(json.dumps({KEY: recorded(model)}) + "\n")


def load_from_adapter(model: Any, path: str | os.PathLike) -> None:
    """Reads the record of an adapter into the model's configuration, which is its base's."""
    if not hasattr(model, "peft_config"):
        return
    file = find_file(model_folder(path), ADAPTER_FILE, {})
    record(model, None if file is None else json.loads(Path(file).read_text()).get(KEY))
