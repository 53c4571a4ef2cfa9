"""A language-model head in chunks, for the ops on hidden states.

Logits exist a chunk at a time, in a workspace of bounded size. Products are library GEMMs
(``gemm``); the element-wise work on a chunk is done by a :class:`HeadBackend`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ._cpu.row_chunks import FLOOR, LEAST, NOTHING, blocks, rows_at_a_time
from .checks import (
    check_count,
    check_device,
    check_float,
    check_labels_of,
    check_mask,
    check_positive,
    check_temperature,
    checked_labels,
    counts,
)
from .dispatch import choose, device_kind
from .gemm import Library, library_for
from .token_sets import TokenSets, checked_support
from .types import LOWEST, LogitTransform, RowGradients, RowStatistics, Temperature
from .vocab_parallel import Vocabulary, checked, find
from .workspace import KEPT_BYTES, result_like

COLUMNS, FEWEST_COLUMNS = 8192, 1024  # columns of the vocabulary at a time, unless all
_ROW_STEP = 16  # the rows of a chunk are a multiple of it
_TILE = 256  # on a GPU chunks have multiples of it in rows and columns, as its products have tiles
# Bytes of logits at a time. Less on a CPU, where a chunk should fit in a cache, and memory is kept
# for the next call.
WORKSPACE_BYTES = {"cpu": KEPT_BYTES}
DEFAULT_WORKSPACE_BYTES = 256 << 20


def row_chunks(
    n: int, columns: int, itemsize: int, budget: int, step: int = _ROW_STEP
) -> list[slice]:
    """Rows in chunks whose [r, columns] fit the budget, of about the same length."""
    return _alike(n, max(1, budget // max(1, columns * itemsize)), step)


def _alike(n: int, most: int, step: int) -> list[slice]:
    """Ranges of at most ``most``, of about the same length, a multiple of ``step`` if longer."""
    if most > step:
        most -= most % step
    count = -(-n // most)
    length = -(-n // max(1, count))
    if length > step:
        length = min(most, -(-length // step) * step)
    return [slice(start, min(start + length, n)) for start in range(0, n, max(1, length))]


def tiles(n: int, vocabulary: int, itemsize: int, budget: int) -> tuple[list[slice], list[slice]]:
    """Rows and columns of chunks [r, C] that fit the budget, walked column by column of chunks.

    A chunk has all rows while columns are wide. Then the gradient of C rows of the weight is one
    product, and the hidden states' alone is a sum over chunks, in fp32: 8·N·H·V/C bytes are read
    and written. In chunks of r rows the weight's is one, too, with 8·V·H·N/r bytes. Of chunks
    with E = r·C elements the squares have the least of both, 16·N·V·H/√E; all rows have less down
    to C = √E/2.
    """
    elements = max(1, budget // itemsize)
    width, square = elements // max(1, n), math.isqrt(elements)
    if width < min(vocabulary, max(1, square // 2)):
        width = max(square, FEWEST_COLUMNS)
    columns = _alike(vocabulary, width, _TILE)
    return row_chunks(n, columns[0].stop, itemsize, budget, _TILE), columns


def column_chunks(n: int, vocabulary: int, itemsize: int, budget: int) -> list[slice]:
    """Columns in chunks of 1k to 8k, as few as [n, C] fits the budget."""
    width = COLUMNS
    while width > FEWEST_COLUMNS and n * width * itemsize > budget:
        width //= 2
    return [slice(v, min(v + width, vocabulary)) for v in range(0, vocabulary, width)]


class HeadBackend(Protocol):
    """The element-wise work on a chunk x of logits, between products."""

    by_columns: ClassVar[bool]  # whether rows may come a chunk of columns after the other

    @staticmethod
    def chunk_dtype(hidden: Tensor) -> torch.dtype: ...

    @staticmethod
    def fill(
        x: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        library: type[Library],
    ) -> None:
        """Fills x [r, C] with logits of hidden states [r, H] and rows of the weight [C, H]."""

    @staticmethod
    def statistics(
        x: Tensor,
        labels: Tensor,
        transform: LogitTransform,
        temperature: Temperature,
        out: RowStatistics,
        once: bool = False,
        first: int = 0,
        vocabulary: int | None = None,
        cut: bool = False,
    ) -> None:
        """Fills ``out`` from whole rows [r, V]. ``once``: x is used only by `gradients_` then.

        With ``vocabulary``, x has its columns ``first`` + …; such chunks come in order, and ``out``
        holds their sums until the last. ``cut``: `restrict_` has given x -inf.
        """

    @staticmethod
    def gradients_(
        x: Tensor,
        first: int,
        labels: Tensor,
        transform: LogitTransform,
        temperature: Temperature,
        saved: RowStatistics,
        upstream: RowGradients,
        once: bool = False,
        cut: bool = False,
    ) -> None:
        """Replaces x [r, C], columns ``first`` + … of the rows, by the gradients of its products.

        ``once``: x comes from `statistics` with ``once``, and entropies have no gradient.
        """

    @staticmethod
    def unscaled(x: Tensor, transform: LogitTransform) -> Tensor:
        """Unscaled logits in fp32 of some of a chunk's elements."""

    @staticmethod
    def lowest(transform: LogitTransform) -> float:
        """What stands in a chunk for the lowest logit: a probability of 0, or a cap's -c."""

    @staticmethod
    def restrict_(
        x: Tensor, sets: TokenSets, rows: slice, first: int, transform: LogitTransform
    ) -> None:
        """Gives x, tokens ``first`` + … of some rows, -inf where the row's set has no such token: a
        probability of 0 in chunks that are ``cut``, even with a soft cap."""

    @staticmethod
    def scale_(x: Tensor, factor: Tensor) -> None:
        """x·factor in place, free where the factor is 1."""


