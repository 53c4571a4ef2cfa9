"""Metrics of batches, averaged between logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastrl.run.processes import Processes

Parts = Mapping[str, tuple[Tensor, Tensor]]  # by name: a sum, and of how many it is


class MetricMeans:
    """Means over batches of each batch's mean over all processes, as TRL logs them.

    Batches leave their sums on the device; the processes join them, and the device is waited for,
    once for each log.

    Args:
        differences: by name the two metrics of whose means in each batch it is the difference.
    """

    def __init__(self, differences: Mapping[str, tuple[str, str]]):
        self.differences = differences
        self._names: list[str] = []
        self._batches: list[Tensor] = []  # [K, 2] fp32 each

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, parts: Parts) -> None:
        """Adds a batch's; every batch has the same names, and a count of 0 where it has none."""
        self._names = list(parts)
        sums = torch.stack([x.detach().float() for x, _ in parts.values()])
        counts = torch.stack([n.detach().float() for _, n in parts.values()])
        self._batches.append(torch.stack([sums, counts], dim=-1))

    def take(self, processes: Processes) -> dict[str, float]:
        """The means since the last call; without those that no batch has."""
        if not self._batches:
            return {}
        table = processes.sums(torch.stack(self._batches)).double().cpu()
        self._batches.clear()
        means = dict(zip(self._names, (table[..., 0] / table[..., 1]).unbind(1), strict=True))
        for name, (first, second) in self.differences.items():
            means[name] = means[first] - means[second]
        known = {name: x[~x.isnan()] for name, x in means.items()}
        return {name: float(x.mean()) for name, x in known.items() if len(x)}

    def shorten(self, batches: int) -> None:
        """Leaves out those behind the first so many."""
        del self._batches[batches:]

    def state(self) -> dict[str, Any]:
        """A tree of tensors and plain values."""
        return {"names": list(self._names), "batches": [x.cpu() for x in self._batches]}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._names = list(state["names"])
        self._batches = [x.to(device) for x in state["batches"]]
