"""The memory of preference learning, from a rehearsal of two optimizer steps."""

from __future__ import annotations

from typing import Any

from fastrl.alignment.arguments import AlignmentConfig
from fastrl.alignment.batch_factory import BatchFactory
from fastrl.alignment.losses import Loss
from fastrl.alignment.trainer import Trainer
from fastrl.data.datas_loader import DatasLoader
from fastrl.plan.rehearsal import rehearsal
from fastrl.plan.report import Plan
from fastrl.plan.skeleton import Skeleton, blank_tokenizer, words
from fastrl.trainers.planning import rehearse_training, rehearsed, shortened_steps

_STEPS = 2


def plan_alignment(
    skeleton: Skeleton,
    args: AlignmentConfig,
    prompt_tokens: int,
    response_tokens: int,
    loss: Loss | str = "dpo",
    device: str = "cpu",
) -> Plan:
    """The memory of the alignment framework's trainer on pairs of responses, all at their greatest
    length.

    Raises:
        ValueError: settings that the trainer refuses; a loss of another task.
    """
    from datasets import Dataset

    size = args.per_device_train_batch_size
    count = _STEPS * size * shortened_steps(args)
    rows: dict[str, list[Any]] = {
        # Each another, because samples with the same prompt run it once.
        "prompt": [words(prompt_tokens, others=i) for i in range(count)],
        "chosen": [words(response_tokens - 1)] * count,
        "rejected": [words(response_tokens - 1, 1)] * count,
    }
    with rehearsal(device) as found:
        tokenizer = blank_tokenizer()
        length = prompt_tokens + response_tokens
        arguments = rehearsed(args, AlignmentConfig, found, max_length=length)
        loader = DatasLoader(Dataset.from_dict(rows), tokenizer, max_length=length)
        factory = BatchFactory("offline-pairwise", loader, batch_size=size)
        trainer = Trainer(skeleton.build(), arguments, factory, loss)
        rehearse_training(trainer, found, skeleton)
        name = loss if isinstance(loss, str) else loss.name
        return Plan.of(
            f"{skeleton.name}: {name}",
            device,
            found,
            {
                "prompt_tokens": prompt_tokens,
                "response_tokens": response_tokens,
                "batch_size": size,
                "reference": args.reference,
            },
        )
