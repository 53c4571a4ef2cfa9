"""The rewards of a run: the weighted sum of reward functions, with time limits and retries."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl.config import ON_NONFINITE
from fastrl.rewards.calls import (
    EventLoop,
    LoopBlocked,
    TimeLimitExceeded,
    await_within,
    call_within,
    is_async,
    wants_finished,
)
from fastrl.rewards.classifier import ClassifierReward
from fastrl.rewards.functions import (
    RewardFunction,
    as_number,
    load_ready,
    read_token_rewards,
    say_not_finite,
    shown,
)
from fastrl.user_code import name_of, own_copy, running

_Given = RewardFunction | str  # the name of a ready reward
RewardFunctions = _Given | Sequence[_Given] | Mapping[str, _Given]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before a retry; each pause doubles the last


@dataclass(frozen=True)
class RewardBatch:
    """The rewards of B samples.

    Attributes:
        total: Σ_k w_k·r_k over the functions k that judge a sample, [B] fp64; NaN where none does
            or one's r_k is not finite, metrics aside, see :class:`Rewards`.
        by_function: r_k by the function's name, [B] fp64 each; NaN where it was not asked, did not
            judge the sample, or returned a number that is not finite.
        seconds: how long each function took, by its name.
        nonfinite: the number of samples left out because a reward of theirs was not finite.
        retries: how often calls were repeated.
        of_tokens: each sample's weighted sum for each token, [L] fp64, whose sum is the ``total``;
            rewards that are one number are added to the last token. None where no function whose
            weight is not 0 returned rewards of the sample's tokens.
    """

    total: Tensor
    by_function: dict[str, Tensor]
    seconds: dict[str, float]
    nonfinite: int
    retries: int
    of_tokens: Sequence[Tensor | None]
    unjudged: Sequence[int] = ()  # samples asked about that no function judged, metrics aside

    def counts(self) -> dict[str, float]:
        """Statistics of the calls, and with several functions the time that each took."""
        counts = {"reward/nonfinite": float(self.nonfinite), "reward/retries": float(self.retries)}
        if len(self.by_function) > 1:
            counts |= {
                f"time/reward/{name}": self.seconds.get(name, 0.0) for name in self.by_function
            }
        return counts

    def statistics(self) -> dict[str, float]:
        """:func:`reward_statistics` and :meth:`counts`."""
        return {**reward_statistics(self.total, self.by_function), **self.counts()}


def reward_statistics(rewards: Tensor, by_function: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean and deviation of rewards [B] that are not NaN; with several functions those of each,
    too."""
    moments = {"reward": rewards}
    if len(by_function) > 1:
        moments |= {f"reward/{name}": of_function for name, of_function in by_function.items()}
    statistics = {}
    for name, values in moments.items():
        statistics[f"{name}/mean"], statistics[f"{name}/std"] = _moments(values)
    return statistics


@dataclass(frozen=True)
class _Function:
    name: str  # in statistics
    who: str  # in messages
    call: RewardFunction
    weight: float
    batch_size: int | None
    is_async: bool
    is_users: bool  # whether its errors are the user's, not fastrl's


@dataclass(frozen=True)
class _Call:
    function: _Function
    samples: list[int]  # indices in the batch
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        return self.function.call(**own_copy(self.arguments))


