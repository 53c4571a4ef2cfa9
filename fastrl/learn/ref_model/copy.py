"""A frozen copy of the policy as reference model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastrl.learn.ref_model.base import RefModel
from fastrl.models.routing import without_routing
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.sharding import own_share, spread, spread_frozen, whole
from fastrl.run.state import is_dtensor

Copied = TypeVar("Copied", bound=nn.Module)


def frozen_copy(model: Copied, shared: dict[int, Any] | None = None) -> Copied:
    """A frozen copy in evaluation mode; ``shared`` maps ids of objects to what replaces them."""
    return copy.deepcopy(model, dict(shared or {})).requires_grad_(False).eval()


def in_dtype(model: Copied, dtype: str) -> Copied:
    """The model with its floating-point weights in a dtype, by torch's name: the model itself where
    they have it already, or dtype is "auto", else a frozen copy. Buffers, such as the frequencies
    of rotary embeddings, keep theirs, as when a model is loaded in a dtype."""
    if dtype == "auto":
        return model
    target = getattr(torch, dtype)
    others = [p for p in model.parameters() if p.is_floating_point() and p.dtype != target]
    if not others:
        return model
    cast = {id(p): nn.Parameter(p.detach().to(target), requires_grad=False) for p in others}
    return frozen_copy(model, cast)


@torch.no_grad()
def mix(targets: list[Tensor], sources: list[Tensor], weight: float) -> None:
    """target ← weight·source + (1 - weight)·target, on any devices; each process mixes its share of
    targets that are spread over processes."""
    for target, source in zip(targets, sources, strict=True):
        share = own_share(target)
        source_share = own_share(source) if is_dtensor(target) else whole(source)
        share.lerp_(source_share.to(share.device, share.dtype), weight)


class SecondModel(RefModel):
    """A frozen model beside the policy."""

    def __init__(self, model: nn.Module, policy: nn.Module | None = None):
        self.model: Any = model.requires_grad_(False).eval()
        self._copy, self._policy = model, policy
        # Shared weights are the same objects, until FSDP2 makes shares of each model.
        shared = {} if policy is None else dict(policy.named_parameters())
        named = model.named_parameters()
        self._own = frozenset(name for name, p in named if shared.get(name) is not p)

    def place(self, policy: nn.Module, accelerator: Any) -> None:
        self.model = accelerator.prepare_model(self.model, evaluation_mode=True)
        spread_frozen(self._copy, accelerator)

    @torch.no_grad()
    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        return self.model(**without_routing(inputs), scoring=request)

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[nn.Module]:
        yield self.model

    def follow(self, weight: float) -> None:
        assert self._policy is not None
        spread(self._policy)
        sources = dict(self._policy.named_parameters())
        weights = {name: x for name, x in self.own_weights().items() if name in sources}
        mix(list(weights.values()), [sources[name].data for name in weights], weight)

    def own_weights(self) -> dict[str, Tensor]:
        spread(self._copy)
        return {name: p.data for name, p in self._copy.named_parameters() if name in self._own}


class CopyRefModel(SecondModel):
    """A second model with weights of its own."""

    mode = "copy"
