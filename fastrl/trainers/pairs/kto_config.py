"""Settings of KTOTrainer, by TRL 1.x's names."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.learn.preferences import UNPAIRED_LOSSES as LOSSES
from fastrl.settings import setting
from fastrl.trainers.pairs.preference_config import PreferenceConfig


@dataclass
class KTOConfig(PreferenceConfig):
    """Settings of :class:`fastrl.KTOTrainer`: names, meanings and defaults of TRL 1.x's KTOConfig.

    Raises:
        ValueError: a value out of range, an unknown loss; with a loss that estimates a KL, another
            ``train_sampling_strategy`` than sequential, or ``micro_batch_tokens``.
    """

    train_sampling_strategy: str = setting(
        "Order of the training data: random, sequential or group_by_length; kto needs sequential, "
        "as each batch is compared with its own mismatched completions.",
        "sequential",
    )
    loss_type: str = setting(f"One of {', '.join(LOSSES)}.", "kto", choices=LOSSES)
    desirable_weight: float = setting("Weight of desirable completions.", 1.0, within="[0, inf)")
    undesirable_weight: float = setting(
        "Weight of undesirable completions.", 1.0, within="[0, inf)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.read_together and self.train_sampling_strategy != "sequential":
            raise ValueError(
                f"train_sampling_strategy={self.train_sampling_strategy!r} would take completions "
                "away from the batch whose KL they estimate: leave it at 'sequential', or choose "
                "loss_type='apo_zero_unpaired', which estimates none"
            )
        if self.read_together and self.micro_batch_tokens is not None:
            raise ValueError(
                f"micro_batch_tokens splits batches, and the KL of {self.loss_type} is one of the "
                "whole batch: leave it out, and lower per_device_train_batch_size"
            )

    @property
    def read_together(self) -> list[str]:
        """Losses that read all of a batch."""
        return [self.loss_type] if LOSSES[self.loss_type].has_kl else []