class Rewards:
    """Reward functions of a run, called as ``reward_fn(prompts=, completions=, completion_ids=,
    **columns)``; their weighted sum is the reward.

    A function returns a number for each completion, or for each a list, an array or a 1-D tensor
    with a number for each token. As in TRL 1.x it may be an ``async def``, and may return None for
    a sample that it does not judge, whose sum then leaves it out. A function of weight 0, beside
    others, is a metric: it decides neither a reward nor whether a sample has one. Async functions
    run after the others, at the same time, on one event loop; so do their calls with a
    ``reward_batch_size``.

    Args:
        reward_fn: a function, a list of functions, or a dict of functions by name; a ready reward's
            name stands for it (:func:`fastrl.rewards.functions.load_ready`). In a list their names
            are their ``__name__``, or their class's; equal ones are numbered.
        reward_weights: a number for each function, in their order; default 1.
        reward_timeout: seconds that a call of a function may take; None: no limit. With a limit,
            functions that are not async run in a thread: one that hangs is left behind there, and
            does not keep the process from ending.
        reward_retries: how often a call is repeated that raised an exception or took too long
            (and may be running still), after a pause of 0.5 s that doubles each time, up to 30 s.
        reward_batch_size: completions per call; None: all of them in one. A
            :class:`ClassifierReward` has a batch size of its own.
        on_nonfinite: see ``PPOConfig``: "raise" makes a reward that is not finite an error, other
            values leave the sample out, and count it.
        shared: whether other processes ask about other samples of the same batch, so that a call
            may leave out all of its own.
        judges_all: whether it is an error where no function judges a sample; its total is NaN else.
        counted_as: where samples that are left out are counted, for a warning.
        further: functions of weight 1 behind those of ``reward_fn``, which may be an empty list
            then.

    Attributes:
        names: the functions' names.

    Raises:
        ValueError: no function, a setting out of range, not one weight for each function.
        TypeError: something that is not a function.
    """

    def __init__(
        self,
        reward_fn: RewardFunctions,
        reward_weights: Sequence[float] | None = None,
        *,
        reward_timeout: float | None = None,
        reward_retries: int = 0,
        reward_batch_size: int | None = None,
        on_nonfinite: str = "raise",
        shared: bool = False,
        judges_all: bool = True,
        counted_as: str = "; reward/nonfinite counts them",
        further: Sequence[RewardFunction] = (),
    ):
        functions = _by_name(reward_fn, further)
        check_reward_settings(
            len(functions) - len(further),
            reward_weights,
            reward_timeout,
            reward_retries,
            reward_batch_size,
        )
        if on_nonfinite not in ON_NONFINITE:
            raise ValueError(
                f"on_nonfinite must be one of {', '.join(ON_NONFINITE)}, got {on_nonfinite!r}"
            )
        self.names = tuple(functions)
        self._timeout = None if reward_timeout is None else float(reward_timeout)
        self._retries = reward_retries
        self._raises, self._shared = on_nonfinite == "raise", shared
        self._judges_all, self._counted_as = judges_all, counted_as
        weights = [1.0] * len(functions)
        if reward_weights is not None:
            weights[: len(reward_weights)] = map(float, reward_weights)
        self._functions = [
            _Function(
                name=name,
                who=name_of(call, f"the reward function {name}"),
                call=call,
                weight=weight,
                batch_size=None if isinstance(call, ClassifierReward) else reward_batch_size,
                is_async=is_async(call),
                is_users=not isinstance(call, ClassifierReward),
            )
            for (name, call), weight in zip(functions.items(), weights, strict=True)
        ]
        self._loop: EventLoop | None = None
        self._warned: set[tuple[str, str]] = set()

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions, in the order of ``names``."""
        return tuple(function.call for function in self._functions)

    @property
    def weights(self) -> dict[str, float]:
        """The functions' weights, by their names."""
        return {function.name: function.weight for function in self._functions}

    @property
    def wants_finished(self) -> bool:
        """Whether a function needs to know which completions are whole."""
        return any(wants_finished(function.call) for function in self._functions)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        finished: Sequence[bool] | None = None,
        left_out: Collection[int] = (),
        also: Mapping[str, Any] | None = None,
    ) -> RewardBatch:
        """Rewards of B samples; arguments but ``left_out`` and ``also`` have an element for each.

        Args:
            also: further arguments, the same for all samples.
            prompts, completions: texts, or lists of chat messages.
            completion_ids: token ids; None: the functions do not get them.
            columns: the data's other columns.
            finished: False for completions that were cut by their length; for functions that take
                it, see :func:`fastrl.rewards.calls.wants_finished`.
            left_out: indices of samples that no function is asked about.

        Raises:
            ValueError: a function did not return one number, one for each token, or None for each
                completion; a reward is not finite, unless ``on_nonfinite`` allows it; with
                ``judges_all``, a completion for which all functions returned None, or, unless
                ``shared``, no completion with finite rewards. The message names the first fault.
            TimeoutError: a call's last attempt, or one that blocked the event loop, took longer
                than ``reward_timeout``.
            Exception: what a function raised in the last of its attempts.
        """
        skipped = set(left_out)
        included = [i for i in range(len(prompts)) if i not in skipped]
        all_columns = {"prompts": prompts, "completions": completions, **(columns or {})}
        if completion_ids is not None:
            all_columns["completion_ids"] = completion_ids

        self._repeated = 0
        rewards: dict[str, list[float | Tensor | None]]
        rewards = {n: [None] * len(prompts) for n in self.names}
        lengths = None if completion_ids is None else list(map(len, completion_ids))
        seconds = dict.fromkeys(self.names, 0.0)
        async_calls: list[_Call] = []
        for function in self._functions:
            calls = _calls(function, all_columns, finished, included, also or {})
            if function.is_async:
                async_calls += calls
                continue
            begin = time.perf_counter()
            for call in calls:
                _keep(self._answer(call), call, lengths, rewards)
            seconds[function.name] = time.perf_counter() - begin
        begin = time.perf_counter()
        for call, (answer, end) in zip(async_calls, self._answers(async_calls), strict=True):
            _keep(answer, call, lengths, rewards)
            seconds[call.function.name] = max(seconds[call.function.name], end - begin)
        return self._summed(rewards, seconds, prompts, included)

    def event_loop(self) -> EventLoop:
        """The event loop that async functions run on, the same for all calls."""
        self._loop = self._loop or EventLoop()
        return self._loop

    def _answer(self, call: _Call) -> Any:
        """What a call of a function returns, in one of its attempts."""
        attempt = 1
        while True:
            try:
                if self._timeout is None:
                    return call()
                return call_within(self._timeout, call, f"fastrl-reward-{call.function.name}")
            except Exception as error:
                pause = self._pause(call.function, attempt, error)
            time.sleep(pause)
            attempt += 1

    def _answers(self, calls: list[_Call]) -> list[tuple[Any, float]]:
        """What calls of async functions return, in one of their attempts, and at what time."""
        if not calls:
            return []
        try:
            return self.event_loop().gather([self._awaited(call) for call in calls], self._timeout)
        except LoopBlocked:
            self._loop = None  # the loop's thread may hang forever
            names = ", ".join(dict.fromkeys(call.function.who for call in calls))
            raise TimeoutError(
                f"{names} did not return within reward_timeout={self._timeout:g} s and could not "
                "be cancelled: something blocks the event loop, such as time.sleep or a client "
                "that is not async, instead of being awaited"
            ) from None

    async def _awaited(self, call: _Call) -> tuple[Any, float]:
        attempt = 1
        while True:
            try:
                return await await_within(self._timeout, call), time.perf_counter()
            except Exception as error:
                pause = self._pause(call.function, attempt, error)
            await asyncio.sleep(pause)
            attempt += 1

    def _pause(self, function: _Function, attempt: int, error: Exception) -> float:
        """Seconds to wait after an attempt that failed; raises the error of the last attempt."""
        late = isinstance(error, TimeLimitExceeded)
        what = f"raised {type(error).__name__}: {error}"
        if late:
            what = f"did not return within reward_timeout={self._timeout:g} s"
        if attempt <= self._retries:
            self._repeated += 1
            again = "is called again, as after any later failure; reward/retries counts these calls"
            self._warn("retry", function, f"{what}: it {again}")
            return min(_FIRST_PAUSE * 2.0 ** min(attempt - 1, 100), _LONGEST_PAUSE)
        which = f" (attempt {attempt} of {self._retries + 1})" if self._retries else ""
        if late:
            raise TimeoutError(
                f"{function.who} {what}{which}: let it answer faster, or allow it more time"
            ) from None
        if which and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised by {function.who}{which}")
        if function.is_users:
            with running(function.who + which):
                raise error
        raise error

    def _summed(
        self,
        rewards: dict[str, list[float | Tensor | None]],
        seconds: dict[str, float],
        prompts: Sequence[Any],
        included: list[int],
    ) -> RewardBatch:
        numbers = [[math.nan if r is None else _sum(r) for r in row] for row in rewards.values()]
        values = torch.tensor(numbers, dtype=torch.float64)  # [K, B] of K functions and B samples
        judged = torch.tensor(
            [[r is not None for r in row] for row in rewards.values()], dtype=torch.bool
        )
        weights = torch.tensor([[f.weight] for f in self._functions], dtype=torch.float64)
        decides = (weights != 0) | (weights == 0).all()  # functions of weight 0 are metrics
        has_none = (~(judged & decides).any(0)).tolist()
        unjudged = [i for i in included if has_none[i]]
        for i in unjudged:
            if self._judges_all:
                raise ValueError(
                    f"no reward function judges completion {i} ({shown(prompts[i])}): "
                    f"{', '.join(self.names)} returned None; one must return a number"
                )
        wrong = judged & ~values.float().isfinite()  # in fp32, as scores are
        nonfinite = (wrong & decides).any(0)
        self._check_finite(wrong, values, prompts, bool(nonfinite[included].all()))
        total = (weights * values.where(judged & ~wrong, 0.0)).sum(0)
        total[nonfinite | torch.tensor(has_none, dtype=torch.bool)] = math.nan
        values[wrong] = math.nan
        by_function = dict(zip(self.names, values, strict=True))
        by_weight = zip((f.weight for f in self._functions), rewards.values(), strict=True)
        weighted = [(weight, row) for weight, row in by_weight if weight]
        of_tokens = [
            _of_tokens([(weight, row[i]) for weight, row in weighted], total[i])
            for i in range(len(prompts))
        ]
        count = int(nonfinite.sum())
        return RewardBatch(total, by_function, seconds, count, self._repeated, of_tokens, unjudged)

    def _check_finite(
        self, wrong: Tensor, values: Tensor, prompts: Sequence[Any], none_left: bool
    ) -> None:
        """Warns of rewards that are not finite, once for each function, or raises an error."""
        # Whether a function may return None: another one may judge, or none has to.
        several = len(self._functions) > 1 or not self._judges_all
        instead = ", or let it return None for what it cannot judge" if several else ""
        for function, row, of_function in zip(self._functions, wrong, values, strict=True):
            which = row.nonzero()[:, 0].tolist()
            if not which:
                continue
            what = say_not_finite(which, of_function, prompts)
            if not function.weight:
                what += ": left out of its mean, as any later ones will be; its weight is 0"
                self._warn("nonfinite", function, what)
                continue
            if self._raises or (none_left and self._judges_all and not self._shared):
                what += "" if self._raises else ", and no completion is left"
                raise ValueError(f"{function.who} {what}: rewards must be finite numbers")
            self._warn(
                "nonfinite",
                function,
                f"{what}: left out of the step and its group, as any later ones will be"
                f"{self._counted_as}; mend the function{instead}; on_nonfinite='raise' makes this "
                "an error",
            )

    def _warn(self, kind: str, function: _Function, what: str) -> None:
        if (kind, function.name) not in self._warned:
            self._warned.add((kind, function.name))
            warnings.warn(f"{function.who} {what}", stacklevel=6)


