"""The log and the evaluation that are due behind a step, where an exception prevents them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from transformers import TrainerControl, TrainerState


class BeforeEvaluation(NamedTuple):
    """What an evaluation changes, as it was before; a failed evaluation is done again whole."""

    callbacks: list[tuple[Any, dict[str, Any]]]  # each with the values of its attributes
    rows: int | None  # of the metrics' file, if there is one


def prevented(
    control: TrainerControl, state: TrainerState, before: BeforeEvaluation | None
) -> dict[str, bool]:
    """Says what is still due behind a step, for the run that is resumed: "log" and "evaluate".
    Callbacks and the logs' history become what they were before an evaluation that is due.

    Args:
        before: None: no evaluation had begun.
    """
    for callback, attributes in before.callbacks if before else ():
        vars(callback).update(attributes)
    evaluates = before is not None or control.should_evaluate
    if evaluates:
        state.log_history[:] = [
            row
            for row in state.log_history
            if row.get("step") != state.global_step or not of_evaluation(row)
        ]
    return {"log": control.should_log, "evaluate": evaluates}


def of_evaluation(logs: Mapping[str, Any] | Iterable[str]) -> bool:
    """Whether these are metrics of an evaluation, by their names."""
    return any(name.startswith("eval_") for name in logs)
