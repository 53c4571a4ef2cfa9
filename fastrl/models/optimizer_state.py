"""An optimizer's state by the names of the weights that it trains."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.models.master_weights import MASTER, MasterWeights
from fastrl.models.sharding import like
from fastrl.run.state import SharedOut, is_dtensor

# torchao's classes of tensors that are several tensors inside, each with its module.
_IN_PARTS = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
}
_KIND, _PARTS, _CONTEXT = "__kind__", "parts", "context"


def optimizer_groups(optimizer: Any, model: nn.Module) -> list[dict[str, Any]]:
    """The optimizer's groups, with the names of their weights."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = []
    for number, group in enumerate(_inner(optimizer).param_groups):
        weights = [names.get(id(p), f"{number}.{i}") for i, p in enumerate(group["params"])]
        groups.append({**group, "params": weights})
    return groups


def set_weights(optimizer: Any, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """Puts a model's present weights into an optimizer's groups, by the names in ``groups``, which
    :func:`optimizer_groups` returned; weights that the model does not name stay."""
    weights = dict(model.named_parameters())
    for group, named in zip(_inner(optimizer).param_groups, groups, strict=True):
        pairs = zip(group["params"], named["params"], strict=True)
        group["params"] = [weights.get(name, p) for p, name in pairs]


def optimizer_state(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """Moments by the names of weights, and the groups' settings; tensors are the optimizer's own,
    spread over processes as they are there.

    Args:
        optimizer: torch's optimizer, or accelerate's wrapper of it.
        model: the model; weights that are spread over processes must not be gathered just now.

    Raises:
        TypeError: moments of a kind that a checkpoint cannot hold.
    """
    groups = optimizer_groups(optimizer, model)
    names = [name for group in groups for name in group["params"]]
    moments = _inner(optimizer).state_dict()["state"]
    return {"groups": groups, "moments": {names[i]: _plain(x) for i, x in moments.items()}}


def load_optimizer_state(optimizer: Any, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Makes an optimizer of the same weights continue from a state that :func:`optimizer_state`
    returned, or that was read from a file. Its master weights are left out where the optimizer
    keeps none."""
    inner = _inner(optimizer)
    index = {
        name: i
        for i, name in enumerate(name for group in state["groups"] for name in group["params"])
    }
    groups = [
        {**group, "params": [index[name] for name in group["params"]]} for group in state["groups"]
    ]
    for group, settings in zip(groups, inner.param_groups, strict=True):
        # JSON has no tuples, such as Adam's betas.
        for name, value in settings.items():
            if isinstance(value, tuple):
                group[name] = tuple(group[name])
            elif isinstance(value, Tensor):
                group[name] = group[name].clone()
    weights = dict(model.named_parameters())
    moments = {
        index[name]: {
            k: _copied(v, weights.get(name))
            for k, v in each.items()
            if k != MASTER or isinstance(inner, MasterWeights)
        }
        for name, each in state["moments"].items()
    }
    inner.load_state_dict({"state": moments, "param_groups": groups})


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights that are trained, by name, and buffers that are saved with a model."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stored = nn.Module.state_dict(model)  # a wrapper's override leaves out the language model
    buffers = {name: b for name, b in model.named_buffers() if name in stored}
    return {**parameters, **buffers}


@torch.no_grad()
def copy_weights(targets: Mapping[str, Tensor], sources: Mapping[str, Any]) -> None:
    """Copies weights by name, each of which may be whole, or spread over processes or files."""
    for name, target in targets.items():
        target.copy_(like(sources[name], target))


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def _plain(value: Any) -> Any:
    """Moments as a checkpoint can hold them: tensors of torchao by their parts."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if not hasattr(value, "__tensor_flatten__") or is_dtensor(value):
        return value
    kind = type(value).__name__
    if kind not in _IN_PARTS:
        raise TypeError(
            f"the optimizer keeps tensors of the kind {kind}, which a checkpoint cannot hold: "
            "choose another optim, such as adamw_torch"
        )
    names, context = value.__tensor_flatten__()
    return {
        _KIND: kind,
        _PARTS: {name: getattr(value, name) for name in names},
        _CONTEXT: [_written(part) for part in context],
    }


def _copied(value: Any, weight: Tensor | None) -> Any:
    """A weight's moments from a saved state, copied: a file's tensors are memory-mapped, and not
    aligned as torch's own are, by which kernels may round differently."""
    if isinstance(value, (Tensor, SharedOut)):
        return like(value, weight).clone()
    if not isinstance(value, Mapping):
        return value
    if _KIND not in value:
        return {name: _copied(each, weight) for name, each in value.items()}
    kind = getattr(importlib.import_module(_IN_PARTS[value[_KIND]]), value[_KIND])
    parts = {name: each.clone() for name, each in value[_PARTS].items()}
    return kind.__tensor_unflatten__(parts, [_read(each) for each in value[_CONTEXT]])


def _written(value: Any) -> Any:
    """A part of the context of a tensor's ``__tensor_flatten__``, as JSON can hold it."""
    return str(value) if isinstance(value, torch.dtype) else value


def _read(value: Any) -> Any:
    if isinstance(value, str):
        return getattr(torch, value.removeprefix("torch."))
    return tuple(value) if isinstance(value, list) else value
