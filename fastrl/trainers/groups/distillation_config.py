"""Settings of DistillationTrainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastrl.learn.teacher import TeacherSettings
from fastrl.settings import refused, setting, setting_like
from fastrl.trainers.groups.online_config import OnlineConfig

_NO_REWARDS = "nothing is rewarded here: use GRPOTrainer with teacher_kl_coef"
_NO_RATIOS = "the loss has no ratio of probabilities"
_ALONE = "the loss is the divergence from the teacher alone"


@dataclass
class DistillationConfig(OnlineConfig):
    """Settings of :class:`DistillationTrainer`; names, meanings and defaults are those of TRL 1.16
    where it has any. Raises ValueError for a value out of range, or settings that do not go
    together."""

    num_generations: int = setting_like(OnlineConfig, "num_generations", 1)
    beta: float = setting(
        "Which divergence of the policy's p from the teacher's q: 1 is KL(p||q), 0 is KL(q||p), "
        "between them β·KL(q||m) + (1-β)·KL(p||m), m = (1-β)p + βq. (In GRPOConfig, beta is the "
        "coefficient of the KL to a reference model; here is none.)",
        1.0,
        within="[0, 1]",
    )
    teacher_model_name_or_path: str | None = setting(
        "Path or Hub id of the teacher, where teacher_model is not given.", None
    )
    teacher_model_revision: str | None = setting(
        "Branch, tag or commit of a teacher on the Hub.", None
    )

    teacher_kl_coef: float = refused(0.0, "the loss is the divergence alone")
    teacher_beta: float = refused(1.0, "beta chooses the divergence")
    teacher_kl_in: str = refused("loss", "use GRPOTrainer for the sampled form")
    reward_weights: list[float] | None = refused(None, _NO_REWARDS)
    reward_timeout: float | None = refused(None, _NO_REWARDS)
    reward_retries: int = refused(0, _NO_REWARDS)
    reward_batch_size: int | None = refused(None, _NO_REWARDS)
    missing_eos_penalty: float | None = refused(None, _NO_REWARDS)
    overlong_buffer: int | None = refused(None, _NO_REWARDS)
    overlong_penalty: float = refused(1.0, _NO_REWARDS)
    dynamic_sampling_rounds: int = refused(0, _NO_REWARDS)
    epsilon: float = refused(0.2, _NO_RATIOS)
    epsilon_high: float | None = refused(None, _NO_RATIOS)
    off_policy_mask_threshold: float | None = refused(None, _NO_RATIOS)
    vllm_importance_sampling_correction: bool = refused(False, _NO_RATIOS)
    vllm_importance_sampling_mode: str = refused("sequence_mask", _NO_RATIOS)
    vllm_importance_sampling_clip_max: float | None = refused(3.0, _NO_RATIOS)
    vllm_importance_sampling_clip_min: float | None = refused(None, _NO_RATIOS)
    reference: str = refused("auto", _ALONE)
    num_shared_layers: int | None = refused(None, _ALONE)
    reference_dtype: str = refused("auto", _ALONE)
    sync_ref_model: bool = refused(False, _ALONE)
    policy_support: str = refused("full", "teachers and students are compared over all tokens")
    reference_support: str = refused("sampled", _ALONE)

    compares: ClassVar[bool] = False

    @property
    def kl_coef(self) -> float:
        return 0.0

    @property
    def teacher_settings(self) -> TeacherSettings:
        return super().teacher_settings._replace(coef=1.0, beta=self.beta)
