"""The rewards of all processes' responses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.run.processes import Processes
from fastrl.samples import Samples

_LOGGER = logging.getLogger(__name__)


class Judged(NamedTuple):
    """The rewards of the responses of all processes."""

    by_function: Tensor  # [B, K]; NaN where a function does not apply
    rewards: Tensor  # [B], weighted sums less penalties; NaN where no function applies

    @classmethod
    def of(
        cls, own: Samples, names: Sequence[str], weights: Tensor, processes: Processes
    ) -> Judged:
        """Of this process's responses and the others'. Warns of those that no function judged.

        Args:
            names, weights: of the reward functions, [K].
        """
        if True in own.unjudged:
            i = own.unjudged.index(True)
            row = {name: values[i] for name, values in own.columns.items()}
            _LOGGER.warning(
                "All reward functions returned None for the following kwargs:\n%s\nNothing is "
                "learned from such responses: let one function return a number",
                {**row, "prompt": own.prompts[i], "completion": own.completions[i]},
            )
        table = torch.stack([*own.rewards_by_function.values(), own.rewards, own.penalties], 1)
        joined = processes.joined(table.float(), [len(own)] * processes.count)
        by_function, total, off = joined[:, :-2], joined[:, -2], joined[:, -1]
        if by_function.isnan().all():
            _LOGGER.warning(
                "Nothing is learned from this generation: no reward function returned a number for "
                "any of its %d responses (%s)",
                len(by_function),
                ", ".join(names),
            )
        found = (by_function * weights).nansum(1) - off
        return cls(by_function, found.masked_fill(total.isnan(), torch.nan))


def nanstd(values: Tensor) -> float:
    """The unbiased deviation of the numbers that are not NaN; NaN of fewer than two."""
    known = values[~values.isnan()]
    return float(known.std()) if len(known) > 1 else float("nan")
