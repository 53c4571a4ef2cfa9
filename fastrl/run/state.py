"""A tree of tensors and plain values as files: safetensors for tensors, JSON for the rest.

A tensor that is spread over processes is never whole on its way: each process writes its share, and
reads what it needs of all shares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastrl.run.processes import OneProcess, Processes

STATE = "state.json"
_TENSOR, _ARRAY, _BYTES = "__tensor__", "__array__", "__bytes__"
_SHARES, _SHAPE, _DTYPE = "__shares__", "shape", "dtype"

Region = tuple[slice, ...]  # a part of a tensor: a slice for each dimension


def save_tree(tree: Mapping[str, Any], folder: Path, processes: Processes | None = None) -> None:
    """Writes ``state.json``, and a safetensors file for each top-level name that has tensors; for
    tensors that are spread over processes (DTensors), a file per process, ``NAME-1-of-2``.

    Args:
        tree: dicts with texts as keys, lists, tuples (which are read as lists), tensors, arrays of
            NumPy, bytes, numbers, texts, booleans and None.
        processes: the run's processes, which all call this; the main one writes what is not spread.

    Raises:
        TypeError: a value of another type; the message names its place in the tree.
        OSError: a file cannot be written.
    """
    processes = processes or OneProcess()
    folder.mkdir(parents=True, exist_ok=True)
    plain: dict[str, Any] = {}
    for name, branch in tree.items():
        if not processes.is_main and not _has_shares(branch):
            continue
        tensors: dict[str, Tensor] = {}
        shares: dict[str, Any] = {}
        plain[name] = _plain(branch, name, tensors, shares)
        if tensors and processes.is_main:
            _save(folder / f"{name}.safetensors", tensors)
        if shares:
            written = {place: share for place, share in shares.items() if _writes(share)}
            places = {
                place: json.dumps([[x.start, x.stop] for x in region_of(share)])
                for place, share in written.items()
            }
            parts = {
                place: x.to_local().detach().cpu().contiguous() for place, x in written.items()
            }
            _save(_share(folder, name, processes.index, processes.count), parts, places)
    if processes.is_main:
        if any(map(_has_shares, tree.values())):
            plain[_SHARES] = processes.count
        (folder / STATE).write_text(json.dumps(plain) + "\n", encoding="utf-8")


def load_tree(folder: Path) -> dict[str, Any]:
    """Reads what :func:`save_tree` wrote, to the CPU; spread tensors are :class:`SharedOut`.

    Raises:
        ValueError: a share of a tensor is missing; the message names the tensor.
    """
    from safetensors.torch import load_file

    plain = json.loads((folder / STATE).read_text(encoding="utf-8"))
    count = plain.pop(_SHARES, 0)
    tree = {}
    for name, branch in plain.items():
        path = folder / f"{name}.safetensors"
        files = [_share(folder, name, index, count) for index in range(count)]
        shares = _Shares([file for file in files if file.is_file()])
        tree[name] = _whole(branch, load_file(path) if path.is_file() else {}, shares)
    return tree


class SharedOut:
    """A tensor whose parts lie in several files, to be read by regions with bounds in each
    dimension, ``x[2:4, 0:8]``, or as a whole, ``x[...]``, to the CPU.

    Attributes:
        place: the tensor's place in its tree, which is its name in the files.
        shape, dtype: the shape and dtype of the whole tensor.
    """

    def __init__(
        self,
        place: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: list[tuple[Path, Region]],
    ):
        self.place, self.shape, self.dtype = place, torch.Size(shape), dtype
        self._parts = parts

    def __getitem__(self, region: Region | Any) -> Tensor:
        from safetensors import safe_open

        wanted = tuple(slice(0, n) for n in self.shape) if region is ... else region
        tensor = torch.empty([x.stop - x.start for x in wanted], dtype=self.dtype)
        for file, part in self._parts:
            common = [
                slice(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(wanted, part, strict=True)
            ]
            if any(x.start >= x.stop for x in common):
                continue
            with safe_open(file, framework="pt") as tensors:
                read = tensors.get_slice(self.place)[_within(common, part)]
            tensor[_within(common, wanted)] = read
        return tensor


def is_dtensor(value: Any) -> bool:
    """Whether a value is a tensor of which each process has a share."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def region_of(tensor: Any) -> Region:
    """The region of a tensor spread over processes that is this process's share."""
    # The method that torch's own distributed checkpoints call.
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(
        slice(start, start + n) for start, n in zip(chunk.offsets, chunk.sizes, strict=True)
    )


