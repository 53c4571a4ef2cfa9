"""Responses of a GRPOTrainer's or RLOOTrainer's past, drawn again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastrl.collect.collector import Collector
from fastrl.collect.replayed import Replayed, ReplayedSample, compared, recorded_rollout
from fastrl.collect.respond import Asked, Sampled
from fastrl.run.ledger import PER_FUNCTION
from fastrl.samples import Samples
from fastrl.trainers.replaying import Drawn, Player
from fastrl.trl.online import OnlineTrainer

_DECIDING = (
    *("num_generations", "temperature", "steps_per_generation", "num_iterations"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
)


def replay(trainer: OnlineTrainer, output: str | Path, generation: int) -> Replayed:
    """Draws the responses of a generation of a run again, see
    :meth:`fastrl.trainers.replaying.Player.replay`. On the machine, threads and versions of the run
    they are the recorded ones bit for bit; a warning says what differs.

    Args:
        trainer: made as for the run, from the same model and data, in one process.
        output: the run's ``output_dir``, with its ledger.
        generation: from 1.

    Raises:
        ValueError: a generation that the ledger does not have, or one between it and the
            checkpoint; responses that others than the policy wrote; a trainer of other settings or
            of several processes.
        BadCheckpoint: a ValueError: a checkpoint of another model.
    """
    return _GenerationPlayer(trainer, output, generation).replay()


class _GenerationPlayer(Player):
    """A player that stands in the place of a trainer's collector."""

    def __init__(self, trainer: OnlineTrainer, output: str | Path, last: int):
        super().__init__(trainer, output, last)
        self.collector: Collector = trainer._collect
        own = {name: getattr(trainer.args, name) for name in _DECIDING}
        self.check_same(own, self.facts["settings"])

    def made(self, own: Mapping[str, Any]) -> int:
        return own["online"]["generations"]

    @contextmanager
    def playing(self) -> Iterator[None]:
        trainer, args = self.trainer, self.trainer.args
        own = trainer._collect, trainer._ledger, args.log_completions
        trainer._collect, trainer._ledger, args.log_completions = self, None, False
        try:
            yield
        finally:
            trainer._collect, trainer._ledger, args.log_completions = own

    def __call__(self, asked: Asked) -> Samples:
        generation = self.trainer._generations.made["train"] + 1
        rows = self.rows(generation)
        if generation == self.last:
            self.samples = self._drawn(rows, len(rows) // len(asked.keys))
            raise Drawn
        return self._recorded(asked.prompts, rows)

    def resampled(self, samples: Samples, *_: Any) -> tuple[Samples, dict, dict]:
        """The ledger has what was drawn in the end."""
        return samples, {}, {}

    def _recorded(self, prompts: Samples, rows: Sequence[dict[str, Any]]) -> Samples:
        rollout = recorded_rollout(list(rows), self.trainer.temperature)
        masks = None
        if any(row["written"] is not None for row in rows):
            masks = [torch.tensor(row["written"], dtype=torch.bool) for row in rows]
        texts = [row["completion"] for row in rows]

        def column(name: str) -> torch.Tensor:
            return torch.tensor([row[name] for row in rows], dtype=torch.float64)

        names = [name for name in rows[0] if name.startswith(PER_FUNCTION)]
        by_function = {name.removeprefix(PER_FUNCTION): column(name) for name in names}
        return replace(
            rollout,
            prompts=prompts.prompts,
            prompt_texts=[row["prompt"] for row in rows],
            prompt_ids=[torch.tensor(row["prompt_ids"]) for row in rows],
            prompt_rows=prompts.prompt_rows,
            columns={},
            texts=texts,
            completions=list(texts),
            masks=masks,
            left_out=[row["finish_reason"] == "nan" for row in rows],
            rewards=column("reward"),
            rewards_by_function=by_function,
            token_rewards=[None] * len(rows),
            unjudged=[False] * len(rows),
            penalties=self.collector.penalties(rollout.ended, list(map(len, rollout.sequences))),
            noted={},
        )

    def _drawn(self, rows: list[dict[str, Any]], size: int) -> list[ReplayedSample]:
        trainer, first = self.trainer, rows[0]
        room = {"slots": first["slots"], "length": first["slot_length"]}
        trainer._sampler.reserve({"policy": room} if room["slots"] else {})
        respond = self.collector.respond
        assert isinstance(respond, Sampled)
        ids = [torch.tensor(row["prompt_ids"]) for row in rows]
        keys = [row["sample_id"] for row in rows[::size]]
        resampled = keys != list(range(len(keys)))
        if resampled and not room["slots"]:
            raise ValueError(
                f"generation {self.last} was drawn by model.generate, whose draws hang on all "
                "responses of a batch, and dynamic sampling replaced some: it cannot be drawn again"
            )
        out = respond.sample(ids, size, keys, first["seed"])
        dtype = next(trainer.model.parameters()).dtype
        # What dynamic sampling replaced is not there to be drawn beside the others.
        tolerance = math.sqrt(torch.finfo(dtype).eps) if resampled else 0.0
        return compared(rows, out, trainer.temperature, tolerance)
