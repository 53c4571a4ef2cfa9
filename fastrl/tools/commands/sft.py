"""``fastrl sft``: supervised fine-tuning of a language model on texts or conversations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from fastrl.settings import setting, setting_like
from fastrl.tools.commands.fit import CommandFlags, FitJob, essential_flags, fit
from fastrl.tools.commands.memory import longest_text
from fastrl.trainers.sft import SFTConfig


@dataclass(kw_only=True)
class SFTJob(FitJob):
    """A job of ``fastrl sft``: what to train, on which texts, and where the results go."""

    command: ClassVar[str] = "sft"
    essentials: ClassVar[dict[str, str]] = essential_flags(
        "", "max_length dataset_text_field response_template packing"
    )

    output: str = setting_like(FitJob, "output", "runs/sft")
    response_template: str | None = setting(
        "Learn only what follows this text in each example, such as '### Answer:'.", None
    )


@dataclass
class SFTFlags(CommandFlags, SFTConfig):
    """SFTConfig with defaults for a command."""

    _argument_group_name: ClassVar[str] = "SFT, and transformers' training arguments"


def run_sft(job: SFTJob, flags: SFTFlags) -> dict[str, Any]:
    """Trains, saves and reports; returns what :func:`fit` does."""
    from fastrl.data.collators import DataCollatorForCompletionOnlyLM
    from fastrl.models.load import load_language_model
    from fastrl.trainers.sft import SFTTrainer

    with job.claimed(flags) as folder:
        peft_config = job.lora_config("CAUSAL_LM")
        train, held_out, tokenizer = job.begin(flags)
        trainer = SFTTrainer(
            load_language_model(job.model, **job.loading(flags), trainable=True),
            flags,
            None
            if job.response_template is None
            else DataCollatorForCompletionOnlyLM(job.response_template, tokenizer=tokenizer),
            train,
            held_out,
            processing_class=tokenizer,
            peft_config=peft_config,
        )

        def results(metrics: dict[str, float]) -> dict[str, float]:
            loss = metrics["eval_loss"]
            return {"held_out_loss": loss, "held_out_perplexity": math.exp(min(loss, 700.0))}

        return fit(
            trainer,
            folder,
            job,
            flags,
            description="SFT",
            title=f"{job.model}: SFT on {job.dataset}",
            results=results,
            lengths=lambda: (longest_text(trainer.train_dataset, "input_ids"),),
        )
