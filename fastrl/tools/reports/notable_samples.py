"""Samples of a run that are worth reading: the first, the best, the worst, the longest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fastrl.run.folder import RunFolder
from fastrl.run.ledger import Ledger, read_ledger

_WINDOW = 50  # steps of the ledger in memory at a time


@dataclass(frozen=True)
class Sample:
    """A prompt and its completion.

    Args:
        score: the score that was learned from, or the reward; NaN if there is none.
        length: the completion's length, in ``unit``.
        place: its place in the run, such as "step 3, sample 12".
        before: the completion before training, and its reward; None where it is not known.
    """

    prompt: str
    completion: str
    score: float
    length: int
    unit: str = "tokens"
    place: str = ""
    before: tuple[str, float] | None = None


@dataclass(frozen=True)
class NotableSamples:
    """Notable samples of a run, the most notable of each kind first, and no text twice in a kind.

    Args:
        source: what samples these are, for their heading.
        kinds: samples by their kind: "first", "best", "worst" and "longest".
    """

    source: str
    kinds: dict[str, list[Sample]]


def notable_samples(folder: RunFolder, count: int = 3) -> NotableSamples | None:
    """Chooses at most ``count`` samples of each kind: from the ledger's training samples or, where
    there are none, from samples.jsonl, the responses to held-out prompts; None without either."""
    kinds = _choose(_of_ledger(folder), count)
    if kinds["first"]:
        return NotableSamples("training samples", kinds)
    kinds = _choose(map(_held_out, folder.samples()), count)
    if kinds["first"]:
        return NotableSamples("responses to held-out prompts, after training", kinds)
    return None


# Functions that rank a sample within a kind: the most notable has the smallest number, and samples
# with None are left out.
_KINDS: dict[str, Callable[[Sample], float | None]] = {
    "first": lambda sample: 0.0,
    "best": lambda sample: None if math.isnan(sample.score) else -sample.score,
    "worst": lambda sample: None if math.isnan(sample.score) else sample.score,
    "longest": lambda sample: -sample.length,
}


def _choose(samples: Iterable[Sample], count: int) -> dict[str, list[Sample]]:
    chosen: dict[str, list[tuple[float, Sample]]] = {kind: [] for kind in _KINDS}
    for sample in samples:
        for kind, rank_of in _KINDS.items():
            best, rank = chosen[kind], rank_of(sample)
            if rank is None or (len(best) == count and rank >= best[-1][0]):
                continue
            text = (sample.prompt, sample.completion)
            if all((other.prompt, other.completion) != text for _, other in best):
                best.append((rank, sample))
                best.sort(key=lambda pair: pair[0])  # stable: of equal ranks the earlier is first
                del best[count:]
    return {kind: [sample for _, sample in best] for kind, best in chosen.items()}


def _of_ledger(folder: RunFolder) -> Iterator[Sample]:
    columns = ("step", "sample", "prompt", "completion", "completion_ids", "finish_reason", "score")
    for first in range(1, Ledger(folder.ledger).last_step + 1, _WINDOW):
        table = read_ledger(folder.ledger, columns, first, first + _WINDOW - 1)
        for batch in table.to_batches(max_chunksize=1024):
            yield from map(_trained_on, batch.to_pylist())


def _trained_on(row: dict[str, Any]) -> Sample:
    ended = f", {row['finish_reason']}" if row["finish_reason"] else ""
    return Sample(
        row["prompt"] or "",
        row["completion"] or "",
        _number(row["score"]),
        len(row["completion_ids"] or ()),
        place=f"step {row['step']}, sample {row['sample']}{ended}",
    )


def _held_out(row: dict[str, Any]) -> Sample:
    completion = str(row.get("after", ""))
    return Sample(
        str(row.get("prompt", "")),
        completion,
        _number(row.get("reward_after")),
        len(completion),
        unit="characters",
        before=(str(row["before"]), _number(row.get("reward_before"))) if "before" in row else None,
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
