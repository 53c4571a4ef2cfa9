"""The LoRA adapter that a command's flags ask for."""

from __future__ import annotations

from typing import Any


def lora_config(job: Any, task_type: str) -> Any:
    """Of a job with ``lora_r``, ``lora_alpha`` and ``lora_dropout``; None where the rank is 0."""
    if job.lora_r == 0:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=job.lora_r,
        lora_alpha=job.lora_alpha,
        lora_dropout=job.lora_dropout,
        task_type=task_type,
    )
