"""What a PPOTrainer learns of its teachers: a term of the loss, or a part of tokens' rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fastrl.config import PPOConfig
from fastrl.learn.experience import Experience
from fastrl.learn.samples import teacher_batch
from fastrl.learn.scorer import Scorer
from fastrl.learn.teacher import TeacherSettings
from fastrl.models import PreTrainedModelWrapper
from fastrl.samples import Samples
from fastrl.trainers.teachers import SCALED, TeacherModels, Teaching, teachers_of


def checked_teachers(
    config: PPOConfig, given: Any, policy: PreTrainedModelWrapper, tokenizer: Any, precision: str
) -> TeacherModels | None:
    """The teachers that were passed to a trainer, or that its configuration names; None without.

    Args:
        precision: accelerate's mixed precision.

    Raises:
        ValueError: two teachers; an encoder–decoder as policy; a loss that is scaled; as
            :func:`fastrl.trainers.teachers.teachers_of`.
    """
    if given is not None and config.teacher_model is not None:
        raise ValueError(
            f"teacher_model is given, and PPOConfig.teacher_model={config.teacher_model!r} names "
            "another: leave one out"
        )
    two = (
        "a teacher reads a prompt and its response as one text, and the policy is an "
        "encoder–decoder: leave teacher_kl_coef at 0, or train a causal language model"
    )
    given = config.teacher_model if given is None else given
    several = given.values() if isinstance(given, Mapping) else [given]
    function = (
        "teacher_model is a function, which PPOTrainer does not ask: use GRPOTrainer, RLOOTrainer "
        "or DistillationTrainer, or pass a model"
    )
    return teachers_of(
        given,
        config,
        policy,
        tokenizer,
        coef=config.teacher_kl_coef,
        fresh=False,
        refused={
            two: policy.is_encoder_decoder,
            function: any(callable(x) and not isinstance(x, nn.Module) for x in several),
            f"mixed precision fp16 {SCALED}: use bf16": precision == "fp16",
        },
    )


def teacher_settings(config: PPOConfig) -> TeacherSettings:
    """How much is learned of teachers, and by which divergence."""
    return TeacherSettings(
        config.teacher_kl_coef,
        config.teacher_beta,
        config.temperature,
        None,
        config.micro_batch_tokens,
        config.on_nonfinite == "raise",
    )


class StepTeaching(Teaching):
    """Gives a step's experience what its teachers have to say.

    Attributes:
        noted: whether a ledger notes the teachers' log-probs.
    """

    noted: bool = False

    def limit_passes(self, tokens: int | None) -> None:
        """Limits the tokens of a teacher's forward pass in the loss."""
        settings = self.teachers.settings._replace(micro_batch_tokens=tokens)
        self.teachers.settings = settings

    def __call__(self, scored: Experience, samples: Samples, scorer: Scorer) -> Experience:
        """The scored batch with the responses behind their teachers' prompts, and where rewards
        have them, or a ledger, with the teachers' log-probs. All processes call it with the same
        samples.

        Args:
            scorer: has the limits of forward passes, and halves them where memory runs out.
        """
        samples = replace(samples, learned=[mask.bool() for mask in samples.written])
        tokens = teacher_batch(samples, self.pad_token)
        if tokens is not None:
            tokens = tokens.to(self.device)
        reads = self.in_reward or self.noted
        logprobs = self._logprobs(scored, samples, scorer) if reads else None
        return replace(scored, teacher_tokens=tokens, teacher_logprobs=logprobs)

    def _logprobs(self, scored: Experience, samples: Samples, scorer: Scorer) -> Tensor:
        """Log-probs of the responses' tokens by their teachers, [B, T-1]."""
        for attempt in scorer.slices(min(scorer.limit.samples, len(samples))):
            with attempt as size:
                limit = scorer.limit._replace(samples=size)
                found = self.log_probs(samples, limit, shared=True)
        return scored.tokens.placed(found)

    def rewards(self, scored: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        """-coef·(log π_old - log π_teacher) of each token, [B, T-1]; and statistics."""
        assert scored.teacher_logprobs is not None
        apart = scored.logprobs - scored.teacher_logprobs
        samples = scored.tokens.mask.any(-1).sum()
        statistics = {"objective/teacher_kl": apart.sum() / samples}
        return self.reward_of(apart), statistics