class TorchHead:
    """Element-wise work in PyTorch. Chunks are fp32 for heads of any dtype, with unscaled logits
    (:class:`LogitTransform`)."""

    by_columns: ClassVar[bool] = False

    @staticmethod
    def chunk_dtype(hidden: Tensor) -> torch.dtype:
        return torch.float32

    @staticmethod
    def fill(
        x: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transform: LogitTransform,
        library: type[Library],
    ) -> None:
        """Fills x with the product, rounded to the head's dtype, as a model rounds its logits."""
        library.multiply(x, hidden, weight, bias)
        if transform.softcap is not None:
            x.mul_(transform.inner).tanh_()

    @staticmethod
    def statistics(
        x: Tensor,
        labels: Tensor,
        transform: LogitTransform,
        temperature: Temperature,
        out: RowStatistics,
        once: bool = False,
        first: int = 0,
        vocabulary: int | None = None,
        cut: bool = False,
    ) -> None:
        """Fills ``out`` from whole rows [r, V]. With ``once`` and without a soft cap, it replaces x
        by exp(z - max z), which `gradients_` then does not compute again."""
        assert vocabulary in (None, x.shape[1]), "rows are whole"
        d, e = buffers(x, 2)
        once = once and transform.softcap is None
        for rows, block in blocks(x):
            exp = block if once else e[: len(block)]
            t, found = temperature.at(rows), out.at(rows)
            _statistics(block, labels[rows], transform, t, found, d, exp, cut)

    @staticmethod
    def gradients_(
        x: Tensor,
        first: int,
        labels: Tensor,
        transform: LogitTransform,
        temperature: Temperature,
        saved: RowStatistics,
        upstream: RowGradients,
        once: bool = False,
        cut: bool = False,
    ) -> None:
        """Replaces x by dz = g·1_y - exp(d)/Σ·[ g + g_H·(d - mean) ], d = z - max z, Σ =
        exp_sum."""
        exps_given = once and transform.softcap is None
        d, e = buffers(x, 2) if not exps_given else (x, x)
        for rows, block in blocks(x):
            t, row, grads = temperature.at(rows), saved.at(rows), upstream.at(rows)
            # From dz to the product's gradient: ·s/T here, and with a cap ·(1 - tanh²) below.
            g = _times_(grads.logprobs.clone(), transform.logit_scale, t)
            base = -g / row.exp_sum
            if exps_given:
                gradient = block.mul_(base[:, None])
            else:
                gradient = _gradients_by_z(block, base, transform, t, row, grads, d, e, cut)
            add_at_labels_(gradient, labels[rows] - first, g)
            if transform.softcap is not None:
                if cut:
                    block.clamp_(min=-1.0)
                block.square_().neg_().add_(1.0).mul_(gradient)

    @staticmethod
    def unscaled(x: Tensor, transform: LogitTransform) -> Tensor:
        return x.float()

    @staticmethod
    def lowest(transform: LogitTransform) -> float:
        return -math.inf if transform.softcap is None else -1.0

    @staticmethod
    def restrict_(
        x: Tensor, sets: TokenSets, rows: slice, first: int, transform: LogitTransform
    ) -> None:
        sets.restrict_(x, rows, first)

    @staticmethod
    def scale_(x: Tensor, factor: Tensor) -> None:
        if factor.device.type != "cpu" or factor.item() != 1.0:
            x.mul_(factor)