def check_reward_settings(
    count: int,
    reward_weights: Sequence[float] | None,
    reward_timeout: float | None,
    reward_retries: int,
    reward_batch_size: int | None,
) -> None:
    """Checks the settings of ``count`` reward functions, see :class:`Rewards`.

    Raises:
        ValueError: a setting out of range, not one weight for each function.
    """
    if reward_weights is not None:
        if isinstance(reward_weights, (str, Mapping)) or not hasattr(reward_weights, "__len__"):
            raise ValueError(f"reward_weights must be a list of numbers, got {reward_weights!r}")
        if len(reward_weights) != count:
            raise ValueError(
                f"reward_weights has {len(reward_weights)} numbers for {count} reward functions: "
                "pass one for each, in their order"
            )
        for i, weight in enumerate(reward_weights):
            if not math.isfinite(as_number(weight)):
                raise ValueError(f"reward_weights[{i}] must be a finite number, got {weight!r}")
    if reward_timeout is not None and not 0 < as_number(reward_timeout) < threading.TIMEOUT_MAX:
        raise ValueError(
            f"reward_timeout must be a positive number of seconds, or None for no limit, got "
            f"{reward_timeout!r}"
        )
    if not isinstance(reward_retries, int) or reward_retries < 0:
        raise ValueError(f"reward_retries must be 0 or more, got {reward_retries!r}")
    if reward_batch_size is not None and (
        not isinstance(reward_batch_size, int) or reward_batch_size < 1
    ):
        raise ValueError(f"reward_batch_size must be positive, got {reward_batch_size!r}")


