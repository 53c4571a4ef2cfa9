"""Rewards of a decoder with a score head, at given rows of its input."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastrl.models.attention import Attention, replaced


def score_head(model: Any) -> nn.Module | None:
    """The layer that scores each token's hidden state; None where a model has another head."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return getattr(base, "score", None)


def rewards_at(
    model: Any, plain: Any, rows: Tensor, attention: Attention | None = None, **inputs: Any
) -> Tensor:
    """Scores [N, labels] of the tokens at flat positions ``rows`` [N], whichever the model itself
    takes for the last of a sequence.

    Args:
        model: as accelerate has wrapped it; ``plain`` without that.
        attention: in place of the model's own.
        inputs: further arguments of the model's forward.
    """
    scores: list[Tensor] = []
    head = score_head(plain)
    assert head is not None
    handle = head.register_forward_hook(lambda _head, _args, out: scores.append(out))
    try:
        with replaced(plain, attention):
            model(**inputs, use_cache=False)
    finally:
        handle.remove()
    return scores[0].flatten(0, -2)[rows]
