"""Draws responses of an alignment trainer's earlier batch again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastrl.alignment.records import deciding, sampling_of
from fastrl.alignment.trainer import Trainer
from fastrl.collect.compare_replay import Replayed, compared, recorded_rollout, rounding
from fastrl.data.examples import Example, Response
from fastrl.run.ledger import PER_FUNCTION
from fastrl.samples import Samples
from fastrl.trainers.ppo.setup import precision_of
from fastrl.trainers.replay_walk import Drawn, LoopWalk


def replay(trainer: Trainer, output: str | Path, batch: int) -> Replayed:
    """Draws the responses of a batch of an online run again, see
    :meth:`fastrl.trainers.replay_walk.LoopWalk.replay`; the annotator is not called. On the
    machine, threads and versions of the run they are the recorded ones bit for bit; a warning says
    which of the three differ. Where the run had several processes, one computes their updates: sums
    are rounded otherwise, so that log-probs and values may differ by √ε of the model's precision.

    Args:
        trainer: made as for the run, from the same model and data, in one process; its factory's
            ``batch_size`` is that of all processes of the run together.
        output: the run's ``output_dir``, or a command's --output, with its ledger.
        batch: the batch's number, from 1.

    Raises:
        ValueError: the ledger lacks this batch, or one since the newest good checkpoint before it;
            responses that cannot be drawn again in one process; a trainer with other settings or
            data, or of several processes.
        BadCheckpoint: a ValueError: a checkpoint of another model.
    """
    return _BatchWalk(trainer, output, batch).replay()


class _BatchWalk(LoopWalk):
    """A walk that answers in the place of a factory's sampler and annotator, from the ledger."""

    counted_as = ("batches", "taken")

    def __init__(self, trainer: Trainer, output: str | Path, last: int):
        super().__init__(trainer, output, last)
        recorded = self.facts["settings"]
        now = {**deciding(trainer.factory, trainer.loss), **sampling_of(trainer.factory)}
        for name in ("seed", "gradient_accumulation_steps"):
            now[name] = getattr(trainer.args, name)
        self.check_same(now, {**self.facts["generation_kwargs"], **recorded})
        dtype = precision_of(trainer.model, trainer.accelerator)
        self.tolerance = rounding(dtype) if recorded["processes"] > 1 else 0.0
        silent = (trainer.args, "ledger", False), (trainer.args, "log_completions", False)
        self.stands_in = ((trainer.factory, "answer", self), *silent)

    def __call__(
        self, examples: Sequence[Example], ids: Sequence[int] | None
    ) -> tuple[list[Example], list[list[float]] | None, Samples]:
        number, size = self.trainer.factory.taken + 1, self.trainer.factory.task.generations
        rows = self.rows(number)
        if [list(e.prompt_ids) for e in examples] != [row["prompt_ids"] for row in rows[::size]]:
            raise ValueError(
                f"the prompts of batch {number} are not those of the run: bring its data, in their "
                "order"
            )
        if number == self.last:
            self._draw(examples, ids, rows)
            raise Drawn
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        judged = [_judged(e, group) for e, group in zip(examples, groups, strict=True)]
        names = [x for x in rows[0] if x.startswith(PER_FUNCTION) and rows[0][x] is not None]
        scores = None
        if names and not all(math.isnan(row[names[0]]) for row in rows):
            values = [0.0 if math.isnan(row[names[0]]) else row[names[0]] for row in rows]
            scores = [values[side::size] for side in range(size)]
        return judged, scores, recorded_rollout(rows, 1.0)

    def _draw(
        self, examples: Sequence[Example], ids: Sequence[int] | None, rows: list[dict[str, Any]]
    ) -> None:
        """Draws the responses again, and sets ``samples`` to their comparison with ``rows``."""
        factory, first = self.trainer.factory, rows[0]
        if first["slots"]:
            factory.sampler.engine.reserve(first["slots"], first["slot_length"])
        elif self.tolerance:
            raise ValueError(
                f"batch {self.last} was drawn by model.generate in several processes, each with "
                "draws of its own: it cannot be drawn again in one"
            )
        _, drawn = factory.sampler(examples, factory.task.generations, first["seed"], ids)
        self.samples = compared(rows, drawn, 1.0, self.tolerance)


def _judged(example: Example, rows: Sequence[dict[str, Any]]) -> Example:
    """An example with the responses and rewards of its ledger rows."""
    responses = tuple(
        Response(row["completion"], tuple(row["completion_ids"]), row["finish_reason"] != "length")
        for row in rows
    )
    rewards = tuple(row["reward"] for row in rows)
    if any(map(math.isnan, rewards)):  # the annotator had no opinion
        half = (0.5,) * len(rows)
        return replace(example, responses=responses, rewards=half, weights=(0.0,) * len(rows))
    weights = (1.0,) * len(rows) if len(rows) > 1 else ()
    return replace(example, responses=responses, rewards=rewards, weights=weights)
