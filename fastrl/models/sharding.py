"""Weights that FSDP2 has spread over processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from fastrl.run.state import SharedOut, is_dtensor, region_of

_whole: weakref.WeakSet[Any] = weakref.WeakSet()  # units whose weights are whole for now


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Context in which each process has all weights of a model: all processes gather them at its
    beginning, and spread them again at its end. Forwards within it wait for no other process. It
    has no effect where weights are not spread, or are whole already."""
    units = [unit for unit in _units(model) if unit not in _whole]
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


def of_fsdp(hook: Any) -> bool:
    """Whether FSDP2 has put this hook on a module: it gathers weights, and changes no result."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def wrapped_by_fsdp(method: Any) -> bool:
    """Whether FSDP2 has wrapped a method, whose wrapper bears the method's name."""
    function = getattr(method, "__func__", method)
    within = getattr(function, "__globals__", {}).get("__name__", "")
    return within.startswith("torch.distributed.fsdp.")


def seen_by_fsdp(
    model: nn.Module, change: Callable[[nn.Module, Any, Any], Any]
) -> AbstractContextManager[Any]:
    """Context in which a forward hook changes a model's output before FSDP2's own hook sees it:
    FSDP2 adds up only gradients of tensors that depend on what it has seen. It has no effect on
    models that FSDP2 does not spread."""
    if not _is_unit(model):
        return nullcontext()
    return model.register_forward_hook(change, prepend=True)


def spread(model: nn.Module) -> None:
    """Spreads weights that are still gathered from the last forward, so that the model's parameters
    are the tensors that the optimizer steps."""
    for unit in _units(model):
        unit.reshard()


def layers_to_spread(model: nn.Module) -> list[str] | None:
    """Names of classes of layers, by which accelerate finds layers for FSDP: those that the
    architecture names and the model has, all named ones if it has none of them. A text model lacks
    the vision tower's, and accelerate refuses a name that the model lacks. None: none is named."""
    named = getattr(model, "_no_split_modules", None)
    kinds = {type(module).__name__ for module in model.modules()}
    return named and ([name for name in named if name in kinds] or [*named])


def name_by_path(model: Any) -> None:
    """Makes a wrapper's state dict name weights by their paths, by which FSDP2 finds them."""
    model.names_by_path = True


def spread_frozen(model: nn.Module, accelerator: Any) -> None:
    """Spreads a model that is not trained as accelerate has spread the policy: accelerate itself
    spreads none without an optimizer. The model's weights are whole only while a forward needs
    them. It has no effect where accelerate spreads nothing.

    Args:
        accelerator: the accelerator that has prepared the policy.
    """
    if not accelerator.is_fsdp2:
        return
    from accelerate.utils import fsdp2_prepare_model

    name_by_path(model)
    fsdp2_prepare_model(accelerator, model)
    # FSDP2 leaves the last units whole for a backward pass, which never comes.
    for unit in _units(model):
        unit.set_reshard_after_forward(True, recurse=False)


def own_share(tensor: Any) -> Tensor:
    """This process's part of a tensor that may be spread over processes; shares its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole(tensor: Any) -> Tensor:
    """The whole of a tensor that may be spread over files, or over processes, all of which must
    then call this."""
    if isinstance(tensor, SharedOut):
        return tensor[...]
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def gathered_state_dict(model: nn.Module, *, keep: bool) -> dict[str, Tensor] | None:
    """The state dict, on the CPU, of a model whose weights are spread over processes, all of which
    must call this; None for any other model.

    Args:
        keep: whether this process needs the dict; else it gets an empty one.
    """
    if not _units(model):
        return None
    spread(model)
    state: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}  # by weight: a tied one has two names
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in gathered:
            tensor = whole(weight.detach())
            gathered[id(weight)] = tensor.cpu() if keep else tensor.new_empty(0)
        if keep:
            state[name] = gathered[id(weight)]
    return state


def like(tensor: Tensor | SharedOut, other: Any) -> Tensor:
    """``tensor``, spread over processes if ``other`` is and has its shape, else whole. Processes
    wait for each other only where a spread tensor is made whole."""
    if not is_dtensor(other) or tensor.shape != other.shape:
        return whole(tensor)
    if is_dtensor(tensor):
        return tensor  # type: ignore[return-value]
    from torch.distributed.tensor import DTensor

    share = tensor[region_of(other)].to(other.device)
    return DTensor.from_local(
        share,
        other.device_mesh,
        other.placements,
        run_check=False,
        shape=other.shape,
        stride=other.stride(),
    )


def _units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _is_unit(module)]


def _is_unit(module: nn.Module) -> bool:
    """Whether the module is a unit of FSDP2, whose weights are gathered together."""
    # The class is found by its name: torch may be built without it, and its import takes long.
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _reshards(unit: Any) -> bool:
    """Whether the module spreads its weights after a forward; torch has no public name for it."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is not None and group.post_forward_mesh_info is not None
