"""Draws responses of a GRPOTrainer's or RLOOTrainer's earlier generation again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fastrl.collect.compare_replay import (
    Replayed,
    compared,
    recorded_masks,
    recorded_rollout,
    rounding,
)
from fastrl.collect.respond import Asked, Sampled
from fastrl.config import SAMPLED
from fastrl.learn.nonfinite import is_lost
from fastrl.run.ledger import PER_FUNCTION
from fastrl.samples import Samples
from fastrl.trainers.groups.online import OnlineTrainer
from fastrl.trainers.ppo.setup import precision_of
from fastrl.trainers.replay_walk import Drawn, LoopWalk

_DECIDING = (
    *("num_generations", "temperature", "steps_per_generation", "num_iterations"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
)


def replay(trainer: OnlineTrainer, output: str | Path, generation: int) -> Replayed:
    """Draws the responses of a generation of a run again, see
    :meth:`fastrl.trainers.replay_walk.LoopWalk.replay`. On the machine, threads and versions of the
    run they are the recorded ones bit for bit (log-probs up to rounding where dynamic sampling
    replaced groups); warnings name which of these differ.

    Args:
        trainer: made as for the run, from the same model and data, in one process.
        output: the run's ``output_dir``, with its ledger.
        generation: the generation's number, from 1.

    Raises:
        ValueError: the ledger lacks this generation, or one between it and the checkpoint that is
            resumed; responses that the policy did not write, or that cannot be drawn again after
            dynamic sampling; a trainer with other settings, or of several processes.
        BadCheckpoint: a ValueError: a checkpoint of another model.
    """
    return _GenerationWalk(trainer, output, generation).replay()


class _GenerationWalk(LoopWalk):
    """A walk that replaces a trainer's collector."""

    counted_as = ("online", "generations")

    def __init__(self, trainer: OnlineTrainer, output: str | Path, last: int):
        super().__init__(trainer, output, last)
        self.collector = trainer._collect
        now = {name: getattr(trainer.args, name) for name in _DECIDING}
        self.check_same(now, self.facts["settings"])
        silent = (trainer.args, "ledger", False), (trainer.args, "log_completions", False)
        self.stands_in = ((trainer, "_collect", self), *silent)

    def __call__(self, asked: Asked) -> Samples:
        generation = self.trainer._generations.made["train"] + 1
        rows = self.rows(generation)
        size = len(rows) // len(asked.keys)
        if generation == self.last:
            self._draw(rows, size)
            raise Drawn
        over_sets = self.trainer.args.policy_support == SAMPLED
        again = self._sampled(rows, size) if over_sets else None
        return self._recorded(asked.prompts, rows, again)

    def resampled(self, samples: Samples, *_: Any) -> tuple[Samples, dict, dict]:
        """The samples, as they are: the ledger has only those that were drawn in the end."""
        return samples, {}, {}

    def _recorded(
        self, prompts: Samples, rows: Sequence[dict[str, Any]], again: Samples | None
    ) -> Samples:
        """The ledger's rows as the judged samples of ``prompts``, with the sets of ``again``."""
        rollout = recorded_rollout(rows, self.trainer.temperature, again)
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
            columns=prompts.columns,
            texts=texts,
            completions=list(texts),
            masks=recorded_masks(rows),
            left_out=[is_lost(row["finish_reason"], len(row["completion_ids"])) for row in rows],
            rewards=column("reward"),
            rewards_by_function=by_function,
            token_rewards=[None] * len(rows),
            unjudged=[False] * len(rows),
            penalties=self.collector.penalties(rollout.ended, list(map(len, rollout.sequences))),
            noted={},
        )

    def _draw(self, rows: list[dict[str, Any]], size: int) -> None:
        """Draws responses again in groups of ``size``, and compares them with those of ``rows``."""
        trainer = self.trainer
        dtype = precision_of(trainer.model, trainer.accelerator)
        self.tolerance = rounding(dtype) if self.is_resampled(rows, size) else 0.0
        drawn = self._sampled(rows, size)
        self.samples = compared(rows, drawn, trainer.temperature, self.tolerance)

    def _sampled(self, rows: list[dict[str, Any]], size: int) -> Samples:
        """The responses of rows in groups of ``size``, drawn again."""
        trainer, respond = self.trainer, self.collector.respond
        room = {"slots": rows[0]["slots"], "length": rows[0]["slot_length"]}
        trainer._rollouts.backend.reserve({"policy": room} if room["slots"] else {})
        assert isinstance(respond, Sampled)
        ids = [torch.tensor(row["prompt_ids"]) for row in rows]
        keys = [row["sample_id"] for row in rows[::size]]
        return respond.sample(ids, size, keys, rows[0]["seed"])
