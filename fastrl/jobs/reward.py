"""The job behind ``fastrl reward``: a model and preference pairs in, a reward model out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastrl.jobs.fit import COMMAND_DEFAULTS, FitJob, fit, flag, standard_error
from fastrl.supervised.reward import RewardConfig


@dataclass
class RewardJob(FitJob):
    """Pairs to learn from: chosen, rejected, and a prompt that they may share."""

    output: str = flag("Folder for the model, the metrics and the report.", "runs/reward")


@dataclass
class RewardFlags(RewardConfig):
    """RewardConfig with defaults for a command."""

    _argument_group_name: ClassVar[str] = "reward modelling, and transformers' training arguments"

    output_dir: str | None = field(default=None, init=False)
    logging_steps: float = flag("Steps between two logs.", COMMAND_DEFAULTS["logging_steps"])
    eval_strategy: str = flag(
        "When to evaluate: no, steps or epoch.", COMMAND_DEFAULTS["eval_strategy"]
    )
    save_strategy: str = flag(
        "When to save checkpoints beside the final model: no, steps or epoch.",
        COMMAND_DEFAULTS["save_strategy"],
    )
    num_print_samples: int = flag("Pairs to show at each evaluation; -1 is all of them.", 0)


def run_reward(job: RewardJob, flags: RewardFlags) -> dict[str, Any]:
    """Train, save and report."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

    from fastrl.supervised.reward import RewardTrainer

    set_seed(flags.seed)
    flags.output_dir = f"{job.output}/checkpoints"
    train, held_out = job.load(flags.seed)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if held_out is None:
        flags.eval_strategy = type(flags.eval_strategy)("no")
    trainer = RewardTrainer(
        AutoModelForSequenceClassification.from_pretrained(
            job.model, num_labels=1, dtype=job.dtype, use_safetensors=True
        ),
        flags,
        None,
        train,
        held_out,
        processing_class=tokenizer,
        peft_config=job.adapter("SEQ_CLS"),
    )
    pairs: Any = trainer.eval_dataset

    def judge(metrics: dict[str, float]) -> dict[str, float]:
        accuracy = metrics["eval_accuracy"]
        return {
            "held_out_loss": metrics["eval_loss"],
            "held_out_accuracy": accuracy,
            "held_out_accuracy_sem": standard_error(accuracy, len(pairs)),
        }

    title = f"{job.model}: rewards from {job.dataset}"
    return fit(trainer, job, flags, description="reward", title=title, judge=judge)
