"""RLOO under the names of TRL 0.10 to 0.21: a policy, a reward model, and prompts as token ids."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fastrl.compat.older.ppo import PPOv2Trainer
from fastrl.compat.older.ppo_config import PPOv2Config
from fastrl.config import PPOConfig
from fastrl.settings import refused, setting

_OF_TODAY = "take RLOOTrainer, whose RLOOConfig(normalize_advantages=True) normalises advantages"


@dataclass
class RLOOv1Config(PPOv2Config):
    """Settings of :class:`RLOOv1Trainer`: names, meanings and defaults of the RLOOConfig of TRL
    0.10 to 0.21."""

    rloo_k: int = setting("Responses to each prompt.", 2, within="[2, inf)")
    normalize_advantage: bool = refused(False, _OF_TODAY)
    normalize_reward: bool = refused(False, "make scores comparable in the reward model")
    token_level_kl: bool = refused(False, "the KL is a response's")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % self.rloo_k:
            raise ValueError(
                f"a batch of {self.batch_size} samples (per_device_train_batch_size × "
                f"gradient_accumulation_steps) must be a multiple of rloo_k ({self.rloo_k})"
            )

    def classic(self) -> PPOConfig:
        return dataclasses.replace(
            super().classic(),
            advantage="rloo",
            group_size=self.rloo_k,
            ratio_level="product",
            loss_aggregate="seq-mean-token-mean",
            whiten_rewards=False,
        )


class RLOOv1Trainer(PPOv2Trainer):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al., "Back to basics", 2024), by a
    reward model: the RLOOTrainer of TRL 0.10 to 0.21, run as :class:`PPOv2Trainer` is, without a
    value model.

    A response's return is its score less β times the KL of the whole response; A is the return less
    the mean return of the other responses to the prompt. The loss is the mean over responses of
    -min(ρ·A, clip(ρ, 1 - ε, 1 + ε)·A), ρ = Π_t π(y_t)/π_old(y_t).
    """

    has_values = False