class PlannedHead(TorchHead):
    """The head of tensors without memory that stand for a GPU's, whose kernels work in place. All
    rows are the same there, and the first is computed for all."""

    by_columns: ClassVar[bool] = True

    @staticmethod
    def chunk_dtype(hidden: Tensor) -> torch.dtype:
        return hidden.dtype

    @staticmethod
    def statistics(
        x: Tensor,
        labels: Tensor,
        transform: LogitTransform,
        temperature: Temperature,
        out: RowStatistics,
        once: bool = False,
        first: int = 0,
        vocabulary: int | None = None,
        cut: bool = False,
    ) -> None:
        row = slice(0, 1)
        one = x[row].float()
        TorchHead.statistics(one, labels[row], transform, temperature.at(row), out.at(row), once)
        for wanted in out:
            if wanted is not None:
                wanted[1:] = wanted[:1]

    @staticmethod
    def restrict_(*_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def gradients_(*_: Any, **__: Any) -> None:
        pass


def buffers(x: Tensor, count: int) -> Tensor:
    """``count`` buffers for the rows of x that are worked on at a time, in one tensor."""
    return x.new_empty(count, min(len(x), rows_at_a_time(x.shape[1])), x.shape[1])


def _times_(x: Tensor, factor: float, temperature: Temperature) -> Tensor:
    """x·factor/T in place."""
    return temperature.divide_(x if factor == 1.0 else x.mul_(factor))


def _shifted(
    x: Tensor,
    row_max: Tensor,
    transform: LogitTransform,
    temperature: Temperature,
    out: Tensor,
    cut: bool,
) -> Tensor:
    """z - max z. -inf, of tokens that a bias masks out, becomes FLOOR, so that exp(d)·d is 0; where
    rows are ``cut`` LEAST: MKL takes up to 150 times as long for exponentials that underflow, which
    there are nearly all."""
    d = torch.sub(x, row_max[:, None], out=out[: len(x)])
    return _times_(d, transform.outer, temperature).clamp_(min=LEAST if cut else FLOOR)


def _statistics(
    x: Tensor,
    labels: Tensor,
    transform: LogitTransform,
    temperature: Temperature,
    out: RowStatistics,
    d: Tensor,
    e: Tensor,
    cut: bool,
) -> None:
    known = (labels >= 0) & (labels < x.shape[1])
    columns = labels.clamp(0, x.shape[1] - 1)[:, None]
    torch.amax(x, -1, out=out.unscaled_max).clamp_(min=LOWEST)
    d = _shifted(x, out.unscaled_max, transform, temperature, d, cut)
    at_label = x.gather(1, columns)[:, 0] - out.unscaled_max
    at_label = _times_(at_label, transform.outer, temperature)
    if out.mean_logit is not None:
        out.mean_logit.copy_(_times_(x.mean(-1), transform.outer, temperature))
    if out.is_top1 is not None:
        torch.eq(x.argmax(-1), labels, out=out.is_top1)
    torch.exp(d, out=e)
    further = out.entropies, out.log_sum_sq_probs
    if cut and (e is x or any(wanted is not None for wanted in further)):
        torch.threshold_(e, NOTHING, 0.0)  # e is x where it is kept; a sum alone does not see it
    torch.sum(e, -1, out=out.exp_sum)
    log_sum = out.exp_sum.log()
    out.logprobs.copy_(torch.where(known, at_label - log_sum, torch.nan))
    if out.mean is not None and out.entropies is not None:
        torch.div(torch.mul(e, d, out=d).sum(-1), out.exp_sum, out=out.mean)
        torch.sub(log_sum, out.mean, out=out.entropies)
    if out.log_sum_sq_probs is not None:
        torch.sub(torch.square(e, out=d).sum(-1).log(), 2 * log_sum, out=out.log_sum_sq_probs)


def _gradients_by_z(
    x: Tensor,
    base: Tensor,
    transform: LogitTransform,
    temperature: Temperature,
    saved: RowStatistics,
    upstream: RowGradients,
    d: Tensor,
    e: Tensor,
    cut: bool,
) -> Tensor:
    """exp(d)·(base + slope·(d - mean)), in place of x, or in d where a cap still needs x."""
    out = x if transform.softcap is None else d[: len(x)]
    d = _shifted(x, saved.unscaled_max, transform, temperature, d, cut)
    e = torch.exp(d, out=e[: len(x)])
    if cut:
        torch.threshold_(e, NOTHING, 0.0)
    if upstream.entropies is None or saved.mean is None:
        return torch.mul(e, base[:, None], out=out)
    slope = _times_(-upstream.entropies / saved.exp_sum, transform.logit_scale, temperature)
    base = base - slope * saved.mean
    return torch.mul(d.mul_(slope[:, None]).add_(base[:, None]), e, out=out)


def add_at_labels_(x: Tensor, columns: Tensor, g: Tensor) -> None:
    """Adds g where a row's label lies within x."""
    here = (columns >= 0) & (columns < x.shape[1])
    columns = columns.clamp(0, x.shape[1] - 1)[:, None]
    x.scatter_add_(1, columns, torch.where(here, g, 0.0)[:, None])


class HeadInputs(NamedTuple):
    """A checked call: N rows, and the shape of its results. Weight, bias and columns are those of
    this process, where others have some of the vocabulary."""

    hidden: Tensor  # [N, H], 0 where a row does not count
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N] int64 columns; the vocabulary's first where a row does not count
    counted: Tensor  # [N] bool
    temperature: Temperature
    transform: LogitTransform
    shape: torch.Size
    backend: str
    workspace: int  # bytes
    vocabulary: Vocabulary
    support: TokenSets | None = None  # the rows' sets; None: all tokens
    leaf: Tensor | None = None  # the tensor that autocast made ``weight`` from

    @property
    def scored(self) -> Tensor:
        """``counted`` in the results' shape."""
        return self.counted.view(self.shape)

    @property
    def weight_leaf(self) -> Tensor:
        """The tensor that the weight's gradient is for, in its dtype."""
        return self.weight if self.leaf is None else self.leaf

    @property
    def head(self) -> type[HeadBackend]:
        if self.backend == "triton":
            from ._triton.lm_head import TritonHead

            return TritonHead
        return TorchHead if device_kind(self.hidden) == self.hidden.device.type else PlannedHead

    def row_chunks(self, itemsize: int, saved_by_one: int = 0) -> list[slice]:
        """Chunks of whole rows.

        Args:
            itemsize: the bytes of a chunk's elements.
            saved_by_one: bytes beside the workspace that are not needed where one chunk has all
                rows: on a GPU as many may go to that chunk.
        """
        # All processes must have the same chunks, since they call each other for each chunk.
        n, vocabulary = len(self.hidden), self.vocabulary.widest
        if device_kind(self.hidden) == "cpu":
            if self.vocabulary.shared:  # shares of different sizes may choose different libraries
                itemsize = max(itemsize, torch.float32.itemsize)
            return row_chunks(n, vocabulary, itemsize, self.workspace)
        if n * vocabulary * itemsize <= self.workspace + saved_by_one:
            return [slice(0, n)] if n else []
        return row_chunks(n, vocabulary, itemsize, self.workspace, _TILE)

    @property
    def library(self) -> type[Library]:
        """The library of all products with the weight, or with a part of it."""
        return library_for(self.weight)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The ``HEAD_TENSORS`` tensors of the call."""
        sets = (None,) * 3 if self.support is None else self.support.tensors()
        return *self[:5], self.temperature.per_row, *sets

    def with_tensors(self, *tensors: Any) -> HeadInputs:
        """The same call with other tensors, or with None while autograd keeps them."""
        temperature = self.temperature._replace(per_row=tensors[5])
        inputs = HeadInputs(*(*tensors[:5], temperature, *self[6:]))
        if self.support is None:
            return inputs
        return inputs._replace(support=self.support.with_tensors(*tensors[6:]))

    def fill(self, x: Tensor, rows: slice, columns: slice | None = None) -> None:
        """Computes x, logits of some rows, and of some columns or all, in the backend's form."""
        weight, bias = self.weight, self.bias
        if columns is not None:
            weight, bias = weight[columns], None if bias is None else bias[columns]
        self.head.fill(x, self.hidden[rows], weight, bias, self.transform, self.library)
        self.restrict_(x, rows, 0 if columns is None else columns.start)

    def restrict_(self, x: Tensor, rows: slice, first: int) -> None:
        """Gives x, columns ``first`` + … of some rows, -inf where a token is not in a row's set."""
        if self.support is not None:
            start = self.vocabulary.start + first
            self.head.restrict_(x, self.support, rows, start, self.transform)

    def _cut(self, rows: slice) -> bool:
        return self.support is not None and self.support.cuts(rows)

    def statistics(
        self,
        x: Tensor,
        rows: slice,
        out: RowStatistics,
        once: bool = False,
        first: int = 0,
    ) -> None:
        """Fills the rows of ``out``, whose columns come from ``first`` on in order."""
        self.head.statistics(
            x, self.labels[rows], self.transform, self.temperature.at(rows), out.at(rows), once,
            first, len(self.weight), self._cut(rows),
        )  # fmt: skip

    def join_(self, rows: slice, out: RowStatistics, common: bool = False) -> None:
        """Makes the rows' statistics those of the whole vocabulary, where others have some of it;
        ``out`` has all rows. What gradients take, the first three, stays relative to the maximum
        of this process's columns, unless it is ``common``."""
        temperature = self.temperature.at(rows)

        def scaled(x: Tensor) -> Tensor:
            return _times_(x, self.transform.outer, temperature)

        self.vocabulary.join_(out.at(rows), self.labels[rows], scaled, common)

    @property
    def outside(self) -> Tensor:
        """Which rows count and have a label that is none of the vocabulary, [N] bool."""
        start, stop = -self.vocabulary.start, self.vocabulary.size - self.vocabulary.start
        return self.counted & ((self.labels < start) | (self.labels >= stop))

    def gradients_(
        self,
        x: Tensor,
        rows: slice,
        first: int,
        saved: RowStatistics,
        upstream: RowGradients,
        once: bool = False,
    ) -> None:
        """Replaces x by its products' gradients; ``saved`` has all rows, ``upstream`` these."""
        self.head.gradients_(
            x, first, self.labels[rows], self.transform, self.temperature.at(rows), saved.at(rows),
            upstream, once, self._cut(rows),
        )  # fmt: skip


