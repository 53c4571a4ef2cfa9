"""One example of a data set, as text and as the tokens that a model reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Response:
    """A response to a prompt; its ids follow the prompt's, and end in EOS where it is complete.

    Attributes:
        finished: False where a length has cut it.
    """

    text: str
    ids: tuple[int, ...]
    finished: bool = True


@dataclass(frozen=True)
class Example:
    """A prompt, the responses to it that are learned from, and what a data set has beside them.

    Attributes:
        prompt: as the model reads it, chat template included.
        prompt_ids: its tokens.
        responses: none, one, or a pair; of the data's pairs the first is the preferred one.
        desired: of a single response, whether it is a good one; None where the data do not say.
        columns: the row's other columns.
        rewards: of the responses; None where nobody has judged them.
        weights: of the responses, 1 each where there are none.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    responses: tuple[Response, ...] = ()
    desired: bool | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    rewards: tuple[float, ...] | None = None
    weights: tuple[float, ...] = ()
