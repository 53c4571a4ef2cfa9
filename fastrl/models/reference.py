"""The frozen policy that the KL penalty measures against."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.value_head import AutoModelForCausalLMWithValueHead


def create_reference_model(
    model: AutoModelForCausalLMWithValueHead,
    num_shared_layers: int | None = None,
    pattern: str | None = None,
) -> AutoModelForCausalLMWithValueHead:
    """A frozen copy of ``model``, in evaluation mode.

    Args:
        num_shared_layers, pattern: sharing layers is not available yet; both must be None.

    Raises:
        ValueError: layers to share, or a PEFT model (its base model is its reference already).
    """
    if num_shared_layers is not None or pattern is not None:
        raise ValueError("num_shared_layers is not available yet: leave it None for a full copy")
    if model.is_peft_model:
        raise ValueError(
            "a PEFT model is its own reference with the adapter off: pass ref_model=None"
        )
    reference = copy.deepcopy(model)
    return reference.requires_grad_(False).eval()


class CopyReference:
    """A second, frozen model."""

    def __init__(self, model: nn.Module):
        self.model = model.requires_grad_(False).eval()

    @torch.no_grad()
    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        return self.model(**inputs, scoring=request)

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[nn.Module]:
        """The reference as a model to generate with."""
        yield self.model


class AdapterReference:
    """A PEFT policy with its adapter switched off: no further weights."""

    def __init__(self, policy: nn.Module, unwrapped: AutoModelForCausalLMWithValueHead):
        self.policy = policy
        self._unwrapped = unwrapped

    @torch.no_grad()
    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        with self._unwrapped.disable_adapter():
            return self.policy(**inputs, scoring=request)

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[nn.Module]:
        """The reference as a model to generate with."""
        with self._unwrapped.disable_adapter():
            yield self.policy


Reference = CopyReference | AdapterReference
