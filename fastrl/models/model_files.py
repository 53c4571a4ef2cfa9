"""Where a model's files are: in a folder, a run's folder, or on the Hub."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from fastrl.nearest import did_you_mean_path
from fastrl.run.files import NO_PICKLE

CONFIG_NAME = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_TOKENIZER_FILES_ON_THE_HUB = ("tokenizer_config.json", "tokenizer.json", "tekken.json")


def model_folder(path: str | os.PathLike, subfolder: str | None = None) -> str:
    """The folder of a checkpoint or of an adapter; for a run's folder, the ``model/`` in it.

    Hub ids, and any folder with a ``subfolder``, are returned as they are.

    Raises:
        FileNotFoundError: a folder without a model, or a local path that does not exist: any name
            that cannot be a Hub id, and one whose first part is a folder here, unless the Hub's
            cache on this machine has a model of that very name.
        ValueError: an empty name.
    """
    name = os.fspath(path)
    if not name.strip():
        raise ValueError("the model's name is empty: name a folder or a Hub id")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise FileNotFoundError(f"{name} is a file: name the folder of the model")
        # Hub ids have one slash at most. The Hub is asked for minutes where it cannot be reached.
        path_only = name.startswith((".", "~")) or len(folder.parts) > 2 or not _may_be_an_id(name)
        beside = len(folder.parts) == 2 and folder.parent.is_dir() and not _is_cached(name)
        if path_only or beside:
            hub = f" (an id of the Hub is looked up where no folder is called {folder.parent})"
            raise FileNotFoundError(
                f"there is no folder {name}, where a model was looked for{hub * beside}"
                f"{did_you_mean_path(folder)}"
            )
        return name
    if subfolder or _holds_a_model(folder):
        return str(folder)
    inner = folder / "model"
    if _holds_a_model(inner):
        return str(inner)
    raise FileNotFoundError(
        f"{name} holds no model: there is no {CONFIG_NAME} and no {ADAPTER_CONFIG} in it, nor in "
        f"{inner}"
    )


def _may_be_an_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_adapter(path: str | os.PathLike, **options: Any) -> bool:
    """Whether a folder or a Hub id holds a PEFT adapter; ``options`` are from_pretrained's. Raises
    what :func:`model_folder` does."""
    folder = model_folder(path, options.get("subfolder"))
    return find_file(folder, ADAPTER_CONFIG, options) is not None


def find_file(path: str, name: str, options: dict[str, Any]) -> str | None:
    """The path of a file in a local folder or on the Hub; None where it is missing or out of reach.

    Args:
        options: keywords of ``from_pretrained``: revision, token, cache_dir and subfolder are read.
    """
    if os.path.isdir(path):
        file = Path(path) / (options.get("subfolder") or "") / name
        return str(file) if file.is_file() else None
    return cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
        **hub_options(options),
    )


def hub_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of ``from_pretrained`` by which the Hub is asked for files."""
    return {name: options[name] for name in _HUB_OPTIONS if options.get(name) is not None}


def check_weights(folder: str, subfolder: str | None) -> None:
    """Raises ValueError where a local folder has a file of weights that is cut short or is not of
    safetensors' format, and OSError where there are pickles alone."""
    files = sorted((Path(folder) / (subfolder or "")).glob("*.safetensors"))
    pickled = [] if files else sorted((Path(folder) / (subfolder or "")).glob("*model*.bin"))
    if pickled:
        raise OSError(f"{pickled[0]}: {NO_PICKLE}")
    for file in files:
        try:
            with safe_open(file, framework="pt"):  # checks the header and the length
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error


def weights_in(files: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Names and slices of the weights in safetensors files."""
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                yield key, tensors.get_slice(key)


def is_path(model: Any) -> bool:
    """Whether a model is given as a name or folder."""
    return isinstance(model, str) or hasattr(model, "__fspath__")


def holds_a_tokenizer(model: str) -> bool:
    """Whether a folder or a Hub id has a tokenizer's files."""
    folder = Path(model)
    if folder.is_dir():
        return any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)
    return any(find_file(model, name, {}) for name in _TOKENIZER_FILES_ON_THE_HUB)


def _holds_a_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG_NAME, ADAPTER_CONFIG))


def _is_cached(name: str) -> bool:
    with contextlib.suppress(ValueError):  # no id of the Hub
        files = (try_to_load_from_cache(name, x) for x in (CONFIG_NAME, ADAPTER_CONFIG))
        return any(isinstance(file, str) for file in files)
    return False
