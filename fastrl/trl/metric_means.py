"""Metrics of batches, averaged between logs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.run.processes import Processes

Parts = Mapping[str, tuple[Tensor, Tensor]]  # by name: a sum, and of how many it is
_MEAN, _LEAST, _MOST = "mean", "least", "most"


class _Rows(NamedTuple):
    names: tuple[str, ...]
    kind: str
    table: Tensor  # [K, 2] fp32: sums and counts; or extremes, and 1 where there are any
    of_none: float = math.nan


class MetricMeans:
    """Means over batches of each batch's mean over all processes, as TRL logs them: each batch
    weighs the same, where in :class:`fastrl.trainers.logged.LoggedMetrics` each number does.

    Batches leave their sums on the device; the processes join them, and the device is waited for,
    once for each log. All processes add the same names in the same order.

    Args:
        differences: by name the two metrics of whose means in each batch it is the difference.
    """

    def __init__(self, differences: Mapping[str, tuple[str, str]] | None = None):
        self.differences = dict(differences or {})
        self._rows: list[_Rows] = []

    def __len__(self) -> int:
        """How often there was something added."""
        return len(self._rows)

    def add(self, parts: Parts, of_none: float = math.nan) -> None:
        """Adds a batch's sums with their counts; a count of 0 where the batch has none.

        Args:
            of_none: the mean where no process has any; of NaN the batch is left out.
        """
        if not parts:
            return
        sums = torch.stack([x.detach().float() for x, _ in parts.values()])
        counts = torch.stack([n.detach().float() for _, n in parts.values()])
        table = torch.stack([sums, counts], dim=-1)
        self._rows.append(_Rows(tuple(parts), _MEAN, table, of_none))

    def add_number(self, name: str, value: float) -> None:
        """Adds a batch's mean that every process knows; NaN where there is none."""
        known = value == value
        row = torch.tensor([[value if known else 0.0, float(known)]])
        self._rows.append(_Rows((name,), _MEAN, row))

    def add_extreme(self, name: str, values: Tensor, most: bool) -> None:
        """Adds the greatest or least of all processes' values [B] that are not NaN."""
        values, sign = values.detach().float(), 1.0 if most else -1.0
        known = ~values.isnan()
        none = torch.where(known, values * sign, -torch.inf)
        # One more, so that there always is one.
        best = torch.cat([none, none.new_full((1,), -torch.inf)]).max() * sign
        row = torch.stack([best, known.any().float()])[None]
        self._rows.append(_Rows((name,), _MOST if most else _LEAST, row))

    def take(self, processes: Processes) -> dict[str, float | None]:
        """The means since the last call; None of those that no batch has."""
        if not self._rows:
            return {}
        device = next((x.table.device for x in self._rows if x.table.device.type != "cpu"), None)
        own = torch.cat([x.table if device is None else x.table.to(device) for x in self._rows])
        every = processes.joined(own[None], [1] * processes.count).double().cpu()  # [P, R, 2]
        values: dict[str, list[float]] = {}
        start = 0
        for rows in self._rows:
            part = every[:, start : start + len(rows.names)]
            start += len(rows.names)
            for name, value in zip(rows.names, _joined(part, rows).tolist(), strict=True):
                values.setdefault(name, []).append(value)
        self._rows.clear()
        for name, (first, second) in self.differences.items():
            pairs = zip(values[first], values[second], strict=True)
            values[name] = [one - other for one, other in pairs]
        return {name: _mean(x) for name, x in values.items()}

    def shorten(self, length: int) -> None:
        """Leaves out what was added behind that length."""
        del self._rows[length:]

    def state(self) -> dict[str, Any]:
        """A tree of tensors and plain values."""
        return {"rows": [[list(x.names), x.kind, x.table.cpu(), x.of_none] for x in self._rows]}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._rows = [
            _Rows(tuple(names), kind, table.to(device), of_none)
            for names, kind, table, of_none in state["rows"]
        ]


def mean_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """A part of numbers [n], for :meth:`MetricMeans.add`."""
    values = values.detach().float()
    return values.sum(), torch.full((), float(len(values)), device=values.device)


def _joined(part: Tensor, rows: _Rows) -> Tensor:
    """[K] of all processes, from [P, K, 2]."""
    values, counts = part.unbind(-1)
    if rows.kind == _MEAN:
        found = values.sum(0) / counts.sum(0)
    else:
        found = values.max(0).values if rows.kind == _MOST else values.min(0).values
    return torch.where(counts.sum(0) > 0, found, rows.of_none)


def _mean(values: list[float]) -> float | None:
    known = [x for x in values if x == x]
    return sum(known) / len(known) if known else None
