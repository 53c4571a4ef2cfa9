"""What parses and compares answers for :mod:`fastrl.rewards.math_reward`, in a process of its own.

It needs math-verify alone: see :mod:`fastrl.rewards.timed_worker`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

_DELIMITED = re.compile(r"\$.+\$|\\\(|\\\[|\\boxed", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?|\d*\.\d+|\d+)\s*%?")
_SCIENTIFIC = re.compile(r"[-+]?(?:\d*\.)?\d+[eE][-+]?\d{1,3}")
_MIXED = re.compile(r"(?<![\w/])(\d+) (\d+)/(\d+)(?![\w/])")
_ROOT = re.compile(r"√\s*(\w+)")
_FUNCTION = re.compile(
    r"(?<![a-zA-Z\\])"
    r"(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi)"
    r"(?![a-zA-Z])"
)
_TEXT = re.compile(r"\\text\w*\{[^}]*\}|\\(?:begin|end)\{\w+\}|\bsqrt\b|\\[a-zA-Z]+")
_WORD = re.compile(r"(?<![a-zA-Z])(?!(?:and|or)\b)(?:[a-zA-Z]{3,}|is|it|of|to|in|at)(?![a-zA-Z])")
_PIECE = re.compile(r"\\[a-zA-Z]|[\^_]\{")


def delimited(solution: str) -> str:
    r"""A solution with its LaTeX in delimiters, as math-verify reads it.

    A solution without delimiters may be an expression: it is read as if it stood in ``\boxed{}``,
    and functions in plain text (``2*sqrt(3)``, ``sin(x)``) are read as LaTeX's. Or it is a
    sentence, of which only the numbers are read; of a sentence with LaTeX nothing is read (""),
    since a number may be a piece of a formula.
    """
    text = solution.rpartition("####")[2].strip()  # GSM8K's mark of the answer
    text = re.sub(r"(?<=[^.])\.$", "", text)
    if _SCIENTIFIC.fullmatch(text):
        return format(Decimal(text), "f")
    if _DELIMITED.search(text) or _NUMBER.fullmatch(text):
        return text
    text = _FUNCTION.sub(r"\\\1", text)
    if not text.isalpha() and _WORD.search(_TEXT.sub(" ", text)):
        return "" if _PIECE.search(text) else text
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _ROOT.sub(r"\\sqrt{\1}", text))
    for written, latex in (("**", "^"), ("√", "sqrt"), ("°", r"^\circ"), ("²", "^2"), ("³", "^3")):
        text = text.replace(written, latex)
    return rf"\boxed{{{text}}}"


def make_judge() -> Callable[..., dict[str, Any]]:
    """Makes the function that judges a question's fields: a ``solution`` alone by whether it
    parses; a solution and an ``answer`` by whether they are equal. math-verify's own time limits
    are off, since they need signals."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # Answers are in LaTeX, a boxed one first, as in TRL's accuracy_reward.
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )

    @functools.lru_cache(maxsize=64)  # the responses to a prompt have one solution
    def solution_of(text: str) -> Any:
        return parse(delimited(text), parsing_timeout=None)

    def judge(solution: str, answer: str | None = None) -> dict[str, Any]:
        gold = solution_of(solution)
        if answer is None:
            return {"shown": shown(gold), "parsed": bool(gold)}
        parsed = parse(
            answer, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=None
        )
        return {"shown": shown(parsed), "equal": bool(verify(gold, parsed, timeout_seconds=None))}

    return judge


def shown(parsed: list[Any]) -> str:
    """What was parsed, for a table; empty where nothing was."""
    try:
        return str(parsed) if parsed else ""
    except Exception:  # a number of very many digits
        return "[not shown]"
