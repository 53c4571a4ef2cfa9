"""Reward functions under TRL's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastrl.data.chat import TextOrMessages, as_text
from fastrl.rewards.math_reward import load_math_reward
from fastrl.rewards.text_rewards import get_soft_overlong_punishment, think_format_reward

__all__ = [
    "accuracy_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]


def accuracy_reward(
    completions: Sequence[TextOrMessages], solution: Sequence[Any], **columns: Any
) -> list[float | None]:
    """Rewards by :func:`fastrl.rewards.math_reward.math_reward`: 1 where the answer is the
    solution, else 0; None where the solution does not parse.

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
    """Rewards by :func:`accuracy_reward` of what stands behind thoughts; 0 where these do not end.

    Args:
        reasoning_delimiters: texts that end thoughts; by default ``</think>``.
    """
    ends = ["</think>"] if reasoning_delimiters is None else list(reasoning_delimiters)
    texts = [as_text(completion) for completion in completions]
    cuts = [max((t.rfind(end) + len(end) for end in ends if end in t), default=None) for t in texts]
    answers = ["" if cut is None else t[cut:] for t, cut in zip(texts, cuts, strict=True)]
    rewards = accuracy_reward(answers, solution, **columns)
    return [0.0 if cut is None else reward for reward, cut in zip(rewards, cuts, strict=True)]
