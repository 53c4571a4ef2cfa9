"""A chunk of rows of a fused head on a CPU, a piece of the vocabulary at a time.

A piece [r, C] of logits is made, and its softmax taken, while it is in the cache; pieces are then
joined by their maxima and sums, as in an online softmax.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..gemm import pieces
from ..lm_head import HeadInputs, TorchHead
from ..types import LOWEST, RowGradients, RowStatistics
from ..workspace import Workspace
from .row_chunks import FLOOR


def suits(inputs: HeadInputs) -> bool:
    """Whether rows are computed in pieces: by libraries that are as fast for a piece, and for heads
    without a soft cap."""
    on_cpu = inputs.hidden.device.type == "cpu" and inputs.head is TorchHead
    return on_cpu and inputs.library.in_pieces and inputs.transform.softcap is None


class LabelsInPiece(NamedTuple):
    """The rows of a chunk whose label lies in a piece of the vocabulary, and its column there."""

    rows: Tensor
    columns: Tensor


class PieceGradient(NamedTuple):
    """The gradient by a piece of the logits, in factors: probs·factors, and ``at_labels`` where a
    row's label is."""

    probs: Tensor  # [r, C], 0 at labels
    factors: Tensor  # [r] fp32
    labels: LabelsInPiece
    at_labels: Tensor  # [len(labels.rows)] fp32


