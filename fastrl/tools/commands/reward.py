"""``fastrl reward``: a reward model from preference pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fastrl.data.collators import ID_COLUMNS, SIDES
from fastrl.settings import setting_like
from fastrl.tools.commands.fit import CommandFlags, FitJob, essential_flags, fit, held_out_accuracy
from fastrl.tools.commands.memory import longest_text, most_in_a_pass
from fastrl.trainers.reward import RewardConfig


@dataclass(kw_only=True)
class RewardJob(FitJob):
    """A job of ``fastrl reward``: what to train, on which pairs, and where the results go."""

    command: ClassVar[str] = "reward"
    essentials: ClassVar[dict[str, str]] = essential_flags("", "max_length")

    output: str = setting_like(FitJob, "output", "runs/reward")


@dataclass
class RewardFlags(CommandFlags, RewardConfig):
    """RewardConfig with defaults for a command."""

    _argument_group_name: ClassVar[str] = "reward modelling, and transformers' training arguments"

    num_print_samples: int = setting_like(RewardConfig, "num_print_samples", 0)


def run_reward(job: RewardJob, flags: RewardFlags) -> dict[str, Any]:
    """Trains, saves and reports; returns what :func:`fit` does."""
    from fastrl.data.reads_eos import load_from_adapter
    from fastrl.models.load import load_reward_model
    from fastrl.trainers.reward import RewardTrainer

    with job.claimed(flags) as folder:
        peft_config = job.lora_config("SEQ_CLS")
        train, held_out, tokenizer = job.begin(flags)
        model = load_reward_model(job.model, **job.loading(flags))
        load_from_adapter(model, job.model)
        trainer = RewardTrainer(
            model, flags, None, train, held_out, processing_class=tokenizer, peft_config=peft_config
        )
        pairs: Any = trainer.eval_dataset

        def results(metrics: dict[str, float]) -> dict[str, float]:
            accuracy = held_out_accuracy(metrics["eval_accuracy"], len(pairs))
            return {"held_out_loss": metrics["eval_loss"], **accuracy}

        return fit(
            trainer,
            folder,
            job,
            flags,
            description="reward",
            title=f"{job.model}: rewards from {job.dataset}",
            results=results,
            lengths=lambda: (_longest(trainer, flags),),
        )


def _longest(trainer: Any, flags: RewardFlags) -> int:
    """The texts' length in a plan: the longest text's, or less if two of it exceed a pass."""
    longest = longest_text(trainer.train_dataset, *ID_COLUMNS)
    return most_in_a_pass(longest, flags.micro_batch_tokens, len(SIDES))
