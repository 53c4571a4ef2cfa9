"""The files of a processor: training on texts leaves them as they are, beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",  # a processor's; a tokenizer saves its own
)


def keep_processor(model: Any, files: Mapping[str, bytes]) -> None:
    """Notes the contents of a checkpoint's processor files, for :func:`write_processor`: by the
    time that the model is saved the checkpoint may be gone."""
    model.processor_files = dict(files)


def write_processor(model: Any, folder: str | Path) -> None:
    """Writes a model's processor files, if it has any, beside its weights, byte for byte.

    Args:
        model: a model of transformers or PEFT. For a model that fastrl has not loaded the files are
            read from the local folder that it names.
    """
    files: Mapping[str, bytes] | None = getattr(model, "processor_files", None)
    if files is None:
        source = getattr(model, "name_or_path", None)
        paths = [Path(source, name) for name in PROCESSOR_FILES] if source else []
        files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    for name, content in files.items():
        (Path(folder) / name).write_bytes(content)
