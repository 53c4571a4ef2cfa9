"""Settings of the alignment framework's trainer."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.config import REFERENCE_DTYPES, PPOConfig
from fastrl.settings import setting, setting_like
from fastrl.trainers.supervised import SupervisedArguments

REFERENCES = ("auto", "cached", "copy", "adapter", "trunk", "offload")


@dataclass
class AlignmentConfig(SupervisedArguments):
    """Settings of :class:`fastrl.alignment.Trainer`, beside those of
    ``transformers.TrainingArguments``. The :class:`BatchFactory` has the batch size and the number
    of samples.

    Raises:
        ValueError: an unknown reference, or layers to share without it.
    """

    max_length: int | None = setting(
        "Longest prompt with its response, in tokens. None: the model's limit.",
        1024,
        within="[1, inf)",
    )
    reference: str = setting(
        "Reference model of the losses: cached (its log-probs are computed once, before training; "
        "offline), copy (a frozen copy), adapter (a PEFT model's base), trunk (a copy that shares "
        "the bottom layers), offload (a copy in host memory), auto (adapter for PEFT models, trunk "
        "with num_shared_layers, cached for offline tasks, else copy).",
        "auto",
    )
    num_shared_layers: int | None = setting_like(PPOConfig, "num_shared_layers")
    reference_dtype: str = setting_like(PPOConfig, "reference_dtype")
    reference_adapter: str = setting_like(PPOConfig, "reference_adapter")
    disable_dropout: bool = setting("Train without dropout.", True)
    rollout_slots: int = setting_like(PPOConfig, "rollout_slots")

    def __post_init__(self) -> None:
        for name in (
            "trust_remote_code",
            "chat_template_path",
            "eos_token",
            "pad_token",
            "pad_to_multiple_of",
        ):
            if getattr(self, name):
                raise ValueError(f"{name} is not read here: set it on the tokenizer or the model")
        super().__post_init__()
        if self.reference not in REFERENCES:
            raise ValueError(
                f"unknown reference {self.reference!r}: choose one of {', '.join(REFERENCES)}"
            )
        if self.reference_dtype not in REFERENCE_DTYPES:
            raise ValueError(
                f"unknown reference_dtype {self.reference_dtype!r}: choose one of "
                f"{', '.join(REFERENCE_DTYPES)}"
            )
