"""A ready reward: is the answer of a response mathematically equal to the solution?"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from fastrl.data.chat import TextOrMessages, as_text
from fastrl.rewards import math_worker
from fastrl.rewards.timed import TimedChild

SECONDS = 10  # for a solution, and for an answer
_UNPARSED, _SKIPPED, _LATE = "[unparseable]", "[skipped]", "[took too long]"


def math_reward(
    prompts: Sequence[TextOrMessages],
    completions: Sequence[TextOrMessages],
    completion_ids: Any = None,
    *,
    solution: Sequence[Any],
    log_extra: Callable[[str, list], None] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""Rewards of 1 where a response's answer equals the solution, by math-verify, else 0.

    A response's answer is its LaTeX in ``\boxed{...}``, or behind "answer"; one that does not parse
    is wrong. A solution without delimiters is read as if it stood in a box; of a sentence only the
    numbers are read. The reward is None ("does not apply") where the solution does not parse, or is
    None; docs/ready_rewards.md has a table.

    Solutions and answers are parsed in another process, in which one that takes longer than 10
    seconds is ended, whatever thread calls: the reward is None for such a solution, and 0 for such
    an answer.

    Args:
        completions: texts, or lists of messages.
        solution: the data set's column: LaTeX, or numbers, expressions and sentences.
        log_extra: notes what was parsed; trainers by TRL 1.x's names pass it.

    Raises:
        ImportError: math-verify is not installed.
    """
    rewards: list[float | None] = []
    golds, answers = [], []
    for completion, one in zip(completions, solution, strict=True):
        reward, gold, answer = _judge(None if one is None else str(one), completion)
        rewards.append(reward)
        golds.append(gold)
        answers.append(answer)
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", golds)
        log_extra("answer_parsed", answers)
    return rewards


def load_math_reward() -> Callable[..., Any]:
    """:func:`math_reward`; raises ImportError where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(
            "the reward math needs math-verify, which is not installed: "
            "pip install 'math-verify>=0.9'"
        )
    return math_reward


_PROCESS = TimedChild(math_worker.__file__, "math-verify")


def _judge(solution: str | None, completion: TextOrMessages) -> tuple[float | None, str, str]:
    """The reward, and what was parsed of the solution and of the answer."""
    if solution is None:
        return None, _UNPARSED, _SKIPPED
    load_math_reward()
    gold = _PROCESS.ask(SECONDS, solution=solution)
    if gold is None or not gold["parsed"]:
        return None, _LATE if gold is None else _UNPARSED, _SKIPPED
    verdict = _PROCESS.ask(SECONDS, solution=solution, answer=as_text(completion))
    if verdict is None:
        return 0.0, gold["shown"], _LATE
    return float(verdict["equal"]), gold["shown"], verdict["shown"] or _UNPARSED
