"""What PPOConfig's settings mean: the parts of :mod:`fastrl.learn` that a trainer puts together."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastrl.config import PPOConfig
from fastrl.learn.advantages import (
    GAE,
    Advantages,
    BatchReturns,
    DecoupledGAE,
    GroupBaseline,
)
from fastrl.learn.aggregate import Aggregate
from fastrl.learn.correction import ImportanceWeights
from fastrl.learn.engine import Engine
from fastrl.learn.gradient import GradientStep, StepRules
from fastrl.learn.kl_penalty import (
    AdaptiveKLController,
    FixedKLController,
)
from fastrl.learn.loss import ClippedValues, RouterTerm, UpdateLoss, ValueLoss
from fastrl.learn.memory import MicroBatches
from fastrl.learn.nonfinite import NonFiniteNumbers
from fastrl.learn.objective import TokenObjective
from fastrl.learn.teacher import Teachers
from fastrl.learn.update import Epochs
from fastrl.registry import GROUP_ADVANTAGES


def advantages_of(config: PPOConfig) -> Advantages:
    """The advantages that ``advantage`` names."""
    if config.compares_groups:
        return GroupBaseline(config.group_size, GROUP_ADVANTAGES[config.advantage])
    if not config.needs_values:
        return BatchReturns(config.gamma)
    options = config.gamma, config.lam, config.whiten_rewards
    if config.lam_value in (None, config.lam) and config.lam_length_alpha is None:
        return GAE(*options)
    lam_value = config.lam if config.lam_value is None else config.lam_value
    return DecoupledGAE(*options, lam_value, config.lam_length_alpha)


def has_kl_in_loss(config: PPOConfig) -> bool:
    # A KL coefficient of 0 stays 0, and then there need not be a reference.
    return config.kl_in == "loss" and config.init_kl_coef > 0


def kl_controller_of(config: PPOConfig) -> AdaptiveKLController | FixedKLController:
    """The controller of the KL coefficient, adaptive where ``adap_kl_ctrl`` says so."""
    if config.adap_kl_ctrl and config.init_kl_coef > 0:  # 0 stays 0, whatever the KL
        return AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
    return FixedKLController(config.init_kl_coef)


def correction_of(config: PPOConfig) -> ImportanceWeights | None:
    """The weights that ``sampler_correction`` names; None where it is "off"."""
    if config.sampler_correction == "off":
        return None
    return ImportanceWeights(
        config.sampler_correction,
        config.sampler_correction_min,
        config.sampler_correction_max,
        config.temperature,
    )


def old_logprobs_of(config: PPOConfig, *, needs_logits: bool, recomputes: bool) -> str:
    """The argument ``kind`` of :class:`fastrl.learn.old_logprobs.OldLogprobs`.

    Args:
        needs_logits: whether the policy's logits are needed, for the KL over the vocabulary.
        recomputes: whether a sampler's log-probs are compared with the policy's.
    """
    # Without values, groups of equal rewards learn the KL alone, and its rounding errors.
    in_reward = config.kl_in == "reward" and bool(config.init_kl_coef)
    in_reward |= config.teacher_kl_in == "reward" and bool(config.teacher_kl_coef)
    learns_kl = config.old_logprobs == "auto" and in_reward and not config.needs_values
    return "recompute" if needs_logits or recomputes or learns_kl else config.old_logprobs


def loss_of(
    config: PPOConfig,
    *,
    values: bool | None = None,
    routes: bool = False,
    teachers: Teachers | None = None,
) -> UpdateLoss:
    """The update's loss, by the settings.

    Args:
        values: whether the policy learns values; None: where the advantage needs them.
        routes: whether the policy is a mixture of experts whose routers can be followed.
        teachers: those with a term in the loss.
    """
    high = config.cliprange if config.cliprange_high is None else config.cliprange_high
    kind = config.loss_denominator  # "auto": the mini-batch with values, as in TRL, else the step
    return UpdateLoss(
        TokenObjective.of(config, config.policy_loss, config.ratio_level, (config.cliprange, high)),
        Aggregate(config.loss_aggregate, config.loss_norm_length),
        value_term_of(config) if (config.needs_values if values is None else values) else None,
        per_step=kind == "step" or (kind == "auto" and not config.needs_values),
        has_kl=has_kl_in_loss(config),
        entropy_coef=config.entropy_coef,
        temperature=config.temperature,
        off_policy=config.off_policy_mask_threshold,
        teachers=teachers,
        router=RouterTerm(config.router_aux_loss_coef, config.replay_routing) if routes else None,
    )


def value_term_of(config: PPOConfig) -> ClippedValues:
    return ClippedValues(config.cliprange_value, config.vf_coef)


def gradient_of(
    config: PPOConfig,
    engine: Engine,
    loss: UpdateLoss | ValueLoss,
    decode: Callable[[Tensor], str] | NonFiniteNumbers | None = None,
) -> GradientStep:
    """The gradient step of a loss, by the settings.

    Args:
        decode: a handler of non-finite numbers; or the argument ``decode`` of the
            :class:`NonFiniteNumbers` that is made.
    """
    nonfinite = decode
    if not isinstance(nonfinite, NonFiniteNumbers):
        nonfinite = NonFiniteNumbers(config.on_nonfinite, nonfinite)
    rules = StepRules(
        config.ratio_threshold,
        1.5 * config.target_kl if config.early_stopping else None,
        config.micro_batch_tokens,
    )
    remedy = (
        "lower mini_batch_size (and raise gradient_accumulation_steps), or set "
        "gradient_checkpointing"
    )
    return GradientStep(engine, loss, rules, nonfinite, MicroBatches("the update", remedy))


def epochs_of(config: PPOConfig, processes: int) -> Epochs:
    """The epochs of an update; batch sizes are those of the configuration times ``processes``."""
    return Epochs(
        config.ppo_epochs,
        config.batch_size * processes,
        config.mini_batch_size * processes,
        config.backward_batch_size * processes,
        config.group_size,
        config.seed,
    )
