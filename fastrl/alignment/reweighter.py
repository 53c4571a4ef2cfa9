"""Reweighters: they set the weights of samples, which multiply their losses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fastrl.alignment.batch import Batch
from fastrl.rewards.functions import as_number, load_function


class SampleReweighter(Protocol):
    """Sets the weights of a batch, which are 1 by default."""

    def __call__(self, batch: Batch, policy: Any) -> None:
        """Calls ``batch.weigh(i, weights)`` for i from 1 to ``batch.generations``, with weights [B]
        of generation i, the i-th responses to the prompts.

        Args:
            policy: the model that is trained; ``logprobs(batch)`` of a policy returns, per
                generation, the responses' summed log-probs ``sums`` and lengths ``tokens``, [B].
        """


class Uniform:
    """w = 1."""

    def __call__(self, batch: Batch, policy: Any = None) -> None:
        for i in _each(batch):
            batch.weigh(i, torch.ones(batch.size))


class ByLength:
    """w ∝ length^-power, with a mean of 1: longer responses weigh less.

    A response's length counts its tokens, EOS included. The mean is over the samples of the batch;
    a pair's weight is the geometric mean of its two responses' weights.

    Raises:
        ValueError: a power that is negative or not finite.
    """

    def __init__(self, power: float = 1.0):
        if not 0 <= power < math.inf:
            raise ValueError(f"power must be a number of 0 or more, got {power}: 0 is uniform")
        self.power = power

    def __call__(self, batch: Batch, policy: Any = None) -> None:
        lengths = [torch.tensor([len(r) for r in batch.responses(i)]) for i in _each(batch)]
        weights = torch.stack(lengths).double().clamp(min=1) ** -self.power  # [generations, B]
        weights = weights / weights.log().mean(0).exp().mean()
        _weigh(self, batch, weights)


class ByMargin:
    """w ∝ |score₁ - score₂|^power of pairs, with a mean of 1 in the batch; if all margins are 0,
    w = 1.

    The scores are the annotator's, ``batch.scores``, if there are any; else the data's column of
    margins is read, or without it those of scores.

    Args:
        power: the exponent of the margin.
        margin_column: the column of margins.
        score_columns: the columns of both sides' scores, the preferred side first.

    Raises:
        ValueError: a power that is not positive and finite, not two ``score_columns``; for a batch:
            not pairs, neither scores nor these columns, a value that is not a finite number.
    """

    def __init__(
        self,
        power: float = 1.0,
        *,
        margin_column: str = "margin",
        score_columns: tuple[str, str] = ("chosen_score", "rejected_score"),
    ):
        if not 0 < power < math.inf:
            raise ValueError(f"power must be a positive number, got {power}")
        if len(score_columns) != 2 or isinstance(score_columns, str):
            raise ValueError(f"score_columns must name two columns, got {score_columns!r}")
        self.power, self.margin_column, self.score_columns = power, margin_column, score_columns

    def __call__(self, batch: Batch, policy: Any = None) -> None:
        if batch.generations != 2:
            raise ValueError("ByMargin weighs pairs, and this batch has one response per prompt")
        weights = self._margins(batch).abs() ** self.power
        mean = weights.mean()
        weights = weights / mean if mean > 0 else torch.ones_like(weights)
        _weigh(self, batch, weights.expand(2, -1))

    def _margins(self, batch: Batch) -> Tensor:
        """The pairs' margins, [B] fp64."""
        columns = batch.columns
        if batch.scores is not None:
            sides = [_numbers(self, "scores", scores) for scores in batch.scores]
        elif self.margin_column in columns:
            return _numbers(self, self.margin_column, columns[self.margin_column])
        elif all(name in columns for name in self.score_columns):
            sides = [_numbers(self, name, columns[name]) for name in self.score_columns]
        else:
            raise ValueError(
                "ByMargin needs an annotator that scores, or the data's column "
                f"{self.margin_column!r} (margin_column), or {' and '.join(self.score_columns)} "
                f"(score_columns); the columns are {', '.join(columns) or 'none'}"
            )
        return sides[0] - sides[1]


