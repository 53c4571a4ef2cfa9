"""Responses of a GRPOTrainer's or RLOOTrainer's past, drawn again."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fastrl.collect.collector import Collector
from fastrl.collect.replayed import (
    Replayed,
    ReplayedSample,
    recorded_rollout,
    warn_of_another_machine,
)
from fastrl.collect.respond import Asked, Sampled
from fastrl.collect.responses import Collected, Responses
from fastrl.data.prompts import Prompts
from fastrl.rewards.weighted import RewardBatch
from fastrl.run.checkpoints import Checkpoints, step_of
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import PER_FUNCTION, no_step, read_facts, read_ledger
from fastrl.run.state import load_tree
from fastrl.trl.online import OnlineTrainer

_DECIDING = (
    *("num_generations", "temperature", "steps_per_generation", "num_iterations"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
)


class _Drawn(Exception):
    """The generation that was asked for has been drawn."""


def replay(trainer: OnlineTrainer, output: str | Path, generation: int) -> Replayed:
    """Draws the responses of a generation of a run again.

    Resumes from the newest good checkpoint from before it, or begins anew; learns from the
    responses, rewards and log-probs of the ledger, without sampling or reward functions; and draws
    the generation's responses by what keyed their draws. On the machine, threads and versions of
    the run they are the recorded ones bit for bit; a warning says what differs. Nothing is written
    to ``output``, evaluated or reported; callbacks are called.

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
    if trainer.processes.count > 1:
        raise ValueError("a replay runs as one process: start it without a launcher")
    folder = RunFolder(output)
    facts = read_facts(folder.ledger, generation, generation)
    if not facts:
        raise ValueError(no_step(folder.ledger, generation))
    _check_settings(trainer, facts[-1]["settings"])
    if read_ledger(folder.ledger, ["seed"], generation, generation)["seed"].null_count:
        raise ValueError(
            f"the responses of generation {generation} came from a rollout_func, tools or an "
            "environment, which may say something else each time, and cannot be drawn again; what "
            "they were is in the ledger (fastrl samples)"
        )
    checkpoint = _newest_before(Path(output), generation)
    player = _Player(trainer, folder.ledger, generation)
    with _nothing_left(trainer, player):
        warn_of_another_machine(read_facts(folder.ledger, 1, generation))
        try:
            trainer.train(None if checkpoint is None else str(checkpoint))
        except _Drawn:
            begun_at = 0 if checkpoint is None else step_of(checkpoint)
            return Replayed(generation, begun_at, player.samples, player.strayed)
    raise ValueError(
        f"the run ends before generation {generation}: make the trainer as for the run"
    )


class _Player:
    """In the place of a trainer's collector: says what the ledger has."""

    def __init__(self, trainer: OnlineTrainer, ledger: Path, last: int):
        self.trainer, self.ledger, self.last = trainer, ledger, last
        self.collector: Collector = trainer._collect
        self.samples: list[ReplayedSample] = []
        self.strayed: str | None = None

    def __call__(self, asked: Asked) -> Collected:
        generation = self.trainer._generations["train"] + 1
        rows = read_ledger(self.ledger, None, generation, generation).to_pylist()
        if not rows:
            raise ValueError(no_step(self.ledger, generation))
        now, then = self.trainer.state.global_step, rows[0]["weights_version"]
        if now != then and self.strayed is None:
            self.strayed = (
                f"generation {generation}: {now} optimizer steps were taken before it, {then} in "
                "the run"
            )
        if generation == self.last:
            self.samples = self._drawn(rows, len(rows) // len(asked.keys))
            raise _Drawn
        return self._recorded(asked.prompts, rows)

    def resampled(self, collected: Collected, *_: Any) -> tuple[Collected, dict, dict]:
        """The ledger has what was drawn in the end."""
        return collected, {}, {}

    def _recorded(self, prompts: Prompts, rows: Sequence[dict[str, Any]]) -> Collected:
        rollout = recorded_rollout(list(rows), self.trainer.temperature)
        ended = list(map(self.trainer._ended, rollout.sequences))
        masks = None
        if any(row["written"] is not None for row in rows):
            masks = [torch.tensor(row["written"], dtype=torch.bool) for row in rows]
        texts = [row["completion"] for row in rows]
        known = [torch.tensor(row["prompt_ids"]) for row in rows]
        prompts = Prompts(
            prompts.said, [row["prompt"] for row in rows], known, {}, prompts.rows, prompts.name_of
        )

        def column(name: str) -> torch.Tensor:
            return torch.tensor([row[name] for row in rows], dtype=torch.float64)

        names = [name for name in rows[0] if name.startswith(PER_FUNCTION)]
        by_function = {name.removeprefix(PER_FUNCTION): column(name) for name in names}
        seconds = dict.fromkeys(by_function, 0.0)
        rewards = RewardBatch(column("reward"), by_function, seconds, 0, 0, [None] * len(rows))
        lengths = list(map(len, rollout.sequences))
        return Collected(
            Responses(prompts, rollout, texts, list(texts), ended, masks),
            rewards,
            self.collector.penalties(ended, lengths),
            [i for i, row in enumerate(rows) if row["finish_reason"] == "nan"],
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
        logprobs = out.logprobs_at(trainer.temperature)
        dtype = next(trainer.model.parameters()).dtype
        # What dynamic sampling replaced is not there to be drawn beside the others.
        tolerance = math.sqrt(torch.finfo(dtype).eps) if resampled else 0.0
        return [
            ReplayedSample(
                {**row, "values": None},
                out.sequences[i].tolist(),
                out.finish_reasons[i],
                None if logprobs is None else logprobs[i].float().cpu().numpy(),
                None,
                tolerance,
            )
            for i, row in enumerate(rows)
        ]


@contextmanager
def _nothing_left(trainer: OnlineTrainer, player: _Player) -> Iterator[None]:
    """Context in which a trainer learns from a ledger, and leaves nothing of its own behind."""
    args, handler = trainer.args, trainer.callback_handler
    kept = {name: getattr(args, name) for name in ("output_dir", "save_strategy", "eval_strategy")}
    callbacks = list(handler.callbacks)
    own = trainer._collect, trainer._ledger, trainer.saves_when_it_fails, trainer.log_completions
    integrations = "transformers.integrations"
    with tempfile.TemporaryDirectory() as elsewhere:
        args.output_dir, args.save_strategy, args.eval_strategy = elsewhere, "no", "no"
        handler.callbacks[:] = [
            x for x in callbacks if not type(x).__module__.startswith(integrations)
        ]
        trainer._collect, trainer._ledger = player, None  # type: ignore[assignment]
        trainer.saves_when_it_fails = trainer.log_completions = False
        try:
            yield
        finally:
            handler.callbacks[:] = callbacks
            trainer._collect, trainer._ledger, *rest = own
            trainer.saves_when_it_fails, trainer.log_completions = rest
            for name, value in kept.items():
                setattr(args, name, value)


def _check_settings(trainer: OnlineTrainer, recorded: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: settings that decide what a generation is are not the run's.
    """
    for name in _DECIDING:
        own, then = getattr(trainer.args, name), recorded[name]
        if own != then:
            raise ValueError(
                f"the trainer has {name}={own}, the run {then}: make it as for the run"
            )


def _newest_before(folder: Path, generation: int) -> Path | None:
    """The newest good checkpoint that has not made a generation yet."""
    checkpoints = Checkpoints(folder)
    found = checkpoints.newest_good()
    while found is not None:
        made = load_tree(found / "process-0")["own"]["online"]["generations"]
        if made < generation:
            return found
        found = checkpoints.newest_good(before=step_of(found))
    return None
