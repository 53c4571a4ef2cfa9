"""Settings of PPOv2Trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from fastrl.config import PPOConfig
from fastrl.models.optimizers import class_and_keywords, optimizer_name
from fastrl.settings import check_refused, refused, setting
from fastrl.trainers.supervised import SupervisedArguments

_OFTEN = ("no", "steps")
_TOKENIZER = "the tokenizer (processing_class)"
# Settings of transformers that PPOv2Trainer has no use for, by the reason; then those it refuses.
_IDLE = {
    "prompts are token ids, in this process": (
        "dataloader_num_workers dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
        "dataset_num_proc remove_unused_columns length_column_name ignore_data_skip"
    ),
    "all batches are whole": "dataloader_drop_last",
    "num_sample_generations says how often responses to eval_dataset are shown": (
        "eval_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches "
        "eval_use_gather_object eval_accumulation_steps prediction_loss_only batch_eval_metrics "
        "include_for_metrics label_names bf16_full_eval fp16_full_eval"
    ),
    "logging_steps says how often metrics are logged": (
        "log_on_each_node include_num_input_tokens_seen skip_memory_metrics"
    ),
    "on_nonfinite has its meaning": "logging_nan_inf_filter",
    "transformers.logging.set_verbosity says what is told": "log_level log_level_replica",
    "checkpoints hold all that a run needs to go on": (
        "save_only_model save_on_each_node enable_jit_checkpoint "
        "restore_callback_states_from_checkpoint"
    ),
    "push_to_hub() uploads": "hub_strategy hub_always_push",
    "accelerate's own handlers have these": (
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph"
    ),
    "losses are means over the tokens of all processes": "average_tokens_across_devices",
    "gradients are not clipped, as in TRL": "max_grad_norm",
    "the rollout engine has a cache of its own": "use_cache torch_empty_cache_steps",
    "log-probs come out of the LM head in chunks": "liger_kernel_config",
    "layers are computed again as PPOConfig has it": (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs"
    ),
}
_REFUSED = {
    f"set it on {_TOKENIZER}": "chat_template_path eos_token pad_token",
    "batches are as wide as they need be": "pad_to_multiple_of",
    "load the models with it, and pass them": "trust_remote_code model_init_kwargs",
    "set total_episodes": "max_steps",
    "lower per_device_train_batch_size": "auto_find_batch_size",
    "prompts come in random order, drawn by seed": "data_seed train_sampling_strategy",
    "rewards are no labels": "label_smoothing_factor",
    "responses are drawn from the policy as it is": "neftune_noise_alpha",
    "the last weights are kept": "load_best_model_at_end",
    "compile the models, and pass them": "torch_compile",
    "start several processes by accelerate launch": "fsdp deepspeed",
}


def _by_name(names_by_text: dict[str, str]) -> dict[str, str]:
    return {name: text for text, names in names_by_text.items() for name in names.split()}


@dataclass
class PPOv2Config(SupervisedArguments):
    """Settings of :class:`PPOv2Trainer`: names, meanings and defaults of the PPOConfig of TRL 0.12
    to 1.9, or of the PPOv2Config of TRL 0.11.

    Sizes count samples per process: a batch has ``per_device_train_batch_size ×
    gradient_accumulation_steps`` samples, and ``num_mini_batches`` optimizer steps in each epoch.

    Raises:
        ValueError: sizes that do not divide; a value that is not supported, with what to do.
    """

    changes_nothing: ClassVar[dict[str, str]] = _by_name(_IDLE)
    not_supported: ClassVar[dict[str, str]] = _by_name(_REFUSED)

    max_length: int | None = refused(None, "cut prompts in the data set, and set response_length")
    logging_steps: float = setting(
        "Steps (of a batch each) between two logs; below 1: a share of all.", 10, within="(0, inf)"
    )
    weight_decay: float = setting("Decay of all weights, biases too.", 0.0, within="[0, inf)")
    learning_rate: float = setting("Learning rate at the start.", 5e-5, within="[0, inf)")
    exp_name: str = setting("Name of the experiment.", "ppo_config")
    total_episodes: int | None = setting(
        "Samples to train on; None: num_train_epochs passes over the prompts.",
        None,
        within="[1, inf)",
    )
    num_mini_batches: int = setting("Optimizer steps per batch and epoch.", 1, within="[1, inf)")
    num_ppo_epochs: int = setting("Passes over each batch.", 4, within="[1, inf)")
    num_sample_generations: int = setting(
        "How often responses to held-out prompts are shown.", 10, within="[0, inf)"
    )
    local_rollout_forward_batch_size: int = setting(
        "Samples that are scored at a time without gradients.", 64, within="[1, inf)"
    )
    response_length: int = setting("Longest response, in tokens.", 53, within="[1, inf)")
    stop_token: str | None = setting(
        "eos: responses end at EOS, as they do in any case.", None, choices=("eos",)
    )
    stop_token_id: int | None = setting(
        "Another token at which responses end.", None, within="[0, inf)"
    )
    temperature: float = setting("T of the policy softmax(logits / T).", 0.7, within="(0, inf)")
    missing_eos_penalty: float | None = setting(
        "Taken off the score of responses without an EOS token.", None, within="[0, inf)"
    )
    kl_coef: float = setting("Coefficient of the KL in rewards.", 0.05, within="[0, inf)")
    kl_estimator: str = refused(
        "k1", "rewards have log π - log π_ref, and PPOConfig(kl_in='loss') has k3 in the loss"
    )
    whiten_rewards: bool = setting("Whiten rewards.", False)
    cliprange: float = setting("Bound of the clipped ratio.", 0.2, within="[0, inf)")
    vf_coef: float = setting("Coefficient of the value loss.", 0.1, within="[0, inf)")
    cliprange_value: float = setting("Bound of the clipped values.", 0.2, within="[0, inf)")
    gamma: float = setting("Discount.", 1.0, within="[0, 1]")
    lam: float = setting("λ of GAE.", 0.95, within="[0, 1]")
    sft_model_path: str = setting("For scripts that read it.", "EleutherAI/pythia-160m")
    reward_model_path: str = setting("For scripts that read it.", "EleutherAI/pythia-160m")
    model_adapter_name: str | None = refused(None, "make it active by model.set_adapter(name)")
    ref_adapter_name: str | None = refused(None, "load the reference, and pass it as ref_model")
    ds3_gather_for_generation: bool = refused(True, "use FSDP2 in place of DeepSpeed")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_refused(self)
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ValueError("stop_token and stop_token_id exclude each other: set one of them")
        for name in ("save_strategy", "logging_strategy"):
            if self._text(name) not in _OFTEN:
                raise ValueError(
                    f"{name}={self._text(name)!r} is not supported: choose one of "
                    f"{', '.join(_OFTEN)}"
                )
        if self.batch_size % self.num_mini_batches:
            raise ValueError(
                f"a batch of {self.batch_size} samples (per_device_train_batch_size × "
                f"gradient_accumulation_steps) must be a multiple of num_mini_batches "
                f"({self.num_mini_batches})"
            )

    @property
    def batch_size(self) -> int:
        """Samples of a batch, of this process."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def save_every(self, steps: int) -> int:
        """Returns how many of a run's steps lie between two checkpoints; 0: there are none."""
        if self._text("save_strategy") == "no" or not self.save_steps:
            return 0
        interval = self.save_steps if self.save_steps >= 1 else self.save_steps * steps
        return max(1, math.ceil(interval))

    def _text(self, name: str) -> str:
        value = getattr(self, name)
        return str(getattr(value, "value", value))

    @property
    def optimizer_arguments(self) -> str:
        """The settings of weight decay, betas and eps as text, and ``optim_args`` behind it."""
        _, keywords = class_and_keywords(self)
        arguments: dict[str, Any] = {"weight_decay": self.weight_decay}
        if "betas" in keywords:
            arguments["beta1"], arguments["beta2"] = keywords["betas"]
        if "eps" in keywords:
            arguments["eps"] = keywords["eps"]
        named = [f"{name}={value}" for name, value in arguments.items()]
        return ",".join([*named, *filter(None, [self.optim_args])])

    def classic(self) -> PPOConfig:
        """Translates the settings to :class:`fastrl.PPOConfig`."""
        step = self.batch_size // self.num_mini_batches
        size = min(self.per_device_train_batch_size, step)
        return PPOConfig(
            exp_name=self.exp_name,
            seed=self.seed,
            learning_rate=self.learning_rate,
            optim=optimizer_name(self),
            optim_args=self.optimizer_arguments,
            batch_size=self.batch_size,
            mini_batch_size=size if step % size == 0 else step,
            gradient_accumulation_steps=step // size if step % size == 0 else 1,
            micro_batch_tokens=self.micro_batch_tokens,
            padding_free=self.padding_free,
            ddp_timeout=self.ddp_timeout,
            ppo_epochs=self.num_ppo_epochs,
            ratio_threshold=math.inf,
            gradient_checkpointing=bool(self.gradient_checkpointing),
            adap_kl_ctrl=False,
            init_kl_coef=self.kl_coef,
            cliprange=self.cliprange,
            cliprange_value=self.cliprange_value,
            vf_coef=self.vf_coef,
            gamma=self.gamma,
            lam=self.lam,
            whiten_rewards=self.whiten_rewards,
            temperature=self.temperature,
            on_nonfinite=self.on_nonfinite,
            master_weights=self.master_weights,
            offload_optimizer=self.offload_optimizer,
            activation_offloading=self.activation_offloading,
            accelerator_kwargs=self._accelerator_kwargs(),
        )

    def _accelerator_kwargs(self) -> dict[str, Any]:
        precision = "bf16" if self.bf16 else "fp16" if self.fp16 else None
        arguments: dict[str, Any] = {"cpu": True} if self.use_cpu else {}
        return arguments if precision is None else {**arguments, "mixed_precision": precision}
