"""Reinforcement learning from rewards for language models, on plain Hugging Face models."""

from importlib import metadata

from fastrl import core
from fastrl.config import PPOConfig
from fastrl.core import LengthSampler, set_seed
from fastrl.models import AutoModelForCausalLMWithValueHead, create_reference_model
from fastrl.rollout import GenerateEngine, RolloutOutput, SamplingParams
from fastrl.trainers import (
    Evaluation,
    JsonlCallback,
    PPOTrainer,
    ProgressCallback,
    TrainCallback,
    TrainResult,
)

try:
    __version__ = metadata.version("fastrl-lm")
except metadata.PackageNotFoundError:  # a bare checkout on PYTHONPATH
    __version__ = "0+unknown"

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "Evaluation",
    "GenerateEngine",
    "JsonlCallback",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "ProgressCallback",
    "RolloutOutput",
    "SamplingParams",
    "TrainCallback",
    "TrainResult",
    "__version__",
    "core",
    "create_reference_model",
    "set_seed",
]
