"""What the policy wrote for an online task and an annotator said of it, for ledgers and tables."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from fastrl.alignment.annotator import name_of
from fastrl.alignment.batch import Batch
from fastrl.alignment.batch_factory import BatchFactory
from fastrl.alignment.losses import Loss
from fastrl.collect.responses import Collected, Responses
from fastrl.data.chat import as_answer
from fastrl.data.prompts import Prompts
from fastrl.rewards.weighted import RewardBatch
from fastrl.run.processes import Processes


def collected_of(batch: Batch, annotator: Any) -> Collected:
    """The responses of a batch that was sampled, those to a prompt one after the other.

    Rewards are those that are learned from, of pairs the preferences; NaN where the annotator had
    no opinion. Beside them stand its scores, where it gives any: NaN for pairs of equal responses,
    about which it is not asked.
    """
    examples, sides = batch.examples, range(batch.generations)
    rollout, scores = batch.rollout, batch.scores
    assert rollout is not None
    each = [(example, side) for example in examples for side in sides]
    texts = [example.responses[side].text for example, side in each]
    prompts = Prompts(
        [example.said for example, _ in each],
        [example.prompt for example, _ in each],
        [torch.tensor(example.prompt_ids) for example, _ in each],
        {},
        [place for place in batch.places for _ in sides],
        "example {}".format,
    )
    nan = float("nan")
    weighed = [not example.weights or any(example.weights) for example in examples]
    total = [
        example.rewards[side] if counts and example.rewards else nan
        for example, counts in zip(examples, weighed, strict=True)
        for side in sides
    ]
    by_function = {}
    if batch.generations == 1 or hasattr(annotator, "last_scores"):
        asked = [len({e.responses[side].text for side in sides}) == len(sides) for e in examples]
        by_function[name_of(annotator)] = torch.tensor(
            [
                scores[side][i] if scores is not None and asked[i] else nan
                for i in range(len(examples))
                for side in sides
            ],
            dtype=torch.float64,
        )
    rewards = RewardBatch(
        torch.tensor(total, dtype=torch.float64),
        by_function,
        dict.fromkeys(by_function, 0.0),
        0,
        0,
        [None] * len(each),
    )
    responses = Responses(
        prompts,
        rollout.recorded(),
        texts,
        [as_answer(example.said, text) for (example, _), text in zip(each, texts, strict=True)],
    )
    return Collected(responses, rewards, torch.zeros(len(each)))


def joined_at_main(own: Collected | None, processes: Processes) -> Collected | None:
    """The responses of all processes in the order of their batch, with the rooms in which they were
    drawn; None but in the main process.

    Args:
        own: None of a process without a sample.
    """
    parts = [part for part in processes.objects_at_main(own) if part is not None]
    if not processes.is_main:
        return None
    rooms = [part.responses.rollout.room for part in parts for _ in range(len(part))]
    whole = functools.reduce(Collected.joined, parts)
    places = whole.responses.prompts.rows
    order = sorted(range(len(whole)), key=places.__getitem__)
    return replace(whole.select(order), rooms=[rooms[i] for i in order])


def deciding(factory: BatchFactory, loss: Loss) -> dict[str, Any]:
    """What decides what a batch is, beside the settings of the trainer and of the sampling."""
    size = factory.batch_size * factory.world
    return {"task": factory.task.name, "loss": repr(loss), "batch_size": size}


def sampling_of(factory: BatchFactory) -> Mapping[str, Any]:
    """How a factory's responses are sampled, as JSON may have it."""
    settings = asdict(factory.params)
    return {k: list(x) if isinstance(x, tuple) else x for k, x in settings.items()}
