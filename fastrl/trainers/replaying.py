"""A run of a trainer on transformers' that is walked again by its ledger."""

from __future__ import annotations

import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from fastrl.collect.replayed import (
    Replayed,
    ReplayedSample,
    warn_of_another_machine,
    warn_of_other_code,
)
from fastrl.run.checkpoints import CODE_DIFFERS, Checkpoints, step_of
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import no_step, read_facts, read_ledger
from fastrl.run.state import load_tree


class Drawn(Exception):
    """The generation that was asked for has been drawn."""


class Player(ABC):
    """Gives a trainer the ledger's responses and judgements in the place of new ones, and draws the
    last generation, at which it ends the run by :class:`Drawn`.

    Args:
        trainer: made as for the run, from the same model and data, in one process.
        output: the run's folder, with its ledger.
        last: the generation that is to be drawn, from 1.

    Attributes:
        facts: what the ledger notes of the last generation.

    Raises:
        ValueError: a generation that the ledger does not have, or that others than the policy
            wrote; several processes.
    """

    def __init__(self, trainer: Any, output: str | Path, last: int):
        if trainer.processes.count > 1:
            raise ValueError("a replay runs as one process: start it without a launcher")
        self.trainer, self.folder, self.last = trainer, RunFolder(output), last
        self.samples: list[ReplayedSample] = []
        self.strayed: str | None = None
        self._walked = 0
        ledger = self.folder.ledger
        every = read_facts(ledger, last, last)
        if not every:
            raise ValueError(no_step(ledger, last))
        self.facts = every[-1]
        if read_ledger(ledger, ["seed"], last, last)["seed"].null_count:
            raise ValueError(
                f"the responses of generation {last} came from a rollout_func, tools, an "
                "environment or an engine of yours, which may say something else each time, and "
                "cannot be drawn again; what they were is in the ledger (fastrl samples)"
            )

    def check_same(self, settings: Mapping[str, Any], then: Mapping[str, Any]) -> None:
        """Checks that the trainer's settings are the run's.

        Args:
            settings, then: settings by name, the trainer's and the run's.

        Raises:
            ValueError: a setting of the trainer's has another value.
        """
        for name, value in settings.items():
            if value != then[name]:
                raise ValueError(
                    f"the trainer has {name}={value}, the run {then[name]}: make it as for the run"
                )

    @abstractmethod
    def made(self, own: Mapping[str, Any]) -> int:
        """How many generations had been made where a trainer's own state was saved."""

    @abstractmethod
    def playing(self) -> AbstractContextManager[None]:
        """Context in which the trainer asks this object, and keeps no record of its own."""

    def rows(self, generation: int) -> list[dict[str, Any]]:
        """The ledger's rows of a generation.

        Raises:
            ValueError: there are none.
        """
        rows = read_ledger(self.folder.ledger, None, generation, generation).to_pylist()
        if not rows:
            raise ValueError(no_step(self.folder.ledger, generation))
        now, then = self.trainer.state.global_step, rows[0]["weights_version"]
        if now != then and self.strayed is None:
            self.strayed = (
                f"generation {generation}: {now} optimizer steps were taken before it, {then} in "
                "the run"
            )
        self._walked += generation < self.last
        return rows

    def replay(self, tolerance: float = 0.0) -> Replayed:
        """Resumes from the newest good checkpoint from before the last generation, or begins anew;
        learns from the responses, rewards and log-probs of the ledger; and draws that generation's
        responses. Nothing is written to the run's folder, evaluated or reported; callbacks are
        called.

        Args:
            tolerance: the tolerance for what was computed in batches of other sizes.

        Raises:
            ValueError: a generation between checkpoint and the last that the ledger does not have.
            BadCheckpoint: a ValueError: a checkpoint of another model.
        """
        checkpoint = self._newest_before()
        with _nothing_left(self.trainer), self.playing():
            facts = read_facts(self.folder.ledger, 1, self.last)
            warn_of_another_machine(facts)
            warn_of_other_code(facts, self.trainer.own_code())
            try:
                self.trainer.train(None if checkpoint is None else str(checkpoint))
            except Drawn:
                begun_at = 0 if checkpoint is None else step_of(checkpoint)
                return Replayed(
                    self.last, begun_at, self.samples, self.strayed, tolerance, self._walked
                )
        raise ValueError(
            f"the run ends before generation {self.last}: make the trainer as for the run"
        )

    def _newest_before(self) -> Path | None:
        """The newest good checkpoint that has not made the last generation yet."""
        of_command = self.folder.checkpoints
        checkpoints = Checkpoints(of_command if of_command.is_dir() else self.folder.path)
        found = checkpoints.newest_good()
        while found is not None:
            if self.made(load_tree(found / "process-0")["own"]) < self.last:
                return found
            found = checkpoints.newest_good(before=step_of(found))
        return None


@contextmanager
def _nothing_left(trainer: Any) -> Iterator[None]:
    """Context in which a trainer writes and reports nothing that stays."""
    args, handler = trainer.args, trainer.callback_handler
    silent = {"save_strategy": "no", "eval_strategy": "no", "eval_on_start": False}
    kept = {name: getattr(args, name) for name in ("output_dir", *silent)}
    callbacks, saves = list(handler.callbacks), trainer.saves_when_it_fails
    integrations = "transformers.integrations"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Rewards are not called here; that other code has changed is seen by the ledger.
        warnings.filterwarnings("ignore", CODE_DIFFERS)
        for name, value in {"output_dir": folder, **silent}.items():
            setattr(args, name, value)
        handler.callbacks[:] = [
            x for x in callbacks if not type(x).__module__.startswith(integrations)
        ]
        trainer.saves_when_it_fails = False
        try:
            yield
        finally:
            handler.callbacks[:] = callbacks
            trainer.saves_when_it_fails = saves
            for name, value in kept.items():
                setattr(args, name, value)
