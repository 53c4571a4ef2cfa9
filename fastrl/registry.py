"""Tables of functions by name, to which users add theirs, and whose names settings take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fastrl.user_code import load_function
from fastrl_kernels.argument_types import check_takes
from fastrl_kernels.policy_losses import POLICY_LOSSES, register_policy_loss

__all__ = [
    "GROUP_ADVANTAGES",
    "POLICY_LOSS_NAMES",
    "Registry",
    "group_advantage",
    "register_policy_loss",
]

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Mapping[str, Any]):
    """The names of a table's rows.

    A name such as "file.py:function" or "module:function" that is not there yet is loaded, and is a
    row from then on.

    Args:
        rows: the table.
        add: adds a function to it, by a name.
    """

    def __init__(self, rows: dict[str, Any], add: Callable[[str, Callable[..., Any]], Any]):
        self._rows, self._add = rows, add

    def __getitem__(self, name: str) -> Any:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        if name not in self._rows and isinstance(name, str) and ":" in name:
            self._add(name, load_function(name))
        return name in self._rows


# Of the responses to a prompt; the functions are fastrl.learn.baselines'.
_OURS = ("grpo", "dr_grpo", "rloo")
_OTHERS = ("gae", "reinforce++")  # PPOConfig's, of no group
_GROUPS: dict[str, Callable[..., Any] | None] = dict.fromkeys(_OURS)


def group_advantage(name: str) -> Callable[[F], F]:
    """Decorator: adds an advantage of a group, by which ``PPOConfig.advantage`` and
    ``GRPOConfig.advantage`` may choose it.

        @fastrl.group_advantage("above_median")
        def above_median(rewards, counts):
            known = torch.where(counts, rewards, torch.nan)
            return rewards - known.nanmedian(-1, keepdim=True).values

    The function gets the rewards R of the responses to each prompt, less that of the first one that
    counts, [groups, size] fp32, 0 where a response does not count; and which count, [groups, size]
    bool. It returns advantages [groups, size]; those of responses that do not count, and of groups
    with fewer than two that do, are 0 in their place.

    Raises:
        TypeError: it is called with the function itself; a function that takes something else.
        ValueError: the name of one of fastrl's. One's own is replaced.
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
    check_takes(function, "rewards", "counts")
    _GROUPS[name] = function


GROUP_ADVANTAGES = Registry(_GROUPS, _add_advantage)
POLICY_LOSS_NAMES = Registry(
    POLICY_LOSSES, lambda name, function: register_policy_loss(name)(function)
)
