"""What ends responses of ``model.generate`` besides EOS and their length, and where it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from fastrl.rollout.sampling_params import check_stop

STOPPING = ("stop", "stop_strings", "stopping_criteria", "max_time")


class NoStops:
    """Of a call in which nothing else ends a response."""

    def __init__(self, rows: int):
        self.rows = rows

    def kwargs(self) -> dict[str, Any]:
        """What ``generate`` is given."""
        return {}

    def lengths(self) -> list[int | None]:
        """After how many new tokens each row was stopped; None where it was not."""
        return [None] * self.rows


class RecordedStops(NoStops, StoppingCriteria):
    """Criteria in one, which remembers where each row was stopped: behind that ``generate`` pads
    the row, with a token that may well be its EOS.

    Args:
        criteria: that stop a row.
        front: tokens in front of the new ones.
        rows: prompts of the call.
        device: of the model.
    """

    def __init__(self, criteria: StoppingCriteriaList, front: int, rows: int, device: torch.device):
        super().__init__(rows)
        self.criteria, self.front = criteria, front
        self.stopped = torch.zeros(rows, dtype=torch.long, device=device)  # 0: not yet

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = self.criteria(input_ids, scores, **kwargs)
        first = done & (self.stopped == 0)
        self.stopped = torch.where(first, input_ids.shape[1] - self.front, self.stopped)
        return done

    def kwargs(self) -> dict[str, Any]:
        return {"stopping_criteria": StoppingCriteriaList([self])}

    def lengths(self) -> list[int | None]:
        return [length or None for length in self.stopped.tolist()]


class RecordedNaN(LogitsProcessor):
    """Remembers after how many new tokens the logits of each row became NaN, from which nothing can
    be drawn: ``generate`` would end the call for all rows. What it draws there is to be cut off.

    Args:
        front: tokens in front of the new ones.
        rows: prompts of the call.
        device: of the model.
    """

    def __init__(self, front: int, rows: int, device: torch.device):
        self.front = front
        self.at = torch.full((rows,), -1, dtype=torch.long, device=device)  # -1: not yet

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bad = scores.isnan().any(-1)
        self.at = torch.where(bad & (self.at < 0), input_ids.shape[1] - self.front, self.at)
        return torch.where(bad[:, None], 0.0, scores)

    def lengths(self) -> list[int | None]:
        """New tokens in front of the first NaN of each row; None where there is none."""
        return [None if at < 0 else at for at in self.at.tolist()]


class _StopTokens(StoppingCriteria):
    """Token sequences that end a response."""

    def __init__(self, stops: Sequence[Sequence[int]], front: int, device: torch.device):
        self.stops = [torch.tensor([int(t) for t in stop]).to(device) for stop in stops]
        self.front = front

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return ends_with(input_ids[:, self.front :], self.stops)


def ends_with(new: Tensor, stops: Sequence[Tensor]) -> Tensor:
    """Which rows of [b, T] end with one of the sequences, [b] bool."""
    done = torch.zeros(len(new), dtype=torch.bool, device=new.device)
    for stop in stops:
        if len(stop) <= new.shape[1]:
            done = done | (new[:, -len(stop) :] == stop).all(1)
    return done


def beams_of(kwargs: Mapping[str, Any], model: Any) -> int:
    """Of a call of ``generate``."""
    config = getattr(model, "pretrained_model", model).generation_config
    return kwargs.get("num_beams") or getattr(config, "num_beams", None) or 1


def stops_of(
    kwargs: dict[str, Any], model: Any, tokenizer: Any
) -> Callable[[int, int, torch.device], NoStops]:
    """What makes the stops of a call of ``generate`` from (tokens in front of the new ones, rows,
    device). What they do themselves is taken out of ``kwargs``.

    Raises:
        ValueError: several beams, whose rows are not those of the prompts; ``stop`` is not a list
            of token sequences.
    """
    config = getattr(model, "pretrained_model", model).generation_config
    found = {
        name: kwargs.pop(name) if name in kwargs else getattr(config, name, None)
        for name in STOPPING
    }
    for name in ("stop_strings", "max_time"):  # of the model's generation_config
        if getattr(config, name, None) is not None:
            kwargs[name] = None
    check_stop(found["stop"] or ())
    reader = kwargs.pop("tokenizer", None) or tokenizer
    asked = [name for name, value in found.items() if value]
    if not asked:
        return lambda front, rows, device: NoStops(rows)
    beams = beams_of(kwargs, model)
    if beams > 1:
        raise ValueError(
            f"{asked[0]} with num_beams={beams} is not supported: where a beam was stopped is not "
            "known; leave one of the two out"
        )

    def make(front: int, rows: int, device: torch.device) -> NoStops:
        criteria = StoppingCriteriaList(found["stopping_criteria"] or [])
        if found["stop"]:
            criteria.append(_StopTokens(found["stop"], front, device))
        if found["stop_strings"]:
            criteria.append(
                StopStringCriteria(tokenizer=reader, stop_strings=found["stop_strings"])
            )
        if found["max_time"]:
            criteria.append(MaxTimeCriteria(max_time=found["max_time"]))
        return RecordedStops(criteria, front, rows, device)

    return make
