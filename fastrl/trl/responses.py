"""Responses to prompts, their rewards, and what is logged of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.data.vocabulary import embedding_rows
from fastrl.models.layout import layout_of
from fastrl.rewards.weighted import RewardBatch
from fastrl.trl.metric_means import MetricMeans
from fastrl.trl.prompt_data import reserved_of

_OF_ROLLOUTS = ("prompt_ids", "completion_ids", "logprobs")
_ROUNDING = 0.01  # by which engines' log-probs may lie above 0


class Responses(NamedTuple):
    """Responses to a batch of prompts."""

    prompt_ids: list[Tensor]
    completion_ids: list[Tensor]
    completions: list[Any]  # texts, or lists of one message
    masks: list[Tensor]  # bool: the tokens that the policy wrote
    logprobs: list[Tensor] | None  # at the sampling temperature
    columns: dict[str, Any]  # further ones, for reward functions

    def joined(self, more: Responses) -> Responses:
        """With further responses behind, which came about in the same way."""
        both = self.logprobs is not None and more.logprobs is not None
        return Responses(
            self.prompt_ids + more.prompt_ids,
            self.completion_ids + more.completion_ids,
            self.completions + more.completions,
            self.masks + more.masks,
            [*(self.logprobs or ()), *(more.logprobs or ())] if both else None,
            {name: _behind(x, more.columns.get(name)) for name, x in self.columns.items()},
        )

    def select(self, order: Sequence[int]) -> Responses:
        """Some of the responses, in that order."""

        def of(column: Any) -> Any:
            return [column[i] for i in order] if isinstance(column, list) else column

        columns = {name: of(column) for name, column in self.columns.items()}
        return self._replace(
            prompt_ids=of(self.prompt_ids),
            completion_ids=of(self.completion_ids),
            completions=of(self.completions),
            masks=of(self.masks),
            logprobs=of(self.logprobs),
            columns=columns,
        )


class Rewarded(NamedTuple):
    """A process's responses with their rewards."""

    rows: list[dict[str, Any]]
    prompts: list[Any]
    responses: Responses
    rewards: RewardBatch
    extra: dict[str, list[Any]]  # columns of the table of completions, from reward functions

    def joined(self, more: Rewarded) -> Rewarded:
        """With further responses behind."""
        extra = dict[str, list[Any]]()
        for name in [*self.extra, *(name for name in more.extra if name not in self.extra)]:
            extra[name] = [
                value
                for part in (self, more)
                for value in part.extra.get(name, [None] * len(part.rows))
            ]
        return Rewarded(
            self.rows + more.rows,
            self.prompts + more.prompts,
            self.responses.joined(more.responses),
            self.rewards.joined(more.rewards),
            extra,
        )

    def select(self, order: list[int]) -> Rewarded:
        """Some of the responses, in that order."""
        return Rewarded(
            [self.rows[i] for i in order],
            [self.prompts[i] for i in order],
            self.responses.select(order),
            self.rewards.select(order),
            {name: [x[i] for i in order if i < len(x)] for name, x in self.extra.items()},
        )


class Judged(NamedTuple):
    """The rewards of the responses of all processes."""

    by_function: Tensor  # [B, K]; NaN where a function does not apply
    rewards: Tensor  # [B], weighted sums; NaN where none applies


def rolled_out(
    output: dict[str, Any], count: int, said: Callable[[list[Tensor]], list[Any]], model: Any
) -> Responses:
    """What a ``rollout_func`` has returned for some prompts.

    Args:
        count: of the prompts.
        said: token ids as texts or messages.
        model: that is trained on them.

    Raises:
        ValueError: a key is missing, or is the name of what reward functions get; a list has
            another length than the prompts or responses; token ids that the model does not know,
            or more than its context; masks or log-probs that are none.
    """
    output = dict(output)
    missing = sorted({*_OF_ROLLOUTS} - output.keys())
    if missing:
        raise ValueError(f"rollout_func must return keys {missing} in its output dict")
    prompt_ids, completion_ids, logprobs = (output.pop(name) for name in _OF_ROLLOUTS)
    masks = output.pop("env_mask", None)
    lists = {k: x for k, x in output.items() if isinstance(x, list)}
    for name, given in {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        **lists,
    }.items():
        if not hasattr(given, "__len__"):
            raise ValueError(f"rollout_func: {name} must be a list, got {given!r:.80}")
        if len(given) != count:
            raise ValueError(
                f"rollout_func returned {len(given)} {name} for {count} prompts: return one for "
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
    written = [torch.ones(n, dtype=torch.bool) for n in lengths]
    if masks is not None:
        found = _tensors("env_mask", masks)
        _check_lengths("env_mask", found, lengths)
        for i, mask in enumerate(found):
            other = mask[(mask != 0) & (mask != 1)]
            if len(other):
                raise ValueError(
                    f"rollout_func: env_mask[{i}] holds {other[0].item()}: 1 is a token that the "
                    "policy wrote, 0 one of an environment"
                )
        written = [mask.bool() for mask in found]
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
        if name in reserved_of(environments=False):
            raise ValueError(
                f"rollout_func returned {name!r}, the name of what reward functions get by "
                "keyword, and would replace it: return it by another name"
            )
    return Responses(prompts, responses, said(responses), written, logprobs, output)


def _behind(column: Any, more: Any) -> Any:
    """A column with another behind it; one that is no list is of all responses."""
    return [*column, *more] if isinstance(column, list) else column


def _token_ids(name: str, rows: Iterable[Any], vocabulary: int) -> list[Tensor]:
    found = _tensors(name, rows)
    for i, ids in enumerate(found):
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
    return [ids.long() for ids in found]


def _tensors(name: str, rows: Iterable[Any]) -> list[Tensor]:
    """A row of numbers for each response, copied: a function may use its arrays again."""
    found = []
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
        found.append(numbers)
    return found


def _with_nan(row: Any) -> Any:
    """vLLM gives None for a log-prob that is not finite."""
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
