"""Samples that are learned from, as a model and a loss read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastrl.data.batch import pad
from fastrl.data.token_batch import Padded, Padding, TokenBatch
from fastrl.learn.aggregate import Aggregate
from fastrl.learn.experience import Experience
from fastrl.models.host_memory import to_device
from fastrl.samples import Samples
from fastrl_kernels import TokenSets


def learned_counts(samples: Samples) -> list[int]:
    """How many tokens of each sample are learned."""
    return [int(mask.sum()) for mask in samples.learned]


def of_learned(samples: Samples, column: Sequence[Tensor]) -> Tensor:
    """A column's numbers at the tokens that are learned, [N]."""
    return torch.cat([x[mask] for x, mask in zip(column, samples.learned, strict=True)])


def to_column(samples: Samples, numbers: Tensor, elsewhere: float = 0.0) -> list[Tensor]:
    """A column of numbers [N] at the tokens that are learned, and ``elsewhere`` at others."""
    each = zip(samples.learned, numbers.split(learned_counts(samples)), strict=True)
    return [torch.full((len(mask),), elsewhere).masked_scatter(mask, part) for mask, part in each]


def token_batch(samples: Samples, pad_token: int, padding: Padding | None = None) -> TokenBatch:
    """Prompts and responses as a model's input, on the host."""
    sequences = list(map(torch.cat, zip(samples.prompt_ids, samples.sequences, strict=True)))
    padded = pad(sequences, pad_token, "right")
    batch = TokenBatch.from_padded(
        padded["input_ids"],
        padded["attention_mask"],
        list(map(len, samples.prompt_ids)),
        list(map(len, samples.sequences)),
        samples.learned,
    )
    return replace(
        batch,
        padding=padding or Padded(),
        experts=samples.experts,
        supports=learned_supports(samples.supports, samples.learned),
    )


def learned_supports(
    supports: Sequence[TokenSets] | None, learned: Sequence[Tensor]
) -> list[TokenSets] | None:
    """The sets that the tokens that are learned were drawn from."""
    if supports is None:
        return None
    each = zip(supports, learned, strict=True)
    return [sets.select(mask.nonzero()[:, 0]) for sets, mask in each]


def teacher_batch(samples: Samples, pad_token: int) -> TokenBatch | None:
    """Responses behind their teachers' prompts, on the host, with what functions said of them; None
    where a lone teacher, a model, reads the policy's prompts."""
    columns = samples.teacher_prompt_ids, samples.teachers, samples.likely_ids
    if all(x is None for x in columns):
        return None
    prompts = samples.teacher_prompt_ids or samples.prompt_ids
    as_read = replace(samples, prompt_ids=prompts, experts=None, supports=None)
    batch = token_batch(as_read, pad_token)
    likely = None
    if samples.likely_ids is not None and samples.likely_logprobs is not None:
        pairs = zip(samples.likely_ids, samples.likely_logprobs, samples.learned, strict=True)
        likely = [(ids[mask], logprobs[mask]) for ids, logprobs, mask in pairs]
    return replace(batch, teachers=samples.teachers, likely=likely)


def minibatch_of(
    samples: Samples,
    pad_token: int,
    padding: Padding,
    device: torch.device,
    kl_coef: float,
    aggregate: Aggregate,
) -> Experience:
    """Samples with their tokens' log-probs, weights and advantages, on a device. One transfer takes
    all these numbers there; token ids and masks go apart from it.

    Args:
        kl_coef: β of the KL to the reference in the loss, where the reference's log-probs are
            known; 0: the loss has no KL.
        aggregate: gives each sample's tokens their weight.
    """
    ref = samples.ref_logprobs if kl_coef else None
    sampler = samples.sampler_weights, samples.sampler_logprobs
    of_tokens = samples.old_logprobs, ref, *sampler, samples.token_advantages
    columns = [None if x is None else of_learned(samples, x) for x in of_tokens]
    tensors = [samples.advantages, *(x for x in columns if x is not None)]
    numbers = iter(to_device(torch.cat(tensors), device).split([len(x) for x in tensors]))
    of_samples = next(numbers)
    known = (None if x is None else next(numbers) for x in columns)
    old, ref_logprobs, weights, sampled, further = known
    tokens = token_batch(samples, pad_token, padding).to(device)
    total = sum(learned_counts(samples))
    advantages = of_samples.repeat_interleave(tokens.mask.sum(-1), output_size=total)
    if further is not None:
        advantages = advantages + further
    of_teachers = teacher_batch(samples, pad_token)
    return Experience(
        tokens=tokens,
        logprobs=old,
        ref_logprobs=ref_logprobs,
        kl_coef=None if ref_logprobs is None else kl_coef,
        advantages=advantages,
        weights=aggregate.weights(tokens.mask.sum(-1)),
        sampler_weights=weights,
        sampled=sampled,
        of_responses=of_samples,
        teacher_tokens=None if of_teachers is None else of_teachers.to(device),
    )
