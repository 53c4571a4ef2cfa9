"""Settings of SDFTTrainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastrl.settings import idle, refused, setting, setting_like
from fastrl.trainers.groups.distillation_config import DistillationConfig

MODES = ("full_logits", "sampled_token", "topk_logits")
_WHOLE = "the divergence is over the whole vocabulary"


@dataclass
class SDFTConfig(DistillationConfig):
    """Settings of :class:`SDFTTrainer`; names, meanings and defaults are those of TRL 1.16 where it
    has any. Raises ValueError for a value out of range, or settings that do not go together."""

    # The one value of a setting that a trainer takes, where the default is another, TRL's.
    to_be_named: ClassVar[dict[str, str]] = {"distillation_mode": "full_logits"}

    learning_rate: float = setting_like(DistillationConfig, "learning_rate", 5e-5)
    distillation_alpha: float = setting(
        "Which divergence of the policy's p from the teacher's q: 1 is KL(p||q), 0 is KL(q||p), "
        "between them α·KL(q||m) + (1-α)·KL(p||m), m = (1-α)p + αq.",
        0.5,
        within="[0, 1]",
    )
    beta: float | None = setting(  # type: ignore[assignment]
        "The same as distillation_alpha, by DistillationConfig's name.", None, within="[0, 1]"
    )
    distillation_mode: str = setting(
        "What is compared: full_logits, the distributions over the whole vocabulary. TRL's "
        "topk_logits and sampled_token are refused as training begins.",
        "topk_logits",
        choices=MODES,
    )
    distillation_is_clip: float | None = setting(
        "In TRL the bound of importance weights π/π_old; where there would be any, because "
        "responses are learned from in several steps, it is refused unless None.",
        2.0,
        within="(0, inf)",
    )
    num_loss_tokens_to_skip: int = setting(
        "Tokens at the beginning of each response that are not learned.", 0, within="[0, inf)"
    )
    num_generations: int = setting_like(DistillationConfig, "num_generations", 8)
    max_completion_length: int = setting_like(DistillationConfig, "max_completion_length", 256)
    max_prompt_length: int | None = setting(
        "Prompts, the teacher's too, keep their last tokens. None: they are not cut.",
        512,
        within="[1, inf)",
    )
    disable_dropout: bool = setting_like(DistillationConfig, "disable_dropout", True)
    router_aux_loss_coef: float | None = setting_like(
        DistillationConfig, "router_aux_loss_coef", 0.0
    )

    generate_from_teacher: bool = refused(
        False, "responses are the student's; pass a rollout_func that answers with the hint"
    )
    use_teacher_server: bool = refused(False, "teacher_model_kind='live' is scored in this process")
    distillation_topk: int | None = idle(100, _WHOLE)
    distillation_add_tail: bool = idle(False, _WHOLE)
    teacher_model_name_or_path: str | None = refused(
        None, "the teacher has the student's weights: use DistillationTrainer"
    )

    def __post_init__(self) -> None:
        if self.beta is not None:
            self.distillation_alpha = self.beta
        super().__post_init__()
        self.beta = self.distillation_alpha

    @property
    def longest_teacher_prompt(self) -> int | None:
        return self.max_prompt_length

    def check_mode(self) -> None:
        """Raises ValueError for a divergence that is another in TRL: of the student's likeliest
        tokens, of sampled tokens, or with importance weights."""
        instead = {
            "topk_logits": "compares the student's distillation_topk likeliest tokens alone",
            "sampled_token": "compares the sampled tokens alone, in expectation as alpha=1",
        }
        if self.distillation_mode in instead:
            raise ValueError(
                f"distillation_mode={self.distillation_mode!r} (TRL's default is 'topk_logits') "
                f"{instead[self.distillation_mode]}: set distillation_mode='full_logits', which "
                "compares the whole vocabulary at less memory than TRL's modes"
            )
        uses = int(self.steps_per_generation or 1) * self.num_iterations
        if self.distillation_is_clip is not None and self.gradient_accumulation_steps % uses:
            raise ValueError(
                f"distillation_is_clip={self.distillation_is_clip} weighs responses that are "
                f"learned from in several steps (steps_per_generation × num_iterations = {uses}), "
                "which is not done here: set distillation_is_clip=None, or leave "
                "steps_per_generation and num_iterations out"
            )
