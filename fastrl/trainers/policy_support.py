"""What log-probs are over: all of the vocabulary, or what each token was drawn from."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from fastrl.config import SAMPLED
from fastrl.rollout.generation_kwargs import (
    Change,
    changes_of_the_draw,
    refuse_unknown,
    unknown_changes,
    warning_of,
)
from fastrl.rollout.grammars import check_format
from fastrl.rollout.sampling_params import end_tokens


def check_policy_support(args: Any, **others: Any) -> None:
    """Raises ValueError where log-probs are over what tokens are drawn from, and one of ``others``
    is set, which reads log-probs over the whole vocabulary."""
    conflicting = [name for name, x in others.items() if x]
    if args.policy_support == SAMPLED and conflicting:
        raise ValueError(
            "policy_support='sampled' takes log-probs over what each token was drawn from, which "
            f"is not known to {', '.join(conflicting)}: leave one of the two out"
        )


def check_form(arguments: Mapping[str, Any], model: Any, tokenizer: Any) -> None:
    """Raises ValueError for a response format among arguments of ``generate`` that cannot be
    honoured."""
    form = arguments.get("response_format")
    if form is not None:
        ends = end_tokens(model, tokenizer, arguments.get("eos_token_id")).tolist()
        check_format(form, tokenizer, model.config.get_text_config().vocab_size, ends)


def check_draws(args: Any, model: Any, stacklevel: int) -> None:
    """Warns of settings because of which tokens are drawn from something else than what their
    log-probs are over, once; with sets, which have no part in other changes, they are refused.

    Args:
        args: an :class:`fastrl.trainers.groups.online_config.OnlineConfig`.

    Raises:
        ValueError: such settings beside ``policy_support="sampled"``.
    """
    changes = changes_of_the_draw(args.generation_arguments, model, args.temperature)
    changes = [change for change in changes if not change.origin]
    if args.tool_choice != "auto":
        changes.append(Change("tool_choice", args.tool_choice, "auto", ""))
    refuse_unknown(changes, args.policy_support)
    if unknown := unknown_changes(changes, args.policy_support):
        warnings.warn(warning_of(unknown, args.temperature), stacklevel=stacklevel + 1)
