"""The memory of trainers on transformers' Trainer, from a rehearsal of two optimizer steps."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Protocol

from transformers import AutoModelForSequenceClassification, PrinterCallback, ProgressCallback

from fastrl.plan.rehearsal import OPTIMIZER_STEPS, UPDATE, Rehearsal, rehearsal
from fastrl.plan.report import Plan
from fastrl.plan.skeleton import Skeleton, blank_tokenizer, words
from fastrl.trainers.supervised import SupervisedArguments

# What a rehearsal does not do: it saves, evaluates and reports nothing, and runs on a CPU.
_NOT_REHEARSED: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": OPTIMIZER_STEPS,
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "push_to_hub": False,
    "load_best_model_at_end": False,
    "dataloader_pin_memory": False,
    "dataloader_num_workers": 0,
    "resume_from_checkpoint": None,
    "torch_compile": False,
    "disable_tqdm": True,
    "warmup_steps": 0,
    "dataset_num_proc": None,
    "evaluation_strategy": None,
    **dict.fromkeys(("eos_token", "pad_token", "chat_template_path")),  # of the run's tokenizer
}


class TrainerClass(Protocol):
    """A class of trainers on transformers' Trainer, and that of their arguments."""

    args_class: type

    def __call__(self, model: Any, args: Any, /, *others: Any, **settings: Any) -> Any:
        """Makes a trainer."""


def plan_sft(
    trainer_class: TrainerClass,
    skeleton: Skeleton,
    args: SupervisedArguments,
    tokens: int,
    device: str = "cpu",
) -> Plan:
    """The memory of an SFTTrainer whose texts all have ``tokens`` tokens.

    Raises:
        ValueError: settings that the trainer refuses.
    """
    from datasets import Dataset

    skeleton.check_tokens(tokens=tokens)
    count = OPTIMIZER_STEPS * args.per_device_train_batch_size * shortened_steps(args)
    with rehearsal(device) as memory:
        rows = Dataset.from_dict({"input_ids": [[2] * tokens] * count})
        trainer = trainer_class(
            skeleton.build(),
            rehearsed(args, trainer_class.args_class, memory, max_length=tokens),
            train_dataset=rows,
            processing_class=blank_tokenizer(),
        )
        rehearse_training(trainer, memory, skeleton)
        return Plan.of(f"{skeleton.name}: SFT", device, memory, _sizes(args, tokens))


def plan_reward(
    trainer_class: TrainerClass,
    skeleton: Skeleton,
    args: SupervisedArguments,
    tokens: int,
    device: str = "cpu",
) -> Plan:
    """The memory of a RewardTrainer whose texts, two of each pair, have ``tokens`` tokens.

    Raises:
        ValueError: settings that the trainer refuses.
    """
    from datasets import Dataset

    skeleton.check_tokens(tokens=tokens)
    count = OPTIMIZER_STEPS * args.per_device_train_batch_size * shortened_steps(args)
    with rehearsal(device) as memory:
        sides = {"chosen": [words(tokens - 1)], "rejected": [words(tokens - 1, 1)]}
        rows = Dataset.from_dict({side: texts * count for side, texts in sides.items()})
        trainer = trainer_class(
            reward_model(skeleton),
            rehearsed(args, trainer_class.args_class, memory, max_length=tokens, append_eos=True),
            train_dataset=rows,
            processing_class=blank_tokenizer(),
        )
        rehearse_training(trainer, memory, skeleton)
        return Plan.of(f"{skeleton.name}: reward model", device, memory, _sizes(args, tokens))


def reward_model(skeleton: Skeleton) -> Any:
    """A classifier with one label; to be called within a rehearsal."""
    skeleton = copy.copy(skeleton)
    skeleton.config = copy.deepcopy(skeleton.config)
    skeleton.config.num_labels, skeleton.config.get_text_config().pad_token_id = 1, 0
    if skeleton.adapter is not None:
        skeleton.adapter = copy.deepcopy(skeleton.adapter)
        skeleton.adapter.task_type = "SEQ_CLS"
    return skeleton.build(AutoModelForSequenceClassification)


def shortened_steps(args: Any) -> int:
    """Passes of an optimizer step that are rehearsed: from the second on there are gradients."""
    return min(args.gradient_accumulation_steps, 2)


def rehearsed(args: Any, kind: type, memory: Rehearsal, **own: Any) -> Any:
    """A trainer's arguments, changed for a rehearsal."""
    given = {
        f.name: getattr(args, f.name)
        for f in dataclasses.fields(kind)
        if f.init and hasattr(args, f.name)
    }
    accumulated = {"gradient_accumulation_steps": shortened_steps(args)}
    given |= _NOT_REHEARSED | accumulated | own | {"output_dir": str(memory.folder)}
    known = {f.name for f in dataclasses.fields(kind) if f.init}
    return kind(**{name: x for name, x in given.items() if name in known})


def rehearse_training(trainer: Any, memory: Rehearsal, skeleton: Skeleton) -> None:
    """Runs a trainer's steps."""
    memory.notes += skeleton.guesses
    for kind in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(kind)
    trainer.create_optimizer()
    memory.follow(trainer.model, trainer.optimizer)
    learner = getattr(trainer, "learner", None)  # of the alignment framework
    reference = getattr(trainer, "_reference", getattr(learner, "reference", None))
    memory.loaded(reference, trainer.model)
    with memory.log.phase(UPDATE):
        trainer.train()


def _sizes(args: Any, tokens: int) -> dict[str, Any]:
    return {"tokens": tokens, "batch_size": args.per_device_train_batch_size}
