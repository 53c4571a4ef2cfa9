"""Reinforcement learning from rewards and preferences for language models, on plain Hugging Face
models.

Names are imported at their first use, so that `patch_trl` works with versions of transformers that
are older than what the trainers need.
"""

import importlib
import logging
import sys
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from fastrl.moved import MovedModules, new_name

if TYPE_CHECKING:
    from fastrl import alignment as alignment
    from fastrl import core as core
    from fastrl.compat import patch as patch
    from fastrl.compat.older.ppo import PPOv2Trainer as PPOv2Trainer
    from fastrl.compat.older.ppo_config import PPOv2Config as PPOv2Config
    from fastrl.compat.older.rloo_v1 import RLOOv1Config as RLOOv1Config
    from fastrl.compat.older.rloo_v1 import RLOOv1Trainer as RLOOv1Trainer
    from fastrl.compat.patch import TRLPatch as TRLPatch
    from fastrl.compat.patch import patch_trl as patch_trl
    from fastrl.compat.patch import unpatch_trl as unpatch_trl
    from fastrl.compat.rollout_func import TRLRollouts as TRLRollouts
    from fastrl.compat.scripts.arguments import DatasetConfig as DatasetConfig
    from fastrl.compat.scripts.arguments import DatasetMixtureConfig as DatasetMixtureConfig
    from fastrl.compat.scripts.arguments import DPOScriptArguments as DPOScriptArguments
    from fastrl.compat.scripts.arguments import RewardScriptArguments as RewardScriptArguments
    from fastrl.compat.scripts.arguments import ScriptArguments as ScriptArguments
    from fastrl.compat.scripts.arguments import SFTScriptArguments as SFTScriptArguments
    from fastrl.compat.scripts.arguments import get_dataset as get_dataset
    from fastrl.compat.scripts.best_of_n import BestOfNSampler as BestOfNSampler
    from fastrl.compat.scripts.callbacks import LogCompletionsCallback as LogCompletionsCallback
    from fastrl.compat.scripts.callbacks import RichProgressCallback as RichProgressCallback
    from fastrl.compat.scripts.callbacks import SyncRefModelCallback as SyncRefModelCallback
    from fastrl.compat.scripts.chat_format import SIMPLE_CHAT_TEMPLATE as SIMPLE_CHAT_TEMPLATE
    from fastrl.compat.scripts.chat_format import (
        SIMPLE_SFT_CHAT_TEMPLATE as SIMPLE_SFT_CHAT_TEMPLATE,
    )
    from fastrl.compat.scripts.chat_format import clone_chat_template as clone_chat_template
    from fastrl.compat.scripts.chat_format import setup_chat_format as setup_chat_format
    from fastrl.compat.scripts.model_config import ModelConfig as ModelConfig
    from fastrl.compat.scripts.model_config import get_kbit_device_map as get_kbit_device_map
    from fastrl.compat.scripts.model_config import get_peft_config as get_peft_config
    from fastrl.compat.scripts.model_config import (
        get_quantization_config as get_quantization_config,
    )
    from fastrl.compat.scripts.parser import TrlParser as TrlParser
    from fastrl.compat.scripts.parser import init_zero_verbose as init_zero_verbose
    from fastrl.compat.scripts.rewards import accuracy_reward as accuracy_reward
    from fastrl.compat.scripts.rewards import (
        get_soft_overlong_punishment as get_soft_overlong_punishment,
    )
    from fastrl.compat.scripts.rewards import reasoning_accuracy_reward as reasoning_accuracy_reward
    from fastrl.compat.scripts.rewards import think_format_reward as think_format_reward
    from fastrl.compat.scripts.text_environment import TextEnvironment as TextEnvironment
    from fastrl.compat.scripts.text_environment import TextHistory as TextHistory
    from fastrl.config import PPOConfig as PPOConfig
    from fastrl.core import LengthSampler as LengthSampler
    from fastrl.core import set_seed as set_seed
    from fastrl.data.trl_rows import ConstantLengthDataset as ConstantLengthDataset
    from fastrl.data.trl_rows import apply_chat_template as apply_chat_template
    from fastrl.data.trl_rows import (
        conversations_formatting_function as conversations_formatting_function,
    )
    from fastrl.data.trl_rows import extract_prompt as extract_prompt
    from fastrl.data.trl_rows import is_conversational as is_conversational
    from fastrl.data.trl_rows import maybe_apply_chat_template as maybe_apply_chat_template
    from fastrl.data.trl_rows import maybe_convert_to_chatml as maybe_convert_to_chatml
    from fastrl.data.trl_rows import maybe_extract_prompt as maybe_extract_prompt
    from fastrl.data.trl_rows import (
        maybe_unpair_preference_dataset as maybe_unpair_preference_dataset,
    )
    from fastrl.data.trl_rows import pack_dataset as pack_dataset
    from fastrl.data.trl_rows import unpair_preference_dataset as unpair_preference_dataset
    from fastrl.learn.ref_model import create_reference_model as create_reference_model
    from fastrl.models import AutoModelForCausalLMWithValueHead as AutoModelForCausalLMWithValueHead
    from fastrl.models import (
        AutoModelForSeq2SeqLMWithValueHead as AutoModelForSeq2SeqLMWithValueHead,
    )
    from fastrl.models import CausalLMPolicy as CausalLMPolicy
    from fastrl.models import PreTrainedModelWrapper as PreTrainedModelWrapper
    from fastrl.registry import group_advantage as group_advantage
    from fastrl.rollout import GenerateEngine as GenerateEngine
    from fastrl.rollout import RolloutEngine as RolloutEngine
    from fastrl.rollout import RolloutOutput as RolloutOutput
    from fastrl.rollout import SamplingParams as SamplingParams
    from fastrl.run.callbacks import Evaluation as Evaluation
    from fastrl.run.callbacks import TrainCallback as TrainCallback
    from fastrl.run.callbacks import TrainResult as TrainResult
    from fastrl.run.metrics import JsonlCallback as JsonlCallback
    from fastrl.run.progress import ProgressCallback as ProgressCallback
    from fastrl.trainers import DataCollatorForCompletionOnlyLM as DataCollatorForCompletionOnlyLM
    from fastrl.trainers import RewardConfig as RewardConfig
    from fastrl.trainers import RewardDataCollatorWithPadding as RewardDataCollatorWithPadding
    from fastrl.trainers import RewardTrainer as RewardTrainer
    from fastrl.trainers import SFTConfig as SFTConfig
    from fastrl.trainers import SFTTrainer as SFTTrainer
    from fastrl.trainers import compute_accuracy as compute_accuracy
    from fastrl.trainers.groups.distillation import DistillationConfig as DistillationConfig
    from fastrl.trainers.groups.distillation import DistillationTrainer as DistillationTrainer
    from fastrl.trainers.groups.gkd import GKDConfig as GKDConfig
    from fastrl.trainers.groups.gkd import GKDTrainer as GKDTrainer
    from fastrl.trainers.groups.grpo import GRPOConfig as GRPOConfig
    from fastrl.trainers.groups.grpo import GRPOTrainer as GRPOTrainer
    from fastrl.trainers.groups.rloo import RLOOConfig as RLOOConfig
    from fastrl.trainers.groups.rloo import RLOOTrainer as RLOOTrainer
    from fastrl.trainers.groups.sdft import SDFTConfig as SDFTConfig
    from fastrl.trainers.groups.sdft import SDFTTrainer as SDFTTrainer
    from fastrl.trainers.pairs.dpo import DPOTrainer as DPOTrainer
    from fastrl.trainers.pairs.dpo_config import DPOConfig as DPOConfig
    from fastrl.trainers.pairs.kto import KTOTrainer as KTOTrainer
    from fastrl.trainers.pairs.kto_config import KTOConfig as KTOConfig
    from fastrl.trainers.ppo import PPOTrainer as PPOTrainer
    from fastrl.trainers.ppo.guards import TrainingDiverged as TrainingDiverged
    from fastrl_kernels.policy_losses import register_policy_loss as register_policy_loss

