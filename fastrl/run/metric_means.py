"""Metrics of a trainer's batches, averaged over processes and between logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.run.processes import Processes

Parts = Mapping[str, tuple[Tensor, Tensor]]  # each metric's sum and its count of numbers
_MEAN, _LEAST, _MOST = "mean", "least", "most"
_SIGNS = {_LEAST: -1.0, _MOST: 1.0}


class _Head(NamedTuple):
    names: tuple[str, ...]
    kind: str  # _MEAN, _LEAST or _MOST
    pooled: bool
    of_none: float | None  # the mean of no numbers; None: no mean


class _Rows(NamedTuple):
    head: _Head
    # [K, 2 or 3]: sums, counts and sums of squares; or [1, 2]: the greatest number, and 1 where
    # there is any. A least number is in it as its negative, the greatest of the negated numbers.
    table: Tensor


class _Appending(NamedTuple):
    metrics: MetricMeans
    name: str

    def append(self, value: float) -> None:
        self.metrics.add_number(self.name, float(value))


class MetricMeans:
    """Means and extremes since the last log. They stay on the device until :meth:`take`; the
    processes do not wait for each other.

    A metric of :meth:`add`, :meth:`add_number` or :meth:`add_extreme` is a mean over batches of
    each batch's mean, or extreme, over all processes, as TRL logs it: each batch weighs the same,
    and all processes add the same names in the same order. A pooled metric is the mean, or extreme,
    of all numbers: each number weighs the same, and a process may have metrics that others lack.

    Args:
        differences: for each metric that is a difference, the two metrics of which the second is
            subtracted from the first, batch by batch.
        pools: pool all metrics, as in an evaluation, whose last batch may be smaller.
    """

    def __init__(
        self, differences: Mapping[str, tuple[str, str]] | None = None, pools: bool = False
    ):
        self.differences, self.pools = dict(differences or {}), pools
        self._rows: list[_Rows] = []
        self._pooled: dict[_Head, Tensor] = {}
        self._totals: dict[str, Tensor | float] = {}

    def add(self, parts: Parts, of_none: float | None = None) -> None:
        """Adds a batch's sums with their counts; a count of 0 where the batch has none.

        Args:
            of_none: the mean where no process has numbers; None leaves the batch out.
        """
        if self.pools:
            self.pool(parts, of_none=of_none)
        elif parts:
            head = _Head(tuple(parts), _MEAN, False, of_none)
            self._rows.append(_Rows(head, _table(*zip(*parts.values(), strict=True))))

    def add_number(self, name: str, value: float, count: int = 1) -> None:
        """Adds a batch's mean that every process knows; NaN where there is none.

        Args:
            count: the number of numbers in the mean, its weight where it is pooled.
        """
        weight = float(value == value) * (count if self.pools else 1)
        row = torch.tensor([[value * weight if weight else 0.0, weight]])
        self._add(_Head((name,), _MEAN, self.pools, None), row)

    def __getitem__(self, name: str) -> _Appending:
        """A metric by name, to which a number that every process knows is appended, as in TRL."""
        return _Appending(self, name)

    def add_extreme(self, name: str, values: Tensor, most: bool) -> None:
        """Adds the greatest (``most``) or least of all processes' values [B] that are not NaN."""
        head = _Head((name,), _MOST if most else _LEAST, self.pools, None)
        self._add(head, _greatest(values if most else -values))

    def pool(
        self, parts: Parts, squares: Sequence[Tensor] = (), of_none: float | None = None
    ) -> None:
        """Adds sums of numbers with their counts.

        Args:
            squares: sums of the squares, for standard errors.
            of_none: see :meth:`add`.
        """
        if not parts:
            return
        table = _table(*zip(*parts.values(), strict=True), *([squares] if squares else []))
        for name, row in zip(parts, table, strict=True):
            self._add(_Head((name,), _MEAN, True, of_none), row[None])

    def pool_values(self, values: Mapping[str, Tensor]) -> None:
        """Adds all numbers of some tensors, for means and standard errors."""
        flat = {name: x.detach().float().flatten() for name, x in values.items()}
        squares = [x.square().sum() for x in flat.values()]
        self.pool({name: mean_of(x) for name, x in flat.items()}, squares)

    def pool_extremes(self, least: str, most: str, values: Tensor) -> None:
        """Adds numbers, of which the least and the greatest are logged by these names."""
        values = values.flatten()
        self._add(_Head((least,), _LEAST, True, None), _greatest(-values))
        self._add(_Head((most,), _MOST, True, None), _greatest(values))

    def _add(self, head: _Head, table: Tensor) -> None:
        if not head.pooled:
            self._rows.append(_Rows(head, table))
            return
        before = self._pooled.get(head)
        self._pooled[head] = table if before is None else _join(head.kind, before, table)

    def count(self, name: str, number: Tensor | float) -> None:
        """Adds to a number of the whole run, such as its tokens."""
        self._totals[name] = self._totals.get(name, 0.0) + number

    def totals(self, processes: Processes) -> dict[str, float]:
        """The sums of all processes' counts by name; all processes call this."""
        summed: dict[str, float] = {}
        for counted in processes.objects(self._counted()):
            summed |= {name: summed.get(name, 0.0) + number for name, number in counted.items()}
        return summed

    def take(self, processes: Processes, sem_of: Sequence[str] = ()) -> dict[str, float | None]:
        """The means and extremes since the last call by name; None for a metric without a number.
        All processes call this.

        Args:
            sem_of: names of metrics of :meth:`pool_values` that get a standard error, NAME_sem.
        """
        values: dict[str, list[float]] = {}
        errors: dict[str, float] = {}
        for head, table in self._joined(processes):
            for name, (total, n, *squares) in zip(head.names, table.tolist(), strict=True):
                value = math.nan if head.of_none is None else head.of_none
                if n:
                    value = total / n if head.kind == _MEAN else total * _SIGNS[head.kind]
                values.setdefault(name, []).append(value)
                if name in sem_of and squares and n:
                    errors[f"{name}_sem"] = standard_error(n, total, *squares)
        self.drop()
        self._pooled.clear()
        for name, (first, second) in self.differences.items():
            if first in values and second in values:
                pairs = zip(values[first], values[second], strict=True)
                values[name] = [one - other for one, other in pairs]
        return {**{name: _mean(x) for name, x in values.items()}, **errors}

    def drop(self) -> None:
        """Forgets the batches' means, which would pile up where nobody takes them."""
        self._rows.clear()

    def mark(self) -> Any:
        """A mark for :meth:`rewind` to go back to, made without waiting for the device."""
        return len(self._rows), dict(self._pooled), dict(self._totals)

    def rewind(self, mark: Any) -> None:
        """Forgets what was added since a :meth:`mark`."""
        length, pooled, totals = mark
        del self._rows[length:]
        self._pooled, self._totals = dict(pooled), dict(totals)

    def state(self) -> dict[str, Any]:
        """The numbers so far, as a tree for a checkpoint."""
        rows = [[list(x.head.names), *x.head[1:], x.table.cpu()] for x in self._every()]
        return {"rows": rows, "totals": self._counted()}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Replaces the numbers by those of a :meth:`state`."""
        self._rows, self._pooled = [], {}
        for names, kind, pooled, of_none, table in state["rows"]:
            head = _Head(tuple(names), kind, pooled, of_none)
            if pooled:
                self._pooled[head] = table.to(device)
            else:
                self._rows.append(_Rows(head, table.to(device)))
        self._totals = dict(state["totals"])

    @staticmethod
    def of_others(states: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
        """The state of each of ``count`` processes that resume from the states of others: an equal
        share of pooled sums and of counts; means of batches since the last log are dropped."""
        total = MetricMeans()
        for state in states:
            process = MetricMeans()
            process.load(state, torch.device("cpu"))
            for head, table in process._pooled.items():
                total._add(head, table / count if head.kind == _MEAN else table)
            for name, number in process._totals.items():
                total.count(name, number / count)
        return total.state()

    def _every(self) -> list[_Rows]:
        return [*self._rows, *(_Rows(*x) for x in self._pooled.items())]

    def _counted(self) -> dict[str, float]:
        return {name: float(x) for name, x in self._totals.items()}

    def _joined(self, processes: Processes) -> list[_Rows]:
        """The rows of all processes, in fp64; each process reads its device once."""
        rows = self._every()
        if rows:
            device = next((x.table.device for x in rows if x.table.device.type != "cpu"), None)
            flat = torch.cat([x.table.flatten().to(device or "cpu") for x in rows]).double().cpu()
            parts = flat.split([x.table.numel() for x in rows])
            tables = [part.view_as(x.table) for part, x in zip(parts, rows, strict=True)]
            rows = [x._replace(table=table) for x, table in zip(rows, tables, strict=True)]
        merged: dict[Any, _Rows] = {}
        for of_process in processes.objects(rows):
            for i, (head, table) in enumerate(of_process):
                key = head if head.pooled else i
                if key in merged:
                    table = _join(head.kind, merged[key].table, table)
                merged[key] = _Rows(head, table)
        return [*merged.values()]


def mean_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and count of numbers [n], for :meth:`MetricMeans.add`."""
    values = values.detach().float()
    return values.sum(), torch.full((), float(len(values)), device=values.device)


