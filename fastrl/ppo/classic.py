"""The bodies of classic methods of PPOTrainer that step() does not need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.core import entropy_from_logits
from fastrl.data import batch as data
from fastrl.models.scoring import PolicyObjective, TokenScores
from fastrl.models.utils import evaluating
from fastrl.ppo.experience import scoring_request

if TYPE_CHECKING:
    from fastrl.ppo.update import UpdateLoss


@torch.no_grad()
def batched_forward_pass(
    model: Any,
    batch: data.TokenBatch,
    samples_per_pass: int,
    temperature: float,
    return_logits: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Log-probs, logits or None, values and masks of a batch's responses, without gradients; see
    :meth:`fastrl.PPOTrainer.batched_forward_pass`."""
    shape = batch.mask.shape
    logprobs, values = (torch.zeros(shape, device=batch.mask.device) for _ in range(2))
    logits = None
    with evaluating(model):
        for start in range(0, len(batch), samples_per_pass):
            chosen = range(start, min(start + samples_per_pass, len(batch)))
            columns = batch.columns(chosen)
            block = (slice(chosen.start, chosen.stop), slice(columns.start, columns.stop - 1))
            part = batch.select(chosen)
            request = scoring_request(part, logits=return_logits, temperature=temperature)
            scores = model(**part.model_inputs, scoring=request)
            logprobs[block] = part.scatter(scores.logprobs, request.rows)
            values[block] = part.scatter(scores.values, request.rows)
            if return_logits:
                if logits is None:
                    logits = scores.logits.new_zeros((*shape, scores.logits.shape[-1]))
                logits[block][part.mask] = scores.logits
    return logprobs, logits, values, batch.mask


def loss(
    update_loss: UpdateLoss,
    old_logprobs: Tensor,
    values: Tensor,
    logits: Tensor | None,
    vpreds: Tensor,
    logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    returns: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Policy loss, vf_coef × value loss, and statistics; see :meth:`fastrl.PPOTrainer.loss`."""
    mask = torch.atleast_2d(mask.bool())
    weights = update_loss.aggregate.weights(mask, None)

    def flat(x: Tensor) -> Tensor:
        return torch.atleast_2d(x).expand_as(mask)[mask]

    new = flat(logprobs)
    objective = PolicyObjective(
        flat(old_logprobs),
        flat(advantages),
        update_loss.cliprange,
        token_weights=None if weights is None else flat(weights[:, None]),
        denominator=update_loss.aggregate.denominator(mask.sum(-1), weights),
    )
    policy_loss, policy_stats = fastrl_kernels.ppo_loss(
        new,
        objective.old_logprobs,
        objective.advantages,
        torch.ones_like(new, dtype=torch.bool),
        **objective.options,
    )
    entropies = torch.zeros_like(new)
    if logits is not None:
        entropies = flat(entropy_from_logits(logits, update_loss.temperature)).detach()
    scores = TokenScores(new, entropies, flat(vpreds), None, policy_loss, policy_stats)
    value_loss, named = update_loss.value_loss(scores, objective, flat(values), flat(returns))
    value_loss = update_loss.vf_coef * value_loss
    named["ppo/loss/total"] = (policy_loss + value_loss).detach()
    statistics = {name.removeprefix("ppo/"): value for name, value in named.items()}
    return policy_loss, value_loss, statistics


def checked_step(
    batches: data.BatchMaker,
    device: torch.device,
    batch_size: int,
    queries: list[Tensor],
    responses: list[Tensor],
    scores: list[Tensor],
    masks: Sequence[Tensor] | None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
    """What step() was given, checked, on the device, with scores as 0-d tensors."""
    data.check_scores(scores, batch_size)
    data.check_batch_size(queries, responses, batch_size)
    batches(queries, responses, masks)

    def here(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.to(device) for tensor in tensors]

    flat = [score.reshape(()) for score in here(scores)]
    return here(queries), here(responses), flat, None if masks is None else here(masks)
