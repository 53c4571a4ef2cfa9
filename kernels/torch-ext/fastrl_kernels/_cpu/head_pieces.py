"""A chunk of rows of a fused head on a CPU, a piece of the vocabulary at a time.

A piece [r, C] of logits is made, turned into exponentials and summed up while it is in the cache,
and so is its gradient between the products. Exponentials of a piece are relative to the piece's own
maximum, and pieces are joined as in an online softmax.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..gemm import pieces
from ..lm_head import HeadInputs, TorchHead, add_at_labels_
from ..types import RowGradients, RowStatistics
from ..workspace import Workspace
from .row_chunks import FLOOR

_LOWEST = -3e38  # in place of a maximum of -inf, where a bias masks out a whole piece


def suits(inputs: HeadInputs) -> bool:
    """Whether rows are computed in pieces: by libraries that are as fast for a piece, and for heads
    without a soft cap."""
    on_cpu = inputs.hidden.device.type == "cpu" and inputs.head is TorchHead
    return on_cpu and inputs.library.in_pieces and inputs.transform.softcap is None


class ChunkInPieces:
    """Scores and gradients of up to ``longest`` rows at a time, for entropies without gradients.

    Args:
        statistics: of all rows, without extras; filled by :meth:`score`.
        gradients: sums of gradients, to which :meth:`backward` adds.
        keep: what of the rows stays in memory: their exponentials, for :meth:`backward`; their
            logits; or nothing.
    """

    def __init__(
        self,
        inputs: HeadInputs,
        statistics: RowStatistics,
        gradients: Any,
        longest: int,
        keep: Literal["exps", "logits", None] = "exps",
    ) -> None:
        self.inputs, self.statistics, self.gradients = inputs, statistics, gradients
        self.keep = keep
        width = len(inputs.weight) if keep else 0
        self.workspace = Workspace(inputs.hidden, longest, width, torch.float32)
        self.kept: Tensor  # [r, V], exponentials of each piece relative to its maximum
        self._factors: Tensor  # [r, pieces] exp(a piece's maximum - the row's) / the row's sum

    def score(self, rows: slice) -> None:
        inputs, out = self.inputs, self.statistics.at(rows)
        hidden, labels = inputs.hidden[rows], inputs.labels[rows]
        self.kept = self.workspace.chunk(len(hidden))
        walk = pieces(len(inputs.weight))
        maxima, sums, moments = hidden.new_empty(3, len(hidden), len(walk), dtype=torch.float32)
        at_label = torch.full_like(labels, torch.nan, dtype=torch.float32)
        for i, columns in enumerate(walk):
            x = self._logits(hidden, columns)
            if self.keep == "logits":
                self.kept[:, columns].copy_(x)
            torch.amax(x, -1, out=maxima[:, i]).clamp_(min=_LOWEST)
            _take_labels(x, labels - columns.start, at_label)
            d = self._scaled(x.sub_(maxima[:, i, None]), rows)
            if out.entropies is None:
                e = torch.exp(d, out=self.kept[:, columns] if self.keep == "exps" else d)
            else:
                # FLOOR in place of -inf: 0·-inf is NaN
                d.clamp_(min=FLOOR)
                e = torch.exp(d, out=self.kept[:, columns]) if self.keep == "exps" else d.exp()
                torch.sum(d.mul_(e), -1, out=moments[:, i])
            torch.sum(e, -1, out=sums[:, i])
        self._join(rows, out, maxima, sums, moments, at_label)

    def backward(self, rows: slice, upstream: RowGradients) -> None:
        inputs, gradients = self.inputs, self.gradients
        labels = inputs.labels[rows]
        g = self._scaled(upstream.logprobs.clone(), rows)
        scale = self._factors.mul_(-g[:, None])
        for i, columns in enumerate(pieces(len(inputs.weight))):
            gradient = torch.mul(self.kept[:, columns], scale[:, i, None])
            add_at_labels_(gradient, labels - columns.start, g)
            gradients.add_piece(gradient, rows, columns)

    def release(self) -> None:
        self.workspace.release()

    def _logits(self, hidden: Tensor, columns: slice) -> Tensor:
        inputs = self.inputs
        bias = None if inputs.bias is None else inputs.bias[columns]
        return inputs.library.linear(hidden, inputs.weight[columns], bias).float()

    def _scaled(self, x: Tensor, rows: slice) -> Tensor:
        """x·s/T in place."""
        if self.inputs.transform.logit_scale != 1.0:
            x.mul_(self.inputs.transform.logit_scale)
        return self.inputs.temperature.at(rows).divide_(x)

    def _join(
        self,
        rows: slice,
        out: RowStatistics,
        maxima: Tensor,
        sums: Tensor,
        moments: Tensor,
        at_label: Tensor,
    ) -> None:
        """Statistics of rows from those of their pieces [r, pieces]."""
        torch.amax(maxima, -1, out=out.unscaled_max)
        shifts = self._scaled(maxima - out.unscaled_max[:, None], rows)
        factors = shifts.exp()
        torch.sum(sums * factors, -1, out=out.exp_sum)
        log_sum = out.exp_sum.log()
        torch.sub(self._scaled(at_label - out.unscaled_max, rows), log_sum, out=out.logprobs)
        if out.mean is not None and out.entropies is not None:
            shifted = (moments + sums * shifts.clamp_(min=FLOOR)) * factors
            torch.div(shifted.sum(-1), out.exp_sum, out=out.mean)
            torch.sub(log_sum, out.mean, out=out.entropies)
        self._factors = factors.div_(out.exp_sum[:, None])


def _take_labels(x: Tensor, columns: Tensor, out: Tensor) -> None:
    """out = x at the columns, where these lie within x."""
    here = (columns >= 0) & (columns < x.shape[1])
    found = x.gather(1, columns.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    out.copy_(torch.where(here, found, out))