def standard_error(count: float, total: float, squares: float) -> float:
    """The standard error s/√n of a mean, s² = Σ(x - x̄)²/(n - 1), from n, Σx, Σx²; 0 for n < 2."""
    if count < 2:
        return 0.0
    return math.sqrt(max(squares - total**2 / count, 0.0) / (count - 1) / count)


def _table(*columns: Sequence[Tensor | float]) -> Tensor:
    """K metrics' sums, counts and perhaps squares as a table [K, 2 or 3] fp32, on their device."""
    device = columns[0][0].device  # type: ignore[union-attr]
    of_each = [[torch.as_tensor(x, device=device).detach().float() for x in y] for y in columns]
    return torch.stack([torch.stack(column) for column in of_each], dim=-1)


def _greatest(values: Tensor) -> Tensor:
    """The greatest value that is not NaN, and 1, as [1, 2]; -inf and 0 without one."""
    values = values.detach().float()
    is_number = ~values.isnan()
    candidates = torch.where(is_number, values, -torch.inf)
    # One element more, so that there always is one.
    best = torch.cat([candidates, candidates.new_full((1,), -torch.inf)]).max()
    return torch.stack([best, is_number.any().float()])[None]


def _join(kind: str, one: Tensor, other: Tensor) -> Tensor:
    other = other.to(one.device)
    return one + other if kind == _MEAN else torch.maximum(one, other)


def _mean(values: list[float]) -> float | None:
    numbers = [x for x in values if x == x]
    return sum(numbers) / len(numbers) if numbers else None
