"""Rewards by classifiers: of padded batches, and by the score head at chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.models.attention import Attention, replaced
from fastrl.models.utils import base_of, text_config


def score_head(model: Any) -> nn.Module | None:
    """The layer that scores each token's hidden state; None where a model has another head."""
    return getattr(base_of(model), "score", None)


def rewards_at(
    model: Any, plain: Any, rows: Tensor, attention: Attention | None = None, **inputs: Any
) -> Tensor:
    """Scores [N, labels] of the tokens at flat positions ``rows`` [N], whichever tokens the model
    itself takes for the last of a sequence.

    Args:
        model, plain: the model with and without accelerate's wrapper.
        attention: the attention to use in place of the model's own.
        inputs: further arguments of the model's forward.
    """
    scores: list[Tensor] = []
    head = score_head(plain)
    assert head is not None
    hook = head.register_forward_hook(lambda _head, _args, out: scores.append(out))
    with hook, replaced(plain, attention):
        model(**inputs, use_cache=False)
    return scores[0].flatten(0, -2)[rows]


def padding_of(plain: Any) -> int | None:
    """The id of the token that a classifier takes for padding; None where it has none."""
    return getattr(text_config(plain), "pad_token_id", None)


def give_padding(model: Any, tokenizer: Any) -> None:
    """Gives a classifier without a token of padding that of its tokenizer, by which a decoder's
    classifier finds each text's last token; it is set in the configuration of the text part."""
    config = text_config(model)
    if config is not None and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id


def rewards_of_padded(
    model: Any, inputs: Mapping[str, Tensor], side: str | None, padding: int | None
) -> Tensor:
    """A classifier's rewards of texts, [B, labels], on whichever side their batch is padded.

    A classifier reads a text at its last token, which it finds by the id of padding, or at a row's
    first or last place; many count positions from the first. Padding must be where they expect it.

    Args:
        inputs: ``input_ids`` and ``attention_mask``, [B, T], and others of that shape.
        side: where the model gets its padding, "right" or "left"; None: texts of one length at a
            time, without padding. See :func:`fastrl.data.choose_padding.classifier_side`.
        padding: the id of the model's own token of padding; None: padding stays as it is.
    """
    mask = inputs["attention_mask"]
    if side is None:
        lengths = mask.sum(1)
        groups = [(lengths == n).nonzero().squeeze(1) for n in lengths.unique().tolist()]
        parts = []
        for rows in groups:
            real = mask[rows].bool()
            part = {name: x[rows][real].view(len(rows), -1) for name, x in inputs.items()}
            parts.append(_logits(model(**part, return_dict=True)))
        return torch.cat(parts)[torch.cat(groups).argsort()]
    order = mask.argsort(dim=1, descending=side == "right", stable=True)
    moved = {name: x.gather(1, order) for name, x in inputs.items()}
    if padding is not None:
        unread = moved["attention_mask"] == 0
        moved["input_ids"] = moved["input_ids"].masked_fill(unread, padding)
    return _logits(model(**moved, return_dict=True))


def _logits(output: Any) -> Tensor:
    return output["logits"] if isinstance(output, Mapping) else output.logits
