"""The job behind ``fastrl sft``: a language model and texts in, a fitted model and a report out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastrl.jobs.fit import COMMAND_DEFAULTS, FitJob, fit, flag
from fastrl.supervised.sft import SFTConfig


@dataclass
class SFTJob(FitJob):
    """Texts to learn."""

    output: str = flag("Folder for the model, the metrics and the report.", "runs/sft")
    response_template: str | None = flag(
        "Learn only what follows this text in each example, such as '### Answer:'.", None
    )


@dataclass
class SFTFlags(SFTConfig):
    """SFTConfig with defaults for a command."""

    _argument_group_name: ClassVar[str] = "SFT, and transformers' training arguments"

    output_dir: str | None = field(default=None, init=False)
    logging_steps: float = flag("Steps between two logs.", COMMAND_DEFAULTS["logging_steps"])
    eval_strategy: str = flag(
        "When to evaluate: no, steps or epoch.", COMMAND_DEFAULTS["eval_strategy"]
    )
    save_strategy: str = flag(
        "When to save checkpoints beside the final model: no, steps or epoch.",
        COMMAND_DEFAULTS["save_strategy"],
    )


def run_sft(job: SFTJob, flags: SFTFlags) -> dict[str, Any]:
    """Train, save and report."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from fastrl.supervised.sft import SFTTrainer
    from fastrl.supervised.texts import DataCollatorForCompletionOnlyLM

    set_seed(flags.seed)
    flags.output_dir = f"{job.output}/checkpoints"
    train, held_out = job.load(flags.seed)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if held_out is None:
        flags.eval_strategy = type(flags.eval_strategy)("no")
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype, use_safetensors=True),
        flags,
        None
        if job.response_template is None
        else DataCollatorForCompletionOnlyLM(job.response_template, tokenizer=tokenizer),
        train,
        held_out,
        processing_class=tokenizer,
        peft_config=job.adapter("CAUSAL_LM"),
    )

    def judge(metrics: dict[str, float]) -> dict[str, float]:
        loss = metrics["eval_loss"]
        return {"held_out_loss": loss, "held_out_perplexity": math.exp(min(loss, 700.0))}

    title = f"{job.model}: SFT on {job.dataset}"
    return fit(trainer, job, flags, description="SFT", title=title, judge=judge)
