"""Weights that FSDP2 has spread over processes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_whole: weakref.WeakSet[Any] = weakref.WeakSet()  # units whose weights are whole for now


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Context in which each process has all weights of a model; they are gathered at its beginning
    by all processes, and spread again at its end. Forwards within do not wait for other processes.
    Without effect where weights are not spread."""
    units = _units(model)
    if not units:
        yield
        return
    kept = [unit for unit in units if _reshards(unit)]
    for unit in kept:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        for unit in units:
            unit.unshard()
        _whole.update(units)
        yield
    finally:
        _whole.difference_update(units)
        for unit in kept:
            unit.set_reshard_after_forward(True, recurse=False)
        for unit in units:
            unit.reshard()


def is_spread_unit(module: nn.Module) -> bool:
    """Whether FSDP2 spreads this module's own weights, and no :func:`whole_weights` is around it;
    they may be whole just now, from the last forward."""
    return _is_unit(module) and module not in _whole


def is_spread(model: nn.Module) -> bool:
    """Whether FSDP2 spreads a model's weights over processes."""
    return bool(_units(model))


def spread(model: nn.Module) -> None:
    """Spreads weights that are still gathered from the last forward, so that what the model's
    parameters are is what the optimizer steps."""
    for unit in _units(model):
        unit.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be spread over processes, all of which must ask for it, as a whole."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def gathered_state_dict(model: nn.Module, *, keep: bool) -> dict[str, Tensor] | None:
    """The state dict of a model whose weights are spread over processes, all of which must ask for
    it, on the CPU; None of another model.

    Args:
        keep: whether this process keeps it; else it gets an empty one.
    """
    if not _units(model):
        return None
    spread(model)
    found = {}
    for name, tensor in model.state_dict().items():
        gathered = whole(tensor)
        if keep:
            found[name] = gathered.cpu()
    return found


def like(tensor: Tensor, other: Any) -> Tensor:
    """A whole tensor, spread over processes as another one of its shape is."""
    mesh = getattr(other, "device_mesh", None)
    if mesh is None or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(other.device), mesh, other.placements)


def _units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _is_unit(module)]


def _is_unit(module: nn.Module) -> bool:
    """Whether it is one of those whose weights are gathered together."""
    # By name: torch may be built without it, and its import takes long.
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _reshards(unit: Any) -> bool:
    """Whether it spreads its weights after a forward; torch has no public name for it."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is not None and group.post_forward_mesh_info is not None
