"""Compares samples that were drawn again with the recorded ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastrl.collect.ledger import CODE, hash_of
from fastrl.run.machine import differences, machine, other_draws, remedies, versions
from fastrl.samples import Samples


@dataclass(frozen=True)
class ReplayedSample:
    """A sample that was drawn again.

    Attributes:
        recorded: the sample's row in the ledger.
        tolerance: the largest difference at which log-probs and values count as the recorded ones.
        completion_ids, finish_reason: the L tokens and the finish reason of the sample drawn now.
        logprobs, values: its tokens' log-probs, at the temperature of the recorded ones, and
            values, [L] fp32; None where rollouts compute none.
        support: a hash of the sets that its tokens were drawn from; None: it is not recorded.
    """

    recorded: dict[str, Any]
    completion_ids: list[int]
    finish_reason: str
    logprobs: np.ndarray | None
    values: np.ndarray | None
    tolerance: float = 0.0
    support: str | None = None

    @property
    def identical(self) -> bool:
        """Whether tokens, finish reason, log-probs and values are the recorded ones, bit for bit
        where ``tolerance`` is 0."""
        return not self.differences()

    def differences(self) -> list[str]:
        """A line for each of tokens, finish reason, log-probs and values that differs."""
        before, now = self.recorded["completion_ids"], self.completion_ids
        same = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), None)
        same = min(len(before), len(now)) if same is None else same
        lines = []
        if before != now:
            lines.append(
                f"tokens: the first {same} are the same, of {len(before)} recorded and {len(now)} "
                "drawn now"
            )
        reason = self.recorded["finish_reason"]
        if reason != self.finish_reason:
            lines.append(f"finish reason: {reason} recorded, {self.finish_reason} now")
        for name in ("logprobs", "values"):
            drawn = getattr(self, name)
            lines += difference(name, self.recorded[name], drawn, same, self.tolerance)
        other = self.recorded.get("support") != self.support
        if other and before == now and not self.tolerance:
            lines.append("sets: what tokens were drawn from is not what was recorded")
        return lines


@dataclass(frozen=True)
class Replayed:
    """The samples of a step, drawn again.

    Attributes:
        step: the number of the step, or generation, in the ledger.
        begun_at: the number in the loaded checkpoint's name; 0: the beginning of the run.
        strayed: where updates first were not the run's, and how they differed; None: nowhere.
        tolerance: the largest difference at which numbers of samples and updates count as the
            recorded ones; above 0 where the run had several processes, whose sums one process
            rounds otherwise, and where the batch lacks samples that dynamic sampling replaced.
        walked: the number of recorded steps that were learned from again.
    """

    step: int
    begun_at: int
    samples: list[ReplayedSample]
    strayed: str | None
    tolerance: float = 0.0
    walked: int = 0

    @property
    def identical(self) -> bool:
        return all(sample.identical for sample in self.samples)


def rounding(dtype: torch.dtype) -> float:
    """√ε of a dtype, the tolerance of numbers that were computed in batches of other sizes."""
    return math.sqrt(torch.finfo(dtype).eps)


def recorded_rollout(
    rows: Sequence[Mapping[str, Any]], temperature: float, again: Samples | None = None
) -> Samples:
    """Samples of the ledger's rows of a step, whose log-probs are at ``temperature``.

    Args:
        again: the same samples, drawn again, whose sets the recorded ones have: a ledger has but
            hashes of sets.

    Raises:
        ValueError: tokens or sets of ``again`` are not the recorded ones.
    """

    def tensors(name: str) -> list[torch.Tensor] | None:
        if any(row[name] is None for row in rows):
            return None
        return [torch.tensor(row[name], dtype=torch.float32) for row in rows]

    logprobs = tensors("logprobs")
    supports = None if again is None else again.supports
    if again is not None and supports is not None:
        drawn = zip(rows, again.sequences, supports, strict=True)
        for i, (row, sequence, sets) in enumerate(drawn):
            if row["completion_ids"] != sequence.tolist() or row.get("support") != hash_of(sets):
                raise ValueError(
                    f"sample {i} was drawn from sets that are not known here: drawn again for "
                    "them, it is not what was recorded; replay where the run was done, or a step "
                    "right behind a checkpoint"
                )
    return Samples(
        [torch.tensor(row["completion_ids"], dtype=torch.long) for row in rows],
        [row["finish_reason"] for row in rows],
        logprobs=logprobs,
        logprobs_t1=logprobs if temperature == 1 else None,
        values=tensors("values"),
        temperature=temperature,
        supports=supports,
    )


def recorded_masks(rows: Sequence[Mapping[str, Any]]) -> list[torch.Tensor] | None:
    """Which tokens of each sample the policy wrote, [L] bool; None where it wrote all."""
    if all(row["written"] is None for row in rows):
        return None
    return [torch.tensor(row["written"], dtype=torch.bool) for row in rows]


def compared(
    rows: list[dict[str, Any]], drawn: Samples, temperature: float, tolerance: float
) -> list[ReplayedSample]:
    """Pairs samples ``drawn`` again with their rows of the ledger, in the same order.

    Args:
        temperature: the temperature of the rows' log-probs.
    """

    def of(column: list[torch.Tensor] | None, i: int) -> np.ndarray | None:
        return None if column is None else column[i].float().cpu().numpy()

    logprobs = drawn.logprobs_at(temperature)
    return [
        ReplayedSample(
            row,
            drawn.sequences[i].tolist(),
            drawn.finish_reasons[i],
            of(logprobs, i),
            of(drawn.values, i),
            tolerance,
            None if drawn.supports is None else hash_of(drawn.supports[i]),
        )
        for i, row in enumerate(rows)
    ]


def difference(
    name: str, recorded: Any, now: Any, common: int | None = None, tolerance: float = 0.0
) -> list[str]:
    """Returns a line that says how two lists of numbers differ; [] where they are the same bits,
    lie within a tolerance above 0, or have no token in common.

    Args:
        common: how many numbers from the first on are of the same tokens; None: all.
    """
    if recorded is None or now is None:
        return [] if recorded is now is None else [f"{name}: recorded or drawn without them"]
    before, after = (np.asarray(x, dtype=np.float32) for x in (recorded, now))
    if before.tobytes() == after.tobytes():
        return []
    if common is None and len(before) != len(after):
        return [f"{name}: {len(before)} recorded, {len(after)} now"]
    length = min(len(before), len(after)) if common is None else common
    if length == 0:
        return []
    delta = np.abs(before[:length] - after[:length])
    worst, count = float(delta.max()), int((delta > 0).sum())
    if len(before) == len(after) and worst <= tolerance and tolerance > 0:
        return []
    return [f"{name}: up to {worst:.1e} apart, in {count} of {length} tokens"]


def changes(
    recorded: Sequence[Mapping[str, Any]],
    of: Callable[[Mapping[str, Any]], dict[str, Any]],
    now: dict[str, Any],
) -> str:
    """How ``of(facts)``, for each of the ``recorded`` facts of a ledger's files, differs from
    ``now``, each difference once; "" where nothing differs."""
    lines = (line for facts in recorded for line in differences(of(facts), now))
    return "; ".join(dict.fromkeys(lines))


def warn_of_other_code(recorded: Sequence[Mapping[str, Any]], code: Mapping[str, str]) -> None:
    """Warns of users' functions that have changed since the run's updates.

    Args:
        recorded: the ledger's facts, see :func:`fastrl.run.ledger.read_facts`.
        code: the functions' hashes now, see :func:`fastrl.collect.ledger.note_settings`.
    """
    changed = {
        f"{name}: {hash_} → {code.get(name)}": None
        for facts in recorded
        for name, hash_ in facts.get(CODE, {}).items()
        if code.get(name) != hash_
    }
    if changed:
        warnings.warn(
            f"the code is not that of the run ({', '.join(changed)}): updates are not the run's, "
            "and what is drawn after them may differ",
            stacklevel=4,
        )


def warn_of_another_machine(recorded: Sequence[Mapping[str, Any]]) -> None:
    """Warns where machine or versions differ from those in the facts of the ledger's files."""
    this_machine = machine()
    now = {**versions(), **this_machine}
    if changed := changes(recorded, lambda facts: {**facts["versions"], **facts["machine"]}, now):
        remedy = remedies(recorded[-1]["machine"], this_machine)
        warnings.warn(
            f"the run was done under other conditions ({changed}): the replay is the same "
            "computation, but its last bits may differ, and with them tokens"
            + other_draws(recorded[-1]["versions"])
            + (f"; start it with {remedy} for the run's bits" if remedy else ""),
            stacklevel=4,
        )
