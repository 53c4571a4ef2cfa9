"""Learning from examples, on transformers' Trainer: reward models from pairs, language models from
texts."""

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
