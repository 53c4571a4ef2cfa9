"""The clipped PPO objective from hidden states: the language-model head and the loss in one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .argument_types import explains_types
from .checks import check_device, check_like
from .head_pass import HandOut, HeadPass, save_gradients, scaled_gradients, wanted_gradients
from .lm_head import (
    HEAD_ARGUMENTS,
    HEAD_SCHEMA,
    HeadInputs,
    checked_head,
    fake_gradients,
    flat_head,
    labels_name,
    split_head,
)
from .operators import new, operator, or_empty
from .policy_losses import PPO_CLIP, PolicyLoss, of_top_entropy
from .ppo_loss import checked_loss, denominator_of, inverse_of, joined_slopes, loss_of, policy_terms
from .sequence_ratios import token_weights as token_weights_of
from .sequence_ratios import with_sequences
from .token_sets import TokenSets
from .types import KLTerm, LinearLossStats, LossStats, PPOConstants, PPOSettings
from .vocab_parallel import VocabParallel


class EntropyTerms(NamedTuple):
    """What the loss from hidden states makes of entropies."""

    coef: float = 0.0  # -coef·H is added to each token's loss
    top_share: float = 1.0  # the share of tokens that learn, those of the highest entropies

    @property
    def reads(self) -> bool:
        return self.coef != 0 or self.top_share < 1

    def check(self) -> None:
        """Raises TypeError for a tensor in place of a number, and ValueError for a coefficient that
        is not finite or a share outside of (0, 1]."""
        if any(isinstance(number, Tensor) for number in self):
            raise TypeError(
                "entropy_coef and top_entropy must be Python numbers: a tensor would wait"
            )
        if not math.isfinite(self.coef):
            raise ValueError(f"entropy_coef must be finite, got {self.coef}")
        if not 0 < self.top_share <= 1:
            raise ValueError(f"top_entropy must lie in (0, 1], got {self.top_share}: 1 is all")


def _all_slopes(
    inputs: HeadInputs,
    head: HeadPass,
    constants: PPOConstants,
    settings: PPOSettings,
    entropies: EntropyTerms,
    passes: Any,
) -> Tensor:
    """The gradient of the sum by log-probs [..., T], where a token's depends on others: on its
    sequence's, or on the entropies of all. With several chunks of rows these are scored first,
    which computes logits once more."""
    scored = head
    if head.chunks > 1:
        scored = HeadPass(inputs, entropies.top_share < 1, (False,) * 3)
        for _ in scored:
            pass
    logprobs, mask = scored.statistics.logprobs.view(constants.mask.shape), constants.mask
    constants = _with_old(constants, logprobs)
    if entropies.top_share < 1:
        assert scored.statistics.entropies is not None
        constants = _of_top(constants, scored.statistics.entropies.view(mask.shape), entropies)
    with_ratios = with_sequences(logprobs, constants, settings)
    weights = token_weights_of(constants, settings)
    if passes is None:
        slopes = policy_terms(logprobs, with_ratios, settings).slope
        return joined_slopes(slopes, logprobs, weights, with_ratios, settings)
    slopes = passes.policy_slopes(logprobs, with_ratios, settings)
    if settings.objective.joins_slopes:
        return joined_slopes(slopes, logprobs, weights, with_ratios, settings)
    return slopes if weights is None else slopes * weights


def _of_top(constants: PPOConstants, entropies: Tensor, terms: EntropyTerms) -> PPOConstants:
    """The constants with an importance weight of 0 for tokens that are to learn nothing."""
    top = of_top_entropy(entropies, constants.mask, terms.top_share).float()
    return constants._replace(
        weights=top if constants.weights is None else top * constants.weights.float()
    )


def _with_old(constants: PPOConstants, logprobs: Tensor) -> PPOConstants:
    """The constants with ``logprobs`` as the old log-probs, where these are None."""
    if constants.old_logprobs is not None:
        return constants
    return constants._replace(old_logprobs=logprobs.detach())


@torch.no_grad()
def _forward(
    inputs: HeadInputs,
    constants: PPOConstants,
    settings: PPOSettings,
    entropy: bool,
    wanted: tuple[bool, ...],
    terms: EntropyTerms,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """The loss, its statistics, log-probs and entropies, and the wanted gradients of the loss by
    hidden states, weight and bias. The weight of a token does not depend on its log-prob."""
    passes: Any = None
    if inputs.backend == "triton" and not settings.objective.is_registered:
        from ._triton import ppo_loss

        passes = ppo_loss
    inverse = inverse_of(denominator_of(constants, settings))
    by_tokens = token_weights_of(constants, settings)
    weights = inverse if by_tokens is None else inverse * by_tokens
    weights = weights.expand(constants.mask.shape).reshape(-1)
    flat = [x if x is None or x.dim() == 0 else x.reshape(-1) for x in constants]
    of_others = settings.objective.reads_sequences or terms.top_share < 1
    of_entropies = None
    if terms.coef:
        of_entropies = torch.where(inputs.counted, -terms.coef * weights, 0.0)
    head = HeadPass(inputs, entropy or terms.reads, wanted, terms.coef != 0)
    all_slopes: Tensor | None = None
    for rows in head:
        if not head.wanted:
            continue
        if of_others:
            if all_slopes is None:
                all_slopes = _all_slopes(inputs, head, constants, settings, terms, passes)
                all_slopes = (all_slopes * inverse).reshape(-1)
            slopes = all_slopes[rows]
        else:
            logprobs = head.statistics.logprobs[rows]
            part = PPOConstants(*(x if x is None or x.dim() == 0 else x[rows] for x in flat))  # type: ignore[arg-type]
            part = _with_old(part, logprobs)
            if passes is None:
                slopes = joined_slopes(
                    policy_terms(logprobs, part, settings).slope, logprobs, None, part, settings
                )
            else:
                slopes = passes.policy_slopes(logprobs, part, settings)
            slopes = slopes.mul_(weights[rows])
        head.backward(rows, slopes, None if of_entropies is None else of_entropies[rows])
    logprobs, entropies = head.per_token(head.statistics.logprobs), head.statistics.entropies
    entropies = None if entropies is None else head.per_token(entropies)
    if terms.top_share < 1:
        assert entropies is not None
        constants = _of_top(constants, entropies, terms)
    constants = _with_old(constants, logprobs)
    loss, numbers = loss_of(logprobs, None, constants, settings, inputs.backend)
    if terms.coef:
        assert entropies is not None
        loss -= terms.coef * (entropies * weights.view(entropies.shape)).sum()
        numbers[LossStats.NAMES.index("loss")] = loss
    return loss, numbers, logprobs, entropies if entropy else None, head.gradients()


@operator(
    f"({HEAD_SCHEMA}, Tensor? old_logprobs, Tensor advantages, Tensor mask, Tensor? weights, "
    "Tensor? ref_logprobs, Tensor? denominator, Tensor? token_weights, Tensor? lengths, float low, "
    "float high, float? dual_clip, str aggregate, float? denominator_number, float kl_coef, "
    "str kl_kind, str objective, str ratio_level, float? delta, float[] sapo_temperatures, "
    "float[] vespo_powers, float[] vespo_decays, float entropy_coef, float top_entropy, "
    "bool entropy, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _linear_ppo_loss(*arguments: Any) -> tuple[Tensor, ...]:
    """The results, and the wanted gradients of the loss by the first three arguments."""
    inputs, others = split_head(arguments)
    old_logprobs, advantages, mask, weights, *tensors = others[:8]
    low, high, dual_clip, aggregate, number, kl_coef, kl_kind, *others = others[8:]
    kind, level, delta, soft, powers, decays, coef, top, entropy, wanted = others
    constants = PPOConstants(old_logprobs, advantages, mask, weights, None, None, *tensors)
    settings = PPOSettings(
        low, high, dual_clip, aggregate, number, 0.0, 0.0, kl_coef, kl_kind,
        PolicyLoss(kind, level, delta, tuple(soft), tuple(powers), tuple(decays)),
    )  # fmt: skip
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        *results, entropies, gradients = _forward(
            inputs._replace(shape=mask.shape), constants, settings, entropy, tuple(wanted),
            EntropyTerms(coef, top),
        )  # fmt: skip
    results.append(or_empty(entropies, results[0]))
    return *results, *(or_empty(x, inputs.hidden) for x in gradients)


@_linear_ppo_loss.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    hidden, mask, (entropy, wanted) = arguments[0], arguments[HEAD_ARGUMENTS + 2], arguments[-2:]
    return (
        new(hidden),
        new(hidden, len(LossStats.NAMES)),
        new(hidden, *mask.shape),
        new(hidden, *mask.shape, wanted=entropy),
        *fake_gradients(arguments[:3], wanted),
    )


_linear_ppo_loss.register_autograd(scaled_gradients, setup_context=save_gradients)


def _compiled(
    inputs: HeadInputs,
    constants: PPOConstants,
    settings: PPOSettings,
    entropy: bool,
    wanted: tuple[bool, ...],
    terms: EntropyTerms,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    c = constants
    low, high, dual_clip, aggregate, number, _, _, kl_coef, kl_kind, objective = settings
    loss, numbers, logprobs, entropies, *_ = _linear_ppo_loss(
        *flat_head(inputs), c.old_logprobs, c.advantages, c.mask, c.weights, c.ref_logprobs,
        c.denominator, c.token_weights, c.lengths, low, high, dual_clip, aggregate, number, kl_coef,
        kl_kind, *objective[:3], *map(list, objective[3:]), *terms, entropy, wanted,
    )  # fmt: skip
    return loss, numbers.detach(), logprobs.detach(), entropies.detach() if entropy else None


@explains_types
def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float | tuple[float, float] = 0.2,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    kl: KLTerm | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    aggregate: str = "token-mean",
    denominator: float | Tensor | None = None,
    objective: PolicyLoss = PPO_CLIP,
    lengths: Tensor | None = None,
    entropy: bool = False,
    entropy_coef: float = 0.0,
    top_entropy: float = 1.0,
    shift: bool | int = False,
    support: TokenSets | None = None,
    vocab_parallel: VocabParallel | None = None,
    workspace_bytes: int | None = None,
    check_labels: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, LinearLossStats]:
    """``ppo_loss(linear_logprobs(hidden, weight, labels), old_logprobs, advantages, mask)``.

    The weight of every token in the loss is known before its log-prob is, so that a chunk of logits
    gives log-probs, loss and gradients while it is there: 6·N·V·H flops, where computing logits
    once more for backward takes 8. Gradients exist as soon as the loss does; backward multiplies
    them with its own, once.

    So gradients are rounded to the tensors' dtype before a factor from upstream, such as a
    GradScaler's scale, reaches them, and in fp16 small ones underflow whatever the scale: train in
    bf16 or fp32, or use ``linear_logprobs`` with ``ppo_loss``, whose gradients are scaled first.

    Args:
        hidden, weight, labels, bias, temperature, softcap, logit_scale: as for ``linear_logprobs``,
            and so is the rounding; labels [..., T]. With several chunks of rows the weight's
            gradient is summed in fp32, V·H·4 bytes; a GPU has one chunk where its logits fit into
            ``workspace_bytes`` and these.
        old_logprobs, advantages, mask, cliprange, kl, dual_clip, weights, token_weights, aggregate,
            denominator: as for ``ppo_loss``, per token [..., T]. A label of -100 counts as masked.
            Without old log-probs (None) these weights are the policy that sampled, and ρ = 1.
        objective, lengths: as for ``ppo_loss``. Where the ratios are those of sequences, and with
            several chunks of rows, log-probs are computed in a pass of their own first.
        entropy: also compute entropies, as a statistic.
        entropy_coef: adds -entropy_coef·H to each token's loss, with token weights, aggregation and
            denominator as all that it adds; the gradient goes through the entropies H. On CPUs
            logits are then computed a whole chunk at a time.
        top_entropy: only this share of the counted tokens, those of the highest entropies, has the
            policy's objective; the others' is 0, with their KL term and entropy as they are. With
            several chunks of rows it needs a pass of its own, too.
        shift: as for ``linear_logprobs``; whatever is per token, but hidden states and labels, is
            [..., T - n] then.
        support: as for ``linear_logprobs``; old and reference log-probs are to be over the same
            sets, or the ratio has what they leave out in it.
        vocab_parallel: as for ``linear_logprobs``. Each chunk of rows is one exchange, and the
            hidden states' gradient another, at the end of forward.
        workspace_bytes, check_labels, backend: as for ``linear_logprobs``.

    Returns:
        The loss, 0-d fp32, differentiable with respect to ``hidden``, ``weight`` and ``bias``; and
        its :class:`LinearLossStats`, detached. A value loss is to be added.

    Raises:
        TypeError, ValueError: as ``linear_logprobs`` and ``ppo_loss``.
        RuntimeError: a second backward through the same call, unless it is compiled.
    """
    inputs = checked_head(
        hidden, weight, labels, bias, temperature, softcap, logit_scale, mask, shift,
        vocab_parallel, workspace_bytes, check_labels, backend, support,
    )  # fmt: skip
    if labels.dim() == 0:
        raise ValueError("labels has no time dimension: pass hidden [..., T, H], labels [..., T]")
    name, like = "advantages", advantages
    if old_logprobs is not None:
        name, like = "old_logprobs", old_logprobs
    check_like(name, like, labels_name(shift), inputs.scored)
    _, constants, settings = checked_loss(
        like, old_logprobs, advantages, inputs.scored, cliprange, None, kl, dual_clip,
        weights, token_weights, aggregate, denominator, objective, lengths,
    )  # fmt: skip
    for name, tensor in constants._asdict().items():
        if tensor is not None:
            check_device(name, tensor, "hidden", hidden)
    terms = EntropyTerms(entropy_coef, top_entropy)
    if terms.reads:
        terms.check()
    wanted = wanted_gradients(inputs.hidden, inputs.weight_leaf, inputs.bias)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        if torch.compiler.is_compiling():
            loss, numbers, logprobs, entropies = _compiled(
                inputs, constants, settings, entropy, wanted, terms
            )
        else:
            loss, numbers, logprobs, entropies, gradients = _forward(
                inputs, constants, settings, entropy, wanted, terms
            )
            loss = HandOut.apply(
                inputs.hidden, inputs.weight_leaf, inputs.bias, loss, gradients, inputs.head,
                "linear_ppo_loss",
            )  # fmt: skip
    mean = torch.full_like(numbers[:1], math.nan)
    if entropies is not None:
        tokens = numbers[LossStats.NAMES.index("tokens")].clamp(min=1)
        mean = (entropies.sum() / tokens).view(1)
    return loss, LinearLossStats(torch.cat([numbers, mean]), logprobs, entropies)
