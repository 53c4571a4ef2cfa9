"""Reference models of a PEFT policy: its base model, or the adapter that training started from."""

from __future__ import annotations

import contextlib
import copy
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.learn.ref_model.base import RefModel
from fastrl.learn.ref_model.copy import mix
from fastrl.models.adapter_base import plain_name
from fastrl.models.adapters import (
    REFERENCE_ADAPTER,
    acting,
    add_adapter,
    load_adapter,
    trainability_kept,
)
from fastrl.models.routing import without_routing
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.sharding import like, own_share, spread
from fastrl.models.utils import evaluating
from fastrl.models.value_head import PreTrainedModelWrapper

_B = ("lora_B", "lora_embedding_B")  # LoRA's factors that begin at 0
# Parts of names of weights that PEFT adds without its tuner's prefix, and that act with an adapter.
_ADDED = ("modules_to_save", "trainable_tokens_", "prompt_encoder")


def trained_before(peft_model: Any) -> bool:
    """Whether the active adapter may change the outputs already: a new LoRA adapter's B is 0."""
    active = [f".{name}." for name in peft_model.active_adapters]
    factors = [
        p
        for name, p in peft_model.named_parameters()
        if any(f".{b}{each}" in f"{name}." for b in _B for each in active)
    ]
    # Weights of adapters of other kinds do not show whether they were trained.
    return not factors or any(bool(p.any()) for p in factors)


def trained_below(peft_model: Any) -> dict[str, nn.Parameter]:
    """The base's own weights that are trained beside an adapter, by name, such as the biases of
    LoRA's ``bias="all"``: they act whether the adapter is on or off."""
    return {name: p for name, p in _below(peft_model).items() if p.requires_grad}


def base_weights(model: Any) -> dict[str, nn.Parameter]:
    """A model's own weights by name, of one with an adapter those that its base has without it."""
    if not hasattr(model, "peft_config"):
        return dict(model.named_parameters())
    below = _below(model).items()
    return {plain_name(name).removeprefix("base_model.model."): p for name, p in below}


def _below(peft_model: Any) -> dict[str, nn.Parameter]:
    """The weights that are not an adapter's, by name."""
    prefix = getattr(peft_model.base_model, "prefix", None)
    added = _ADDED if prefix is None else (prefix, *_ADDED)
    named = peft_model.named_parameters()
    return {n: p for n, p in named if not any(x.startswith(added) for x in n.split("."))}


class SwitchedAdapter(RefModel):
    """The policy itself. While it acts as reference, its adapter is off or replaced, and base
    weights that are trained, too, are as before training, or as :meth:`follow` has moved them."""

    mode = "adapter"

    def __init__(self, policy: PreTrainedModelWrapper):
        self.policy: Any = policy
        self._unwrapped = policy
        below = trained_below(policy.pretrained_model)
        self._begun = {name: p.detach().clone() for name, p in below.items()}

    def place(self, policy: nn.Module, accelerator: Any) -> None:
        self.policy = policy

    @torch.no_grad()
    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        # In training mode the reference would have dropout, too.
        still = evaluating(self.policy) if self.policy.training else contextlib.nullcontext()
        with still, self.as_policy():
            return self.policy(**without_routing(inputs), scoring=request)

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[nn.Module]:
        with self._switched(), self._as_begun():
            yield self.policy

    @contextlib.contextmanager
    def _as_begun(self) -> Iterator[None]:
        """Context in which the base's trained weights have the values that the reference has."""
        if not self._begun:
            yield
            return
        spread(self._unwrapped)
        parameters = dict(self._unwrapped.pretrained_model.named_parameters())
        shares = [own_share(parameters[name].data) for name in self._begun]
        trained = [share.clone() for share in shares]
        try:
            for (name, begun), share in zip(self._begun.items(), shares, strict=True):
                share.copy_(own_share(like(begun, parameters[name].data)))
            yield
        finally:
            for share, now in zip(shares, trained, strict=True):
                share.copy_(now)
            spread(self._unwrapped)  # weights that a forward gathered are the reference's

    @abstractmethod
    def _switched(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the policy acts as the reference."""


class AdapterOffRefModel(SwitchedAdapter):
    """The policy with its adapter off, which is its base model; there is no second adapter."""

    @contextlib.contextmanager
    def _switched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._begun:  # PEFT warns that biases stay as they are: they are put back
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "Careful, disabling adapter layers with bias")
            stack.enter_context(trainability_kept(self._unwrapped))
            stack.enter_context(self._unwrapped.disable_adapter())
            yield


class LiveRefModel(SwitchedAdapter):
    """The policy itself, with the weights that it has by then."""

    mode = "live"

    def __init__(self, policy: PreTrainedModelWrapper):
        self.policy: Any = policy
        self._unwrapped = policy
        self._begun = {}

    def _switched(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class OwnAdapterRefModel(SwitchedAdapter):
    """The policy's base with another adapter than the one that is trained.

    Args:
        path: a directory or Hub id of the adapter.
        name: the name that PEFT is to know it by.

    Raises:
        ValueError: what :func:`fastrl.models.adapters.load_adapter` refuses.
    """

    def __init__(self, policy: PreTrainedModelWrapper, path: str, name: str, hub: dict[str, Any]):
        super().__init__(policy)
        self._peft: Any = policy.pretrained_model
        self._name = name
        load_adapter(self._peft, path, name, hub)

    def own_weights(self) -> dict[str, Tensor]:
        spread(self._unwrapped)
        named = self._peft.named_parameters()
        added = {name: p.data for name, p in named if f".{self._name}." in name}
        return {**added, **self._begun}

    def equals_active(self) -> bool:
        """Whether the adapter that is trained has the same weights now."""
        active, named = self._peft.active_adapter, dict(self._peft.named_parameters())
        mine = {name.replace(f".{self._name}.", f".{active}."): name for name in named}
        mine = {theirs: name for theirs, name in mine.items() if theirs != name}
        others = {name for name in named if f".{active}." in name}
        return mine.keys() == others and all(
            torch.equal(named[theirs], named[name]) for theirs, name in mine.items()
        )

    def _switched(self) -> contextlib.AbstractContextManager[None]:
        return acting(self._peft, self._name)


class StartAdapterRefModel(SwitchedAdapter):
    """The policy with a frozen copy of the adapter that it had when training started.

    Args:
        name: the name that PEFT is to know the copy by.
    """

    def __init__(self, policy: PreTrainedModelWrapper, name: str = REFERENCE_ADAPTER):
        super().__init__(policy)
        self._name = name
        self._peft: Any = policy.pretrained_model
        trained = self._peft.active_adapter
        config = copy.copy(self._peft.peft_config[trained])
        config.init_lora_weights = True  # "pissa", say, would change the base once more
        config.bias = "none"  # PEFT refuses a second adapter that trains biases
        add_adapter(self._peft, name, config)
        self._trained = trained
        self.follow(1.0)

    def follow(self, weight: float) -> None:
        adapter = self.own_weights()
        trained = [name.replace(f".{self._name}.", f".{self._trained}.") for name in adapter]
        weights = dict(self._peft.named_parameters())
        mix(list(adapter.values()), [weights[name].data for name in trained], weight)

    def own_weights(self) -> dict[str, Tensor]:
        spread(self._unwrapped)
        named = self._peft.named_parameters()
        added = {name: p.data for name, p in named if f".{self._name}." in name}
        return {**added, **self._begun}

    def _switched(self) -> contextlib.AbstractContextManager[None]:
        return acting(self._peft, self._name)
