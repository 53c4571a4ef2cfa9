"""A run that is walked again by its ledger: what the walks of all trainers have in common. Each
kind of trainer that keeps a ledger has a subclass of :class:`Walk`."""

from __future__ import annotations

import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fastrl.collect.compare_replay import (
    Replayed,
    ReplayedSample,
    warn_of_another_machine,
    warn_of_other_code,
)
from fastrl.run.checkpoints import CODE_DIFFERS, Checkpoints, step_of
from fastrl.run.contexts import attributes_set
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import no_step, read_facts, read_ledger
from fastrl.run.state import load_tree


class Drawn(Exception):
    """The generation that was asked for has been drawn."""


class Walk(ABC):
    """Gives a trainer the ledger's samples and judgements in the place of new ones, up to a step
    whose samples are drawn again.

    Args:
        trainer: made as for the run, in one process.
        output: the run's folder, with its ledger.
        last: the step, from 1, whose samples are drawn again.

    Attributes:
        facts: facts of the step ``last`` from the ledger.
        unit: what a step of the ledger is called in messages.
        samples_of: what a step's samples are called in messages.
        others: sources of samples that cannot be drawn again, for messages.
        strayed: where optimizer steps, or PPO's advantages, first differed from the run's; or None.
        walked: the number of the ledger's steps that were walked before ``last``.

    Raises:
        ValueError: a step that the ledger lacks, or whose samples the policy did not write;
            several processes.
    """

    unit: ClassVar[str] = "generation"
    samples_of: ClassVar[str] = "responses"
    others: ClassVar[str] = (
        "completions in data, a rollout_func, tools, an environment or an engine of yours"
    )

    def __init__(self, trainer: Any, output: str | Path | RunFolder, last: int):
        if trainer.processes.count > 1:
            raise ValueError("a replay runs as one process: start it without a launcher")
        self.trainer, self.last = trainer, last
        self.folder = output if isinstance(output, RunFolder) else RunFolder(output)
        self.ledger = self.folder.ledger
        self.strayed: str | None = None
        self.walked = 0
        facts = read_facts(self.ledger, last, last)
        if not facts:
            raise ValueError(no_step(self.ledger, last))
        self.facts = facts[-1]
        if read_ledger(self.ledger, ["seed"], last, last)["seed"].null_count:
            raise ValueError(
                f"the {self.samples_of} of {self.unit} {last} came from {self.others}, which "
                "may say something else each time, and cannot be drawn again; what they were is in "
                "the ledger (fastrl samples)"
            )

    @property
    @abstractmethod
    def weights_version(self) -> int:
        """Optimizer steps that the trainer has taken."""

    def rows(self, step: int, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The ledger's rows of a step, with ``columns``, "weights_version" among them; None: all.
        Notes in ``strayed`` where the trainer has taken more or fewer optimizer steps than the run.

        Raises:
            ValueError: the ledger has no rows of the step.
        """
        rows = read_ledger(self.ledger, columns, step, step).to_pylist()
        if not rows:
            raise ValueError(no_step(self.ledger, step))
        now, then = self.weights_version, rows[0]["weights_version"]
        if now != then and self.strayed is None:
            self.strayed = (
                f"{self.unit} {step}: {now} optimizer steps were taken before it, {then} in the run"
            )
        self.walked += step < self.last
        return rows

    def is_resampled(self, rows: Sequence[Mapping[str, Any]], size: int) -> bool:
        """Whether dynamic sampling dropped some of a step's groups of ``size`` samples for others.
        The ledger lacks the dropped ones; drawn again without them, the rest is rounded otherwise.

        Raises:
            ValueError: groups were replaced, and ``model.generate`` drew them.
        """
        resampled = [row["sample_id"] for row in rows[::size]] != list(range(len(rows) // size))
        if resampled and not rows[0]["slots"]:
            raise ValueError(
                f"{self.unit} {self.last} was drawn by model.generate, whose draws hang on all "
                f"{self.samples_of} of a batch, and dynamic sampling replaced some: it cannot be "
                "drawn again"
            )
        return resampled


class LoopWalk(Walk):
    """The walk of a trainer that runs the loop of transformers' Trainer.

    Attributes:
        counted_as: two keys, under which the trainer's saved state counts its generations.
        stands_in: attributes (object, name, value) to set during the walk, so that the walk answers
            prompts and nothing is recorded.
        samples: the samples that were drawn again.
        tolerance: the tolerance for log-probs that were computed in batches of other sizes.
    """

    counted_as: ClassVar[tuple[str, str]]
    stands_in: tuple[tuple[Any, str, Any], ...]
    samples: list[ReplayedSample]
    tolerance = 0.0

    def check_same(self, settings: Mapping[str, Any], then: Mapping[str, Any]) -> None:
        """Raises ValueError where a setting of the trainer differs from the run's."""
        for name, value in settings.items():
            if value != then[name]:
                raise ValueError(
                    f"the trainer has {name}={value}, the run {then[name]}: make it as for the run"
                )

    @property
    def weights_version(self) -> int:
        return self.trainer.state.global_step

    def replay(self) -> Replayed:
        """Resumes from the newest good checkpoint from before generation ``last``, or begins anew;
        learns from the responses, rewards and log-probs of the ledger; and draws that generation's
        responses. Nothing is written to the run's folder, evaluated or reported; callbacks are
        called.

        Raises:
            ValueError: the ledger lacks a generation between the checkpoint and ``last``, or the
                trainer ends before ``last``.
            BadCheckpoint: a ValueError: a checkpoint of another model.
        """
        trainer, checkpoint = self.trainer, self._newest_before()
        args, handler = trainer.args, trainer.callback_handler
        facts, trackers = read_facts(self.ledger, 1, self.last), "transformers.integrations"
        kept = [x for x in handler.callbacks if not type(x).__module__.startswith(trackers)]
        silent = {"save_strategy": "no", "eval_strategy": "no", "eval_on_start": False}
        of_trainer = (handler, "callbacks", kept), (trainer, "saves_when_it_fails", False)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            # Rewards are not called here; warn_of_other_code warns of other code that has changed.
            warnings.filterwarnings("ignore", CODE_DIFFERS)
            of_args = ((args, name, x) for name, x in {"output_dir": folder, **silent}.items())
            with attributes_set(*of_args, *of_trainer, *self.stands_in):
                warn_of_another_machine(facts)
                warn_of_other_code(facts, trainer.own_code())
                try:
                    trainer.train(None if checkpoint is None else str(checkpoint))
                except Drawn:
                    begun_at = 0 if checkpoint is None else step_of(checkpoint)
                    walk = self.samples, self.strayed, self.tolerance, self.walked
                    return Replayed(self.last, begun_at, *walk)
        raise ValueError(
            f"the run ends before generation {self.last}: make the trainer as for the run"
        )

    def _newest_before(self) -> Path | None:
        """The newest good checkpoint from before generation ``last``; None: there is none."""
        of_command, (part, name) = self.folder.checkpoints, self.counted_as
        checkpoints = Checkpoints(of_command if of_command.is_dir() else self.folder.path)
        checkpoint = checkpoints.newest_good()
        while checkpoint and load_tree(checkpoint / "process-0")["own"][part][name] >= self.last:
            checkpoint = checkpoints.newest_good(before=step_of(checkpoint))
        return checkpoint
