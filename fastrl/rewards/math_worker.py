"""What parses and compares answers for :mod:`fastrl.rewards.math_reward`, in a process of its own.

It needs math-verify alone: see :mod:`fastrl.rewards.timed_worker`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def make_judge() -> Callable[..., dict[str, Any]]:
    """The function of a line's fields: of ``solution`` alone, whether that parses; with
    ``answer``, whether both are equal. No time limits of math-verify's, which need signals."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # As TRL's accuracy_reward: answers in LaTeX, a boxed one first.
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )

    @functools.lru_cache(maxsize=64)  # the responses to a prompt have one solution
    def solution_of(text: str) -> Any:
        return parse(text, parsing_timeout=None)

    def judge(solution: str, answer: str | None = None) -> dict[str, Any]:
        gold = solution_of(solution)
        if answer is None:
            return {"shown": shown(gold), "parsed": bool(gold)}
        found = parse(
            answer, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=None
        )
        return {"shown": shown(found), "equal": bool(verify(gold, found, timeout_seconds=None))}

    return judge


def shown(parsed: list[Any]) -> str:
    """What was parsed, for a table; empty where nothing was."""
    try:
        return str(parsed) if parsed else ""
    except Exception:  # a number of very many digits
        return "[not shown]"
