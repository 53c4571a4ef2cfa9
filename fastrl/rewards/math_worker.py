"""The process that parses and compares answers for :mod:`fastrl.rewards.math_reward`.

``python math_worker.py SECONDS`` reads a JSON object a line and writes one a line; a line that
takes longer than SECONDS ends the process, in the midst of a product of long integers too. It needs
math-verify alone.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    # What libraries print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # The alarm's default action needs no interpreter. Ctrl-C is the parent's, which closes stdin.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    try:
        judge = make_judge()
    except Exception as error:
        answer({"failed": f"{type(error).__name__}: {error}"})
        return
    answer({"ready": True})
    for line in sys.stdin:
        signal.alarm(int(sys.argv[1]))
        found = judge(**json.loads(line))
        signal.alarm(0)
        answer(found)


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


if __name__ == "__main__":
    main()
