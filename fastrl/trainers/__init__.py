"""The trainers of all methods, and what they share: loop, plans of memory, resuming, replay.

The names of ``__all__`` are imported at their first use: PPOTrainer, which does not derive from
transformers' Trainer, does not need them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


if not TYPE_CHECKING:  # else type checkers would take any other name for an object

    def __getattr__(name: str) -> object:
        for home in ("fastrl.data.collators", "fastrl.trainers.sft", "fastrl.trainers.reward"):
            if name in __all__ and hasattr(module := import_module(home), name):
                return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
