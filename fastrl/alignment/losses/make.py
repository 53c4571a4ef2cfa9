"""Losses by their names."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastrl.alignment.losses.base import LOSSES, Loss
from fastrl.alignment.losses.pairwise import loss_of_row
from fastrl.learn.preferences import PAIR_LOSSES, PairObjective

for _name, _row in PAIR_LOSSES.items():
    if _name not in LOSSES and _row.reads != "batch":
        LOSSES[_name] = loss_of_row(_row)


def make_loss(kind: str | type[Loss] | PairObjective, **coefficients: Any) -> Loss:
    """Makes a loss from its name, its class, or its row of the table of pair losses.

    Raises:
        ValueError: an unknown loss or coefficient, or a coefficient out of range.
        TypeError: a class that is no loss.
    """
    made: Any = kind
    if isinstance(kind, str):
        made = LOSSES.get(kind, PAIR_LOSSES.get(kind))
        if made is None:
            raise ValueError(f"unknown loss {kind!r}: choose one of {', '.join(LOSSES)}")
    if isinstance(made, PairObjective):
        made = loss_of_row(made)
    if not (isinstance(made, type) and issubclass(made, Loss)):
        raise TypeError(
            f"{kind!r} is no loss: derive a dataclass from PairwiseLoss or Loss, or write "
            "@loss_of_pairs() above a function of two sides"
        )
    own = [field.name for field in dataclasses.fields(made) if field.init]
    for given in coefficients:
        if given not in own:
            raise ValueError(
                f"the loss {made.name} has no coefficient {given!r}: it has "
                f"{', '.join(own) or 'none'}"
            )
    return made(**coefficients)
