"""A frozen copy of the policy as reference model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.ref_model.base import RefModel

Copied = TypeVar("Copied", bound=nn.Module)


def frozen_copy(model: Copied, shared: dict[int, Any] | None = None) -> Copied:
    """Makes a frozen copy in evaluation mode; objects in ``shared``, by id, are not copied."""
    return copy.deepcopy(model, dict(shared or {})).requires_grad_(False).eval()


@torch.no_grad()
def mix(targets: list[Tensor], sources: list[Tensor], weight: float) -> None:
    """target ← weight·source + (1 - weight)·target, on any devices."""
    for target, source in zip(targets, sources, strict=True):
        target.lerp_(source.to(target.device, target.dtype), weight)


class SecondModel(RefModel):
    """A frozen model beside the policy."""

    def __init__(self, model: nn.Module, policy: nn.Module | None = None):
        self.model: Any = model.requires_grad_(False).eval()
        self._copy, self._policy = model, policy

    def place(self, policy: nn.Module, accelerator: Any) -> None:
        self.model = accelerator.prepare_model(self.model, evaluation_mode=True)

    @torch.no_grad()
    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        return self.model(**inputs, scoring=request)

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[nn.Module]:
        yield self.model

    def follow(self, weight: float) -> None:
        assert self._policy is not None
        sources = dict(self._policy.named_parameters())
        own = {name: x for name, x in self.own_weights().items() if name in sources}
        mix(list(own.values()), [sources[name].data for name in own], weight)

    def own_weights(self) -> dict[str, Tensor]:
        # Shared weights are the same objects.
        policy = {} if self._policy is None else dict(self._policy.named_parameters())
        named = self._copy.named_parameters()
        return {name: p.data for name, p in named if policy.get(name) is not p}


class CopyRefModel(SecondModel):
    """A second model with weights of its own."""

    mode = "copy"
