"""What a ``rollout_func`` returns, checked."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.collect.sampling_masks import NAME as SAMPLING_MASK
from fastrl.collect.sampling_masks import supports_of
from fastrl.config import FULL, SAMPLED
from fastrl.data.columns import REWARD_ARGUMENTS
from fastrl.data.vocabulary import embedding_rows
from fastrl.models.layout import layout_of
from fastrl.samples import Samples

_OF_ROLLOUTS = ("prompt_ids", "completion_ids", "logprobs")
_ROUNDING = 0.01  # by which engines' log-probs may lie above 0


def rolled_out(
    output: dict[str, Any],
    count: int,
    model: Any,
    reserved: Sequence[str] = REWARD_ARGUMENTS,
    policy_support: str = FULL,
) -> Samples:
    """Checks what a ``rollout_func`` returned, and makes samples of it; their columns are what it
    returned for reward functions.

    Args:
        count: the number of prompts.
        model: the model that is trained on the responses.
        reserved: names of what reward functions get by keyword.
        policy_support: with "sampled" a key ``sampling_mask`` has the sets that tokens were drawn
            from, see :func:`fastrl.collect.sampling_masks.supports_of`.

    Raises:
        ValueError: a key is missing, or is the name of what reward functions get; a list has
            another length than the prompts or responses; token ids that the model does not know,
            or more than its context; masks of other numbers than 0 and 1; log-probs above 0; sets
            that do not fit.
    """
    output = dict(output)
    needed = {*_OF_ROLLOUTS, *([SAMPLING_MASK] if policy_support == SAMPLED else [])}
    missing = sorted(needed - output.keys())
    if missing:
        raise ValueError(f"rollout_func must return keys {missing} in its output dict")
    prompt_ids, completion_ids, logprobs = (output.pop(name) for name in _OF_ROLLOUTS)
    masks = output.pop("env_mask", None)
    drawn_from = output.pop(SAMPLING_MASK) if policy_support == SAMPLED else None
    if SAMPLING_MASK in output:
        warnings.warn(
            f"rollout_func returned {SAMPLING_MASK}, which policy_support='full' does not read: "
            "log-probs are over the whole vocabulary, whatever tokens were drawn from",
            stacklevel=4,
        )
    lists = {k: x for k, x in output.items() if isinstance(x, list)}
    for name, values in {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        **lists,
    }.items():
        if not hasattr(values, "__len__"):
            raise ValueError(f"rollout_func: {name} must be a list, got {values!r:.80}")
        if len(values) != count:
            raise ValueError(
                f"rollout_func returned {len(values)} {name} for {count} prompts: return one for "
                "each; every prompt is there as often as it has responses"
            )
    rows, exceeded = embedding_rows(model), layout_of(model).exceeded
    prompts = _token_ids("prompt_ids", prompt_ids, rows)
    responses = _token_ids("completion_ids", completion_ids, rows)
    lengths = list(map(len, responses))
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        if not len(prompt):
            raise ValueError(f"rollout_func: prompt_ids[{i}] is empty: return at least one token")
        limit = exceeded(len(prompt), length)
        if limit is not None:
            raise ValueError(
                f"rollout_func: the {len(prompt)} + {length} tokens of response {i} exceed the "
                f"{limit}: return shorter ones"
            )
    written = None
    if masks is not None:
        tensors = _tensors("env_mask", masks)
        _check_lengths("env_mask", tensors, lengths)
        for i, mask in enumerate(tensors):
            wrong = mask[(mask != 0) & (mask != 1)]
            if len(wrong):
                raise ValueError(
                    f"rollout_func: env_mask[{i}] holds {wrong[0].item()}: 1 is a token that the "
                    "policy wrote, 0 one of an environment"
                )
        written = [mask.bool() for mask in tensors]
    supports = None
    if drawn_from is not None:
        vocabulary = model.config.get_text_config().vocab_size
        supports = supports_of(drawn_from, responses, written, vocabulary)
    if logprobs is not None:
        logprobs = [x.float() for x in _tensors("logprobs", map(_with_nan, logprobs))]
        _check_lengths("logprobs", logprobs, lengths)
        for i, row in enumerate(logprobs):
            if (row > _ROUNDING).any():
                raise ValueError(
                    f"rollout_func: logprobs[{i}] holds {float(row.nan_to_num().max()):g}: "
                    "log-probs are 0 or less; take the logarithm of probabilities"
                )
            row[~row.isfinite()] = math.nan
    for name in output:
        if name in reserved:
            raise ValueError(
                f"rollout_func returned {name!r}, the name of what reward functions get by "
                "keyword, and would replace it: return it by another name"
            )
    columns = {k: x if isinstance(x, list) else [x] * count for k, x in output.items()}
    return Samples(
        responses,
        prompt_ids=prompts,
        masks=written,
        logprobs=logprobs,
        supports=supports,
        columns=columns,
    )


def _token_ids(name: str, rows: Iterable[Any], vocabulary: int) -> list[Tensor]:
    tokens = _tensors(name, rows)
    for i, ids in enumerate(tokens):
        if len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool):
            raise ValueError(
                f"rollout_func: {name}[{i}] is {ids.tolist()!r:.80}: it must hold whole token ids"
            )
        wrong = ids[(ids < 0) | (ids >= vocabulary)]
        if len(wrong):
            raise ValueError(
                f"rollout_func: {name}[{i}] has the token id {int(wrong[0])}, outside the model's "
                f"vocabulary of {vocabulary} tokens"
            )
    return [ids.long() for ids in tokens]


def _tensors(name: str, rows: Iterable[Any]) -> list[Tensor]:
    """A row of numbers for each response, copied: a function may use its arrays again."""
    tensors = []
    for i, row in enumerate(rows):
        try:
            numbers = torch.as_tensor(row).detach().cpu().clone()
        except (TypeError, ValueError, RuntimeError, OverflowError):
            numbers = torch.zeros(())
        if numbers.dim() != 1 or numbers.is_complex():
            raise ValueError(
                f"rollout_func: {name}[{i}] is {row!r:.80}: it must be a list of one number for "
                "each token"
            )
        tensors.append(numbers)
    return tensors


def _with_nan(row: Any) -> Any:
    """A row with NaN in place of None, which TRL's vLLM generation gives for a NaN log-prob."""
    if isinstance(row, list) and None in row:
        return [math.nan if x is None else x for x in row]
    return row


def _check_lengths(name: str, tensors: Sequence[Tensor], lengths: Sequence[int]) -> None:
    if len(tensors) != len(lengths):
        raise ValueError(
            f"rollout_func returned {len(tensors)} {name} for {len(lengths)} completion_ids: "
            "return one for each"
        )
    for i, (row, length) in enumerate(zip(tensors, lengths, strict=True)):
        if len(row) != length:
            raise ValueError(
                f"rollout_func returned {name} of {len(row)} tokens for completion_ids of {length} "
                f"(response {i}): return one for each token"
            )
