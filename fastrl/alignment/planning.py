"""The memory of preference learning, from a rehearsal of two optimizer steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from fastrl.alignment.arguments import AlignmentConfig
from fastrl.alignment.batch_factory import BatchFactory
from fastrl.alignment.losses import Loss, make_loss
from fastrl.alignment.tasks import Task, find_task
from fastrl.data.columns import ANSWERS, FEEDBACK, PAIRS
from fastrl.data.datas_loader import DatasLoader
from fastrl.plan.rehearsal import OPTIMIZER_STEPS, Rehearsal, rehearsal
from fastrl.plan.report import Plan
from fastrl.plan.skeleton import Skeleton, blank_tokenizer, words
from fastrl.rollout import SamplingParams
from fastrl.rollout.rehearsed_engine import RehearsedEngine
from fastrl.rollout.self_check import UnsupportedModel
from fastrl.samples import Samples
from fastrl.trainers.planning import (
    TrainerClass,
    rehearse_training,
    rehearsed,
    reward_model,
    shortened_steps,
)


def plan_alignment(
    trainer_class: TrainerClass,
    skeleton: Skeleton,
    args: AlignmentConfig,
    prompt_tokens: int,
    response_tokens: int,
    loss: Loss | str = "dpo",
    device: str = "cpu",
    task: Task | str | None = None,
) -> Plan:
    """The memory of the alignment framework's trainer on samples that all have their greatest
    length; online with the rollouts of the policy, and without the annotator's memory.

    Args:
        task: by default the loss's first.

    Raises:
        ValueError: settings that the trainer refuses; a loss of another task.
    """
    loss = make_loss(loss) if isinstance(loss, str) else copy.deepcopy(loss)
    task = find_task(task or loss.tasks[0])
    skeleton.check_tokens(prompt_tokens=prompt_tokens, response_tokens=response_tokens)
    size = args.per_device_train_batch_size
    count = OPTIMIZER_STEPS * max(1, loss.minibatches_per_batch) * size * shortened_steps(args)
    with rehearsal(device) as found:
        tokenizer = blank_tokenizer()
        length = prompt_tokens + response_tokens
        arguments = rehearsed(args, trainer_class.args_class, found, max_length=length)
        rows = _rows(task.data, count, prompt_tokens, response_tokens)
        factory = BatchFactory(
            task,
            DatasLoader(rows, tokenizer, max_length=length),
            batch_size=size,
            annotator=_Indifferent() if task.online else None,
            params=SamplingParams(max_new_tokens=response_tokens),
        )
        judges = loss.learns == "reward model"
        model = reward_model(skeleton) if judges else skeleton.build()
        trainer = trainer_class(model, arguments, factory, loss)
        if task.online:
            _sample_in_rehearsal(trainer, factory, found, response_tokens)
            found.notes.append("the annotator's memory: left out")
        rehearse_training(trainer, found, skeleton)
        return Plan.of(
            f"{skeleton.name}: {loss.name}, {task.name}",
            device,
            found,
            {
                "prompt_tokens": prompt_tokens,
                "response_tokens": response_tokens,
                "batch_size": size,
                "reference": args.reference,
            },
        )


def _rows(kind: str, count: int, prompt_tokens: int, response_tokens: int) -> Any:
    """Examples of a kind, as a data set."""
    from datasets import Dataset

    good, bad = words(response_tokens - 1), words(response_tokens - 1, 1)
    # Each prompt is another, because samples with the same prompt run it once.
    rows: dict[str, list[Any]] = {"prompt": [words(prompt_tokens, others=i) for i in range(count)]}
    if kind == PAIRS:
        rows |= {"chosen": [good] * count, "rejected": [bad] * count}
    elif kind in (ANSWERS, FEEDBACK):
        rows["response"] = [good if i % 2 else bad for i in range(count)]
    if kind == FEEDBACK:
        rows["label"] = [bool(i % 2) for i in range(count)]
    return Dataset.from_dict(rows)


class _Indifferent:
    """An annotator for responses that say nothing."""

    def score(self, prompts: Sequence[Any], responses: Sequence[Any], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(responses))]

    def compare(
        self, prompts: Sequence[Any], firsts: Sequence[Any], seconds: Sequence[Any], **_: Any
    ) -> list[float | None]:
        return [1.0 for _ in prompts]

    def statistics(self) -> dict[str, float]:
        return {}


class _Rollouts:
    """The engine of an online task in a rehearsal."""

    def __init__(self, engine: RehearsedEngine, found: Rehearsal, tokens: int):
        self.engine, self.found, self.tokens = engine, found, tokens
        self.model = engine.model

    def generate(
        self, prompts: Sequence[Any], params: SamplingParams, sample_ids: Any = None
    ) -> Samples:
        self.engine.rehearse(prompts, params)
        self.found.keeps(*self.engine.memory())
        count = params.n * len(prompts)
        response = torch.full((self.tokens,), 2)
        return Samples([response] * count, ["length"] * count)

    def sleep(self) -> None:
        self.engine.sleep()


def _sample_in_rehearsal(
    trainer: Any, factory: BatchFactory, found: Rehearsal, response_tokens: int
) -> None:
    """Has a rehearsed engine, or nobody, write the responses."""
    try:
        engine = RehearsedEngine(
            trainer.accelerator.unwrap_model(trainer.model),
            factory.tokenizer,
            autocast=trainer.accelerator.autocast,
            max_slots=trainer.args.rollout_slots,
        )
    except UnsupportedModel as error:
        found.notes.append(f"the KV cache, left out: {error.cause}")
        return
    factory.sample_with(_Rollouts(engine, found, response_tokens))
