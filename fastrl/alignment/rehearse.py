"""Rehearses the alignment framework's trainer, with made-up data and an indifferent annotator."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from fastrl.alignment.batch_factory import BatchFactory
from fastrl.alignment.losses import Loss, make_loss
from fastrl.alignment.tasks import Task, find_task
from fastrl.data.columns import ANSWERS, FEEDBACK, PAIRS
from fastrl.data.datas_loader import DatasLoader
from fastrl.rollout import SamplingParams
from fastrl.trainers.plan.skeleton import blank_tokenizer, words
from fastrl.trainers.rehearse import Stage, Surface, alternating, reward_model


def _run(
    stage: Stage, loss: Loss | str = "dpo", task: Task | str | None = None
) -> tuple[str, dict[str, Any]]:
    """Rehearses a loss for a task, by default the loss's first, on samples of full length, which
    the policy samples if the task is online.

    Raises:
        ValueError: an unknown loss or task, or a task that the loss does not fit.
    """
    loss = make_loss(loss) if isinstance(loss, str) else copy.deepcopy(loss)
    task = find_task(task or loss.tasks[0])
    tokenizer = blank_tokenizer()
    count = stage.count * max(1, loss.minibatches_per_batch)
    factory = BatchFactory(
        task,
        DatasLoader(_rows(task.data, count, **stage.tokens), tokenizer, max_length=stage.length),
        batch_size=stage.size,
        annotator=_Indifferent() if task.online else None,
        params=SamplingParams(max_new_tokens=stage.tokens["response_tokens"]),
    )
    learns_rewards = loss.learns == "reward model"
    model = reward_model(stage.skeleton) if learns_rewards else stage.skeleton.build()
    arguments = stage.arguments(max_length=stage.length)
    trainer = stage.trainer_class(model, arguments, factory, loss)
    if task.online:
        options = {"autocast": trainer.accelerator.autocast, "max_slots": arguments.rollout_slots}
        policy = trainer.accelerator.unwrap_model(trainer.model)
        engine = stage.engine(policy, tokenizer, **options)
        if engine is not None:
            factory.sample_with(engine)
        stage.memory.notes.append("the annotator's memory: left out")
    stage.train(trainer, getattr(trainer.learner, "reference", None))
    sizes = {"batch_size": stage.size, "reference": stage.settings.reference}
    return f"{loss.name}, {task.name}", sizes


class _Indifferent:
    """An annotator whose judgements do not depend on the responses."""

    def score(self, prompts: Any, responses: Sequence[Any], **_: Any) -> list[float]:
        return alternating(responses)

    def compare(self, prompts: Sequence[Any], *_: Any, **__: Any) -> list[float | None]:
        return [1.0] * len(prompts)

    def statistics(self) -> dict[str, float]:
        return {}


def _rows(kind: str, count: int, prompt_tokens: int, response_tokens: int) -> Any:
    """A data set of ``count`` examples of a kind of :mod:`fastrl.data.columns`."""
    from datasets import Dataset

    good, bad = words(response_tokens - 1), words(response_tokens - 1, 1)
    # All prompts differ, because samples with the same prompt run it once.
    rows: dict[str, list[Any]] = {"prompt": [words(prompt_tokens, others=i) for i in range(count)]}
    if kind == PAIRS:
        rows |= {"chosen": [good] * count, "rejected": [bad] * count}
    elif kind in (ANSWERS, FEEDBACK):
        rows["response"] = [good if i % 2 else bad for i in range(count)]
    if kind == FEEDBACK:
        rows["label"] = [bool(i % 2) for i in range(count)]
    return Dataset.from_dict(rows)


def _samples(trainer: Any) -> tuple[int, int]:
    """How many texts a batch has, and the fewest that a pass can have: 1; for a reward model the
    texts of an example; for a loss with a ``backward`` those of a batch."""
    texts, loss = trainer.factory.task.generations, trainer.loss
    whole = trainer.factory.batch_size * texts
    if loss.backward is not None:
        return whole, whole
    return whole, texts if loss.learns == "reward model" else 1


ALIGNMENT = Surface(
    _run, _samples, lambda trainer: {"loss": trainer.loss, "task": trainer.factory.task}
)