def _by_name(
    reward_fn: RewardFunctions, further: Sequence[RewardFunction] = ()
) -> dict[str, RewardFunction]:
    named: list[tuple[Any, Any]]
    if isinstance(reward_fn, Mapping):
        named = [(name, _ready(function)) for name, function in reward_fn.items()]
    else:
        several = reward_fn if isinstance(reward_fn, (list, tuple)) else [reward_fn]
        named = [(_own_name(function), function) for function in map(_ready, several)]
    named += [(_own_name(function), function) for function in further]
    if not named:
        raise ValueError(
            "reward_fn is empty: pass a reward function, or several, or an environment_factory "
            "whose objects have a get_reward"
        )
    for name, function in named:
        if not callable(function):
            raise TypeError(
                f"reward_fn must be a function, a list or a dict of functions, got {function!r}; "
                "fastrl.rewards.functions.load_reward makes one of a name"
            )
        if not isinstance(name, str) or not name:
            raise TypeError(f"the names of reward functions must be texts, got {name!r}")
    names = numbered(name for name, _ in named)
    return dict(zip(names, (function for _, function in named), strict=True))


def numbered(names: Iterable[str]) -> list[str]:
    """Makes names unique: those equal to an earlier one get a number, ``name_2`` and so on."""
    counted: dict[str, None] = {}
    for name in names:
        unique, number = name, 2
        while unique in counted:
            unique, number = f"{name}_{number}", number + 1
        counted[unique] = None
    return [*counted]


