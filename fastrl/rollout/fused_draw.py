"""Decode steps that draw tokens as the LM head's product is computed, without logits."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastrl_kernels
from fastrl.models.products import is_plain
from fastrl_kernels import SampledTokens, linear_sample_pays

# Allowed differences of log-probs from sums in another order, relative to the largest logit.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
_ROWS = range(1, 65)  # numbers of rows for which the fused draw may be faster


class FusedDraw:
    """A model's LM head fused with the draw of tokens, for models whose logits are the head's
    product, without hooks on the head.

    Attributes:
        active: whether the fused draw was compared with the model's logits, and agreed.
    """

    def __init__(self, model: Any):
        self.model = model
        self.active = False
        self._head: Any = None

    def look(self) -> None:
        """Looks at the model's present head, before a rollout adds hooks of its own."""
        head = self.model.get_output_embeddings()
        plain = is_plain(head) and head._compiled_call_impl is None
        self._head = head if plain else None

    def pays(self, rows: int) -> bool:
        """Whether a decode step of so many rows is faster by this draw, with the present weight."""
        if self._head is None:
            return False
        vocabulary, hidden = self._head.weight.shape
        return linear_sample_pays(rows, hidden, vocabulary, self._head.weight.dtype)

    def ever_pays(self) -> bool:
        """Whether there are numbers of rows for which the draw :meth:`pays`."""
        return any(map(self.pays, _ROWS))

    def draw(self, hidden: Tensor, keys: Tensor, temperature: float) -> SampledTokens:
        """Draws a token for each of the hidden states [b, H], with a key [b] for each draw."""
        head = self._head
        return fastrl_kernels.linear_sample(
            hidden, head.weight, keys, bias=head.bias, temperature=temperature
        )

    def activate(self, hidden: Tensor, logits: Tensor) -> None:
        """Compares a draw with the model's logits, and sets ``active`` where they agree. Warns if
        they do not, or the draw fails; not where the model changes what its head computes.

        Args:
            hidden: [b, H] in front of the head, of a decode step.
            logits: [b, V] of the same step.
        """
        head = self._head
        product = F.linear(hidden.unsqueeze(1), head.weight, head.bias).squeeze(1)
        # accelerate makes fp32 of what a model that it has prepared returns.
        if logits.dtype not in (product.dtype, torch.float32):
            return
        if not torch.equal(product.to(logits.dtype), logits):
            return
        keys = torch.arange(len(hidden), device=hidden.device)
        try:
            drawn = self.draw(hidden, keys, 1.0)
            at = drawn.tokens.clamp(min=0).unsqueeze(1)
            expected = logits.float().log_softmax(-1).gather(1, at).squeeze(1)
            difference = (drawn.logprobs - expected).abs().max() / logits.abs().max().float()
            cause = f"differs from the model's own way by {difference:.1e} of the largest logit"
            self.active = bool(difference <= _TOLERANCE[product.dtype])
        except Exception as error:  # such as a compiler's
            cause = f"cannot run ({type(error).__name__}: {error})"
        if not self.active:
            warnings.warn(
                f"the LM head fused with the draw {cause}: rollouts compute logits, which is "
                "slower on a GPU",
                stacklevel=4,
            )
