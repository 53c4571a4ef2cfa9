"""An optimizer's state by the names of the weights that it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.models.sharding import like
from fastrl.run.state import SharedOut


def optimizer_groups(optimizer: Any, model: nn.Module) -> list[dict[str, Any]]:
    """The optimizer's groups, with the names of their weights."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = []
    for number, group in enumerate(_inner(optimizer).param_groups):
        weights = [names.get(id(p), f"{number}.{i}") for i, p in enumerate(group["params"])]
        groups.append({**group, "params": weights})
    return groups


def set_weights(optimizer: Any, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """Makes an optimizer train the weights that a model has now under the names of some groups;
    others stay."""
    weights = dict(model.named_parameters())
    for group, named in zip(_inner(optimizer).param_groups, groups, strict=True):
        pairs = zip(group["params"], named["params"], strict=True)
        group["params"] = [weights.get(name, p) for p, name in pairs]


def optimizer_state(optimizer: Any, model: nn.Module) -> dict[str, Any]:
    """Moments by the names of weights, and the groups' settings; tensors are the optimizer's own,
    and spread over processes as it has them.

    Args:
        optimizer: torch's, or accelerate's around it.
        model: whose weights are not gathered just now, if they are spread over processes.
    """
    groups = optimizer_groups(optimizer, model)
    names = [name for group in groups for name in group["params"]]
    moments = _inner(optimizer).state_dict()["state"]
    return {"groups": groups, "moments": {names[i]: each for i, each in moments.items()}}


def load_optimizer_state(optimizer: Any, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Makes an optimizer of the same weights continue from what :func:`optimizer_state` returned,
    or what was read of it."""
    inner = _inner(optimizer)
    index = {
        name: i
        for i, name in enumerate(name for group in state["groups"] for name in group["params"])
    }
    groups = [
        {**group, "params": [index[name] for name in group["params"]]} for group in state["groups"]
    ]
    for group, own in zip(groups, inner.param_groups, strict=True):
        # JSON has no tuples, such as Adam's betas.
        for name, value in own.items():
            if isinstance(value, tuple):
                group[name] = tuple(group[name])
    # Copies: the tensors of a file are mapped, and lie where torch would not put them.
    weights = dict(model.named_parameters())
    moments = {
        index[name]: {
            k: like(v, weights.get(name)).clone() if isinstance(v, (Tensor, SharedOut)) else v
            for k, v in each.items()
        }
        for name, each in state["moments"].items()
    }
    inner.load_state_dict({"state": moments, "param_groups": groups})


@torch.no_grad()
def copy_weights(targets: Mapping[str, Tensor], sources: Mapping[str, Any]) -> None:
    """Copies weights by name, each of which may be whole, or spread over processes or files."""
    for name, target in targets.items():
        target.copy_(like(sources[name], target))


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)
