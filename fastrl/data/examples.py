"""An example of a data set, as text and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Response:
    """A response to a prompt.

    Attributes:
        ids: the tokens behind the prompt's; EOS is the last if it was added and not cut off.
        finished: False if it was cut by a length limit.
    """

    text: str
    ids: tuple[int, ...]
    finished: bool = True


@dataclass(frozen=True)
class Example:
    """A prompt with the responses to train on, and their labels.

    Attributes:
        prompt: the prompt's text as the model reads it, chat template included.
        prompt_ids: its tokens.
        responses: none, one, or a pair; in pairs from the data the first is preferred.
        desired: the label of a single response; None if the data have none.
        columns: the row's other columns.
        rewards: the responses' rewards; None if they have not been judged.
        weights: the responses' weights; empty: 1 each.
        messages: the prompt as chat messages, as the data have it; None where it is a text.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    responses: tuple[Response, ...] = ()
    desired: bool | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    rewards: tuple[float, ...] | None = None
    weights: tuple[float, ...] = ()
    messages: list[dict[str, Any]] | None = None

    @property
    def said(self) -> str | list[dict[str, Any]]:
        """The prompt as reward functions and judges get it: a text, or chat messages."""
        return self.prompt if self.messages is None else self.messages
