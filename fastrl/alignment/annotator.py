"""Annotators: judges of the policy's responses, by scores or by comparing two."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from fastrl.data.chat import TextOrMessages, as_text
from fastrl.data.columns import REWARD_ARGUMENTS, check_reserved
from fastrl.data.encode import encode_responses
from fastrl.rewards.functions import check_preferences, check_rewards, load_reward
from fastrl.rewards.judges import Counts
from fastrl.rewards.weighted import RewardFunctions, Rewards
from fastrl.user_code import own_copy

# Names of the arguments of annotators and of their reward functions.
RESERVED = (*REWARD_ARGUMENTS, "responses", "firsts", "seconds", "finished")


@runtime_checkable
class Annotator(Protocol):
    """Judges B responses or pairs. ``columns`` are the data's columns beside prompts and
    responses, a list of B values each.

    Prompts and responses are texts; where the data's prompts are chats, both are lists of messages.
    An annotator whose ``wants_finished`` is True also gets ``finished``, see :func:`ask_scores`.
    """

    def score(
        self, prompts: list[TextOrMessages], responses: list[TextOrMessages], **columns: Any
    ) -> list[float]:
        """How good each response is, B finite numbers on any scale."""

    def compare(
        self,
        prompts: list[TextOrMessages],
        firsts: list[TextOrMessages],
        seconds: list[TextOrMessages],
        **columns: Any,
    ) -> list[float | None]:
        """Returns B numbers: 1.0 where the first response is better, 0.0 where the second is, 0.5
        for a tie, or anything between; None, for no opinion, gives the pair weight 0."""

    def statistics(self) -> dict[str, float]:
        """Returns counts since the last call, under names such as "annotator/ties"."""


def ask_scores(
    annotator: Annotator,
    prompts: list[TextOrMessages],
    responses: list[TextOrMessages],
    columns: Mapping[str, list[Any]] | None = None,
    finished: list[bool] | None = None,
) -> list[float]:
    """Asks an annotator for its scores of B responses, and checks them.

    Args:
        finished: False for responses that were cut by a length limit; passed to annotators with
            ``wants_finished``.

    Raises:
        ValueError: the annotator does not return B finite numbers; a column named in ``RESERVED``.
    """
    keywords = _checked_copy(columns)
    if finished is not None and getattr(annotator, "wants_finished", False):
        keywords["finished"] = finished
    scores = annotator.score(own_copy(prompts), own_copy(responses), **keywords)
    return check_rewards(scores, len(prompts), f"{name_of(annotator)}.score")


def ask_preferences(
    annotator: Annotator,
    prompts: list[TextOrMessages],
    firsts: list[TextOrMessages],
    seconds: list[TextOrMessages],
    columns: Mapping[str, list[Any]] | None = None,
    finished: tuple[list[bool], list[bool]] | None = None,
) -> list[float | None]:
    """Asks an annotator for its preferences between B pairs of responses, and checks them.

    Args:
        finished: whether each first and each second response has ended, as in :func:`ask_scores`.

    Raises:
        ValueError: the annotator does not return B numbers in [0, 1] or None; a column named
            in ``RESERVED``.
    """
    keywords = _checked_copy(columns)
    if finished is not None and getattr(annotator, "wants_finished", False):
        keywords["finished"] = finished
    preferences = annotator.compare(*map(own_copy, (prompts, firsts, seconds)), **keywords)
    return check_preferences(preferences, len(prompts), f"{name_of(annotator)}.compare")


def name_of(annotator: Any) -> str:
    """An annotator's name, for messages."""
    return getattr(annotator, "name", None) or type(annotator).__name__


class RewardAnnotator:
    """Judges by reward functions, and compares two responses by their rewards.

    Args:
        reward: a function, called as ``reward(prompts=, completions=, completion_ids=,
            **columns)``, see :mod:`fastrl.rewards.functions`, such as a
            :class:`fastrl.rewards.classifier.ClassifierReward`; a list or dict of functions; or a
            :class:`fastrl.rewards.weighted.Rewards`, which has weights, a time limit and retries.
        tokenizer: makes ``completion_ids``; needed only by reward functions that take them.

    Attributes:
        last_scores: the rewards of the first and of the second responses of the last comparison;
            None before a comparison.
    """

    def __init__(self, reward: RewardFunctions | Rewards, tokenizer: Any = None):
        self.reward, self.tokenizer = reward, tokenizer
        self._rewards = reward if isinstance(reward, Rewards) else Rewards(reward)
        self.name = f"RewardAnnotator({', '.join(self._rewards.names)})"
        self.last_scores: tuple[list[float], list[float]] | None = None
        self._needs_ids = tokenizer is None and any(
            _needs(function, "completion_ids") for function in self._rewards.functions
        )
        self._counts = Counts(calls=0, ties=0)

    @property
    def wants_finished(self) -> bool:
        """Whether a reward function takes ``finished``."""
        return self._rewards.wants_finished

    def score(
        self, prompts: list[TextOrMessages], responses: list[TextOrMessages], **columns: Any
    ) -> list[float]:
        """Rewards of B responses.

        Raises:
            ValueError: a reward function returns other than B finite numbers (None is allowed where
                another judges), or needs ``completion_ids``, and the annotator has no tokenizer.
            TimeoutError: a reward function takes longer than the time limit of ``reward``.
        """
        ids, finished = None, columns.pop("finished", None)
        if self.tokenizer is not None and responses:
            ids = encode_responses(list(map(as_text, responses)), self.tokenizer)
        if self._needs_ids and ids is None:
            raise ValueError(f"{self.name} takes completion_ids: make it with a tokenizer")
        self._counts["calls"] += len(responses)
        rewards = self._rewards(prompts, responses, ids, columns, finished=finished)
        return rewards.total.tolist()

    def compare(
        self,
        prompts: list[TextOrMessages],
        firsts: list[TextOrMessages],
        seconds: list[TextOrMessages],
        **columns: Any,
    ) -> list[float | None]:
        """Returns 1.0 where the first response has the higher reward, 0.5 for a tie, else 0.0."""
        finished = columns.pop("finished", None)
        scores = []
        for i, side in enumerate((firsts, seconds)):
            extra = {} if finished is None else {"finished": finished[i]}
            scores.append(self.score(prompts, side, **columns, **extra))
        self.last_scores = (scores[0], scores[1])
        preferences = preferences_of(*scores)
        self._counts["ties"] += preferences.count(0.5)
        return preferences

    def statistics(self) -> dict[str, float]:
        """Counts of scored responses ("annotator/calls") and of ties ("annotator/ties")."""
        return self._counts.read()


def preferences_of(firsts: Sequence[float], seconds: Sequence[float]) -> list[float | None]:
    """Returns 1.0 where the first score is higher, 0.0 where the second is, 0.5 for equal ones."""
    return [0.5 if a == b else float(a > b) for a, b in zip(firsts, seconds, strict=True)]


def load_annotator(
    name: str, *, label: int | str | None = None, batch_size: int = 64, tokenizer: Any = None
) -> Annotator:
    """Returns the annotator for the reward function that a command line names.

    Args:
        name, label, batch_size: see :func:`fastrl.rewards.functions.load_reward`, which may raise.
        tokenizer: for functions that take ``completion_ids``.
    """
    return RewardAnnotator(load_reward(name, label=label, batch_size=batch_size), tokenizer)


def _needs(function: Any, argument: str) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get(argument)
    except ValueError:  # some functions written in C have no signature
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _checked_copy(columns: Mapping[str, list[Any]] | None) -> dict[str, Any]:
    check_reserved(columns or (), "the data", RESERVED)
    return own_copy(dict(columns or {}))
