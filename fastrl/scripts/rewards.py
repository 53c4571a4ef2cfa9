"""Reward functions under TRL's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from fastrl.data.chat import TextOrMessages, as_text
from fastrl.rewards.math_reward import load_math_reward

_THOUGHT = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def accuracy_reward(
    completions: Sequence[TextOrMessages], solution: Sequence[Any], **columns: Any
) -> list[float | None]:
    """:func:`fastrl.rewards.math_reward.math_reward`: 1 where the answer is the solution.

    Raises:
        ImportError: math-verify is not installed.
    """
    prompts = columns.pop("prompts", [""] * len(completions))
    return load_math_reward()(prompts, completions, solution=solution, **columns)


def reasoning_accuracy_reward(
    completions: Sequence[TextOrMessages],
    solution: Sequence[Any],
    reasoning_delimiters: Sequence[str] | None = None,
    **columns: Any,
) -> list[float | None]:
    """:func:`accuracy_reward` of what stands behind the thoughts; 0 where these do not end.

    Args:
        reasoning_delimiters: what ends them; by default ``</think>``.
    """
    ends = ["</think>"] if reasoning_delimiters is None else list(reasoning_delimiters)
    texts = [as_text(completion) for completion in completions]
    cuts = [max((t.rfind(end) + len(end) for end in ends if end in t), default=None) for t in texts]
    answers = ["" if cut is None else t[cut:] for t, cut in zip(texts, cuts, strict=True)]
    found = accuracy_reward(answers, solution, **columns)
    return [0.0 if cut is None else reward for reward, cut in zip(found, cuts, strict=True)]


def think_format_reward(completions: Sequence[TextOrMessages], **_: Any) -> list[float]:
    """1 where a response begins with thoughts in ``<think>`` and ``</think>``, once, else 0."""
    return [1.0 if _THOUGHT.match(as_text(completion)) else 0.0 for completion in completions]


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: int
) -> Callable[..., list[float]]:
    """A reward of a response's length L in tokens (Yu et al., 2025, DAPO, equation 13): 0 up to
    ``max_completion_len - soft_punish_cache``, from there to ``max_completion_len`` falling to -1
    in a line, and -1 beyond."""
    free = max_completion_len - soft_punish_cache

    def soft_overlong_punishment_reward(completion_ids: Sequence[Any], **_: Any) -> list[float]:
        lengths = map(len, completion_ids)
        return [
            -1.0
            if length > max_completion_len
            else min(0.0, (free - length) / max(soft_punish_cache, 1))
            for length in lengths
        ]

    return soft_overlong_punishment_reward
