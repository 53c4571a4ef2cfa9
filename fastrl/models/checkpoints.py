"""Files of checkpoints, and the value head among their weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

WEIGHTS_NAME = "model.safetensors"
HEAD_PREFIX = "v_head."
REWARD_PREFIX = "reward."  # of the reward adapter's score head, which is not saved
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CONFIG_NAME = "config.json"


def read_value_head(path: str, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The value head's weights of a checkpoint, {} where it has none."""
    weights: dict[str, Tensor] = {}
    for file in _weight_files(path, kwargs):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                if key.startswith(HEAD_PREFIX):
                    weights[key.removeprefix(HEAD_PREFIX)] = tensors.get_tensor(key)
    return weights


def _weight_files(path: str, kwargs: dict[str, Any]) -> Iterator[str]:
    import json

    whole = find_file(path, WEIGHTS_NAME, kwargs)
    if whole is not None:
        yield whole
        return
    index = find_file(path, f"{WEIGHTS_NAME}.index.json", kwargs)
    if index is None:
        return
    weight_map = json.loads(Path(index).read_text())["weight_map"]
    for shard in sorted({f for k, f in weight_map.items() if k.startswith(HEAD_PREFIX)}):
        found = find_file(path, shard, kwargs)
        if found is not None:
            yield found


def find_file(path: str, name: str, kwargs: dict[str, Any]) -> str | None:
    """A file of a local directory or of the Hub; None where there is none."""
    if os.path.isdir(path):
        file = Path(path) / (kwargs.get("subfolder") or "") / name
        return str(file) if file.is_file() else None
    hub = {k: kwargs[k] for k in ("revision", "token", "cache_dir", "subfolder") if k in kwargs}
    return cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
        **hub,
    )
