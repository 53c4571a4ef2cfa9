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
    samples: Samples, names: Sequence[str], weights: Tensor, processes: Processes
) -> Samples:
    """Rewards and penalties of all processes' responses, [B] fp32. A function's rewards are NaN
    where it gave no finite number; the weighted sum is NaN where, of the functions whose weight is
    not 0, none judged or one's number was not finite. Warns of a response that no function judged,
    and of a generation of which none is judged.

    Args:
        samples: the responses of this process, judged.
        names, weights: the reward functions' names and weights, [K].
    """
    if True in samples.unjudged:
        i = samples.unjudged.index(True)
        row = {name: values[i] for name, values in samples.columns.items()}
        _LOGGER.warning(
            "All reward functions returned None for the following kwargs:\n%s\nNothing is learned "
            "from such responses: let one function return a number",
            {**row, "prompt": samples.prompts[i], "completion": samples.completions[i]},
        )
    of_process = [*samples.rewards_by_function.values(), samples.rewards, samples.penalties]
    table = torch.stack(of_process, 1)
    joined = processes.joined(table.float(), [len(samples)] * processes.count)
    by_function, total, penalties = joined[:, :-2], joined[:, -2], joined[:, -1]
    if names and by_function.isnan().all():
        _LOGGER.warning(
            "Nothing is learned from this generation: no reward function returned a number for any "
            "of its %d responses (%s)",
            len(by_function),
            ", ".join(names),
        )
    rewards = (by_function * weights).nansum(1).masked_fill(total.isnan(), torch.nan)
    columns = dict(zip(samples.rewards_by_function, by_function.unbind(1), strict=True))
    return Samples(rewards=rewards, rewards_by_function=columns, penalties=penalties)


def nanstd(values: Tensor) -> float:
    """The unbiased standard deviation of the values that are not NaN; NaN for fewer than two."""
    numbers = values[~values.isnan()]
    return float(numbers.std()) if len(numbers) > 1 else float("nan")
