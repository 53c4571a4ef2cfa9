"""Stateless modules whose ``forward`` Hugging Face's ``kernelize()`` gives to a model's layers.

Such a module has no constructor and no members besides ``forward``, whose parameters are those of
the layer that it replaces. ``has_backward`` allows it in training.
"""

from __future__ import annotations

from torch import Tensor, nn

from .full_kl import full_kl
from .logprob import token_logprobs
from .moments import masked_whiten
from .rms_norm import rms_norm
from .swiglu import swiglu


class TokenLogProbs(nn.Module):
    """Log-probs [...] of labels [...] under logits [..., V]; 0 where the label is -100."""

    has_backward = True

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_logprobs(logits, labels)


class FullKL(nn.Module):
    """KL(softmax(logits) || softmax(ref_logits)) over the last dimension: [..., V] -> [...]."""

    has_backward = True

    def forward(self, logits: Tensor, ref_logits: Tensor) -> Tensor:
        return full_kl(logits, ref_logits)


class MaskedWhiten(nn.Module):
    """Values [...] with mean 0 and variance 1 over all that the mask [...] counts; 0 elsewhere."""

    has_backward = True

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        return masked_whiten(values, mask)


class RMSNorm(nn.Module):
    """The norm of Llama and its like in inference: w·x/√(mean x² + ε)."""

    has_backward = False
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        out = rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)
        assert isinstance(out, Tensor)  # a pair only with a residual
        return out


class SwiGLU(nn.Module):
    """The MLP of Llama and its like in inference: W_down(silu(W_gate x)·(W_up x)), each product by
    the layer's own module.

    Raises:
        ValueError: the layer's activation is not SiLU.
    """

    has_backward = False
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if type(self.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            raise ValueError(
                f"{type(self).__name__} has the activation {type(self.act_fn).__name__}, not SiLU: "
                "map another layer to it"
            )
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