class _Shares:
    """The parts of tensors in the files of a branch, a file per process."""

    def __init__(self, files: list[Path]):
        from safetensors import safe_open

        self._parts: dict[str, list[tuple[Path, Region]]] = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for place, bounds in (tensors.metadata() or {}).items():
                    region = tuple(slice(*each) for each in json.loads(bounds))
                    self._parts.setdefault(place, []).append((file, region))

    def of(self, place: str, shape: list[int], dtype: str) -> SharedOut:
        """The tensor at ``place``; raises ValueError where some of its elements are in no file."""
        parts = self._parts.get(place, [])
        held = sum(math.prod(x.stop - x.start for x in region) for _, region in parts)
        if held != math.prod(shape):
            raise ValueError(
                f"{place} has {math.prod(shape)} elements, and the shares that are there {held}: "
                "take another checkpoint"
            )
        return SharedOut(place, tuple(shape), getattr(torch, dtype), parts)


def _save(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:  # also where the disk is full
        raise OSError(str(error)) from error


def _share(folder: Path, name: str, index: int, count: int) -> Path:
    return folder / f"{name}-{index + 1}-of-{count}.safetensors"


def _has_shares(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_shares, value.values()))
    return any(map(_has_shares, value)) if isinstance(value, (list, tuple)) else is_dtensor(value)


def _writes(tensor: Any) -> bool:
    """Whether this process writes its share: the first that holds it does, unless it is empty."""
    dimensions = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    first = all(index == 0 for index, placement in dimensions if placement.is_replicate())
    return first and tensor.to_local().numel() > 0


def _within(region: list[slice] | Region, other: Region) -> Region:
    """``region`` in coordinates of ``other``, which contains it."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(region, other, strict=True)
    )


def _plain(value: Any, place: str, tensors: dict[str, Tensor], shares: dict[str, Any]) -> Any:
    """The value with a reference for each tensor, which is put into ``tensors`` or, if processes
    have shares of it, into ``shares``, by its place in the tree."""
    if is_dtensor(value):
        shares[place] = value
        dtype = str(value.dtype).removeprefix("torch.")
        return {_SHARES: place, _SHAPE: list(value.shape), _DTYPE: dtype}
    if isinstance(value, Tensor):
        # A copy for each name: safetensors takes no two tensors with the same memory.
        taken = value.detach().cpu()
        addresses = {x.data_ptr() for x in tensors.values()}
        tensors[place] = (taken.clone() if taken.data_ptr() in addresses else taken).contiguous()
        return {_TENSOR: place}
    if isinstance(value, np.ndarray):
        data = np.frombuffer(value.tobytes(), dtype=np.uint8).copy()
        tensors[place] = torch.from_numpy(data)
        return {_ARRAY: place, _DTYPE: value.dtype.str, _SHAPE: list(value.shape)}
    if isinstance(value, bytes):
        tensors[place] = torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy())
        return {_BYTES: place}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}: keys must be texts")
        return {key: _plain(x, f"{place}/{key}", tensors, shares) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x, f"{place}/{i}", tensors, shares) for i, x in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{place} is a {type(value).__name__}, which a checkpoint cannot hold")


def _whole(value: Any, tensors: Mapping[str, Tensor], shares: _Shares) -> Any:
    if isinstance(value, list):
        return [_whole(x, tensors, shares) for x in value]
    if not isinstance(value, dict):
        return value
    if _SHARES in value:
        return shares.of(value[_SHARES], value[_SHAPE], value[_DTYPE])
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _ARRAY in value:
        data = tensors[value[_ARRAY]].numpy().tobytes()
        return np.frombuffer(data, dtype=value[_DTYPE]).reshape(value[_SHAPE]).copy()
    if _BYTES in value:
        return tensors[value[_BYTES]].numpy().tobytes()
    return {key: _whole(x, tensors, shares) for key, x in value.items()}
