"""Objects as bytes for another process of the run; of tensors only the elements are sent."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WHOLE = (torch.int8, torch.int16, torch.int32)  # narrower than int64, which ids seldom need


def parcel(value: Any) -> Tensor:
    """A picklable value as uint8 [n], on the host.

    All tensors of a dtype are one flat array: a tensor's own pickle would be some hundred bytes
    longer, and hold a view's whole storage. int64 is sent in the narrowest dtype that holds it.
    """
    pickler = _Pickler()
    pickler.dump(value)
    flat = {
        dtype: _narrowed(torch.cat([x.detach().cpu().flatten() for x in tensors]))
        for dtype, tensors in pickler.tensors.items()
    }
    shapes = {dtype: _shapes(tensors) for dtype, tensors in pickler.tensors.items()}
    arrays = [np.frombuffer(pickler.file.getbuffer(), np.uint8)]
    arrays += [x.view(torch.uint8).numpy() for x in flat.values()]
    sent_as = [(dtype, flat[dtype].dtype, shapes[dtype]) for dtype in flat]
    head = pickle.dumps((sent_as, [array.size for array in arrays]))
    begin = np.frombuffer(len(head).to_bytes(8, "little") + head, np.uint8)
    return torch.from_numpy(np.concatenate([begin, *arrays]))


def opened(data: Tensor) -> Any:
    """The value of a :func:`parcel` of a process of this run; its tensors are on the host."""
    raw = data.numpy()
    end = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    sent_as, sizes = pickle.loads(raw[8:end].tobytes())
    pickled, *arrays = (x.copy() for x in np.split(raw[end:], np.cumsum(sizes)[:-1]))
    tensors = {
        dtype: _parts(torch.from_numpy(array).view(narrow).to(dtype), shapes)
        for (dtype, narrow, shapes), array in zip(sent_as, arrays, strict=True)
    }
    return _Unpickler(pickled.tobytes(), tensors).load()


class _Pickler(pickle.Pickler):
    """Pickles all but plain strided tensors, which it collects by their dtype."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.tensors: dict[torch.dtype, list[Tensor]] = {}
        super().__init__(self.file, protocol=pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided:
            return None
        self.tensors.setdefault(value.dtype, []).append(value)
        return value.dtype  # loading asks for a dtype's tensors in this same order


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: dict[torch.dtype, list[Tensor]]):
        super().__init__(io.BytesIO(pickled))
        self._next = {dtype: iter(each) for dtype, each in tensors.items()}

    def persistent_load(self, dtype: Any) -> Tensor:
        return next(self._next[dtype])


def _narrowed(x: Tensor) -> Tensor:
    if x.dtype != torch.int64 or not len(x):
        return x
    low, high = x.min(), x.max()
    for dtype in _WHOLE:
        bounds = torch.iinfo(dtype)
        if low >= bounds.min and high <= bounds.max:
            return x.to(dtype)
    return x


def _shapes(tensors: list[Tensor]) -> Any:
    """The tensors' lengths as an array where all are 1-D, as most are; else a list of shapes."""
    if all(x.dim() == 1 for x in tensors):
        return np.array([len(x) for x in tensors], np.int32)
    return [tuple(x.shape) for x in tensors]


def _parts(flat: Tensor, shapes: Any) -> list[Tensor]:
    if isinstance(shapes, np.ndarray):
        return list(flat.split(shapes.tolist()))
    sizes = [int(np.prod(shape)) for shape in shapes]
    return [x.view(shape) for x, shape in zip(flat.split(sizes), shapes, strict=True)]
