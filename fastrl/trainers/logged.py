"""Metrics of the batches that are trained on, and how many tokens they had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class LoggedMetrics:
    """Means since the last log, over all processes. They stay on the device until they are asked
    for, so that no step waits for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # [2]: of the numbers, and how many
        self._last: dict[str, float] = {}
        self._tokens: Tensor | int = 0

    def add(self, name: str, total: Tensor, count: Tensor | float = 1.0) -> None:
        """Adds ``count`` numbers whose sum is ``total``."""
        new = torch.stack([torch.as_tensor(x, device=total.device).float() for x in (total, count)])
        self._sums[name] = self._sums[name] + new if name in self._sums else new

    def add_tokens(self, tokens: Tensor | int) -> None:
        self._tokens = self._tokens + tokens

    def logged(self, accelerator: Any) -> dict[str, float]:
        """The means, and ``num_tokens`` of the run; those of the last log where there are no new
        ones. All processes call it."""
        total = torch.as_tensor(self._tokens, device=accelerator.device).double()
        rows = [torch.stack([total, torch.ones_like(total)])]
        rows += [x.to(total) for x in self._sums.values()]
        (tokens, _), *means = accelerator.reduce(torch.stack(rows), reduction="sum").tolist()
        for name, (part, count) in zip(self._sums, means, strict=True):
            self._last[name] = part / count if count else 0.0
        self._sums = {}
        return {**self._last, "num_tokens": tokens}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"sums": dict(self._sums), "last": dict(self._last), "tokens": self._tokens}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._sums = {name: x.to(device) for name, x in state["sums"].items()}
        self._last, self._tokens = dict(state["last"]), state["tokens"]
        if isinstance(self._tokens, Tensor):
            self._tokens = self._tokens.to(device)
