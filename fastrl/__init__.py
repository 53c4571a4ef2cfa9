"""Reinforcement learning from rewards and preferences for language models, on plain Hugging Face
models.

Names are imported at their first use, so that `patch_trl` works with versions of transformers that
are older than what the trainers need.
"""

import importlib
import logging
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastrl import alignment, core, patch
    from fastrl.config import PPOConfig
    from fastrl.core import LengthSampler, set_seed
    from fastrl.models import (
        AutoModelForCausalLMWithValueHead,
        AutoModelForSeq2SeqLMWithValueHead,
        CausalLMPolicy,
    )
    from fastrl.patch import TRLPatch, patch_trl, unpatch_trl
    from fastrl.ppo import PPOTrainer
    from fastrl.ppo.guards import TrainingDiverged
    from fastrl.ref_model import create_reference_model
    from fastrl.registry import group_advantage, register_policy_loss
    from fastrl.rollout import GenerateEngine, RolloutEngine, RolloutOutput, SamplingParams
    from fastrl.run.callbacks import Evaluation, TrainCallback, TrainResult
    from fastrl.run.metrics import JsonlCallback
    from fastrl.run.progress import ProgressCallback
    from fastrl.trainers import (
        DataCollatorForCompletionOnlyLM,
        RewardConfig,
        RewardDataCollatorWithPadding,
        RewardTrainer,
        SFTConfig,
        SFTTrainer,
        compute_accuracy,
    )
    from fastrl.trl.dpo import DPOTrainer
    from fastrl.trl.dpo_config import DPOConfig
    from fastrl.trl.grpo import GRPOConfig, GRPOTrainer
    from fastrl.trl.kto import KTOTrainer
    from fastrl.trl.kto_config import KTOConfig
    from fastrl.trl.rloo import RLOOConfig, RLOOTrainer
    from fastrl.trl.rollout_func import TRLRollouts

try:
    __version__ = metadata.version("fastrl-lm")
except metadata.PackageNotFoundError:  # a bare checkout on PYTHONPATH
    __version__ = "0+unknown"


def _is_not_about(what: str, record: logging.LogRecord) -> bool:
    return what not in str(record.msg)


# At its import on some CPUs bitsandbytes looks for a faster forward on the Hub and warns that it is
# not there, or cannot be trusted; that forward has no gradient and is never taken here. Only this
# file comes before it, as transformers imports PEFT, and that bitsandbytes, where neither is used.
for _name, _said in (
    ("bitsandbytes.backends.cpu.ops", "gemm_4bit_forward"),
    ("kernels.hf_hub", "kernels-community/quantization-bitsandbytes"),
):
    logging.getLogger(_name).addFilter(partial(_is_not_about, _said))

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "CausalLMPolicy",
    "DPOConfig",
    "DPOTrainer",
    "DataCollatorForCompletionOnlyLM",
    "Evaluation",
    "GRPOConfig",
    "GRPOTrainer",
    "GenerateEngine",
    "JsonlCallback",
    "KTOConfig",
    "KTOTrainer",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "ProgressCallback",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardDataCollatorWithPadding",
    "RewardTrainer",
    "RolloutEngine",
    "RolloutOutput",
    "SFTConfig",
    "SFTTrainer",
    "SamplingParams",
    "TRLPatch",
    "TRLRollouts",
    "TrainCallback",
    "TrainResult",
    "TrainingDiverged",
    "__version__",
    "alignment",
    "compute_accuracy",
    "core",
    "create_reference_model",
    "group_advantage",
    "patch",
    "patch_trl",
    "register_policy_loss",
    "set_seed",
    "unpatch_trl",
]

_HOMES = {
    "fastrl.alignment": (),
    "fastrl.config": ("PPOConfig",),
    "fastrl.core": ("LengthSampler", "set_seed"),
    "fastrl.registry": ("group_advantage", "register_policy_loss"),
    "fastrl.models": (
        "AutoModelForCausalLMWithValueHead",
        "AutoModelForSeq2SeqLMWithValueHead",
        "CausalLMPolicy",
    ),
    "fastrl.ref_model": ("create_reference_model",),
    "fastrl.patch": ("TRLPatch", "patch_trl", "unpatch_trl"),
    "fastrl.rollout": ("GenerateEngine", "RolloutEngine", "RolloutOutput", "SamplingParams"),
    "fastrl.trainers": (
        "DataCollatorForCompletionOnlyLM",
        "RewardConfig",
        "RewardDataCollatorWithPadding",
        "RewardTrainer",
        "SFTConfig",
        "SFTTrainer",
        "compute_accuracy",
    ),
    "fastrl.trl.grpo": ("GRPOConfig", "GRPOTrainer"),
    "fastrl.trl.rloo": ("RLOOConfig", "RLOOTrainer"),
    "fastrl.trl.rollout_func": ("TRLRollouts",),
    "fastrl.ppo": ("PPOTrainer",),
    "fastrl.ppo.guards": ("TrainingDiverged",),
    "fastrl.run.callbacks": ("Evaluation", "TrainCallback", "TrainResult"),
    "fastrl.run.metrics": ("JsonlCallback",),
    "fastrl.run.progress": ("ProgressCallback",),
    "fastrl.trl.dpo": ("DPOTrainer",),
    "fastrl.trl.dpo_config": ("DPOConfig",),
    "fastrl.trl.kto": ("KTOTrainer",),
    "fastrl.trl.kto_config": ("KTOConfig",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # or a type checker would accept any name

    def __getattr__(name: str) -> object:
        if f"fastrl.{name}" in _HOMES:
            return importlib.import_module(f"fastrl.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
