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
    from fastrl.data.trl_rows import (
        ConstantLengthDataset,
        apply_chat_template,
        conversations_formatting_function,
        extract_prompt,
        is_conversational,
        maybe_apply_chat_template,
        maybe_convert_to_chatml,
        maybe_extract_prompt,
        maybe_unpair_preference_dataset,
        pack_dataset,
        unpair_preference_dataset,
    )
    from fastrl.models import (
        AutoModelForCausalLMWithValueHead,
        AutoModelForSeq2SeqLMWithValueHead,
        CausalLMPolicy,
        PreTrainedModelWrapper,
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
    from fastrl.scripts.arguments import (
        DatasetConfig,
        DatasetMixtureConfig,
        DPOScriptArguments,
        RewardScriptArguments,
        ScriptArguments,
        SFTScriptArguments,
        get_dataset,
    )
    from fastrl.scripts.best_of_n import BestOfNSampler
    from fastrl.scripts.callbacks import (
        LogCompletionsCallback,
        RichProgressCallback,
        SyncRefModelCallback,
    )
    from fastrl.scripts.chat_format import (
        SIMPLE_CHAT_TEMPLATE,
        SIMPLE_SFT_CHAT_TEMPLATE,
        clone_chat_template,
        setup_chat_format,
    )
    from fastrl.scripts.model_config import (
        ModelConfig,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from fastrl.scripts.parser import TrlParser, init_zero_verbose
    from fastrl.scripts.rewards import (
        accuracy_reward,
        get_soft_overlong_punishment,
        reasoning_accuracy_reward,
        think_format_reward,
    )
    from fastrl.scripts.text_environment import TextEnvironment, TextHistory
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
    from fastrl.trl.ppo import PPOv2Trainer
    from fastrl.trl.ppo_config import PPOv2Config
    from fastrl.trl.rloo import RLOOConfig, RLOOTrainer
    from fastrl.trl.rloo_v1 import RLOOv1Config, RLOOv1Trainer
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
    "SIMPLE_CHAT_TEMPLATE",
    "SIMPLE_SFT_CHAT_TEMPLATE",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "BestOfNSampler",
    "CausalLMPolicy",
    "ConstantLengthDataset",
    "DPOConfig",
    "DPOScriptArguments",
    "DPOTrainer",
    "DataCollatorForCompletionOnlyLM",
    "DatasetConfig",
    "DatasetMixtureConfig",
    "Evaluation",
    "GRPOConfig",
    "GRPOTrainer",
    "GenerateEngine",
    "JsonlCallback",
    "KTOConfig",
    "KTOTrainer",
    "LengthSampler",
    "LogCompletionsCallback",
    "ModelConfig",
    "PPOConfig",
    "PPOTrainer",
    "PPOv2Config",
    "PPOv2Trainer",
    "PreTrainedModelWrapper",
    "ProgressCallback",
    "RLOOConfig",
    "RLOOTrainer",
    "RLOOv1Config",
    "RLOOv1Trainer",
    "RewardConfig",
    "RewardDataCollatorWithPadding",
    "RewardScriptArguments",
    "RewardTrainer",
    "RichProgressCallback",
    "RolloutEngine",
    "RolloutOutput",
    "SFTConfig",
    "SFTScriptArguments",
    "SFTTrainer",
    "SamplingParams",
    "ScriptArguments",
    "SyncRefModelCallback",
    "TRLPatch",
    "TRLRollouts",
    "TextEnvironment",
    "TextHistory",
    "TrainCallback",
    "TrainResult",
    "TrainingDiverged",
    "TrlParser",
    "__version__",
    "accuracy_reward",
    "alignment",
    "apply_chat_template",
    "clone_chat_template",
    "compute_accuracy",
    "conversations_formatting_function",
    "core",
    "create_reference_model",
    "extract_prompt",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "get_soft_overlong_punishment",
    "group_advantage",
    "init_zero_verbose",
    "is_conversational",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "patch",
    "patch_trl",
    "reasoning_accuracy_reward",
    "register_policy_loss",
    "set_seed",
    "setup_chat_format",
    "think_format_reward",
    "unpair_preference_dataset",
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
        "PreTrainedModelWrapper",
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
    "fastrl.scripts.arguments": (
        "DPOScriptArguments",
        "DatasetConfig",
        "DatasetMixtureConfig",
        "RewardScriptArguments",
        "SFTScriptArguments",
        "ScriptArguments",
        "get_dataset",
    ),
    "fastrl.scripts.best_of_n": ("BestOfNSampler",),
    "fastrl.scripts.callbacks": (
        "LogCompletionsCallback",
        "RichProgressCallback",
        "SyncRefModelCallback",
    ),
    "fastrl.scripts.text_environment": ("TextEnvironment", "TextHistory"),
    "fastrl.scripts.chat_format": (
        "SIMPLE_CHAT_TEMPLATE",
        "SIMPLE_SFT_CHAT_TEMPLATE",
        "clone_chat_template",
        "setup_chat_format",
    ),
    "fastrl.scripts.model_config": (
        "ModelConfig",
        "get_kbit_device_map",
        "get_peft_config",
        "get_quantization_config",
    ),
    "fastrl.scripts.parser": ("TrlParser", "init_zero_verbose"),
    "fastrl.scripts.rewards": (
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
    "fastrl.trl.ppo": ("PPOv2Trainer",),
    "fastrl.trl.ppo_config": ("PPOv2Config",),
    "fastrl.trl.rloo_v1": ("RLOOv1Config", "RLOOv1Trainer"),
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
