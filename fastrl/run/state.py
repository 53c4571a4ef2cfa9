"""A tree of tensors and plain values as files: safetensors for tensors, JSON for the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

STATE = "state.json"
_TENSOR, _ARRAY, _BYTES = "__tensor__", "__array__", "__bytes__"


def save_tree(tree: Mapping[str, Any], folder: Path) -> None:
    """Writes ``state.json``, and a safetensors file for each top-level name that has tensors.

    Args:
        tree: dicts with texts as keys, lists, tuples (which are read as lists), tensors, arrays of
            NumPy, bytes, numbers, texts, booleans and None.

    Raises:
        TypeError: something else, named by its place.
        OSError: a file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {}
    for name, branch in tree.items():
        tensors: dict[str, Tensor] = {}
        plain[name] = _plain(branch, name, tensors)
        if tensors:
            try:
                save_file(tensors, folder / f"{name}.safetensors")
            except SafetensorError as error:  # also where the disk is full
                raise OSError(str(error)) from error
    (folder / STATE).write_text(json.dumps(plain) + "\n", encoding="utf-8")


def load_tree(folder: Path) -> dict[str, Any]:
    """Reads what :func:`save_tree` wrote; tensors are on the CPU."""
    from safetensors.torch import load_file

    plain = json.loads((folder / STATE).read_text(encoding="utf-8"))
    tree = {}
    for name, branch in plain.items():
        path = folder / f"{name}.safetensors"
        tree[name] = _whole(branch, load_file(path) if path.is_file() else {})
    return tree


def _plain(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """The value with references in place of tensors, which go into ``tensors`` by their place."""
    if isinstance(value, Tensor):
        # A copy for each name: safetensors takes no two tensors with the same memory.
        taken = value.detach().cpu()
        known = {x.data_ptr() for x in tensors.values()}
        tensors[place] = (taken.clone() if taken.data_ptr() in known else taken).contiguous()
        return {_TENSOR: place}
    if isinstance(value, np.ndarray):
        data = np.frombuffer(value.tobytes(), dtype=np.uint8).copy()
        tensors[place] = torch.from_numpy(data)
        return {_ARRAY: place, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, bytes):
        tensors[place] = torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy())
        return {_BYTES: place}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}: keys must be texts")
        return {key: _plain(x, f"{place}/{key}", tensors) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x, f"{place}/{i}", tensors) for i, x in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{place} is a {type(value).__name__}, which a checkpoint cannot hold")


def _whole(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_whole(x, tensors) for x in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _ARRAY in value:
        data = tensors[value[_ARRAY]].numpy().tobytes()
        return np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"]).copy()
    if _BYTES in value:
        return tensors[value[_BYTES]].numpy().tobytes()
    return {key: _whole(x, tensors) for key, x in value.items()}
