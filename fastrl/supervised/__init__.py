"""Learning from examples, on transformers' Trainer: reward models from pairs, language models from
texts."""

from fastrl.supervised.pairs import RewardDataCollatorWithPadding
from fastrl.supervised.reward import RewardConfig, RewardTrainer, compute_accuracy
from fastrl.supervised.sft import SFTConfig, SFTTrainer
from fastrl.supervised.texts import DataCollatorForCompletionOnlyLM

__all__ = [
    "DataCollatorForCompletionOnlyLM",
    "RewardConfig",
    "RewardDataCollatorWithPadding",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "compute_accuracy",
]
