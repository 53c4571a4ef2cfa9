"""Trainers."""

from fastrl.ppo.trainer import PPOTrainer
from fastrl.run.callbacks import (
    Evaluation,
    JsonlCallback,
    ProgressCallback,
    TrainCallback,
    TrainResult,
)

__all__ = [
    "Evaluation",
    "JsonlCallback",
    "PPOTrainer",
    "ProgressCallback",
    "TrainCallback",
    "TrainResult",
]
