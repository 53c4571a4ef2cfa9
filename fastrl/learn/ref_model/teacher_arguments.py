"""Settings of the teachers of a policy, by TRL's names and ours."""

from __future__ import annotations

from dataclasses import dataclass

from fastrl.settings import setting

KINDS = ("base", "live", "ema")
PLACES = ("device", "host")
RESTS = ("bucket", "renormalised")
PLACES_OF_KL = ("loss", "reward")
_TEMPLATE = "{prompt}\n\n{privileged_context}"


@dataclass
class TeacherArguments:
    """How much is learned of teachers, which there are, where they are kept, what they read."""

    teacher_kl_coef: float = setting(
        "Weight of the divergence from a teacher in the loss; 0: there is no teacher.",
        0.0,
        within="[0, inf)",
    )
    teacher_beta: float = setting(
        "Which divergence from a teacher's q: 1 is KL(p||q), 0 is KL(q||p), between them "
        "β·KL(q||m) + (1-β)·KL(p||m), m = (1-β)p + βq.",
        1.0,
        within="[0, 1]",
    )
    teacher_kl_in: str = setting(
        "Where teacher_kl_coef acts: loss (the divergence over the whole vocabulary), or reward "
        "(of each token, -coef·(log π - log π_teacher) at the token that was sampled).",
        "loss",
        choices=PLACES_OF_KL,
    )
    teacher_model_kind: str = setting(
        "Teacher where no teacher_model is given: base (the policy as training begins; of an "
        "adapter that begins with it, the model without), live (the policy as it is), ema (an "
        "average of its weights).",
        "base",
        choices=KINDS,
    )
    teacher_update_rate: float = setting(
        "Weight of the policy in an update of teacher_model_kind='ema'; 1 copies it.",
        0.05,
        within="(0, 1]",
    )
    teacher_sync_steps: int = setting(
        "Optimizer steps between two updates of teacher_model_kind='ema'.", 1, within="[1, inf)"
    )
    teacher_placement: str = setting(
        "Where a teacher_model is kept: device, or host (in host memory; its layers are loaded one "
        "by one as it runs).",
        "device",
        choices=PLACES,
    )
    teacher_model_init_kwargs: dict | str | None = setting(
        "Arguments to load a teacher_model with (JSON).", None
    )
    teacher_prompt_template: str = setting(
        "What a teacher reads in place of the prompt (of a chat: of its last message) where the "
        "data have a column privileged_context.",
        _TEMPLATE,
    )
    teacher_column: str | None = setting(
        "The column that names each prompt's teacher, where teacher_model is a dict.", None
    )

    teacher_rest: str = setting(
        "Tokens that a teacher's function does not name: bucket (one outcome more, with what is "
        "left of both distributions) or renormalised (both are taken over the named tokens alone).",
        "bucket",
        choices=RESTS,
    )

    def check_teacher(self) -> None:
        """Raises ValueError for a template without one of its two fields."""
        for name in ("prompt", "privileged_context"):
            if f"{{{name}}}" not in self.teacher_prompt_template:
                raise ValueError(
                    f"teacher_prompt_template has no {{{name}}}: it must hold {{prompt}} and "
                    "{privileged_context}"
                )
