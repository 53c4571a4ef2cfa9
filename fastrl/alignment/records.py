"""The responses of an online task and the annotator's judgements, for ledgers and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from fastrl.alignment.annotator import name_of
from fastrl.alignment.batch import Batch
from fastrl.alignment.batch_factory import BatchFactory
from fastrl.alignment.losses import Loss
from fastrl.data.chat import as_answer
from fastrl.run.processes import Processes
from fastrl.samples import Samples


def samples_of(batch: Batch, annotator: Any) -> Samples:
    """The samples of an online batch, with all responses to a prompt one after the other.

    ``rewards`` are those that the loss reads, for pairs the preferences p and 1 - p; NaN where the
    annotator had no opinion. ``rewards_by_function`` has the scores of an annotator that scores:
    NaN for pairs of equal responses, which it does not judge.
    """
    examples, sides = batch.examples, range(batch.generations)
    rollout, scores = batch.rollout, batch.scores
    assert rollout is not None
    each = [(example, side) for example in examples for side in sides]
    texts = [example.responses[side].text for example, side in each]
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
    return replace(
        rollout.recorded(),
        prompts=[example.said for example, _ in each],
        prompt_texts=[example.prompt for example, _ in each],
        prompt_ids=[torch.tensor(example.prompt_ids) for example, _ in each],
        prompt_rows=[place for place in batch.places for _ in sides],
        texts=texts,
        completions=[
            as_answer(example.said, text) for (example, _), text in zip(each, texts, strict=True)
        ],
        rewards=torch.tensor(total, dtype=torch.float64),
        rewards_by_function=by_function,
        penalties=torch.zeros(len(each)),
        rooms=[rollout.room] * len(each),
    )


def joined_at_main(samples: Samples | None, processes: Processes) -> Samples | None:
    """Returns all processes' samples, in the order of the batch, in the main process; None in the
    other processes.

    Args:
        samples: this process's samples; None where it has none.
    """
    parts = [part for part in processes.objects_at_main(samples) if part is not None]
    if not processes.is_main:
        return None
    whole = Samples.joined(parts)
    return whole.select(sorted(range(len(whole)), key=whole.prompt_rows.__getitem__))


def deciding(factory: BatchFactory, loss: Loss) -> dict[str, Any]:
    """The task, the loss and the batch size of all processes, which a replay must have, too."""
    size = factory.batch_size * factory.world
    return {"task": factory.task.name, "loss": repr(loss), "batch_size": size}


def sampling_of(factory: BatchFactory) -> Mapping[str, Any]:
    """The settings by which a factory samples responses, as JSON values."""
    settings = asdict(factory.params)
    return {k: list(x) if isinstance(x, tuple) else x for k, x in settings.items()}
