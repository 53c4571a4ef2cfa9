"""A vocabulary that is cut over processes, each of which has some rows of the head's weight."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ._cpu.row_chunks import FLOOR
from .types import LOWEST, RowStatistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Vocabulary(Protocol):
    """The columns of the logits, and which of them are this process's."""

    shared: ClassVar[bool]  # whether other processes have some

    @property
    def start(self) -> int:
        """The first of this process's columns."""

    @property
    def size(self) -> int:
        """The number of columns that all processes have."""

    @property
    def widest(self) -> int:
        """The number of columns of the process that has the most."""

    @property
    def key(self) -> str:
        """The name by which :func:`find` finds the vocabulary."""

    def join_(
        self,
        out: RowStatistics,
        labels: Tensor,
        scaled: Callable[[Tensor], Tensor],
        common: bool = False,
    ) -> None:
        """Makes statistics of rows over this process's columns those over all."""

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of x over processes, in place of x where that is contiguous."""

    def gathered(self, x: Tensor) -> Tensor:
        """The tensors x of all processes, stacked in the order of their columns."""


class WholeVocabulary:
    """A vocabulary of which all columns are this process's."""

    shared: ClassVar[bool] = False

    def __init__(self, size: int) -> None:
        self.size = self.widest = size
        self.start, self.key = 0, ""

    def join_(
        self,
        out: RowStatistics,
        labels: Tensor,
        scaled: Callable[[Tensor], Tensor],
        common: bool = False,
    ) -> None:
        pass

    def sum_(self, x: Tensor) -> Tensor:
        return x

    def gathered(self, x: Tensor) -> Tensor:
        return x[None]


