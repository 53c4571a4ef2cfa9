"""A head's distribution against a teacher's, on chunks of rows of logits.

With p the student's probabilities and q the teacher's, and m = (1 - β)·p + β·q,

    D = KL(q || p) at β = 0,  KL(p || q) at β = 1,  else β·KL(q || m) + (1 - β)·KL(p || m).

Its gradient by the student's logits is p - q at β = 0, and s·p·(w - E_p[w]) otherwise, with
w = log p - log q and s = 1 at β = 1, and w = log p - log m and s = 1 - β between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ._cpu.row_chunks import FLOOR, blocks
from .checks import check_choice, check_constant, check_device, check_float
from .lm_head import HeadInputs, PlannedHead, add_at_labels_, buffers, checked_factors
from .types import (
    LOWEST,
    LogitTransform,
    RowGradients,
    RowStatistics,
    TeacherHead,
    TeacherTokens,
    Temperature,
)
from .workspace import Workspace

RESTS = ("bucket", "renormalised")
# The least that a teacher's log-probs leave for the other tokens: less is lost in fp32's rounding.
LEAST_REST = 2.0**-24
_FAR = 1e30  # a difference of log-probs that is as good as infinite, and that 0 can multiply


class Compared(NamedTuple):
    """A checked teacher: its head, or its tokens, and β."""

    beta: float
    hidden: Tensor | None = None  # [N, H'], 0 where a row does not count
    weight: Tensor | None = None  # [V, H']
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0
    ids: Tensor | None = None  # [N, K] int64, of the whole vocabulary; -1 for no token
    logprobs: Tensor | None = None  # [N, K] fp32, -inf for no token
    rest: str = "bucket"

    def itemsize(self, student: HeadInputs) -> int:
        """Bytes of workspace beside each of the student's logits."""
        return 0 if self.hidden is None else student.head.chunk_dtype(self.hidden).itemsize

    def head(self, student: HeadInputs) -> HeadInputs:
        """The teacher's head, for the student's rows."""
        assert self.hidden is not None
        assert self.weight is not None
        transform = LogitTransform(self.softcap, self.logit_scale)
        return student._replace(
            hidden=self.hidden, weight=self.weight, bias=self.bias, transform=transform, leaf=None
        )


# ``Compared`` as arguments of an operator.
TEACHER_SCHEMA = (
    "float beta, Tensor? teacher_hidden, Tensor? teacher_weight, Tensor? teacher_bias, "
    "float? teacher_softcap, float teacher_logit_scale, Tensor? teacher_ids, "
    "Tensor? teacher_logprobs, str rest"
)
TEACHER_ARGUMENTS = TEACHER_SCHEMA.count(",") + 1


def checked_teacher(
    teacher: Any, beta: float, inputs: HeadInputs, vocabulary: int | None, check: bool
) -> Compared:
    """Checks a teacher of the student's rows.

    Args:
        vocabulary: the tokens that count, where heads have rows of padding after them.
        check: also check log-probs where that has to wait for a device.

    Raises:
        TypeError, ValueError: as ``linear_kl`` does.
    """
    if isinstance(beta, Tensor):
        raise TypeError("beta must be a Python number: reading a tensor would wait for it")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie in [0, 1], got {beta}: 0 is KL(q || p), 1 is KL(p || q)")
    beta = float(beta)
    if isinstance(teacher, TeacherTokens):
        return _checked_tokens(teacher, beta, inputs, check)
    if not isinstance(teacher, TeacherHead):
        raise TypeError(
            f"teacher is a {type(teacher).__name__}: pass TeacherHead(hidden, weight) or "
            "TeacherTokens(ids, logprobs)"
        )
    for name, x in teacher._asdict().items():
        if isinstance(x, Tensor):
            check_constant(f"teacher.{name}", x)
    hidden, weight, bias, _ = checked_factors(*teacher[:3], of="teacher.")
    check_device("teacher.hidden", hidden, "hidden", inputs.hidden)
    if hidden.shape[:-1] != inputs.shape:
        raise ValueError(
            f"teacher.hidden has shape {tuple(hidden.shape)}: it must be "
            f"{(*inputs.shape, weight.shape[1])}, a state for each result"
        )
    if vocabulary is not None:
        weight, bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
    if len(weight) != len(inputs.weight):
        raise ValueError(
            f"teacher.weight has {len(weight)} rows, weight {len(inputs.weight)}: both must have "
            "one for each token; where heads end in rows of padding, pass vocabulary=, the number "
            "of real tokens"
        )
    transform = LogitTransform(teacher.softcap, teacher.logit_scale)
    for name, number in transform._asdict().items():
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"teacher.{name} must be positive and finite, got {number}")
    counted = inputs.counted[:, None]
    hidden = torch.where(counted, hidden.detach().reshape(-1, hidden.shape[-1]), 0.0)
    return Compared(beta, hidden, weight.detach(), bias, *transform)


