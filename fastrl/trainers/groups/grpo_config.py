"""Settings of GRPOTrainer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from fastrl.eras import serves_a_program
from fastrl.learn.objective import TokenLoss
from fastrl.registry import GROUP_ADVANTAGES, learns_as_clip, own_functions
from fastrl.settings import refused, setting, setting_like
from fastrl.trainers.groups.online_config import OnlineConfig
from fastrl.trainers.groups.policy_loss import LEVELS, LOSSES_BY_NAME, loss_of_grpo
from fastrl.trainers.groups.rollout_correction import check_correction

SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


@dataclass
class GRPOConfig(OnlineConfig):
    """Settings of :class:`GRPOTrainer`: TRL 1.x's names, meanings and defaults where it has any."""

    delta: float | None = setting(
        "Upper bound of the ratio itself, whatever the advantage's sign.", None, within="(0, inf]"
    )
    importance_sampling_level: str = setting(
        "The ratio: of a token, or of a sequence.", "token", choices=LEVELS
    )
    scale_rewards: str = setting(  # or a bool; of bool | str command lines would parse bools alone
        "What advantages are divided by: the deviation of the group or of the batch, or none.",
        "group",
        choices=SCALES,
    )
    advantage: str | None = setting(
        "Another advantage of a group (grpo, dr_grpo, rloo, or one of yours), in the place of what "
        "scale_rewards says.",
        None,
        choices=GROUP_ADVANTAGES,
    )
    multi_objective_aggregation: str = setting(
        "Of several functions: normalize their rewards' sum, or each one's rewards before the sum.",
        "sum_then_normalize",
        choices=AGGREGATIONS,
    )
    loss_type: str = setting(
        "The loss, see the table in docs/grpo_trainer.md.", "dapo", choices=LOSSES_BY_NAME
    )
    use_bias_correction_kl: bool = setting("Multiply the KL by the ratio.", True)
    top_entropy_quantile: float = setting(
        "Share of the tokens, those of highest entropy, that the policy's loss is of.",
        1.0,
        within="(0, 1]",
    )
    entropy_coef: float = setting(
        "This times the mean entropy is taken off the loss.", 0.0, within="(-inf, inf)"
    )
    use_adaptive_entropy: bool = setting("Adapt entropy_coef to entropy_target.", False)
    entropy_coef_min: float = setting("Adaptive entropy_coef: minimum.", 0.0, within="(-inf, inf)")
    entropy_coef_max: float = setting("Adaptive entropy_coef: maximum.", 1.0, within="(-inf, inf)")
    entropy_coef_delta: float = setting(
        "Change of an adaptive entropy_coef per optimizer step.", 0.005, within="[0, inf)"
    )
    entropy_target: float = setting(
        "Entropy in nats up to which an adaptive bonus acts.", 0.2, within="[0, inf)"
    )
    sapo_temperature_neg: float = setting(
        "Temperature τ of loss_type='sapo' where A is negative.", 1.05, within="(0, inf)"
    )
    sapo_temperature_pos: float = setting(
        "Temperature τ of loss_type='sapo' where A is positive.", 1.0, within="(0, inf)"
    )
    cast_lm_head_to_fp32: bool = setting(
        "Have the head's products in float32: refuse a bf16 or fp16 head, and mixed precision.",
        False,
    )
    vespo_k_pos: float = setting(
        "Of loss_type='vespo': power k where A is 0 or more.", 2.0, within="[0, inf)"
    )
    vespo_lambda_pos: float = setting(
        "Of loss_type='vespo': decay λ where A is 0 or more.", 3.0, within="(0, inf)"
    )
    vespo_k_neg: float = setting(
        "Of loss_type='vespo': power k where A is negative.", 3.0, within="[0, inf)"
    )
    vespo_lambda_neg: float = setting(
        "Of loss_type='vespo': decay λ where A is negative.", 2.0, within="(0, inf)"
    )
    vllm_importance_sampling_correction: bool = setting_like(
        OnlineConfig, "vllm_importance_sampling_correction", True
    )
    vllm_importance_sampling_cap: float | None = setting(
        "Deprecated name of vllm_importance_sampling_clip_max.", None, within="(0, inf]"
    )
    log_completions_hub_repo: str | None = refused(None, "upload the folder completions yourself")

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):  # older scripts pass a bool
            self.scale_rewards = "group" if self.scale_rewards else "none"
        super().__post_init__()
        if self.vllm_importance_sampling_cap is not None:
            warnings.warn(
                "vllm_importance_sampling_cap is deprecated: use vllm_importance_sampling_clip_max",
                FutureWarning,
                stacklevel=3,
            )
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        if self.advantage is not None and (
            self.scale_rewards != "group" or self.multi_objective_aggregation != AGGREGATIONS[0]
        ):
            raise ValueError(
                f"advantage={self.advantage!r} takes the place of scale_rewards and "
                "multi_objective_aggregation: leave these as they are"
            )
        check_correction(self)
        self._check_loss(loss_of_grpo(self))

    def _settle_batches(self) -> None:
        """Settles batch sizes. In a program for TRL, a batch size that does not divide into groups
        counts prompts: only TRL 0.14 and 0.15 accepted such sizes, and they counted prompts."""
        from_batch = (self.generation_batch_size, self.steps_per_generation) == (None, None)
        size = self.per_device_train_batch_size * self.world_size * self.gradient_accumulation_steps
        if from_batch and size % self.num_generations and serves_a_program():
            prompts = self.per_device_train_batch_size
            self.per_device_train_batch_size *= self.num_generations
            self.per_device_eval_batch_size *= self.num_generations_eval or self.num_generations
            warnings.warn(
                f"per_device_train_batch_size={prompts} counts prompts here, as in TRL 0.14, since "
                f"a batch of so many completions does not divide into groups of num_generations="
                f"{self.num_generations}: it is {self.per_device_train_batch_size} completions",
                stacklevel=5,
            )
        super()._settle_batches()

    def _check_loss(self, loss: TokenLoss) -> None:
        """Warns of a ``delta`` that is not read, and of a user's loss that acts as PPO's clip.

        Raises:
            ValueError: a ``delta`` with a user's loss.
        """
        kind, name = loss.objective.loss.kind, self.loss_type
        if self.delta is not None and "delta" not in loss.row.arguments:
            if loss.objective.loss.is_registered:
                raise ValueError(f"delta is for losses with PPO's clip, not {name!r}: leave it out")
            warnings.warn(
                f"delta={self.delta} is not read by loss_type={name!r}, as in TRL: leave it out",
                stacklevel=4,
            )
        uses = int(self.steps_per_generation or 1) * self.num_iterations
        functions, one_step = own_functions(kind), self.gradient_accumulation_steps % uses == 0
        if functions and one_step and learns_as_clip(kind, loss.objective.cliprange):
            warnings.warn(
                f"loss_type={name!r} makes no difference to 'dapo' here: each generation serves "
                "one optimizer step (gradient_accumulation_steps is a multiple of num_iterations × "
                "steps_per_generation), so that all ratios are 1, where it has the gradient of "
                "PPO's clip: raise num_iterations or steps_per_generation until their product is "
                "above gradient_accumulation_steps",
                stacklevel=4,
            )
