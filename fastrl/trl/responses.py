"""Responses to prompts, their rewards, and what is logged of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.trl.metric_means import MetricMeans
from fastrl.trl.prompt_data import reserved_of

_OF_ROLLOUTS = ("prompt_ids", "completion_ids", "logprobs")


class Responses(NamedTuple):
    """Responses to a batch of prompts."""

    prompt_ids: list[Tensor]
    completion_ids: list[Tensor]
    completions: list[Any]  # texts, or lists of one message
    masks: list[Tensor]  # bool: the tokens that the policy wrote
    logprobs: list[Tensor] | None  # at the sampling temperature
    columns: dict[str, Any]  # further ones, for reward functions


class Judged(NamedTuple):
    """The rewards of the responses of all processes."""

    by_function: Tensor  # [B, K]; NaN where a function does not apply
    rewards: Tensor  # [B], weighted sums; NaN where none applies


def rolled_out(
    output: dict[str, Any], count: int, said: Callable[[list[Tensor]], list[Any]]
) -> Responses:
    """What a ``rollout_func`` has returned for some prompts.

    Args:
        count: of the prompts.
        said: token ids as texts or messages.

    Raises:
        ValueError: a key is missing, or is the name of what reward functions get; a list has
            another length than the prompts or responses.
    """
    output = dict(output)
    missing = sorted({*_OF_ROLLOUTS} - output.keys())
    if missing:
        raise ValueError(f"rollout_func must return keys {missing} in its output dict")
    prompt_ids, completion_ids, logprobs = (output.pop(name) for name in _OF_ROLLOUTS)
    for name, given in (("prompt_ids", prompt_ids), ("completion_ids", completion_ids)):
        if len(given) != count:
            raise ValueError(
                f"rollout_func returned {len(given)} {name} for {count} prompts: return one for "
                "each; every prompt is there as often as it has responses"
            )
    responses = _tensors(completion_ids, torch.long)
    lengths = list(map(len, responses))
    masks = output.pop("env_mask", None)
    written = [torch.ones(n, dtype=torch.bool) for n in lengths]
    if masks is not None:
        written = [x.bool() for x in _tensors(masks, torch.long)]
        _check_lengths("env_mask", written, lengths)
    if logprobs is not None:
        # vLLM gives None for a log-prob that is not finite.
        known = [_with_nan(row) for row in logprobs]
        logprobs = _tensors(known, torch.float32)
        _check_lengths("logprobs", logprobs, lengths)
    for name in output:
        if name in reserved_of(environments=False):
            raise ValueError(
                f"rollout_func returned {name!r}, the name of what reward functions get by "
                "keyword, and would replace it: return it by another name"
            )
    return Responses(
        _tensors(prompt_ids, torch.long), responses, said(responses), written, logprobs, output
    )


def _tensors(rows: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    return [torch.as_tensor(row, dtype=dtype).cpu() for row in rows]


def _with_nan(row: Any) -> Any:
    if isinstance(row, list) and None in row:
        return [math.nan if x is None else x for x in row]
    return row


def _check_lengths(name: str, found: Sequence[Tensor], lengths: Sequence[int]) -> None:
    if len(found) != len(lengths):
        raise ValueError(
            f"rollout_func returned {len(found)} {name} for {len(lengths)} completion_ids: return "
            "one for each"
        )
    for i, (row, length) in enumerate(zip(found, lengths, strict=True)):
        if len(row) != length:
            raise ValueError(
                f"rollout_func returned {name} of {len(row)} tokens for completion_ids of {length} "
                f"(response {i}): return one for each token"
            )


def note_lengths(metrics: MetricMeans, lengths: Tensor, cut: Tensor) -> None:
    """Logs the lengths of all processes' responses [B].

    Args:
        cut: bool [B], those without an end.
    """
    whole = lengths[~cut] if bool((~cut).any()) else torch.zeros(1)
    for name, of in (("", lengths), ("terminated_", whole)):
        metrics.add_number(f"completions/mean_{name}length", float(of.float().mean()))
        metrics.add_number(f"completions/min_{name}length", float(of.min()))
        metrics.add_number(f"completions/max_{name}length", float(of.max()))
    metrics.add_number("completions/clipped_ratio", float(cut.float().mean()))


def note_rewards(
    metrics: MetricMeans, names: Sequence[str], judged: Judged, spreadless: Tensor
) -> None:
    """Logs rewards.

    Args:
        names: of the reward functions.
        spreadless: bool, groups whose rewards are all the same.
    """
    for name, column in zip(names, judged.by_function.t(), strict=True):
        metrics.add_number(f"rewards/{name}/mean", float(column.nanmean()))
        metrics.add_number(f"rewards/{name}/std", nanstd(column))
    metrics.add_number("reward", float(judged.rewards.nanmean()))
    metrics.add_number("reward_std", nanstd(judged.rewards))
    metrics.add_number("frac_reward_zero_std", float(spreadless.float().mean()))


def nanstd(values: Tensor) -> float:
    """The unbiased deviation of the numbers that are not NaN; NaN of fewer than two."""
    known = values[~values.isnan()]
    return float(known.std()) if len(known) > 1 else float("nan")