def _checked_tokens(
    teacher: TeacherTokens, beta: float, inputs: HeadInputs, check: bool
) -> Compared:
    ids, logprobs = teacher.ids, teacher.logprobs
    check_choice("teacher.rest", teacher.rest, RESTS)
    check_float("teacher.logprobs", logprobs)
    check_constant("teacher.logprobs", logprobs)
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise TypeError(f"teacher.ids must be integers, got {ids.dtype}")
    for name, x in (("ids", ids), ("logprobs", logprobs)):
        check_device(f"teacher.{name}", x, "hidden", inputs.hidden)
        if x.dim() == 0 or x.shape[:-1] != inputs.shape or not x.shape[-1]:
            raise ValueError(
                f"teacher.{name} has shape {tuple(x.shape)}: it must be {(*inputs.shape, 'K')}, K "
                "tokens for each result"
            )
    if ids.shape != logprobs.shape:
        raise ValueError(
            f"teacher.ids has shape {tuple(ids.shape)}, teacher.logprobs {tuple(logprobs.shape)}: "
            "they must be equal"
        )
    ids = ids.reshape(-1, ids.shape[-1]).long()
    logprobs = logprobs.reshape(ids.shape).float()
    there = inputs.counted[:, None] & (logprobs != -torch.inf)
    ids = torch.where(there, ids, -1)
    logprobs = torch.where(there, logprobs, -torch.inf)
    impossible = _impossible(ids, logprobs, there, inputs.vocabulary.size)
    if teacher.rest == "renormalised":
        impossible = impossible | (inputs.counted & ~there.any(-1))
    broken = logprobs.isnan().any(-1)
    read = check or (inputs.backend == "torch" and inputs.hidden.device.type == "cpu")
    if read and not torch.compiler.is_compiling() and impossible.any():
        raise ValueError(
            f"row {int(impossible.nonzero()[0])} of teacher.ids and teacher.logprobs is no "
            f"distribution: ids must be distinct and in [0, {inputs.vocabulary.size}), and "
            "probabilities have a sum of 1 at most; a log-prob of -inf leaves an entry out, but "
            "not all that are renormalised"
        )
    logprobs = torch.where((impossible | broken)[:, None], torch.nan, logprobs)
    ids = torch.where(impossible[:, None], -1, ids)
    return Compared(beta, ids=ids, logprobs=logprobs, rest=teacher.rest)


def _impossible(ids: Tensor, logprobs: Tensor, there: Tensor, vocabulary: int) -> Tensor:
    """Which rows are no distributions of tokens, [N] bool. A NaN is none, either, and is left to
    become the result."""
    outside = there & ((ids < 0) | (ids >= vocabulary))
    ordered = ids.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    too_much = logprobs.exp().sum(-1) > 1.05  # log-probs of bf16 are off by up to 2⁻⁵ above -16
    return outside.any(-1) | twice.any(-1) | too_much


