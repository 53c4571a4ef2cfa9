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
    """The state before a step that failed is not there any more; the message says what is."""


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
            stops: the run is asked to stop, and saves before.

        Returns:
            whether that may have taken long: it evaluated or saved.
        """

    def can_rest(self) -> bool:
        """Whether a run could be resumed from here."""

    def is_over(self) -> bool:
        """Whether no further batch of the feed is learned."""

    def save_to_stop(self) -> None:
        """Saves the state, where :meth:`conclude` has not."""

    def stopped(self) -> Stopped:
        """What a run raises that was asked to stop; says where its state is."""

    def save_before(self, error: BaseException) -> Path | None:
        """Goes back to the last state that is whole, and saves it, where checkpoints are written
        and it is not there yet; returns the checkpoint.

        Raises:
            StateLost: the weights are not those of that state any more.
        """


class Driver:
    """Drives a run: each step is fed, learned, recorded, evaluated and saved, in this order.

    Ctrl-C and SIGTERM wait for a step's end, in all processes. After an exception in a step that
    has not changed the weights the state before it is saved, and after one in what follows a step,
    such as its evaluation, the state behind it.
    """

    def __init__(self, run: Driven):
        self.run = run

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Context of the whole run.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM, at the end of a step and with its state saved; the
                second is also a SystemExit, with status 143.
        """
        with stop_at_a_steps_end():
            try:
                with exits_are_errors():
                    yield
            except Stopped as stopped:
                if stopped.args:  # the driver's own: the state is saved
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
        """Records, evaluates and saves, and stops the run where that was asked for and a run could
        be resumed."""
        run, stops = self.run, self._stop_is_asked()
        took_long = run.conclude(stops=stops)
        if run.can_rest() and (stops or (took_long and self._stop_is_asked())):
            run.save_to_stop()
            raise run.stopped()

    def _stop_is_asked(self) -> bool:
        return self.run.processes.any(asked())

    def _save_before(self, error: BaseException) -> None:
        """Saves the last state that is whole, and tells of it; the error is raised all the same."""
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
