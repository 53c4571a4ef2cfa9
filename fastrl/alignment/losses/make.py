"""Losses by their names."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastrl.alignment.losses.base import LOSSES, Loss
from fastrl.alignment.losses.pairwise import loss_of_row
from fastrl.learn.preferences import PAIR_LOSSES, PairObjective
from fastrl.user_code import load_function

for _name, _row in PAIR_LOSSES.items():
    if _name not in LOSSES and _row.reads != "batch":
        LOSSES[_name] = loss_of_row(_row)


def make_loss(kind: str | type[Loss] | PairObjective, **coefficients: Any) -> Loss:
    """Makes a loss from its name, its class, or its row of the table of pair losses.

    Args:
        kind: a name is a key of :data:`LOSSES`, or "file.py:name" or "module:name" of a class, a
            row, or a function of a pair's two sides.
        coefficients: values of the loss's fields, by their names.

    Raises:
        ValueError: an unknown loss or coefficient, a coefficient out of range, or a row that
            compares the pairs of a batch.
        TypeError: a class that is no loss, a function that takes something else than two sides.
        ImportError, FileNotFoundError: a name, module or file that does not exist.
    """
    made = _named(kind) if isinstance(kind, str) else kind
    if isinstance(made, PairObjective):
        made = loss_of_row(made)
    if not (isinstance(made, type) and issubclass(made, Loss)):
        raise TypeError(
            f"{kind!r} is no loss: derive a dataclass from PairwiseLoss or Loss, or write "
            "@loss_of_pairs() above a function of two sides"
        )
    names = [field.name for field in dataclasses.fields(made) if field.init]
    for name in coefficients:
        if name not in names:
            raise ValueError(
                f"the loss {made.name} has no coefficient {name!r}: it has "
                f"{', '.join(names) or 'none'}"
            )
    return made(**coefficients)


def _named(name: str) -> Any:
    """The class or row that a name stands for; raises as :func:`make_loss`."""
    if ":" in name and isinstance(loss_class := load_function(name), type):
        return loss_class
    if name in LOSSES:
        return LOSSES[name]
    if name not in PAIR_LOSSES:
        raise ValueError(f"unknown loss {name!r}: choose one of {', '.join(LOSSES)}")
    return PAIR_LOSSES[name]
