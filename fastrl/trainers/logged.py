"""Metrics of the batches that are trained on, and how many tokens they had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.run.processes import Processes


class LoggedMetrics:
    """Means and extremes since the last log, over all processes. They stay on the device until they
    are asked for, so that no step waits for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # [2]: of the numbers, and how many
        self._most: dict[str, Tensor] = {}  # []
        self._least: dict[str, Tensor] = {}  # []
        self._last: dict[str, float] = {}
        self._tokens: Tensor | float = 0.0

    def add(self, name: str, total: Tensor, count: Tensor | float = 1.0) -> None:
        """Adds ``count`` numbers whose sum is ``total``."""
        new = torch.stack([torch.as_tensor(x, device=total.device).float() for x in (total, count)])
        self._sums[name] = self._sums[name] + new if name in self._sums else new

    def add_extremes(self, least: str, most: str, values: Tensor) -> None:
        """Adds numbers [N], of which the least and the greatest are logged by these names."""
        low, high = values.detach().float().aminmax()
        self._least[least] = torch.minimum(self._least.get(least, low), low)
        self._most[most] = torch.maximum(self._most.get(most, high), high)

    def add_tokens(self, tokens: Tensor | int) -> None:
        self._tokens = self._tokens + tokens

    def logged(self, processes: Processes) -> dict[str, float]:
        """The means and extremes, and ``num_tokens`` of the run; those of the last log where there
        are no new ones. All processes call it; each may have metrics that others lack."""
        every = processes.objects(self._on_host())
        for name in _names(every, "sums"):
            parts = [x["sums"][name] for x in every if name in x["sums"]]
            total, count = (sum(column) for column in zip(*parts, strict=True))
            self._last[name] = total / count if count else 0.0
        for kind, best in (("least", min), ("most", max)):
            for name in _names(every, kind):
                self._last[name] = best(x[kind][name] for x in every if name in x[kind])
        self._sums, self._least, self._most = {}, {}, {}
        return {**self._last, "num_tokens": sum(x["tokens"] for x in every)}

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        return {**self._on_host(), "last": dict(self._last)}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        for name in ("sums", "least", "most"):
            known = {key: torch.tensor(x, device=device) for key, x in state[name].items()}
            setattr(self, f"_{name}", known)
        self._last, self._tokens = dict(state["last"]), state["tokens"]

    def mark(self) -> tuple[Any, ...]:
        """What :meth:`rewind` goes back to, without waiting for the device."""
        return dict(self._sums), dict(self._least), dict(self._most), dict(self._last), self._tokens

    def rewind(self, mark: tuple[Any, ...]) -> None:
        self._sums, self._least, self._most, self._last = (dict(x) for x in mark[:-1])
        self._tokens = mark[-1]

    def _on_host(self) -> dict[str, Any]:
        """Numbers by kind and name, fetched in one transfer."""
        columns = {"sums": self._sums, "least": self._least, "most": self._most}
        parts = [x.double().reshape(-1) for column in columns.values() for x in column.values()]
        tokens = torch.as_tensor(self._tokens, dtype=torch.float64)
        device = parts[0].device if parts else tokens.device
        flat = torch.cat([*parts, tokens.to(device).reshape(1)]).tolist()
        found: dict[str, Any] = {}
        for kind, column in columns.items():
            found[kind] = {}
            for name in column:
                found[kind][name] = [flat.pop(0), flat.pop(0)] if kind == "sums" else flat.pop(0)
        return {**found, "tokens": flat[0]}


def joined(states: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """The state of each of ``count`` processes that go on with what others had so far."""
    sums = {
        name: [sum(x["sums"].get(name, (0.0, 0.0))[i] for x in states) / count for i in range(2)]
        for name in _names(states, "sums")
    }
    extremes = {
        kind: {
            name: best(x[kind][name] for x in states if name in x[kind])
            for name in _names(states, kind)
        }
        for kind, best in (("least", min), ("most", max))
    }
    tokens = sum(x["tokens"] for x in states) / count
    return {"sums": sums, **extremes, "tokens": tokens, "last": dict(states[0]["last"])}


def _names(states: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    """In the order of the first process that has each."""
    return list(dict.fromkeys(name for x in states for name in x[kind]))
