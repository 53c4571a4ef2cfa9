"""The rewards of all processes' responses."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from fastrl.run.processes import Processes
from fastrl.samples import Samples

_LOGGER = logging.getLogger(__name__)


def judged_by_all(
    own: Samples, names: Sequence[str], weights: Tensor, processes: Processes
) -> Samples:
    """Rewards and penalties of all processes' responses, fp32. Those of a function are NaN where it
    does not apply, their sums where none does. Warns of responses that no function judged.

    Args:
        own: the responses of this process, judged.
        names, weights: of the reward functions, [K].
    """
    if True in own.unjudged:
        i = own.unjudged.index(True)
        row = {name: values[i] for name, values in own.columns.items()}
        _LOGGER.warning(
            "All reward functions returned None for the following kwargs:\n%s\nNothing is learned "
            "from such responses: let one function return a number",
            {**row, "prompt": own.prompts[i], "completion": own.completions[i]},
        )
    table = torch.stack([*own.rewards_by_function.values(), own.rewards, own.penalties], 1)
    joined = processes.joined(table.float(), [len(own)] * processes.count)
    by_function, total, penalties = joined[:, :-2], joined[:, -2], joined[:, -1]
    if by_function.isnan().all():
        _LOGGER.warning(
            "Nothing is learned from this generation: no reward function returned a number for any "
            "of its %d responses (%s)",
            len(by_function),
            ", ".join(names),
        )
    rewards = (by_function * weights).nansum(1).masked_fill(total.isnan(), torch.nan)
    columns = dict(zip(own.rewards_by_function, by_function.unbind(1), strict=True))
    return Samples(rewards=rewards, rewards_by_function=columns, penalties=penalties)


def nanstd(values: Tensor) -> float:
    """The unbiased deviation of the numbers that are not NaN; NaN of fewer than two."""
    known = values[~values.isnan()]
    return float(known.std()) if len(known) > 1 else float("nan")
