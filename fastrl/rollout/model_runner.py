"""A causal language model, with or without a value head, as rollouts run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.models.lm_head import in_front_of_head
from fastrl.models.utils import evaluating
from fastrl.models.value_head import PreTrainedModelWrapper
from fastrl.rollout.attention import Attention, attached, attending
from fastrl.rollout.autocast_weight_cache import Shadow
from fastrl.rollout.kv_cache import LayerShape, SlotCache

Autocast = Callable[[], contextlib.AbstractContextManager]


class Policy:
    """Runs a model's forward on prompts and on single tokens, with attention of the engine's.

    Args:
        model: a causal LM, or a fastrl model around one.
        autocast: makes the context in which the model runs.
    """

    def __init__(self, model: Any, autocast: Autocast = contextlib.nullcontext):
        self.model = model
        self.v_head = getattr(model, "v_head", None)
        wrapped = isinstance(model, PreTrainedModelWrapper)
        self.language_model: Any = model.pretrained_model if wrapped else model
        self.autocast = autocast
        self._cache = SlotCache()
        self._hidden: Tensor | None = None
        self._logits: Tensor | None = None
        self._product = _head_product(self.language_model)
        self.shadow = Shadow()

    @property
    def device(self) -> torch.device:
        return self.language_model.device

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """While open: no dropout, no gradients, the engine's attention. All of it is put back."""
        behind = self.language_model.get_output_embeddings().register_forward_hook(self._replace)
        try:
            with (
                torch.no_grad(),
                evaluating(self.model),
                attached(self.language_model),
                in_front_of_head(self.language_model, self._see),
                self.autocast(),
                self.shadow.in_place(self.language_model),
            ):
                yield
        finally:
            behind.remove()
            self._cache = SlotCache()  # the last pass's attention would keep the arena alive

    def autocast_dtype(self) -> torch.dtype | None:
        """That of products under autocast, the caller's own too; None where it is off."""
        with self.autocast():
            kind = self.device.type
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def prefill(self, tokens: Tensor, positions: Tensor, attention: Attention) -> None:
        """Keys and values of tokens [T] at positions [T]; the LM head sees none of them."""
        self._hidden = None
        self._run(tokens.unsqueeze(0), positions.unsqueeze(0), attention, head=False)

    def decode(
        self, tokens: Tensor, positions: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [b, V] after tokens [b] at positions [b], and their values [b]."""
        logits = self._run(tokens.unsqueeze(1), positions.unsqueeze(1), attention, head=True)
        values = None
        if self.v_head is not None:
            assert self._hidden is not None
            values = self.v_head(self._hidden).flatten()
        self._hidden = None
        return logits.squeeze(1), values

    def _run(self, tokens: Tensor, positions: Tensor, attention: Attention, head: bool) -> Any:
        self._with_head = head
        self._cache.attention = attention
        with attending(attention):
            return self.language_model(
                input_ids=tokens,
                position_ids=positions,
                # Given, so that no model looks for padding in the tokens.
                attention_mask=torch.ones_like(tokens),
                past_key_values=self._cache,
                use_cache=True,
            ).logits

    def _see(self, head: Any, hidden: Tensor) -> Tensor:
        self._hidden = hidden
        if not self._with_head:
            return hidden[:, :0]
        self._logits = self._product(head, hidden)
        return hidden if self._logits is None else hidden[:, :0]

    def _replace(self, _head: nn.Module, _args: Any, out: Tensor) -> Tensor:
        """Where the head's product was computed in front of it, that is its output: what the model
        does to its logits afterwards it does to these."""
        logits, self._logits = self._logits, None
        return out if logits is None else logits

    @torch.no_grad()
    def layer_shapes(self) -> list[LayerShape]:
        """What one token's keys and values look like, read off a forward with the model's own
        cache."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with evaluating(self.model), self.autocast():
            cache = self.language_model(
                input_ids=token, attention_mask=torch.ones_like(token), use_cache=True
            ).past_key_values
        layers = []
        for layer in cache.layers:
            keys, values = layer.keys, layer.values
            layers.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
            self.dtype = keys.dtype
        return layers


Product = Callable[[Any, Tensor], "Tensor | None"]
# Rows for which CPU libraries are about twice as fast at w·hᵀ as at h·wᵀ, w being tall.
_FEW = range(5, 33)


def _head_product(model: Any) -> Product:
    """What computes a head's product h [b, 1, H] -> [b, 1, V] in its place; None: it does that."""
    head = model.get_output_embeddings()
    plain = (
        type(head) is nn.Linear
        and type(head).forward is nn.Linear.forward
        and "forward" not in vars(head)
        and not nn.utils.parametrize.is_parametrized(head)
    )
    on_cpu = plain and head.weight.device.type == "cpu" and head.weight.dtype == torch.float32
    return _tall_product if on_cpu else lambda _head, _hidden: None


def _tall_product(head: nn.Linear, hidden: Tensor) -> Tensor | None:
    if len(hidden) not in _FEW or torch.is_autocast_enabled("cpu"):
        return None
    logits = (head.weight @ hidden.squeeze(1).t()).t().contiguous().unsqueeze(1)
    return logits if head.bias is None else logits.add_(head.bias)
