"""SFTTrainer and RewardTrainer, on transformers' Trainer."""

from fastrl.data.collators import (
    DataCollatorForCompletionOnlyLM,
    RewardDataCollatorWithPadding,
)
from fastrl.trainers.reward import RewardConfig, RewardTrainer, compute_accuracy
from fastrl.trainers.sft import SFTConfig, SFTTrainer

__all__ = [
    "DataCollatorForCompletionOnlyLM",
    "RewardConfig",
    "RewardDataCollatorWithPadding",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "compute_accuracy",
]