class Divergences(NamedTuple):
    """What a pass finds of its rows, [N] fp32 each."""

    values: Tensor  # D
    means: Tensor  # E_p[w], which gradients are relative to; not read at β = 0

    @classmethod
    def empty(cls, like: Tensor, n: int) -> Divergences:
        return cls(*like.new_empty(2, n, dtype=torch.float32).unbind())

    def at(self, rows: slice) -> Divergences:
        return Divergences(self.values[rows], self.means[rows])


class OneSide(NamedTuple):
    """Some rows of one of both: what makes logits of a chunk, and statistics."""

    transform: LogitTransform
    temperature: Temperature
    statistics: RowStatistics

    @classmethod
    def of(cls, head: HeadInputs, rows: slice, statistics: RowStatistics) -> OneSide:
        return cls(head.transform, head.temperature.at(rows), statistics.at(rows))

    def at(self, rows: slice) -> OneSide:
        return OneSide(self.transform, self.temperature.at(rows), self.statistics.at(rows))


class DivergenceBackend(Protocol):
    """The element-wise work on chunks x of the student's logits and y of the teacher's [r, V]."""

    needs_statistics: ClassVar[bool]  # whether `score` needs those of both sides

    @staticmethod
    def score(
        x: Tensor,
        y: Tensor,
        student: OneSide,
        teacher: OneSide,
        labels: Tensor,
        beta: float,
        out: Divergences,
        known: bool,
    ) -> None:
        """Fills ``out``, sums over the columns that x has; and statistics of both sides, unless
        they are ``known``. Only `gradients_` reads x and y then."""

    @staticmethod
    def gradients_(
        x: Tensor,
        y: Tensor,
        student: OneSide,
        teacher: OneSide,
        labels: Tensor,
        beta: float,
        found: Divergences,
        upstream: RowGradients,
        slopes: Tensor,
        known: bool,
    ) -> None:
        """Replaces x by the gradients of its products.

        Args:
            upstream: by log-probs of the labels, and by entropies.
            slopes: [r] upstream gradients by divergences.
        """


class TorchDivergence:
    """Element-wise work in PyTorch, on fp32 chunks. `score` replaces y by w, or by q at β = 0, and
    without a soft cap x by p."""

    needs_statistics: ClassVar[bool] = False

    @staticmethod
    def score(
        x: Tensor,
        y: Tensor,
        student: OneSide,
        teacher: OneSide,
        labels: Tensor,
        beta: float,
        out: Divergences,
        known: bool,
    ) -> None:
        memory = buffers(x, 4)
        for rows, block in blocks(x):
            *work, copy = memory[:, : len(block)].unbind()
            p = block if student.transform.softcap is None else copy.copy_(block)
            own, q = student.at(rows), y[rows]
            for side, logits in ((own, p), (teacher.at(rows), q)):
                log_probs_(logits, side, None if known else work[0])
                if not known:
                    _pick(logits, labels[rows], side.statistics.logprobs)
            entropies = None if known else own.statistics.entropies
            out.values[rows], out.means[rows] = compare_(p, q, beta, work, entropies)

    @staticmethod
    def gradients_(
        x: Tensor,
        y: Tensor,
        student: OneSide,
        teacher: OneSide,
        labels: Tensor,
        beta: float,
        found: Divergences,
        upstream: RowGradients,
        slopes: Tensor,
        known: bool,
    ) -> None:
        capped, scale = student.transform.softcap is not None, student.transform.logit_scale
        memory = buffers(x, 2)
        for rows, block in blocks(x):
            side, w, log_p = student.at(rows), y[rows], memory[1, : len(block)]
            chain = side.temperature.divide_(torch.full_like(slopes[rows], scale))
            g, p = upstream.logprobs[rows] * chain, block
            if capped:
                p = log_probs_(memory[0, : len(block)].copy_(block), side, None if known else log_p)
                if upstream.entropies is not None:
                    log_p.copy_(p)
                p.exp_()
            elif upstream.entropies is not None:
                torch.log(p, out=log_p)
            if upstream.entropies is not None:
                assert side.statistics.entropies is not None
                log_p.clamp_(min=FLOOR).add_(side.statistics.entropies[:, None])
                log_p.mul_(p).mul_((upstream.entropies[rows] * chain)[:, None])
            slope = (slopes[rows] * chain * slope_factor(beta))[:, None]
            gradient = w if capped else block
            if beta == 0:
                w.sub_(p).mul_(-slope)  # exactly 0 where both are equal
                torch.addcmul(w, p, -g[:, None], out=gradient)
            else:
                w.mul_(slope).sub_(found.means[rows, None] * slope + g[:, None])
                torch.mul(w, p, out=gradient)
            if upstream.entropies is not None:
                gradient.sub_(log_p)
            add_at_labels_(gradient, labels[rows], g)
            if capped:
                block.square_().neg_().add_(1.0).mul_(gradient)


