"""Settings of RLOOTrainer."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.settings import setting
from fastrl.trainers.groups.online_config import OnlineConfig
from fastrl.trainers.groups.rollout_correction import MODES, check_correction


@dataclass
class RLOOConfig(OnlineConfig):
    """Settings of :class:`RLOOTrainer`; names, meanings and defaults are TRL 1.x's. Raises
    ValueError for a value out of range, or settings that do not go together."""

    num_generations: int = setting("Responses to each prompt.", 2, within="[1, inf)")
    beta: float = setting(
        "Coefficient of the KL in the reward; 0: there is none.", 0.05, within="[0, inf)"
    )
    normalize_advantages: bool = setting("Standardise advantages over the batch.", False)
    vllm_importance_sampling_mode: str = setting(
        "Kind of weights π_old/π_sampler, of whole responses as the loss's ratio is.",
        "sequence_mask",
        choices=[mode for mode in MODES if mode.startswith("sequence")],
    )
    # Not a tuple, which no parser of command lines knows.
    reward_clip_range: list[float] | None = setting(
        "Bounds of the reward, low and high.", None, within="[-inf, inf]"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = self.reward_clip_range
        if bounds is not None and not (len(bounds) == 2 and bounds[0] < bounds[1]):
            raise ValueError(f"reward_clip_range must be (low, high), got {bounds}")
        check_correction(self)
