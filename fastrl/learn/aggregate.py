"""How losses of tokens become one number."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Aggregate(NamedTuple):
    """Σ_t v_t·ℓ_t / D over the tokens t of responses, whose losses are ℓ_t.

    | kind | v_t | D |
    | --- | --- | --- |
    | "token-mean" | 1 | tokens |
    | "seq-mean-token-sum" | 1 | responses |
    | "seq-mean-token-mean" | 1/(tokens of its response) | responses |
    | "seq-mean-token-sum-norm" | 1 | responses · norm_length |

    Without a ``norm_length`` the last kind's v is 1/(tokens of the longest response), and its D the
    number of responses. A response's own weight multiplies its v and its part of D.
    v and D are computed here, as the kernels see flat tokens and no responses.

    Attributes:
        counts_empty: whether D counts responses without a token; the last kind always does.
    """

    kind: str
    norm_length: int | None = None
    counts_empty: bool = False

    def weights(self, lengths: Tensor, weights: Tensor | None = None) -> Tensor | None:
        """v of each response's tokens, [B]; None where all are 1.

        Args:
            lengths: tokens of each response, [B].
            weights: the responses' own weights, [B].
        """
        if self.kind == "seq-mean-token-mean":
            v = lengths.clamp(min=1).reciprocal()
        elif self.kind == "seq-mean-token-sum-norm" and self.norm_length is None:
            v = torch.ones_like(lengths) / lengths.max().clamp(min=1)
        else:
            return weights
        return v if weights is None else v * weights

    def denominator(self, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        """D of B responses, [], or 1 where that is 0; for several mini-batches pass the responses
        of all of them. Arguments are those of :meth:`weights`."""
        if self.kind == "token-mean":
            counts = lengths
        elif self.counts_empty or self.kind == "seq-mean-token-sum-norm":
            counts = torch.full_like(lengths, self._norm)
        else:
            counts = (lengths > 0).long()
        total = counts.sum() if weights is None else (weights * counts).sum()
        return torch.where(total > 0, total, 1)

    @property
    def _norm(self) -> int:
        is_norm = self.kind == "seq-mean-token-sum-norm" and self.norm_length is not None
        return int(self.norm_length or 1) if is_norm else 1