class PlannedDivergence:
    """Work on tensors without memory that stand for a GPU's, whose kernels work in place."""

    needs_statistics: ClassVar[bool] = True

    @staticmethod
    def score(*_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def gradients_(*_: Any, **__: Any) -> None:
        pass


def divergence_backend(inputs: HeadInputs) -> type[DivergenceBackend]:
    if inputs.backend == "triton":
        from ._triton.divergence import TritonDivergence

        return TritonDivergence
    return PlannedDivergence if inputs.head is PlannedHead else TorchDivergence


def _pick(log_probs: Tensor, labels: Tensor, out: Tensor) -> None:
    """The labels' log-probs, NaN for a label out of range."""
    known = (labels >= 0) & (labels < log_probs.shape[1])
    picked = log_probs.gather(1, labels.clamp(0, log_probs.shape[1] - 1)[:, None])[:, 0]
    out.copy_(torch.where(known, picked, torch.nan))


def slope_factor(beta: float) -> float:
    """s in the gradient s·p·(w - E_p[w])."""
    return 1.0 if beta in (0, 1) else 1.0 - beta


def log_probs_(x: Tensor, side: OneSide, work: Tensor | None = None) -> Tensor:
    """Log-probs in place of unscaled logits [r, C], by the statistics of the rows, or of all
    columns where there is ``work`` [r, C], which is overwritten."""
    statistics = side.statistics
    x.sub_((statistics.unscaled_max if work is None else x.amax(-1))[:, None])
    if side.transform.outer != 1.0:
        x.mul_(side.transform.outer)
    side.temperature.divide_(x)
    # Not torch.log_softmax, which adds a row up one after the other.
    total = statistics.exp_sum if work is None else torch.exp(x, out=work).sum(-1)
    return x.sub_(total.log()[:, None])


def compare_(
    p: Tensor, q: Tensor, beta: float, work: Sequence[Tensor], entropies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """D and E_p[w] of rows of log-probs, which become p and w, or p and q at β = 0. A token that
    one of the two does not allow has no part in the other's expectations.

    Args:
        p, q: [r, C] log-probs.
        work: three tensors [r, C], overwritten.
        entropies: [r], filled with those of p.
    """
    broken = (p[:, 0] + q[:, 0]).isnan()  # where all of a row is
    if beta == 0:
        apart = torch.sub(q, p, out=work[0])
    else:
        apart = torch.sub(p, q, out=q if beta == 1 else work[0])
    far = _FAR if 0 < beta < 1 else math.inf
    apart.nan_to_num_(nan=0.0, posinf=far, neginf=-_FAR if 0 < beta < 1 else 0.0)
    if entropies is None:
        p.exp_()
    else:
        log_p = torch.clamp(p, min=FLOOR, out=work[1])
        torch.neg(log_p.mul_(p.exp_()).sum(-1), out=entropies)
    if beta == 0:
        values = means = apart.mul_(q.exp_()).sum(-1)
    elif beta == 1:
        values = means = torch.mul(p, apart, out=work[0]).sum(-1)
    else:
        q.exp_()
        # log m less the larger of log p and log q; of the other it is farther by their difference.
        above = _log_mixture(apart, beta, work[1], work[2])
        of_teacher = apart.clamp_(min=0).add_(above).mul_(q).sum(-1)
        w = torch.sub(work[1], above, out=q)
        means = torch.mul(w, p, out=work[0]).sum(-1)
        values = (1 - beta) * means - beta * of_teacher
    # Where a probability has underflowed, and the other side does not allow its token, 0·inf.
    values = torch.where(values.isnan(), math.inf, values)
    return values.masked_fill_(broken, math.nan), means.masked_fill(broken, math.nan)


def _log_mixture(apart: Tensor, beta: float, work: Tensor, out: Tensor) -> Tensor:
    """log m less the larger of log p and log q: log(1 - γ·(1 - e)), e = exp(-|log p - log q|), with
    γ = β where p is the larger and 1 - β otherwise. ``work`` gets min(log p - log q, 0)."""
    # The smaller of β and 1 - β alone is rounded, and a small 1 - γ is never a difference.
    small = min(beta, 1.0 - beta)
    distance = torch.abs(apart, out=work).neg_()
    less = torch.expm1(distance, out=out)
    part = less * small
    far = distance.exp_().sub_(part)
    is_large = apart < 0 if beta <= 0.5 else apart >= 0
    near = torch.where(is_large, less.sub_(part), part)
    far = torch.where(near < -0.5, far.log_(), near.log1p_(), out=out)
    torch.clamp(apart, max=0, out=work)
    return far


class AgainstHead:
    """Chunks of up to ``longest`` rows against those of a teacher's head.

    Args:
        found: all rows' divergences, filled by :meth:`score`, after which only
            :meth:`gradients_` reads the student's chunk.
    """

    def __init__(
        self, inputs: HeadInputs, compared: Compared, found: Divergences, longest: int
    ) -> None:
        self.inputs, self.teacher, self.beta = inputs, compared.head(inputs), compared.beta
        self.found = found
        n = len(inputs.hidden)
        self.statistics = RowStatistics.empty(inputs.hidden, n, False, ())
        dtype = inputs.head.chunk_dtype(self.teacher.hidden)
        self._workspace = Workspace(inputs.hidden, longest, len(inputs.weight), dtype)
        self._y: Tensor

    @property
    def teacher_logprobs(self) -> Tensor | None:
        """The teacher's log-probs of the labels, [N]."""
        return self.statistics.logprobs

    def score(self, x: Tensor, rows: slice, student: RowStatistics) -> None:
        self._y = self._workspace.chunk(rows.stop - rows.start)
        self.teacher.fill(self._y, rows)
        backend, vocabulary = divergence_backend(self.inputs), self.inputs.vocabulary
        self._known = backend.needs_statistics or vocabulary.shared
        if self._known:
            for head, chunk, out in self._both(x, student):
                head.statistics(chunk, rows, out)
                head.join_(rows, out, common=True)
        found = self.found.at(rows)
        labels = self.inputs.labels[rows]
        backend.score(
            x, self._y, *self._sides(rows, student), labels, self.beta, found, self._known
        )
        if vocabulary.shared:
            values, means = vocabulary.gathered(torch.stack(found)).sum(0)
            found.values.copy_(values)
            found.means.copy_(means)

    def gradients_(
        self,
        x: Tensor,
        rows: slice,
        student: RowStatistics,
        upstream: RowGradients,
        slopes: Tensor,
    ) -> None:
        divergence_backend(self.inputs).gradients_(
            x, self._y, *self._sides(rows, student), self.inputs.labels[rows], self.beta,
            self.found.at(rows), upstream, slopes, self._known,
        )  # fmt: skip

    def release(self) -> None:
        self._workspace.release()

    def _both(
        self, x: Tensor, student: RowStatistics
    ) -> tuple[tuple[HeadInputs, Tensor, RowStatistics], ...]:
        return (self.inputs, x, student), (self.teacher, self._y, self.statistics)

    def _sides(self, rows: slice, student: RowStatistics) -> tuple[OneSide, OneSide]:
        own = OneSide.of(self.inputs, rows, student)
        return own, OneSide.of(self.teacher, rows, self.statistics)


class AgainstTokens:
    """Chunks of rows against a teacher's log-probs of K tokens. Arguments as of
    :class:`AgainstHead`.

    With "bucket" the student's other tokens have statistics of their own, of which their gradients
    are: a chunk has lost its K tokens then. Their gradients, and the label's, are computed in fp32
    apart.
    """

    teacher_logprobs: Tensor | None = None

    def __init__(
        self, inputs: HeadInputs, compared: Compared, found: Divergences, longest: int
    ) -> None:
        self.inputs, self.beta, self.found = inputs, compared.beta, found
        assert compared.ids is not None
        assert compared.logprobs is not None
        self.ids, self.logprobs = compared.ids, compared.logprobs
        self.bucket = compared.rest == "bucket"

    def score(self, x: Tensor, rows: slice, student: RowStatistics) -> None:
        inputs, log_q = self.inputs, self.logprobs[rows]
        inputs.statistics(x, rows, student)
        inputs.join_(rows, student, common=True)
        self._find(rows, x.shape[1])
        unscaled = inputs.head.unscaled(x.gather(1, self._columns), inputs.transform)
        self._squares = unscaled.square()
        self._own = log_probs_(unscaled, OneSide.of(inputs, rows, student))
        log_p = torch.where(self._here, self._own, 0.0)[:, :-1]
        log_p = inputs.vocabulary.gathered(log_p).sum(0)
        log_p = torch.where(log_q == -torch.inf, -torch.inf, log_p)
        if self.bucket:
            log_rest = self._split(x, rows, student.at(rows))
            left = (1.0 - log_q.double().exp().sum(-1)).clamp(min=LEAST_REST).log().float()
            left = torch.where(log_rest == -torch.inf, -torch.inf, left)
            log_p = torch.cat([log_p, log_rest[:, None]], -1)
            log_q = torch.cat([log_q, left[:, None]], -1)
            self._log_rest = log_rest.clamp(min=-_FAR)
        else:
            log_p, log_q = (z - z.logsumexp(-1, keepdim=True) for z in (log_p, log_q))
        p, w = log_p, log_q
        values, means = compare_(p, w, self.beta, p.new_empty(3, *p.shape).unbind())
        out = self.found.at(rows)
        out.values.copy_(values)
        out.means.copy_(means)
        # By the logits of each outcome together.
        by_outcomes = p - w if self.beta == 0 else p * (w - means[:, None])
        by_outcomes -= p * by_outcomes.sum(-1, keepdim=True)  # 0, but for p's own rounding
        self._by_outcomes = by_outcomes * slope_factor(self.beta)

    def gradients_(
        self,
        x: Tensor,
        rows: slice,
        student: RowStatistics,
        upstream: RowGradients,
        slopes: Tensor,
    ) -> None:
        inputs, saved = self.inputs, student.at(rows)
        transform, t = inputs.transform, inputs.temperature.at(rows)
        by_outcomes, g = slopes[:, None] * self._by_outcomes, upstream.logprobs[:, None]
        p, less = self._own.exp(), g
        if upstream.entropies is not None:
            assert saved.entropies is not None
            information = self._own.clamp(min=FLOOR) + saved.entropies[:, None]
            less = g + upstream.entropies[:, None] * information
        added = torch.where(self._is_label, g, 0.0) - p * less
        if self.bucket:  # the label has a part in what is left, unless it is one of the K
            part = (self._own[:, -1] - self._log_rest).exp()
            added += torch.cat([by_outcomes[:, :-1], (by_outcomes[:, -1] * part)[:, None]], -1)
        else:
            added[:, :-1] += by_outcomes
        added = t.divide_(torch.where(self._here, added * transform.logit_scale, 0.0))
        if transform.softcap is not None:
            added *= 1.0 - self._squares
        self._lose_(x, self._here)
        if self.bucket:
            saved, upstream = self._of_rest(saved, upstream, by_outcomes[:, -1])
        nowhere = torch.full_like(inputs.labels[rows], -1)
        inputs.head.gradients_(x, 0, nowhere, transform, t, saved, upstream)
        x.scatter_add_(1, self._columns, added.to(x.dtype))

    def release(self) -> None:
        pass

    def _find(self, rows: slice, width: int) -> None:
        """The columns of the K tokens and of the label [r, K + 1]; which of them are this
        process's, the last one only where the label is none of the K; and which is the label's."""
        labels = self.inputs.labels[rows, None]
        ids = self.ids[rows] - self.inputs.vocabulary.start
        here = (self.ids[rows] >= 0) & (ids >= 0) & (ids < width)
        is_label = here & (ids == labels)
        label_here = (labels >= 0) & (labels < width) & ~is_label.any(-1, keepdim=True)
        self._columns = torch.cat([ids, labels], -1).clamp_(0, width - 1)
        self._here = torch.cat([here, label_here], -1)
        self._is_label = torch.cat([is_label, label_here], -1)

    def _lose_(self, x: Tensor, here: Tensor) -> None:
        """Gives x the lowest logits at columns that are ``here``, those of the first ones, in place
        of their own. A capped logit of -c/T stays: its part of a sum is known, its gradient 0."""
        lowest = self.inputs.head.lowest(self.inputs.transform)
        lost = torch.where(here, lowest, torch.inf).to(x.dtype)  # inf changes nothing
        x.scatter_reduce_(1, self._columns[:, : here.shape[1]], lost, "amin")

    def _split(self, x: Tensor, rows: slice, saved: RowStatistics) -> Tensor:
        """log Σ p of the tokens that are none of the K, [r], -inf where there are none. Their
        statistics are kept, and x loses the K tokens."""
        inputs, here = self.inputs, self._here[:, :-1]
        transform, t = inputs.transform, inputs.temperature.at(rows)
        self._lose_(x, here)
        rest = RowStatistics.empty(x, len(x), False, ())
        inputs.head.statistics(x, torch.zeros_like(inputs.labels[rows]), transform, t, rest)
        count = here.sum(-1)
        if transform.softcap is not None:
            lowest_exp = t.divide_((-1.0 - rest.unscaled_max) * transform.outer).exp()
            rest.exp_sum.sub_(count * lowest_exp)
        none = (count == x.shape[1]) | (rest.unscaled_max <= LOWEST)
        rest.exp_sum.masked_fill_(none, 1.0)
        apart = t.divide_((rest.unscaled_max - saved.unscaled_max) * transform.outer)
        log_share = apart + rest.exp_sum.log() - saved.exp_sum.log()
        self._rest, self._log_share = rest, log_share.masked_fill(none, -torch.inf)
        return inputs.vocabulary.gathered(self._log_share).logsumexp(0)

    def _of_rest(
        self, saved: RowStatistics, upstream: RowGradients, by_rest: Tensor
    ) -> tuple[RowStatistics, RowGradients]:
        """Statistics and upstream gradients by which the tokens that x has left get theirs, each in
        proportion to its part of them."""
        rest = self._rest
        # This process's part of all that is left, and its probability.
        part, p = (self._log_share - self._log_rest).exp(), self._log_share.exp()
        entropies = None
        if upstream.entropies is not None:
            assert saved.entropies is not None
            entropies = upstream.entropies * p
            log_share = self._log_share.clamp(min=FLOOR)
            # So that z - max z - mean is log p + H.
            rest = rest._replace(mean=rest.exp_sum.log() - log_share - saved.entropies)
        return rest, RowGradients(upstream.logprobs * p - by_rest * part, entropies)


def against(
    inputs: HeadInputs, compared: Compared, found: Divergences, longest: int
) -> AgainstHead | AgainstTokens:
    """What compares chunks of the student's logits with the teacher."""
    kind = AgainstHead if compared.ids is None else AgainstTokens
    return kind(inputs, compared, found, longest)