class ChunkInPieces:
    """Scores and gradients of up to ``longest`` rows at a time, for entropies without gradients.

    The gradient by the logits is g·(1_y - p). Its products are taken of each piece's own softmax,
    with what a piece has of the row's probability on the [r, H] side, and the label's g·(1 - p_y)
    is added in fp32: nothing of size [r, V] is multiplied.

    Args:
        statistics: all rows' statistics, without extras; filled by :meth:`score`.
        gradients: sums of gradients, to which :meth:`backward` adds.
        keep: what of the rows stays in memory: the pieces' softmax in the weight's dtype,
            for :meth:`backward`; their logits in fp32, ``kept``; or nothing.
    """

    def __init__(
        self,
        inputs: HeadInputs,
        statistics: RowStatistics,
        gradients: Any,
        longest: int,
        keep: Literal["probs", "logits", None] = "probs",
    ) -> None:
        self.inputs, self.statistics, self.gradients = inputs, statistics, gradients
        self.keep = keep
        width = len(inputs.weight) if keep else 0
        dtype = inputs.weight.dtype if keep == "probs" else torch.float32
        self.workspace = Workspace(inputs.hidden, longest, width, dtype)
        self._piece = longest * pieces(len(inputs.weight))[0].stop  # elements
        self._memory: dict[str, Tensor] = {}
        self.kept: Tensor  # [r, V] logits; [r, 0] where nothing is kept
        self._probs: list[Tensor]  # [r, C] each, of which rows sum to 1
        self._masses: Tensor  # [r, pieces] a piece's Σ exp(z - max z), max of the row
        self._labels: list[LabelsInPiece]

    def score(self, rows: slice) -> None:
        inputs, out = self.inputs, self.statistics.at(rows)
        hidden, labels = inputs.hidden[rows], inputs.labels[rows]
        walk = pieces(len(inputs.weight))
        self._labels = labels_in_pieces(labels, walk)
        if self.keep == "probs":
            self._probs = self.workspace.pieces(len(hidden), walk)
        else:
            self.kept = self.workspace.chunk(len(hidden))
        maxima, sums, means = hidden.new_empty(3, len(hidden), len(walk), dtype=torch.float32)
        at_label = torch.full_like(labels, torch.nan, dtype=torch.float32)
        for i, (columns, here) in enumerate(zip(walk, self._labels, strict=True)):
            x = self._logits(hidden, rows, columns)
            if self.keep == "logits":
                self.kept[:, columns].copy_(x)
            torch.amax(x, -1, out=maxima[:, i]).clamp_(min=LOWEST)
            at_label[here.rows] = x[here.rows, here.columns]
            d = self._scaled(x.sub_(maxima[:, i, None]), rows)
            if out.entropies is not None or inputs.bias is not None or inputs.support is not None:
                d.clamp_(min=FLOOR)  # in place of -inf: 0·-inf is NaN
            p = torch.softmax(d, -1, out=self._target(d, i))
            torch.amax(p, -1, out=sums[:, i]).reciprocal_()  # exp(0)/Σ
            if out.entropies is not None:
                torch.sum(d.mul_(p), -1, out=means[:, i])
            if self.keep == "probs" and p is not self._probs[i]:
                self._probs[i].copy_(p)
        self._join(rows, out, maxima, sums, means, at_label)

    def backward(self, rows: slice, upstream: RowGradients) -> None:
        g = self._scaled(upstream.logprobs.clone(), rows)
        # The sum may have been joined with that of other processes' columns.
        factors = self._masses.div_(self.statistics.exp_sum[rows, None]).mul_(-g[:, None])
        at_label = g.mul_(torch.expm1(self.statistics.logprobs[rows]).neg_())
        walk = pieces(len(self.inputs.weight))
        for i, (columns, here) in enumerate(zip(walk, self._labels, strict=True)):
            self._probs[i][here.rows, here.columns] = 0.0
            gradient = PieceGradient(self._probs[i], factors[:, i], here, at_label[here.rows])
            self.gradients.add_piece(gradient, rows, columns)

    def release(self) -> None:
        self.workspace.release()

    def _logits(self, hidden: Tensor, rows: slice, columns: slice) -> Tensor:
        inputs = self.inputs
        bias = None if inputs.bias is None else inputs.bias[columns]
        x = inputs.library.linear(hidden, inputs.weight[columns], bias)
        if x.dtype != torch.float32:
            x = self._fp32("logits", x).copy_(x)
        inputs.restrict_(x, rows, columns.start)
        return x

    def _target(self, d: Tensor, piece: int) -> Tensor:
        """Memory for the softmax of d: that in which it is kept, if fp32, else scratch."""
        if self.keep == "probs" and self._probs[piece].dtype == torch.float32:
            return self._probs[piece]
        return self._fp32("softmax", d)

    def _fp32(self, use: str, like: Tensor) -> Tensor:
        """Memory in the shape of a piece, the same for all pieces."""
        if use not in self._memory:
            self._memory[use] = like.new_empty(self._piece, dtype=torch.float32)
        return self._memory[use][: like.numel()].view(like.shape)

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
        means: Tensor,
        at_label: Tensor,
    ) -> None:
        """Statistics of rows from those of their pieces [r, pieces]."""
        torch.amax(maxima, -1, out=out.unscaled_max)
        shifts = self._scaled(maxima - out.unscaled_max[:, None], rows)
        masses = shifts.exp().mul_(sums)
        torch.sum(masses, -1, out=out.exp_sum)
        log_sum = out.exp_sum.log()
        torch.sub(self._scaled(at_label - out.unscaled_max, rows), log_sum, out=out.logprobs)
        self._masses = masses
        if out.mean is not None and out.entropies is not None:
            shares = masses / out.exp_sum[:, None]
            torch.sum(shifts.clamp_(min=FLOOR).add_(means).mul_(shares), -1, out=out.mean)
            torch.sub(log_sum, out.mean, out=out.entropies)


def labels_in_pieces(labels: Tensor, walk: list[slice]) -> list[LabelsInPiece]:
    """Labels [r] by piece; one outside the vocabulary is in none."""
    ordered, order = labels.sort(stable=True)
    bounds = torch.tensor([columns.start for columns in walk] + [walk[-1].stop])
    ends = torch.searchsorted(ordered, bounds).tolist()
    return [
        LabelsInPiece(order[first:last], ordered[first:last] - columns.start)
        for columns, first, last in zip(walk, ends, ends[1:], strict=False)
    ]
