"""Settings of PPOv2Trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fastrl.config import PPOConfig
from fastrl.settings import refused, setting
from fastrl.trainers.supervised import SupervisedArguments

KL_ESTIMATORS = ("k1", "k3")


@dataclass
class PPOv2Config(SupervisedArguments):
    """Settings of :class:`PPOv2Trainer`: names, meanings and defaults of the PPOConfig of TRL 0.12
    to 1.9, PPOv2Config before.

    Sizes count samples per process: a batch has ``per_device_train_batch_size ×
    gradient_accumulation_steps`` of them, and is learned from in ``num_mini_batches`` steps.
    """

    logging_steps: float = setting("Steps between two logs.", 10, within="(0, inf)")
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
        "eos: responses end there, as they do here in any case.", None, choices=("eos",)
    )
    stop_token_id: int | None = setting(
        "Another token at which responses end.", None, within="[0, inf)"
    )
    temperature: float = setting("T of the policy softmax(logits / T).", 0.7, within="(0, inf)")
    missing_eos_penalty: float | None = setting(
        "Taken off the score of responses without an EOS token.", None, within="[0, inf)"
    )
    kl_coef: float = setting("Coefficient of the KL in rewards.", 0.05, within="[0, inf)")
    kl_estimator: str = setting("Of a token: k1 (log π - log ref).", "k1", choices=KL_ESTIMATORS)
    whiten_rewards: bool = setting("Whiten rewards.", False)
    cliprange: float = setting("Bound of the clipped ratio.", 0.2, within="[0, inf]")
    vf_coef: float = setting("Coefficient of the value loss.", 0.1, within="[0, inf)")
    cliprange_value: float = setting("Bound of the clipped values.", 0.2, within="[0, inf]")
    gamma: float = setting("Discount.", 1.0, within="[0, 1]")
    lam: float = setting("λ of GAE.", 0.95, within="[0, 1]")
    sft_model_path: str = setting("For scripts that read it.", "EleutherAI/pythia-160m")
    reward_model_path: str = setting("For scripts that read it.", "EleutherAI/pythia-160m")
    model_adapter_name: str | None = refused(None, "make it active by model.set_adapter(name)")
    ref_adapter_name: str | None = refused(None, "load the reference, and pass it as ref_model")
    ds3_gather_for_generation: bool = refused(True, "use FSDP2 in place of DeepSpeed")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ValueError("stop_token and stop_token_id exclude each other: set one of them")
        if self.kl_estimator != "k1":
            raise ValueError(
                f"kl_estimator={self.kl_estimator!r} is not supported: rewards have k1 here, or "
                "PPOConfig(kl_in='loss'), whose term is k3"
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

    def classic(self) -> PPOConfig:
        """The same by the names of :class:`fastrl.PPOConfig`."""
        step = self.batch_size // self.num_mini_batches
        size = min(self.per_device_train_batch_size, step)
        trackers = [x for x in self.report_to or () if x != "none"]
        return PPOConfig(
            exp_name=self.exp_name,
            seed=self.seed,
            log_with=trackers[0] if trackers else None,
            learning_rate=self.learning_rate,
            optim=str(getattr(self.optim, "value", self.optim)),
            optim_args=self.optim_args,
            batch_size=self.batch_size,
            mini_batch_size=size if step % size == 0 else step,
            gradient_accumulation_steps=step // size if step % size == 0 else 1,
            micro_batch_tokens=self.micro_batch_tokens,
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
        found: dict[str, Any] = {"cpu": True} if self.use_cpu else {}
        return found if precision is None else {**found, "mixed_precision": precision}
