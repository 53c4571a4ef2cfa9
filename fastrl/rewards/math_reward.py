"""A ready reward: is the answer of a response mathematically equal to the solution?"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from fastrl.data.chat import TextOrMessages, as_text
from fastrl.rewards import math_worker

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
    r"""1 where a response's answer is equal to the solution, by math-verify, else 0.

    A response's answer is its LaTeX, that of ``\boxed{...}`` first; one that does not parse is
    wrong. None, for "does not apply", where the solution does not parse, or is None.

    The answers are parsed in a process of its own, so that what takes longer than 10 seconds, or
    would never end, can be ended, whatever thread this is called in: such a solution is None, such
    an answer 0.

    Args:
        completions: texts, or lists of messages.
        solution: the data set's column: LaTeX, or numbers and expressions.
        log_extra: as trainers by TRL 1.x's names pass it: notes what was parsed.

    Raises:
        ImportError: math-verify is not installed.
    """
    rewards: list[float | None] = []
    golds, answers = [], []
    for completion, one in zip(completions, solution, strict=True):
        reward, gold, answer = _PROCESS.judge(None if one is None else str(one), completion)
        rewards.append(reward)
        golds.append(gold)
        answers.append(answer)
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", golds)
        log_extra("answer_parsed", answers)
    return rewards


def load_math_reward() -> Callable[..., Any]:
    """:func:`math_reward`, where math-verify is installed.

    Raises:
        ImportError: it is not.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(
            "the reward math needs math-verify, which is not installed: "
            "pip install 'fastrl-lm[math]'"
        )
    return math_reward


class _Process:
    """:mod:`fastrl.rewards.math_worker` as a child, made as it is needed; of use in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._of = 0  # the process that made it: a fork has none

    def judge(
        self, solution: str | None, completion: TextOrMessages
    ) -> tuple[float | None, str, str]:
        """The reward, and what was parsed of the solution and of the answer."""
        if solution is None:
            return None, _UNPARSED, _SKIPPED
        with self._lock:
            gold = self._ask(solution=solution)
            if gold is None or not gold["parsed"]:
                return None, _LATE if gold is None else _UNPARSED, _SKIPPED
            found = self._ask(solution=solution, answer=as_text(completion))
        if found is None:
            return 0.0, gold["shown"], _LATE
        return float(found["equal"]), gold["shown"], found["shown"] or _UNPARSED

    def _ask(self, **question: str) -> dict[str, Any] | None:
        """The child's answer; None where it took too long."""
        child = self._started()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(question) + "\n")
            child.stdin.flush()
            answer = self._read(child)
        except BaseException:  # Ctrl-C: the answer would be taken for that of the next question
            self._end()
            raise
        if answer is not None:
            return answer
        ended = child.wait()
        self._end()
        if ended != -signal.SIGALRM:
            raise RuntimeError(
                f"the process that compares mathematical answers ended by itself (exit code "
                f"{ended}) at {json.dumps(question)[:200]}"
            )
        return None

    def _started(self) -> subprocess.Popen[str]:
        if self._child is not None and self._of == os.getpid():
            return self._child
        load_math_reward()
        child = subprocess.Popen(
            [sys.executable, math_worker.__file__, str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )
        self._child, self._of = child, os.getpid()
        ready = self._read(child)
        if ready is None or "failed" in ready:
            self._end()
            said = f": {ready['failed']}" if ready else ""
            raise ImportError(f"math-verify does not run in a process of its own{said}")
        return child

    @staticmethod
    def _read(child: subprocess.Popen[str]) -> dict[str, Any] | None:
        assert child.stdout is not None
        line = child.stdout.readline()
        return json.loads(line) if line else None

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):  # what was not written yet
                    pipe.close()  # type: ignore[union-attr]


_PROCESS = _Process()
