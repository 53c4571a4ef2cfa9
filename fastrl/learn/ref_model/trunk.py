"""A reference model that shares the policy's bottom layers: stored once, run once."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

from fastrl.data.token_batch import TokenBatch
from fastrl.learn.ref_model.copy import Copied, SecondModel, frozen_copy
from fastrl.learn.ref_model.trunk_cache import Budget, TrunkCache
from fastrl.models.sharding import spread, whole_weights
from fastrl.models.trunk import Trunk
from fastrl.models.utils import evaluating, is_empty
from fastrl.models.value_head import PreTrainedModelWrapper

_TOKENS = 8  # tokens of each of the two rows of the self-check
_TOLERANCE = 1e-4, 5e-2  # largest differences of logits: in fp32, and in lower precision

WEIGHTS_ARE_COMPARED = (
    "num_shared_layers: shared layers are tried in every process, which needs their weights: start "
    "without --fsdp_cpu_ram_efficient_loading, or leave out num_shared_layers"
)


class Unshareable(Exception):
    """A model's layers cannot be shared, for the reason in the message."""


def split_off(model: Any, layers: int) -> Trunk:
    """Freezes a language model's trunk, its bottom layers and the embeddings, and returns it.

    Raises:
        ValueError: layers out of range; weights that only another process has loaded.
        Unshareable: layers that are not found, or results that change where they are skipped.
    """
    if is_empty(model):
        raise ValueError(WEIGHTS_ARE_COMPARED)
    try:
        trunk = Trunk(model, layers)
    except LookupError as error:
        raise Unshareable(str(error)) from error
    off, tolerance = _difference(trunk)
    if not off <= tolerance:
        raise Unshareable(
            f"it is off by {off:.1e} when it starts at the output of layer {layers} (more than "
            f"{tolerance:.0e})"
        )
    trunk.freeze()
    if trunk.head_is_tied:
        warnings.warn(
            "the LM head shares its weight with the embeddings, and is frozen with them: with "
            "num_shared_layers, give the model a head of its own (tie_word_embeddings=False) to "
            "train it",
            stacklevel=3,
        )
    return trunk


def shared_copy(model: Copied, trunk: Trunk) -> Copied:
    """A frozen copy of a policy or a plain model: the trunk's weights are the same objects."""
    return frozen_copy(model, {id(p): p for p in trunk.parameters.values()})


class TrunkRefModel(SecondModel):
    """A reference whose bottom layers are the policy's, frozen; the upper layers of both models
    start at their output.

    Where FSDP2 spreads weights, the reference has shares of the bottom layers as well.

    Args:
        budget, tokens_per_pass: arguments of a batch's :class:`TrunkCache`.
    """

    mode = "trunk"

    def __init__(
        self,
        model: PreTrainedModelWrapper,
        policy: PreTrainedModelWrapper,
        budget: Budget,
        tokens_per_pass: int | None = None,
    ):
        super().__init__(model, policy)
        assert policy.trunk is not None
        self._policy: nn.Module = policy
        self._trunk, self._budget = policy.trunk, budget
        self._tokens_per_pass = tokens_per_pass
        self._autocast: Any = None
        self._checksum = self._trunk.checksum()

    def place(self, policy: nn.Module, accelerator: Any) -> None:
        super().place(policy, accelerator)
        self._autocast = accelerator.autocast

    def trunk_cache(self, batch: TokenBatch) -> TrunkCache:
        whole = partial(whole_weights, self._policy)
        return TrunkCache(
            self._trunk, batch, self._budget, self._tokens_per_pass, self._autocast, whole
        )

    def verify(self) -> None:
        spread(self._policy)
        if self._trunk.checksum() != self._checksum:
            raise ValueError(
                f"the {self._trunk.layers} shared layers have changed since training began, though "
                "they are frozen: the reference has changed with them. Was something trained "
                "beside the trainer, or weights loaded into the model?"
            )


@torch.no_grad()
def _difference(trunk: Trunk) -> tuple[float, float]:
    """The largest difference of logits between the whole model and its two parts, and the
    tolerance."""
    model = trunk.model
    ids = torch.arange(2 * _TOKENS, device=model.device).view(2, _TOKENS)
    ids %= model.config.get_text_config().vocab_size
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with evaluating(model):
        whole = model(**inputs).logits.float()
        try:
            boundary = trunk(ids)
            with trunk.skipped(boundary):
                parts = model(**inputs).logits.float()
        # Whatever has failed: such a model is copied whole.
        except Exception as error:
            raise Unshareable(f"{type(error).__name__}: {error}") from error
    exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    return (parts - whole).abs().max().item(), _TOLERANCE[0 if exact else 1]