try:
    __version__ = metadata.version("fastrl-lm")
except metadata.PackageNotFoundError:  # a bare checkout on PYTHONPATH
    __version__ = "0+unknown"


def _is_not_about(what: str, record: logging.LogRecord) -> bool:
    return what not in str(record.msg)


# On some CPUs bitsandbytes, at its import, looks on the Hub for a faster forward, and warns if that
# is missing or cannot be trusted. That forward has no gradient, and fastrl never runs it. The
# filters are set before transformers is imported, which imports PEFT, and PEFT bitsandbytes.
for _name, _said in (
    ("bitsandbytes.backends.cpu.ops", "gemm_4bit_forward"),
    ("kernels.hf_hub", "kernels-community/quantization-bitsandbytes"),
):
    logging.getLogger(_name).addFilter(partial(_is_not_about, _said))

sys.meta_path.insert(0, MovedModules())

_HOMES = {
    "fastrl.alignment": (),
    "fastrl.config": ("PPOConfig",),
    "fastrl.core": ("LengthSampler", "set_seed"),
    "fastrl.registry": ("group_advantage",),
    "fastrl.models": (
        "AutoModelForCausalLMWithValueHead",
        "AutoModelForSeq2SeqLMWithValueHead",
        "CausalLMPolicy",
        "PreTrainedModelWrapper",
    ),
    "fastrl.learn.ref_model": ("create_reference_model",),
    "fastrl.compat.patch": ("TRLPatch", "patch_trl", "unpatch_trl"),
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
    "fastrl.compat.scripts.arguments": (
        "DPOScriptArguments",
        "DatasetConfig",
        "DatasetMixtureConfig",
        "RewardScriptArguments",
        "SFTScriptArguments",
        "ScriptArguments",
        "get_dataset",
    ),
    "fastrl.compat.scripts.best_of_n": ("BestOfNSampler",),
    "fastrl.compat.scripts.callbacks": (
        "LogCompletionsCallback",
        "RichProgressCallback",
        "SyncRefModelCallback",
    ),
    "fastrl.compat.scripts.text_environment": ("TextEnvironment", "TextHistory"),
    "fastrl.compat.scripts.chat_format": (
        "SIMPLE_CHAT_TEMPLATE",
        "SIMPLE_SFT_CHAT_TEMPLATE",
        "clone_chat_template",
        "setup_chat_format",
    ),
    "fastrl.compat.scripts.model_config": (
        "ModelConfig",
        "get_kbit_device_map",
        "get_peft_config",
        "get_quantization_config",
    ),
    "fastrl.compat.scripts.parser": ("TrlParser", "init_zero_verbose"),
    "fastrl.compat.scripts.rewards": (
        "accuracy_reward",
        "get_soft_overlong_punishment",
        "reasoning_accuracy_reward",
        "think_format_reward",
    ),
    "fastrl.data.trl_rows": (
        "ConstantLengthDataset",
        "apply_chat_template",
        "conversations_formatting_function",
        "extract_prompt",
        "is_conversational",
        "maybe_apply_chat_template",
        "maybe_convert_to_chatml",
        "maybe_extract_prompt",
        "maybe_unpair_preference_dataset",
        "pack_dataset",
        "unpair_preference_dataset",
    ),
    "fastrl.compat.older.ppo": ("PPOv2Trainer",),
    "fastrl.compat.older.ppo_config": ("PPOv2Config",),
    "fastrl.compat.older.rloo_v1": ("RLOOv1Config", "RLOOv1Trainer"),
    "fastrl.trainers.groups.distillation": ("DistillationConfig", "DistillationTrainer"),
    "fastrl.trainers.groups.gkd": ("GKDConfig", "GKDTrainer"),
    "fastrl.trainers.groups.grpo": ("GRPOConfig", "GRPOTrainer"),
    "fastrl.trainers.groups.rloo": ("RLOOConfig", "RLOOTrainer"),
    "fastrl.trainers.groups.sdft": ("SDFTConfig", "SDFTTrainer"),
    "fastrl.compat.rollout_func": ("TRLRollouts",),
    "fastrl.trainers.ppo": ("PPOTrainer",),
    "fastrl.trainers.ppo.guards": ("TrainingDiverged",),
    "fastrl.run.callbacks": ("Evaluation", "TrainCallback", "TrainResult"),
    "fastrl.run.metrics": ("JsonlCallback",),
    "fastrl.run.progress": ("ProgressCallback",),
    "fastrl.trainers.pairs.dpo": ("DPOTrainer",),
    "fastrl.trainers.pairs.dpo_config": ("DPOConfig",),
    "fastrl.trainers.pairs.kto": ("KTOTrainer",),
    "fastrl.trainers.pairs.kto_config": ("KTOConfig",),
    "fastrl_kernels.policy_losses": ("register_policy_loss",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["__version__", "alignment", "core", "patch", *_HOME_OF]

if not TYPE_CHECKING:  # a type checker that saw this would accept any name

    def __getattr__(name: str) -> object:
        if f"fastrl.{name}" in _HOMES or new_name(f"fastrl.{name}"):
            return importlib.import_module(f"fastrl.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