class ByImportance:
    """w = min(cap, π_θ(y|x) / π_data(y|x)): the ratio of the trained policy to the one that
    generated the responses (truncated importance sampling, Ionides 2008).

    log π is a sum over a response's tokens; the ratio carries no gradient. A pair has the joint
    ratio of both its responses, truncated once. With ``length_normalised`` the ratio is the
    geometric mean of the tokens' ratios, exp((Σ log π_θ - Σ log π_data) / tokens), for a pair over
    both responses' tokens: biased, but with far less variance.

    The log-probs of sampled responses under π_data are ``batch.rollout_logprobs``: those at
    temperature 1, whatever the sampler's is; of responses from the data they are read from columns.

    Args:
        cap: the largest weight.
        length_normalised: see above.
        columns: the data's column of log-probs under π_data, or one for each side of pairs; they
            hold each response's sum, or a list with one number per token, EOS included.

    Raises:
        ValueError: a cap that is not positive; for a batch: no log-probs under π_data, not one for
            each token, or one that is not finite.
    """

    def __init__(
        self,
        cap: float = 1.0,
        *,
        length_normalised: bool = False,
        columns: str | Sequence[str] | None = None,
    ):
        if not cap > 0:
            raise ValueError(f"cap must be positive, got {cap}")
        self.cap, self.length_normalised = cap, length_normalised
        self.columns = (columns,) if isinstance(columns, str) else columns

    @torch.no_grad()
    def __call__(self, batch: Batch, policy: Any) -> None:
        data = self._data_logprobs(batch)
        now = policy.logprobs(batch)
        sums = torch.stack([part.sums.detach().cpu().double() for part in now])
        ratio = (sums - data).sum(0)
        if self.length_normalised:
            ratio = ratio / torch.stack([part.tokens.cpu().double() for part in now]).sum(0)
        weights = ratio.clamp(max=math.log(self.cap)).exp()
        _weigh(self, batch, weights.expand(batch.generations, -1))

    def _data_logprobs(self, batch: Batch) -> Tensor:
        """The responses' log-probs under π_data, summed over tokens, [generations, B] fp64."""
        if batch.rollout_logprobs is not None:
            logprobs: list[Any] = list(batch.rollout_logprobs)
            names = [f"logprobs of generation {i}" for i in _each(batch)]
        else:
            names = list(self.columns or ())
            columns = batch.columns
            if len(names) != batch.generations or any(name not in columns for name in names):
                raise ValueError(
                    "ByImportance needs the log-probs of the policy that generated the responses: "
                    "choose an online task, or name the data's columns of them with columns=, "
                    f"{batch.generations} here; the columns are {', '.join(columns) or 'none'}"
                )
            logprobs = [columns[name] for name in names]
        return torch.stack(
            [
                _numbers(self, name, _totals(name, values, batch.responses(i + 1)))
                for i, (name, values) in enumerate(zip(names, logprobs, strict=True))
            ]
        )


class ByFunction:
    """Weights from a function of the batch, which returns B numbers for all generations, or a
    tuple with B numbers per generation; a call raises ValueError where it does neither."""

    def __init__(self, function: Callable[[Batch], Any]):
        self.function = function
        self.name = f"ByFunction({getattr(function, '__name__', type(function).__name__)})"

    def __call__(self, batch: Batch, policy: Any = None) -> None:
        weights = self.function(batch)
        nested = isinstance(weights, tuple) and all(_is_list(part) for part in weights)
        per_response = weights if nested else (weights,) * batch.generations
        if len(per_response) != batch.generations:
            raise ValueError(
                f"{self.name}: {len(per_response)} lists of weights for {batch.generations} "
                "responses per prompt: return one each, or one for all"
            )
        _weigh(self, batch, per_response)


_REWEIGHTERS: dict[str, Callable[..., SampleReweighter]] = {
    "uniform": Uniform,
    "length": ByLength,
    "margin": ByMargin,
    "importance": ByImportance,
}


def make_reweighter(name: str, **options: Any) -> SampleReweighter:
    """The reweighter that a command line names.

    Args:
        name: "uniform", "length", "margin", "importance"; or a function of a batch, as
            "module:function" or "path/to/file.py:function".
        options: arguments of the reweighter's class.

    Raises:
        ValueError: an unknown name or option, or an option out of range.
        TypeError, ImportError, FileNotFoundError: see :func:`fastrl.user_code.load_function`.
    """
    if ":" in name:
        make: Callable[..., SampleReweighter] = ByFunction
        options = {"function": load_function(name), **options}
    elif name in _REWEIGHTERS:
        make = _REWEIGHTERS[name]
    else:
        raise ValueError(
            f"unknown reweighter {name!r}: choose one of {', '.join(_REWEIGHTERS)}, or name a "
            "function, as module:function"
        )
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        allowed = ", ".join(inspect.signature(make).parameters) or "no options"
        raise ValueError(f"reweighter {name!r}: {error}; it takes {allowed}") from None
    return make(**options)


def _each(batch: Batch) -> range:
    return range(1, batch.generations + 1)


def _weigh(reweighter: Any, batch: Batch, weights: Any) -> None:
    """Sets the weights of all generations; errors name the reweighter."""
    name = getattr(reweighter, "name", type(reweighter).__name__)
    for i, part in zip(_each(batch), weights, strict=True):
        try:
            batch.weigh(i, part)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and not (isinstance(value, Tensor) and value.dim() == 0)


def _numbers(reweighter: Any, name: str, values: Any) -> Tensor:
    """The values as fp64; raises ValueError where one is not a finite number."""
    values = list(values)
    numbers = [as_number(value) for value in values]
    for i, number in enumerate(numbers):
        if not math.isfinite(number):
            raise ValueError(
                f"{type(reweighter).__name__}: {name}[{i}] is {values[i]!r}: it must be a finite "
                "number"
            )
    return torch.tensor(numbers, dtype=torch.float64)


def _totals(name: str, values: Sequence[Any], responses: Sequence[Tensor]) -> list[Any]:
    """The sum of each response's log-probs, from values that are sums or lists per token."""
    totals = []
    for i, (value, response) in enumerate(zip(values, responses, strict=True)):
        if not _is_list(value) or isinstance(value, str):
            totals.append(value)
            continue
        if len(value) != len(response):
            raise ValueError(
                f"ByImportance: {name}[{i}] has {len(value)} numbers for {len(response)} tokens: "
                "one per token is needed, with EOS, and without tokens that were cut"
            )
        totals.append(torch.as_tensor(value, dtype=torch.float64).sum())
    return totals
