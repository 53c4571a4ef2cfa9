"""What log-probs are over: all of the vocabulary, or what each token was drawn from."""

from __future__ import annotations

import warnings
from typing import Any

from fastrl.config import SAMPLED
from fastrl.rollout.generation_kwargs import CUTS, changes_of_the_draw, warning_of


def check_policy_support(args: Any, **others: Any) -> None:
    """Raises ValueError where log-probs are over what tokens are drawn from, and one of ``others``
    is set, which reads log-probs over the whole vocabulary."""
    conflicting = [name for name, x in others.items() if x]
    if args.policy_support == SAMPLED and conflicting:
        raise ValueError(
            "policy_support='sampled' takes log-probs over what each token was drawn from, which "
            f"is not known to {', '.join(conflicting)}: leave one of the two out"
        )


def check_draws(args: Any, model: Any, stacklevel: int) -> None:
    """Warns of settings because of which tokens are drawn from something else than what their
    log-probs are over, once; with sets, which have no part in other changes, they are refused.

    Args:
        args: an :class:`fastrl.trainers.groups.online_config.OnlineConfig`.

    Raises:
        ValueError: such settings beside ``policy_support="sampled"``.
    """
    changes = changes_of_the_draw(args.generation_arguments, model, args.temperature)
    over_sets = args.policy_support == SAMPLED
    known = CUTS if over_sets else ()
    changes = [change for change in changes if change.name not in known and not change.origin]
    if changes and over_sets:
        raise ValueError(f"policy_support='sampled': {warning_of(changes, args.temperature)}")
    if changes:
        warnings.warn(warning_of(changes, args.temperature), stacklevel=stacklevel + 1)
