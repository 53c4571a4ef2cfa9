"""Sets of tokens as other engines and libraries return them beside what they sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastrl_kernels import TokenSets

NAME = "sampling_mask"


def supports_of(
    masks: Any, responses: Sequence[Tensor], written: Sequence[Tensor] | None, vocabulary: int
) -> list[TokenSets]:
    """The sets that each response's tokens were drawn from; whole ones for tokens that the policy
    did not write.

    Args:
        masks: for each response a list of token ids for each of its tokens, as in the answers of
            vLLM; an object with such a list as ``token_ids``, as vLLM's ``LLM.generate`` returns;
            or an object, or a dict, with ``ids``, those of all tokens one after the other, and
            ``counts``, how many each token has, as in verifiers' traces.
        written: which tokens the policy wrote, bool; None: all.
        vocabulary: the number of the model's logits.

    Raises:
        ValueError: lists of other lengths; ids outside of the vocabulary; a set that does not have
            the token that was drawn from it.
    """
    if not hasattr(masks, "__len__") or len(masks) != len(responses):
        number = len(masks) if hasattr(masks, "__len__") else repr(masks)[:80]
        raise ValueError(
            f"rollout_func: {NAME} has {number} entries for {len(responses)} completion_ids: "
            "return one for each"
        )
    found = []
    for i, (mask, response) in enumerate(zip(masks, responses, strict=True)):
        by_policy = torch.ones(len(response), dtype=torch.bool) if written is None else written[i]
        ids, counts = _flat(mask, i)
        if len(counts) != len(response) or int(counts.sum()) != len(ids):
            raise ValueError(
                f"rollout_func: {NAME}[{i}] has sets of {len(counts)} tokens for completion_ids of "
                f"{len(response)}: return one for each token"
            )
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(
                f"rollout_func: {NAME}[{i}] has ids from {int(ids.min())} to {int(ids.max())}, the "
                f"model has {vocabulary} tokens: was it made with another tokenizer?"
            )
        sets = TokenSets.of_ids(ids.split(counts.tolist()), vocabulary)
        lacks = by_policy & ~sets.has(response)
        if lacks.any():
            at = int(lacks.nonzero()[0])
            raise ValueError(
                f"rollout_func: {NAME}[{i}][{at}] does not have the token {int(response[at])} that "
                "was drawn from it: return the sets of the same tokens, in the same order"
            )
        found.append(sets.whole_where(~by_policy))
    return found


def _flat(mask: Any, i: int) -> tuple[Tensor, Tensor]:
    """The ids of all sets of a response, one after the other, and how many each has."""
    fields = mask if isinstance(mask, Mapping) else getattr(mask, "__dict__", {})
    try:
        if "ids" in fields and "counts" in fields:
            parts = fields["ids"], fields["counts"]
            flat = [torch.from_numpy(np.asarray(x).astype(np.int64)).flatten() for x in parts]
            return flat[0], flat[1]
        rows = getattr(mask, "token_ids", mask)
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        ids = [np.asarray(row, dtype=np.int64) for row in rows]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"rollout_func: {NAME}[{i}] is {mask!r:.80}: return a list of token ids for each token"
        ) from None
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *ids])), counts