@dataclass(frozen=True, eq=False)
class VocabParallel:
    """The rows [start, stop) of a head's weight [V, H], and of its bias [V], that this process has;
    the processes of a group have all V.

    Make it once, on all processes of the group at the same time: they tell each other their ranges,
    whose sizes may differ, and V. An op that gets it is then called by all of them, with the same
    hidden states, labels and options and each with its own rows; backward, too, is run by all.

    With m_k = max z, s_k = Σ exp(z - m_k) and E_k[z] over the columns of process k, m = max_k m_k
    and S = Σ_k s_k·exp(m_k - m), the op joins

        log p_y = z_y - m - log S,  E[z] = Σ_k s_k·exp(m_k - m)/S·E_k[z],  H = m + log S - E[z],

    and the other statistics in the same way. Each process sends 12 to 28 bytes per row for that,
    by one all-gather, and joins what it gets in the vocabulary's order: results are the same bits
    on all processes, whatever algorithm the transport has. The gradient by the hidden states is
    summed over the group in fp32 and rounded once; those by weight and bias are of the own rows.

    Args:
        start, stop: this process's rows of the weight.
        group: the processes that share the vocabulary; the default group where None.

    Raises:
        TypeError: bounds that are not integers.
        ValueError, on all processes: ranges that are empty, overlap, leave out rows, or do not
            begin at 0.
        RuntimeError: no process group has been initialised, or this process is not in the group.

    Once the processes have left their default group (``destroy_process_group``), ops refuse it with
    a RuntimeError, also where they have joined another: make a new one then.
    """

    start: int
    stop: int
    group: ProcessGroup | None = field(default=None, repr=False)
    size: int = field(init=False)
    widest: int = field(init=False, repr=False)
    key: str = field(init=False, repr=False)
    _order: tuple[int, ...] = field(init=False, repr=False)  # processes, by their columns
    _world: Any = field(init=False, repr=False)  # the default group, which ``group`` is part of

    shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} must be an int, got {getattr(self, name)!r}")
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "VocabParallel needs processes: call torch.distributed.init_process_group first, "
                "or leave vocab_parallel out"
            )
        if dist.get_rank(self.group) < 0:
            raise RuntimeError("this process is not in the group: only its members have rows")
        own = torch.tensor([self.start, self.stop], device=_device_of(self.group))
        ranges = [tuple(x.tolist()) for x in self._gathered(own)]
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        ordered = [ranges[k] for k in order]
        starts = [0, *(stop for _, stop in ordered[:-1])]
        if starts != [start for start, _ in ordered] or any(a >= b for a, b in ranges):
            found = ", ".join(f"[{a}, {b})" for a, b in ranges)
            raise ValueError(
                f"start and stop of the group's processes are {found}: they must cut [0, V) into "
                "ranges, none of them empty"
            )
        found_by_all = {
            "size": ordered[-1][1],
            "widest": max(stop - start for start, stop in ranges),
            "key": f"vocabulary {next(_numbers)}",
            "_order": tuple(order),
            "_world": dist.group.WORLD,
        }
        for name, value in found_by_all.items():
            object.__setattr__(self, name, value)
        _known[self.key] = self

    @classmethod
    def of(cls, weight: Tensor) -> VocabParallel:
        """The rows that this process has of a DTensor, such as tensor parallelism makes of a head:
        ``Shard(0)`` over one dimension of its mesh and replicated over others. The op's weight is
        ``weight.to_local()``.

        Raises:
            TypeError: not a DTensor.
            ValueError: another placement; what ``VocabParallel`` refuses.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not isinstance(weight, DTensor):
            raise TypeError(f"weight is a {type(weight).__name__}: pass a DTensor, or the rows")
        placements = weight.placements
        cut = [i for i, placement in enumerate(placements) if placement == Shard(0)]
        if len(cut) != 1 or placements.count(Replicate()) != len(placements) - 1:
            raise ValueError(
                f"weight has placements {placements}: they must be Shard(0) once, and Replicate() "
                "otherwise"
            )
        mesh, rows = weight.device_mesh, weight.to_local().shape[0]
        processes = mesh.size(cut[0])
        each = -(-weight.shape[0] // processes)  # torch.chunk's size
        start = min(mesh.get_local_rank(cut[0]) * each, weight.shape[0])
        return cls(start, start + rows, mesh.get_group(cut[0]))

    def check_group(self) -> None:
        """Raises RuntimeError where the processes have left the group that they agreed on ranges
        in."""
        if not dist.is_initialized() or dist.group.WORLD is not self._world:
            raise RuntimeError(
                "the process group of vocab_parallel has been destroyed: make a new VocabParallel "
                "after torch.distributed.init_process_group"
            )

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """The tensors x of all processes, in their order."""
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, x, group=self.group)
        return parts

    def sum_(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.numel():
            dist.all_reduce(x, group=self.group)
        return x

    def gathered(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x[None]
        parts = self._gathered(x.contiguous())
        return torch.stack([parts[k] for k in self._order])

    def join_(
        self,
        out: RowStatistics,
        labels: Tensor,
        scaled: Callable[[Tensor], Tensor],
        common: bool = False,
    ) -> None:
        """Makes statistics of rows over this process's columns those over all.

        The first three are relative to this process's maximum, m_k, which is what gradients by its
        logits are computed with: S·exp(m - m_k) and E[z] - m_k. With ``common`` they are those of
        all columns, m, S and E[z] - m: log-probs of a process far below others are finite then.

        Args:
            labels: [N] counted from this process's first column; outside of its columns for others'
                labels.
            scaled: makes differences of logits [N] or [N, C] of unscaled ones, in place.
        """
        if not len(labels):
            return
        own = self._own(out, labels)
        joined = self.gathered(torch.stack([*own.values()])).movedim(0, -1)
        of_all = dict(zip(own, joined.unbind(), strict=True))  # [N, processes] each

        row_max = of_all["max"].amax(-1)
        below = scaled(of_all["max"] - row_max[:, None])
        weights = below.exp().mul_(of_all["exp_sum"])
        exp_sum = weights.sum(-1)
        log_sum = exp_sum.log()
        logprobs = (of_all["at_label"] + below).nansum(-1).sub_(log_sum)
        outside = (labels < -self.start) | (labels >= self.size - self.start)
        out.logprobs.copy_(logprobs.masked_fill_(outside, torch.nan))
        mean = None
        if out.mean is not None and out.entropies is not None:
            mean = (weights * (of_all["mean"] + below.clamp(min=FLOOR))).sum(-1).div_(exp_sum)
            torch.sub(log_sum, mean, out=out.entropies)
        if out.log_sum_sq_probs is not None:
            squares = below.mul(2).exp_().mul_(of_all["sq_sum"]).sum(-1)
            torch.sub(squares.log(), 2 * log_sum, out=out.log_sum_sq_probs)
        if out.mean_logit is not None:
            out.mean_logit.copy_(of_all["mean_logit"].sum(-1))
        if out.is_top1 is not None:
            highest = of_all["max"] == row_max[:, None]
            first = highest & (highest.cumsum(-1) == 1)
            out.is_top1.copy_((first & (of_all["top"] > 0)).any(-1))

        if common:
            out.unscaled_max.copy_(row_max)
            out.exp_sum.copy_(exp_sum)
            if mean is not None and out.mean is not None:
                out.mean.copy_(mean)
            return
        # Where a row has no possible token here the sum becomes infinite, and probabilities 0.
        down = scaled(out.unscaled_max - row_max).clamp_(min=LOWEST)
        out.exp_sum.copy_(exp_sum * (-down).exp())
        if mean is not None and out.mean is not None:
            out.mean.copy_(mean - down)

    def _own(self, out: RowStatistics, labels: Tensor) -> dict[str, Tensor]:
        """Statistics of this process's columns that others need, [N] each, with logits relative to
        its maximum. "at_label" is NaN where another process has the label."""
        rows = self.stop - self.start
        # A bias of -inf may mask all tokens of a process. NaN counts as possible.
        possible = ~(out.unscaled_max <= LOWEST)
        log_sum = out.exp_sum.log()
        at_label = torch.where(possible, out.logprobs + log_sum, -torch.inf)
        here = (labels >= 0) & (labels < rows)
        statistics = {
            "max": out.unscaled_max,
            "exp_sum": out.exp_sum,
            "at_label": torch.where(here, at_label, torch.nan),
        }
        if out.mean is not None:
            statistics["mean"] = torch.where(possible, out.mean, 0.0)
        if out.log_sum_sq_probs is not None:
            squares = torch.exp(out.log_sum_sq_probs + 2 * log_sum)
            statistics["sq_sum"] = torch.where(possible, squares, 0.0)
        if out.mean_logit is not None:
            statistics["mean_logit"] = out.mean_logit * (rows / self.size)
        if out.is_top1 is not None:
            statistics["top"] = out.is_top1.float()
        return statistics


_numbers = itertools.count()
# Vocabularies by key. Operators of compiled graphs take keys: a graph is traced, and guarded, with
# the key of the object that it is called with.
_known: weakref.WeakValueDictionary[str, VocabParallel] = weakref.WeakValueDictionary()


def find(key: str, rows: int) -> Vocabulary:
    """The vocabulary of a key, for a weight of so many rows.

    Raises:
        RuntimeError: a VocabParallel that is no longer there.
    """
    if not key:
        return WholeVocabulary(rows)
    try:
        return _known[key]
    except KeyError:
        raise RuntimeError(
            "the VocabParallel that compiled code was called with is gone: keep it until backward"
        ) from None


def checked(split: Any, weight: Tensor) -> Vocabulary:
    """The vocabulary of ``vocab_parallel``, whole where it is None. Raises TypeError for another
    object, ValueError for a weight that has not the rows [start, stop), and RuntimeError where its
    processes have left their group."""
    if split is None:
        return WholeVocabulary(weight.shape[0])
    if not isinstance(split, VocabParallel):
        raise TypeError(
            f"vocab_parallel is a {type(split).__name__}: pass VocabParallel(start, stop, group)"
        )
    if weight.shape[0] != split.stop - split.start:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, vocab_parallel has {split.start} to {split.stop}: "
            "pass this process's rows of the weight"
        )
    split.check_group()
    return split


def _device_of(group: ProcessGroup | None) -> torch.device:
    """A device of tensors that a group's transport takes."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "a group of devices without a device"
    return accelerator
