"""Steps within a time: the most important first, none begun that would not end in time."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterable

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Step:
    """What `run` does, how long it should take, and whether it is (still) worth doing.

    `obstacle` says why not, or None; it is asked when the step's turn comes.
    """

    name: str
    seconds: float
    run: Callable[[], object]
    obstacle: Callable[[], str | None] = lambda: None


@dataclasses.dataclass
class Outcome:
    """Names of the steps that were done; and of the others, why not."""

    done: list[str] = dataclasses.field(default_factory=list)
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)


def carry_out(
    steps: Iterable[Step],
    seconds: float,
    *,
    save: Callable[[Outcome], object] = lambda outcome: None,
    clock: Clock = time.monotonic,
) -> Outcome:
    """Does the steps in their order, each if it fits into what is left, and saves after each.

    How long a step takes is guessed beforehand, and the guess corrected by how long those before
    it took, as a whole, against theirs. A step that raises is noted, and the next one begins.
    """
    began = clock()
    outcome = Outcome()
    guessed = taken = 0.0
    for step in steps:
        obstacle = step.obstacle()
        pace = max(taken / guessed, 0.5) if guessed else 1.0
        left = seconds - (clock() - began)
        if not obstacle and step.seconds * pace > left:
            obstacle = f"about {step.seconds * pace:.0f} s, {left:.0f} s were left"
        if obstacle:
            outcome.left[step.name] = obstacle
            save(outcome)
            continue
        start = clock()
        try:
            step.run()
            outcome.done.append(step.name)
        except Exception as error:  # one op's failure must not cost the others their turn
            traceback.print_exc()
            outcome.failed[step.name] = f"{type(error).__name__}: {error}"[:2000]
        guessed += step.seconds
        taken += clock() - start
        save(outcome)
    return outcome
