"""Ready rewards that read a response's text or length: its format, a pattern, its tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from fastrl.data.chat import TextOrMessages, as_text
from fastrl.rewards import text_worker
from fastrl.rewards.timed import TimedChild

Reward = Callable[..., list[float]]

UNITS = ("tokens", "characters")
_THOUGHT = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
_CHILD = TimedChild(text_worker.__file__, "a pattern")


def think_format_reward(completions: Sequence[TextOrMessages], **_: Any) -> list[float]:
    """Rewards of 1 where a response begins with one ``<think>`` … ``</think>``, else 0."""
    return [1.0 if _THOUGHT.match(as_text(completion)) else 0.0 for completion in completions]


def make_format_reward(tags: Sequence[str] | None = None) -> Reward:
    """The ready reward ``format``: 1 where a response has the form of ``tags``, else 0.

    Args:
        tags: names: a response is ``<tag>…</tag>`` for each of them, in this order, each mark once,
            with nothing but blanks before, between and behind. None: it begins with one
            ``<think>…</think>``, see :func:`think_format_reward`.

    Raises:
        ValueError: no tags, a tag twice, or one with blanks or angle brackets.
    """
    if tags is None:
        return think_format_reward
    if isinstance(tags, str) or not tags or len(set(tags)) < len(tags):
        raise ValueError(f"tags must be a list of different names, got {tags!r}")
    for tag in tags:
        if not isinstance(tag, str) or not re.fullmatch(r"[^\s<>/]+", tag):
            raise ValueError(f"a tag is a name without blanks and brackets, got {tag!r}")
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    any_mark = re.compile("(" + "|".join(map(re.escape, marks)) + ")")

    def follows(text: str) -> bool:
        parts = any_mark.split(text)  # outside, <a>, inside, </a>, outside, <b>, …
        return parts[1::2] == marks and not any(part.strip() for part in parts[::4])

    def format_reward(completions: Sequence[TextOrMessages], **_: Any) -> list[float]:
        return [float(follows(as_text(completion))) for completion in completions]

    return format_reward


def make_regex_reward(pattern: str, *, full: bool = False, seconds: float = 1.0) -> Reward:
    """The ready reward ``regex``: 1 where a pattern is found in a response, else 0.

    Patterns are searched for in a process of its own, which ends a search that takes too long: its
    response gets 0.

    Args:
        pattern: a pattern of Python's :mod:`re`, with flags written in it, as ``(?si)``.
        full: whether the pattern must match the whole response.
        seconds: the longest time for one response.

    Raises:
        ValueError: a pattern that is no regular expression, seconds that are not positive.
    """
    try:
        re.compile(pattern)
    except (re.error, TypeError, OverflowError) as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None
    check_positive("seconds", seconds)

    def matches(text: str) -> bool:
        verdict = _CHILD.ask(seconds, kind="regex", pattern=pattern, full=full, text=text)
        return verdict is not None and verdict["is"]

    def regex_reward(completions: Sequence[TextOrMessages], **_: Any) -> list[float]:
        return [float(matches(as_text(completion))) for completion in completions]

    return regex_reward


def make_length_reward(
    target: int, *, unit: str = "tokens", only_beyond: bool = False, scale: float | None = None
) -> Reward:
    """The ready reward ``length`` of a response's length L and its target T, with a scale s:

    closeness, max(0, 1 - |L - T| / s) in [0, 1]; or ``only_beyond``, a penalty for what is longer,
    -min(1, max(0, L - T) / s) in [-1, 0].

    Args:
        target: T.
        unit: "tokens", of the response's ``completion_ids``, or "characters", code points.
        scale: s, in the same unit; None: T.

    Raises:
        ValueError: a target or scale that is not positive, an unknown unit.
    """
    check_positive("target", target)
    scale = target if scale is None else scale
    check_positive("scale", scale)
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")

    def of(length: int) -> float:
        if only_beyond:
            return -min(1.0, max(0, length - target) / scale)
        return max(0.0, 1.0 - abs(length - target) / scale)

    def length_reward(completion_ids: Sequence[Any], **_: Any) -> list[float]:
        return [of(len(ids)) for ids in completion_ids]

    def length_in_characters_reward(completions: Sequence[TextOrMessages], **_: Any) -> list[float]:
        return [of(len(as_text(completion))) for completion in completions]

    # Surfaces see from a function's arguments whether it needs token ids.
    return length_reward if unit == "tokens" else length_in_characters_reward


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Reward:
    """The ready reward ``soft_overlong`` of a response's length L in tokens (Yu et al., 2025, DAPO,
    equation 13): 0 up to ``max_completion_len - soft_punish_cache``, from there to
    ``max_completion_len`` falling to -1 in a line, and -1 beyond.

    Raises:
        ValueError: a length that is not positive, a cache below 0 or above that length.
    """
    check_positive("max_completion_len", max_completion_len)
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache must be between 0 and max_completion_len={max_completion_len}, got "
            f"{soft_punish_cache!r}"
        )
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


def last_block(text: str, languages: Sequence[str]) -> str:
    """The contents of the last block of a text that is fenced by ``\\`\\`\\``` and of one of the
    languages, "" being a fence that names none; the whole text where there is no such block."""
    block, lines = text, list[str]()
    language: str | None = None
    for line in text.split("\n"):
        mark = line.strip()
        if language is None:
            if mark.startswith("```"):
                language, lines = mark[3:].strip().lower(), []
        elif mark == "```":
            block = "\n".join(lines) if language in languages else block
            language = None
        else:
            lines.append(line)
    return block


def check_positive(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}")
