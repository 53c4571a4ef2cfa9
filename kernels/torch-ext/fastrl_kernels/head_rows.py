"""The element-wise work of a language-model head on a chunk of its logits, in PyTorch.

``_triton/head_rows.py`` has the same in Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .head import Transform, multiply
from .rows import FLOOR

_BLOCK_ELEMENTS = 1 << 20  # that are worked on at a time: 4 MiB, to stay in a cache


class RowStatistics(NamedTuple):
    """What is kept of each row of logits, [N] each; None where not wanted."""

    signal_max: Tensor  # max_v of the signals
    exp_sum: Tensor  # Σ_v exp(z_v - max z)
    mean: Tensor | None  # E[z] - max z, with entropies
    logprobs: Tensor
    entropies: Tensor | None
    log_sum_sq_probs: Tensor | None  # log Σ_v p_v²
    mean_logit: Tensor | None  # mean_v z_v
    is_top1: Tensor | None  # bool: the label is the first of the largest logits

    @classmethod
    def empty(cls, like: Tensor, n: int, entropy: bool, extras: tuple[str, ...]) -> RowStatistics:
        def new(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Any:
            return torch.empty(n, dtype=dtype, device=like.device) if wanted else None

        return cls(
            new(),
            new(),
            new(entropy),
            new(),
            new(entropy),
            new("log_sum_sq_probs" in extras),
            new("mean_logit" in extras),
            new("is_top1" in extras, torch.bool),
        )

    def at(self, rows: slice) -> RowStatistics:
        return RowStatistics(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class Slopes(NamedTuple):
    """Upstream gradients per row, [N] fp32; 0 where a row does not count, NaN where its label is
    out of range."""

    logprobs: Tensor
    entropies: Tensor | None

    def at(self, rows: slice) -> Slopes:
        return Slopes(self.logprobs[rows], None if self.entropies is None else self.entropies[rows])


class TorchRows:
    """Element-wise work in PyTorch. Chunks are fp32 whatever the head is, and hold signals."""

    @staticmethod
    def chunk_dtype(hidden: Tensor) -> torch.dtype:
        return torch.float32

    @staticmethod
    def signals(
        out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: Transform
    ) -> None:
        """out [r, C]; the product is rounded to the head's dtype, as a model rounds its logits."""
        multiply(out, hidden, weight, bias)
        if transform.softcap is not None:
            out.mul_(transform.inner).tanh_()

    @staticmethod
    def statistics(
        x: Tensor, labels: Tensor, transform: Transform, out: RowStatistics, once: bool = False
    ) -> None:
        """Fills ``out`` from whole rows of signals [r, V].

        ``once``: x need not keep them. Without a soft cap it holds exp(z - max z) then, which
        spares `gradients_` the work.
        """
        d, e = _scratch(x, 2)
        once = once and transform.softcap is None
        for rows, block in _blocks(x):
            exp = block if once else e[: len(block)]
            _statistics(block, labels[rows], transform.at(rows), out.at(rows), d, exp)

    @staticmethod
    def gradients_(
        x: Tensor,
        first: int,
        labels: Tensor,
        transform: Transform,
        saved: RowStatistics,
        slopes: Slopes,
        once: bool = False,
    ) -> None:
        """From signals [r, C] in columns ``first`` + … to gradients of their products, in place.

        With d = z - max z and Σ = exp_sum: dz = g·1_y - exp(d)/Σ·[ g + g_H·(d - mean) ].
        ``once``: x comes from `statistics` with it, and there is no g_H.
        """
        exps_given = once and transform.softcap is None
        d, e = _scratch(x, 2) if not exps_given else (x, x)
        for rows, block in _blocks(x):
            at, row, slope = transform.at(rows), saved.at(rows), slopes.at(rows)
            # From dz to the product's gradient: ·s/T here, and with a cap ·(1 - tanh²) below.
            g = at.times_(slope.logprobs.clone(), at.logit_scale)
            base = -g / row.exp_sum
            if exps_given:
                gradient = block.mul_(base[:, None])
            else:
                gradient = _from_signals(block, base, at, row, slope, d, e)
            _add_at_labels_(gradient, labels[rows] - first, g)
            if transform.softcap is not None:
                block.square_().neg_().add_(1.0).mul_(gradient)

    @staticmethod
    def scale_(x: Tensor, factor: Tensor) -> None:
        """x·factor in place, free where the factor is 1."""
        if factor.device.type != "cpu" or factor.item() != 1.0:
            x.mul_(factor)


