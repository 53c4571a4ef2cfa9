"""Reference models of a PEFT policy: its base model, or the adapter that training started from."""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.models.adapters import REFERENCE_ADAPTER, acting, add_adapter, trainability_kept
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.sharding import spread
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
    # The weights of other kinds of adapters do not show it.
    return not factors or any(bool(p.any()) for p in factors)


class SwitchedAdapter(RefModel):
    """The policy itself, with its adapter off or replaced while it is used."""

    mode = "adapter"

    def __init__(self, policy: PreTrainedModelWrapper):
        self.policy: Any = policy
        self._unwrapped = policy

    def place(self, policy: nn.Module, accelerator: Any) -> None:
        self.policy = policy

    @torch.no_grad()
    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        # In training mode the reference would have dropout, too.
        still = evaluating(self.policy) if self.policy.training else contextlib.nullcontext()
        with still, self._switched():
            return self.policy(**inputs, scoring=request)

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[nn.Module]:
        with self._switched():
            yield self.policy

    @abstractmethod
    def _switched(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the policy acts as the reference."""


class AdapterOffRefModel(SwitchedAdapter):
    """The policy with its adapter off, that is its base model: no further weights."""

    @contextlib.contextmanager
    def _switched(self) -> Iterator[None]:
        with trainability_kept(self._unwrapped), self._unwrapped.disable_adapter():
            yield


class StartAdapterRefModel(SwitchedAdapter):
    """The policy with a frozen copy of the adapter that it had when training started."""

    def __init__(self, policy: PreTrainedModelWrapper):
        super().__init__(policy)
        self._peft: Any = policy.pretrained_model
        trained = self._peft.active_adapter
        config = copy.copy(self._peft.peft_config[trained])
        config.init_lora_weights = True  # another start may change the base's weights once more
        add_adapter(self._peft, REFERENCE_ADAPTER, config)
        self._trained = trained
        self.follow(1.0)

    def follow(self, weight: float) -> None:
        own = self.own_weights()
        theirs = [name.replace(f".{REFERENCE_ADAPTER}.", f".{self._trained}.") for name in own]
        weights = dict(self._peft.named_parameters())
        mix(list(own.values()), [weights[name].data for name in theirs], weight)

    def own_weights(self) -> dict[str, Tensor]:
        spread(self._unwrapped)
        named = self._peft.named_parameters()
        return {name: p.data for name, p in named if f".{REFERENCE_ADAPTER}." in name}

    def _switched(self) -> contextlib.AbstractContextManager[None]:
        return acting(self._peft, REFERENCE_ADAPTER)