# HeadInputs as an operator's first arguments.
HEAD_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor counted, "
    "Tensor? temperatures, Tensor? set_kinds, Tensor? set_offsets, Tensor? set_data, "
    "int longest_set, float temperature, float? softcap, float logit_scale, int workspace, "
    "str backend, str vocabulary"
)
HEAD_ARGUMENTS = HEAD_SCHEMA.count(",") + 1
HEAD_TENSORS = HEAD_SCHEMA.count("Tensor")


def flat_head(inputs: HeadInputs) -> tuple[Any, ...]:
    """The arguments of ``HEAD_SCHEMA``."""
    longest = 0 if inputs.support is None else inputs.support.longest
    numbers = inputs.temperature.number, *inputs.transform, inputs.workspace, inputs.backend
    return *inputs.tensors(), longest, *numbers, inputs.vocabulary.key


def split_head(arguments: Sequence[Any]) -> tuple[HeadInputs, Sequence[Any]]:
    """The head of an operator's arguments, and the others."""
    head, others = arguments[:HEAD_ARGUMENTS], arguments[HEAD_ARGUMENTS:]
    *tensors, temperatures, kinds, offsets, data = head[:HEAD_TENSORS]
    longest, number, softcap, logit_scale, workspace, backend, key = head[HEAD_TENSORS:]
    numbers = Temperature(number, temperatures), LogitTransform(softcap, logit_scale)
    vocabulary, support = find(key, len(tensors[1])), None
    if kinds is not None:
        support = TokenSets(kinds, offsets, data, vocabulary.size, longest)
    inputs = HeadInputs(
        *(*tensors, *numbers, tensors[3].shape, backend, workspace, vocabulary, support)
    )
    return inputs, others