def _scratch(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, min(len(x), _block_rows(x)), x.shape[1])


def _block_rows(x: Tensor) -> int:
    return max(1, _BLOCK_ELEMENTS // max(1, x.shape[1]))


def _blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Few enough rows to stay in a cache."""
    for start in range(0, len(x), _block_rows(x)):
        rows = slice(start, start + _block_rows(x))
        yield rows, x[rows]


def _shifted(x: Tensor, signal_max: Tensor, transform: Transform, out: Tensor) -> Tensor:
    """z - max z. Where a bias masks tokens out -inf becomes FLOOR: its product with exp of it,
    which is 0, has to be 0."""
    d = torch.sub(x, signal_max[:, None], out=out[: len(x)])
    return transform.times_(d, transform.outer).clamp_(min=FLOOR)


def _statistics(
    x: Tensor, labels: Tensor, transform: Transform, out: RowStatistics, d: Tensor, e: Tensor
) -> None:
    known = (labels >= 0) & (labels < x.shape[1])
    columns = labels.clamp(0, x.shape[1] - 1)[:, None]
    torch.amax(x, -1, out=out.signal_max)
    d = _shifted(x, out.signal_max, transform, d)
    at_label = x.gather(1, columns)[:, 0] - out.signal_max
    at_label = transform.times_(at_label, transform.outer)
    mean = transform.times_(x.mean(-1), transform.outer) if out.mean_logit is not None else None
    if out.is_top1 is not None:
        torch.eq(x.argmax(-1), labels, out=out.is_top1)
    torch.exp(d, out=e)  # which may be x
    torch.sum(e, -1, out=out.exp_sum)
    log_sum = out.exp_sum.log()
    out.logprobs.copy_(torch.where(known, at_label - log_sum, torch.nan))
    if out.mean is not None and out.entropies is not None:
        torch.div(torch.mul(e, d, out=d).sum(-1), out.exp_sum, out=out.mean)
        torch.sub(log_sum, out.mean, out=out.entropies)
    if out.log_sum_sq_probs is not None:
        torch.sub(torch.square(e, out=d).sum(-1).log(), 2 * log_sum, out=out.log_sum_sq_probs)
    if out.mean_logit is not None and mean is not None:
        out.mean_logit.copy_(mean)


def _from_signals(
    x: Tensor,
    base: Tensor,
    transform: Transform,
    saved: RowStatistics,
    slopes: Slopes,
    d: Tensor,
    e: Tensor,
) -> Tensor:
    """exp(d)·(base + slope·(d - mean)), in x's place, or beside it where a cap still needs it."""
    out = x if transform.softcap is None else d[: len(x)]
    d = _shifted(x, saved.signal_max, transform, d)
    e = torch.exp(d, out=e[: len(x)])
    if slopes.entropies is None or saved.mean is None:
        return torch.mul(e, base[:, None], out=out)
    slope = transform.times_(-slopes.entropies / saved.exp_sum, transform.logit_scale)
    base = base - slope * saved.mean
    return torch.mul(d.mul_(slope[:, None]).add_(base[:, None]), e, out=out)


def _add_at_labels_(x: Tensor, columns: Tensor, g: Tensor) -> None:
    """Adds g where a row's label lies within x."""
    here = (columns >= 0) & (columns < x.shape[1])
    columns = columns.clamp(0, x.shape[1] - 1)[:, None]
    x.scatter_add_(1, columns, torch.where(here, g, 0.0)[:, None])