def _ready(function: Any) -> Any:
    """A ready reward for its name; all else as it is."""
    ready = load_ready(function) if isinstance(function, str) else None
    return function if ready is None else ready


def _own_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _calls(
    function: _Function,
    columns: Mapping[str, Sequence[Any]],
    finished: Sequence[bool] | None,
    included: list[int],
    also: Mapping[str, Any],
) -> list[_Call]:
    """The calls of a function that together ask about the included samples, each with new lists."""
    if finished is not None and wants_finished(function.call, columns):
        columns = {**columns, "finished": finished}
    note = also.get("log_extra")
    size = function.batch_size or max(len(included), 1)
    parts = [included[start : start + size] for start in range(0, len(included), size)]
    return [
        _Call(
            function,
            part,
            {
                **{name: [column[i] for i in part] for name, column in columns.items()},
                **also,
                **({} if note is None else {"log_extra": functools.partial(note, places=part)}),
            },
        )
        for part in parts
    ]


def _keep(
    answer: Any,
    call: _Call,
    lengths: Sequence[int] | None,
    rewards: dict[str, list[float | Tensor | None]],
) -> None:
    call_lengths = None if lengths is None else [lengths[i] for i in call.samples]
    call_rewards = read_token_rewards(answer, call.samples, call_lengths, call.function.who)
    for i, reward in zip(call.samples, call_rewards, strict=True):
        rewards[call.function.name][i] = reward


def _sum(reward: float | Tensor) -> float:
    return float(reward.sum()) if isinstance(reward, Tensor) else reward


def _of_tokens(
    rewards: Sequence[tuple[float, float | Tensor | None]], total: Tensor
) -> Tensor | None:
    """The weighted sum of a sample's rewards for each of its tokens; None where all are numbers.

    Args:
        rewards: each function's weight and reward.
        total: the sum of the result; NaN where the sample is left out.
    """
    dense = [weight * r for weight, r in rewards if isinstance(r, Tensor)]
    if not dense or not len(dense[0]):
        return None
    summed = torch.stack(dense).sum(0)
    for weight, r in rewards:
        if r is not None and not isinstance(r, Tensor):
            summed[-1] += weight * r
    return summed.fill_(math.nan) if total.isnan() else summed


def _moments(rewards: Tensor) -> tuple[float, float]:
    finite = rewards[~rewards.isnan()]
    return float(finite.mean()), float(finite.std()) if len(finite) > 1 else 0.0