def fake_gradients(leaves: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """Fake gradients by hidden states, weight and bias, empty where they are not wanted."""
    hidden = leaves[0]
    assert hidden is not None
    return tuple(
        torch.empty_like(x) if x is not None and want else hidden.new_empty(0)
        for x, want in zip(leaves, wanted, strict=True)
    )


def labels_name(shift: int) -> str:
    """The name of the labels that are scored, for messages."""
    return f"labels[..., {int(shift)}:]" if shift else "labels"


def _checked_shift(shift: int, labels: Tensor) -> int:
    if not isinstance(shift, int):
        raise TypeError(f"shift must be a bool or an int, got {type(shift).__name__}")
    shift = int(shift)
    if shift and labels.dim() == 0:
        raise ValueError("labels has no time dimension: with shift it must be [..., T]")
    if shift and not 0 < shift < labels.shape[-1]:
        raise ValueError(
            f"shift must be at least 0 and less than T, got {shift} for labels of shape "
            f"{tuple(labels.shape)}"
        )
    return shift


def checked_factors(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, of: str = ""
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Hidden states [..., H], weight [V, H] and bias [V] of a head in one dtype, autocast's where
    that is on, and the tensor that autocast cast the weight from. Messages have ``of`` before
    names.

    Raises:
        TypeError, ValueError: as the public ops do.
    """
    for name, x in ((f"{of}hidden", hidden), (f"{of}weight", weight), (f"{of}bias", bias)):
        if x is not None and type(x).__name__ == "DTensor":
            raise TypeError(
                f"{name} is a DTensor: pass {name}.full_tensor(), or call where the module that "
                "owns it has gathered it. To those that score labels, a head whose rows processes "
                "share is weight.to_local() with vocab_parallel=VocabParallel.of(weight)"
            )
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(
            f"{of}weight has shape {tuple(weight.shape)}: it must be [V, H] with V > 0"
        )
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{of}hidden has shape {tuple(hidden.shape)}, {of}weight {tuple(weight.shape)}: they "
            "must be [..., H] and [V, H]"
        )
    check_float(f"{of}hidden", hidden)
    check_float(f"{of}weight", weight)
    kind, leaf = hidden.device.type, None
    # Asked whether there is autocast for a device, torch 2.11 ends a compiled graph.
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, leaf = hidden.to(dtype), weight
        if torch.compiler.is_compiling():
            weight = weight.to(dtype)
        elif weight.dtype != dtype:
            # The gradient goes to the leaf as it is summed up, in fp32, not through the cast.
            weight = result_like(weight, dtype).copy_(weight.detach())
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"{of}hidden is {hidden.dtype}, {of}weight {weight.dtype}: convert one of them"
        )
    check_device(f"{of}weight", weight, f"{of}hidden", hidden)
    if bias is not None:
        check_float(f"{of}bias", bias)
        check_device(f"{of}bias", bias, f"{of}hidden", hidden)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{of}bias has shape {tuple(bias.shape)}: it must be ({len(weight)},)")
        bias = bias.to(hidden.dtype)
    return hidden, weight, bias, leaf


def checked_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    mask: Tensor | None,
    shift: int,
    vocab_parallel: Any,
    workspace_bytes: int | None,
    check_labels: bool,
    backend: str,
    support: TokenSets | None = None,
) -> HeadInputs:
    """Checks a head's arguments; raises TypeError and ValueError as the public ops do."""
    hidden, weight, bias, leaf = checked_factors(hidden, weight, bias)
    vocabulary, kind = checked(vocab_parallel, weight), hidden.device.type
    check_labels_of(labels, "hidden", hidden)
    shift = _checked_shift(shift, labels)
    all_labels, of_labels, of_hidden = labels, labels_name(shift), "hidden"
    if shift:
        hidden, labels = hidden[..., :-shift, :], labels[..., shift:]
        of_hidden = f"hidden[..., :-{shift}, :]"
    number, temperatures = check_temperature(temperature, of_hidden, hidden)
    if mask is not None:
        check_mask(mask, of_labels, labels)
        check_device("mask", mask, "hidden", hidden)
    if softcap is not None:
        softcap = check_positive("softcap", softcap)
    transform = LogitTransform(softcap, check_positive("logit_scale", logit_scale))
    if workspace_bytes is None:
        workspace_bytes = WORKSPACE_BYTES.get(device_kind(hidden), DEFAULT_WORKSPACE_BYTES)
    else:
        check_count("workspace_bytes", workspace_bytes, least=1)
    chosen = choose(backend, hidden, weight, labels)
    read = check_labels or (chosen == "torch" and kind == "cpu")
    if read:
        if not shift:
            labels = checked_labels(labels, mask, vocabulary.size)
        else:
            of_read = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
            of_read = torch.nn.functional.pad(of_read, (shift, 0))
            labels = checked_labels(all_labels, of_read, vocabulary.size)[..., shift:]

    if not torch.is_grad_enabled():  # ``needs_input_grad`` of a Function ignores it
        hidden, weight, leaf = hidden.detach(), weight.detach(), None
        bias = None if bias is None else bias.detach()
    counted = counts(labels, mask)
    # Rows that do not count may hold NaN, and 0·NaN would reach the weight's gradient. This is also
    # what copies the rows that a shift leaves.
    hidden = torch.where(counted[..., None], hidden, 0.0).reshape(-1, hidden.shape[-1])
    counted = counted.reshape(-1)
    columns = torch.where(counted, labels.reshape(-1), 0).long()
    if temperatures is not None:
        temperatures = torch.where(counted, temperatures, 1.0)
    return HeadInputs(
        hidden=hidden,
        weight=weight,
        bias=bias,
        labels=columns - vocabulary.start if vocabulary.start else columns,
        counted=counted,
        temperature=Temperature(number, temperatures),
        transform=transform,
        shape=labels.shape,
        backend=chosen,
        workspace=workspace_bytes,
        vocabulary=vocabulary,
        support=checked_support(support, vocabulary.size, counted, columns, read),
        leaf=None if leaf is weight else leaf,
    )
