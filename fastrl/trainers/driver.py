"""The driver: one loop of steps, which the runs of all trainers go through."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from fastrl.run.processes import Processes
from fastrl.run.stopping import Stopped, asked, stop_at_a_steps_end
from fastrl.user_code import exits_are_errors


class StateLost(Exception):
    """The state before a step that failed is lost; the message names the last checkpoint."""


class Driven(Protocol):
    """A run, as it is driven: what its trainer does in each part of a step."""

    processes: Processes
    resumes_by: str  # the argument that continues a run, for messages

    def learn(self, batch: Any) -> bool:
        """Learns from a batch of the feed; returns whether that ends a step. Gradients of several
        batches may be accumulated."""

    def conclude(self, *, stops: bool) -> bool:
        """Records the step, and evaluates and saves where that is due.

        Args:
            stops: whether the run is asked to stop, so that its state is to be saved.

        Returns:
            whether this may have taken long: whether it evaluated or saved.
        """

    def can_rest(self) -> bool:
        """Whether a run could be resumed from here."""

    def is_over(self) -> bool:
        """Whether no further batch of the feed is learned."""

    def save_to_stop(self) -> None:
        """Saves the state, where :meth:`conclude` has not."""

    def stopped(self) -> Stopped:
        """The exception of a run that was asked to stop; its message says where its state is."""

    def save_before(self, error: BaseException) -> Path | None:
        """Goes back to the last whole state and saves it, unless it is saved already or no
        checkpoints are written; returns the checkpoint, or None if it saved nothing.

        Raises:
            StateLost: the weights have changed since, or saving needs processes that have failed.
        """


class Driver:
    """Drives a run: each step is fed, learned, recorded, evaluated and saved, in this order.

    Ctrl-C and SIGTERM wait for a step's end, in all processes; but in a run of several they break
    off sampling, as an exception does. After an exception in a step that has not changed the
    weights, the state before the step is saved; after an exception in what follows a step, such as
    its evaluation, the state after the step. A second Ctrl-C saves nothing.
    """

    def __init__(self, run: Driven):
        self.run = run

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Context of the whole run.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM; after SIGTERM it is a SystemExit, too, status 143.
        """
        with stop_at_a_steps_end():
            try:
                with exits_are_errors():
                    yield
            except Stopped as stopped:
                if stopped.args:  # raised by conclude(), once the state is saved
                    raise
                self._save_before(stopped)
                raise self.run.stopped() from None
            except Exception as error:
                self._save_before(error)
                raise

    def drive(self, feed: Iterable[Any]) -> None:
        """Runs the steps of a feed, each item of which is what :meth:`Driven.learn` takes."""
        for batch in feed:
            if self.run.learn(batch):
                self.conclude()
            if self.run.is_over():
                break

    def conclude(self) -> None:
        """Records, evaluates and saves; raises :class:`Stopped` if the run was asked to stop and
        can be resumed from here."""
        run, stops = self.run, self._stop_is_asked()
        took_long = run.conclude(stops=stops)
        if run.can_rest() and (stops or (took_long and self._stop_is_asked())):
            run.save_to_stop()
            raise run.stopped()

    def _stop_is_asked(self) -> bool:
        return self.run.processes.any(asked())

    def _save_before(self, error: BaseException) -> None:
        """Saves the last whole state, and warns of where it is, or why it was not saved."""
        name = type(error).__name__
        try:
            saved = self.run.save_before(error)
        except StateLost as why:
            warnings.warn(f"after {name} the state is not saved: {why}", stacklevel=5)
        except Exception as second:
            warnings.warn(f"after {name} the state could not be saved: {second}", stacklevel=5)
        else:
            if saved is not None and not isinstance(error, Stopped):
                warnings.warn(
                    f"after {name} the state is saved in {saved}; --resume "
                    f"({self.run.resumes_by}) continues from there",
                    stacklevel=5,
                )
