"""Trainers."""

from fastrl.trainers.callbacks import (
    Evaluation,
    JsonlCallback,
    ProgressCallback,
    TrainCallback,
    TrainResult,
)
from fastrl.trainers.ppo import PPOTrainer

__all__ = [
    "Evaluation",
    "JsonlCallback",
    "PPOTrainer",
    "ProgressCallback",
    "TrainCallback",
    "TrainResult",
]
