"""The LoRA adapter that a command's flags ask for."""

from __future__ import annotations

from typing import Any


def check_dropout(job: Any) -> None:
    """
    Raises:
        ValueError: a ``lora_dropout`` that is not a probability, or without a new adapter.
    """
    if not 0 <= job.lora_dropout < 1:
        raise ValueError(f"lora_dropout must lie in [0, 1), got {job.lora_dropout}")
    if job.lora_dropout and not job.lora_r:
        raise ValueError(
            f"lora_dropout={job.lora_dropout:g} is for a new adapter: set lora_r, too, or leave it "
            "out (a saved adapter keeps its own)"
        )


def lora_config(job: Any, task_type: str) -> Any:
    """The LoRA configuration of a job; None if its ``lora_r`` is 0.

    Raises:
        FileNotFoundError: a folder without a model.
        ValueError: a rank although the model is already an adapter.
    """
    if job.lora_r == 0:
        return None
    from peft import LoraConfig

    from fastrl.models.load import MERGE_ADAPTER, is_adapter

    if is_adapter(job.model):
        raise ValueError(
            f"lora_r={job.lora_r} asks for a new adapter, but {job.model} is one: leave out lora_r "
            f"to continue training it, or {MERGE_ADAPTER}"
        )
    return LoraConfig(
        r=job.lora_r,
        lora_alpha=job.lora_alpha,
        lora_dropout=job.lora_dropout,
        task_type=task_type,
    )
