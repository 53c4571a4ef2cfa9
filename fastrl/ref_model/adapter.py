"""Reference models of a PEFT policy: its base model, or the adapter that training began with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.models.adapters import REFERENCE_ADAPTER, acting, add_adapter, trainability_kept
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.utils import evaluating
from fastrl.models.value_head import PreTrainedModelWrapper
from fastrl.ref_model.base import RefModel
from fastrl.ref_model.copy import mix

_B = ("lora_B", "lora_embedding_B")  # LoRA's factors that begin at 0


def trained_before(peft_model: Any) -> bool:
    """Whether the active adapter may change the outputs already: a new LoRA adapter's B is 0."""
    active = [f".{name}." for name in peft_model.active_adapters]
    factors = [
        p
        for name, p in peft_model.named_parameters()
        if any(f".{b}{each}" in f"{name}." for b in _B for each in active)
    ]
    # Of adapters of another kind weights do not tell.
    return not factors or any(bool(p.any()) for p in factors)


class SwitchedAdapter(RefModel):
    """The policy itself, with its adapter switched off or exchanged meanwhile."""

    mode = "adapter"

    def __init__(self, policy: nn.Module, unwrapped: PreTrainedModelWrapper, why: str = ""):
        self.policy: Any = policy
        self.why = why
        self._unwrapped = unwrapped

    def place(self, policy: nn.Module, accelerator: Any) -> None:
        self.policy = policy

    @torch.no_grad()
    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        # A policy that is learning with dropout must not be compared with one that has it too.
        still = evaluating(self.policy) if self.policy.training else contextlib.nullcontext()
        with still, self._switched():
            return self.policy(**inputs, scoring=request)

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[nn.Module]:
        with self._switched():
            yield self.policy

    def _switched(self) -> contextlib.AbstractContextManager[None]:
        """While open, the policy is the reference."""
        raise NotImplementedError


class AdapterOffRefModel(SwitchedAdapter):
    """The policy with its adapter off, which is its base model: no further weights."""

    @contextlib.contextmanager
    def _switched(self) -> Iterator[None]:
        with trainability_kept(self._unwrapped), self._unwrapped.disable_adapter():
            yield


class StartAdapterRefModel(SwitchedAdapter):
    """The policy with a frozen copy of the adapter that it had when training began."""

    def __init__(self, policy: nn.Module, unwrapped: PreTrainedModelWrapper, why: str = ""):
        super().__init__(policy, unwrapped, why)
        self._peft: Any = unwrapped.pretrained_model
        self._active = self._peft.active_adapter
        add_adapter(self._peft, REFERENCE_ADAPTER, self._peft.peft_config[self._active])
        self._own, self._theirs = self._pairs()
        mix(self._own, self._theirs, 1.0)

    def follow(self, weight: float) -> None:
        mix(self._own, self._theirs, weight)

    def _switched(self) -> contextlib.AbstractContextManager[None]:
        return acting(self._peft, REFERENCE_ADAPTER)

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """The copy's weights, and those of the adapter that is trained."""
        weights = dict(self._peft.named_parameters())
        own, theirs = [], []
        for name, parameter in weights.items():
            if f".{REFERENCE_ADAPTER}." in name:
                trained = name.replace(f".{REFERENCE_ADAPTER}.", f".{self._active}.")
                own.append(parameter.data)
                theirs.append(weights[trained].data)
        return own, theirs
