"""Tables of functions by name: users add functions, and settings choose them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from fastrl.user_code import load_function

# The kernels, and torch, are imported where a row is read: a command's help needs neither.
if TYPE_CHECKING:
    from torch import Tensor

    from fastrl_kernels.policy_losses import LossRow

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Mapping[str, Any]):
    """A table's rows by name.

    ``name in registry`` loads a "file.py:function" or "module:function" that the table lacks, which
    is a row from then on.

    Args:
        rows: returns the table, and is called whenever it is read.
        add: adds a function to the table, by a name.
    """

    def __init__(
        self, rows: Callable[[], Mapping[str, Any]], add: Callable[[str, Callable[..., Any]], Any]
    ):
        self._rows, self._add = rows, add

    def __getitem__(self, name: str) -> Any:
        return self._rows()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows())

    def __len__(self) -> int:
        return len(self._rows())

    def __contains__(self, name: object) -> bool:
        if name not in self._rows() and isinstance(name, str) and ":" in name:
            self._add(name, load_function(name))
        return name in self._rows()


# Advantages within a group; the functions are in fastrl.learn.baselines.
_OURS = ("grpo", "dr_grpo", "rloo")
_OTHERS = ("gae", "reinforce++")  # PPOConfig's, without groups
_GROUPS: dict[str, Callable[..., Any] | None] = dict.fromkeys(_OURS)


def group_advantage(name: str) -> Callable[[F], F]:
    """Decorator: adds an advantage of a group, for ``PPOConfig.advantage`` and
    ``GRPOConfig.advantage``.

        @fastrl.group_advantage("above_median")
        def above_median(rewards, counts):
            known = torch.where(counts, rewards, torch.nan)
            return rewards - known.nanmedian(-1, keepdim=True).values

    The function gets the rewards R of the responses to each prompt, less that of the first one that
    counts, [groups, size] fp32, 0 where a response does not count (such as one without a reward);
    and which count, [groups, size] bool. It returns advantages [groups, size]; those of responses
    that do not count, and of groups with fewer than two that do, are replaced by 0.

    Raises:
        TypeError: used without a name; a function with other parameters.
        ValueError: an advantage of fastrl's has this name. A user's of this name is replaced.
    """
    if not isinstance(name, str):
        raise TypeError('write @group_advantage("name"), with the name that settings take')

    def add(function: F) -> F:
        _add_advantage(name, function)
        return function

    return add


def _add_advantage(name: str, function: Callable[..., Any]) -> None:
    if name in _OTHERS or (name in _OURS and _GROUPS[name] is not None):
        raise ValueError(f"there is an advantage {name!r} already: choose another name")
    from fastrl_kernels.argument_types import check_takes

    check_takes(function, "rewards", "counts")
    _GROUPS[name] = function


def _policy_losses() -> Mapping[str, Any]:
    from fastrl_kernels.policy_losses import POLICY_LOSSES

    return POLICY_LOSSES


def _add_policy_loss(name: str, function: Callable[..., Any]) -> None:
    from fastrl_kernels.policy_losses import register_policy_loss

    register_policy_loss(name)(function)


GROUP_ADVANTAGES = Registry(lambda: _GROUPS, _add_advantage)
POLICY_LOSS_NAMES = Registry(_policy_losses, _add_policy_loss)


def own_functions(
    policy_loss: str | None = None, advantage: str | None = None
) -> list[tuple[str, Callable[..., Any]]]:
    """The user's functions among the entries that settings name, each with its name in words."""
    row = _policy_losses().get(policy_loss or "")
    function = _GROUPS.get(advantage or "")
    entries = [("policy loss", policy_loss, row.function if row else None)]
    entries.append(("advantage", advantage, None if advantage in _OURS else function))
    return [(f"the {kind} {name}", code) for kind, name, code in entries if code is not None]


def _trial_tokens() -> tuple[Tensor, Tensor]:
    """Log-ratios within clip ranges and beyond, and advantages of both signs, [32] each."""
    import torch

    log_ratios = torch.linspace(-0.8, 0.9, 8).repeat(4)
    return log_ratios, torch.tensor([1.5, -1.5, 0.5, -0.5]).repeat_interleave(8)


def try_policy_loss(kind: str, cliprange: tuple[float, float]) -> None:
    """Computes a user's policy loss of a few tokens, once: not again with the same ``cliprange``.

    Raises:
        ValueError: a token's loss depends on the others'; all gradients are 0; what
            :func:`fastrl_kernels.policy_losses.registered_loss` refuses.
    """
    row = _policy_losses().get(kind)
    if row is not None and row.function is not None:
        _trial(kind, row.function, cliprange)


@lru_cache
def _trial(kind: str, function: Callable[..., Any], cliprange: tuple[float, float]) -> None:
    import torch

    from fastrl_kernels.policy_losses import registered_loss

    log_ratios, advantages = _trial_tokens()

    def losses(count: int) -> tuple[Tensor, Tensor]:
        tokens = log_ratios[:count].clone(), advantages[:count].clone()
        return registered_loss(kind, *tokens, cliprange)

    def same(one: Tensor, other: Tensor) -> bool:
        return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)

    few, count = 11, len(log_ratios)
    with torch.random.fork_rng(devices=[]):
        try:
            whole, slope = losses(count)
            alone = same(whole[:few], losses(few)[0])
            # A function that draws, or counts its calls, differs from itself.
            alone = alone or not same(whole, losses(count)[0])
        except RuntimeError:  # on the CPU alone, perhaps; if not, the first update raises it again
            return
    if not alone:
        raise ValueError(
            f"the policy loss {kind!r} gives a token another loss among other tokens: compute it "
            "element by element, without means, sums or deviations over tokens, as those of all "
            "responses, or of a part of them, stand in one row"
        )
    if not slope.any():
        raise ValueError(
            f"the policy loss {kind!r} has the gradient 0 for every token, and nothing would be "
            "learned: compute it from log_ratio, and detach no more than a weight of it"
        )


def policy_loss(kind: str) -> LossRow:
    """The row of a policy loss in ``fastrl_kernels.policy_losses.POLICY_LOSSES``."""
    return _policy_losses()[kind]


def policy_losses_with(argument: str) -> list[str]:
    """Names of the policy losses that read an argument, such as "cliprange"."""
    return [name for name, row in _policy_losses().items() if argument in row.arguments]


def learns_as_clip(kind: str, cliprange: tuple[float, float]) -> bool:
    """Whether a policy loss has the gradient of "clip", -A, where all ratios are 1."""
    row = policy_loss(kind)
    if row.bounded_above:  # the ratio's bound, 1 + cliprange[1], may be less than 1
        return cliprange[1] >= 0
    return row.function is None or _is_clip_at_one(kind, row.function, cliprange)


@lru_cache
def _is_clip_at_one(
    kind: str, function: Callable[..., Any], cliprange: tuple[float, float]
) -> bool:
    import torch

    from fastrl_kernels.policy_losses import registered_loss

    _, advantages = _trial_tokens()
    try:
        with torch.random.fork_rng(devices=[]):
            ones = torch.zeros_like(advantages)
            _, slope = registered_loss(kind, ones, advantages.clone(), cliprange)
    except RuntimeError:
        return False
    return torch.allclose(slope, -advantages, rtol=1e-4, atol=1e-6)
