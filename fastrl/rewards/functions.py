"""Reward functions from a name: a sequence classifier, or a Python function.

A reward function is called as ``reward_fn(prompts, completions, completion_ids, **columns)`` and
returns one number per completion; ``columns`` are the other columns of the data set. Prompts and
completions are texts; where prompts are chats, both are lists of messages, as in TRL 1.x.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastrl.rewards.classifier import ClassifierReward
from fastrl.user_code import named, running

RewardFunction = Callable[..., Sequence[float]]


def load_reward(
    name: str, *, label: int | str | None = None, batch_size: int = 64
) -> RewardFunction:
    """The reward function that ``name`` stands for.

    Args:
        name: "module:function", "path/to/file.py:function", or a sequence classifier's directory
            or Hub id.
        label, batch_size: see :class:`ClassifierReward`; not read for a function.

    Raises:
        ValueError: a file without a function's name.
        TypeError: a name that does not stand for a function.
        ImportError, FileNotFoundError: a module, function or file that is not there.
        OSError: an id that the Hub does not give.
    """
    if os.path.isdir(name):
        return ClassifierReward.from_pretrained(name, label=label, batch_size=batch_size)
    if name.endswith(".py"):
        raise ValueError(f"name the reward function in {name}, as {name}:function")
    if ":" in name:
        return load_function(name)
    try:
        return ClassifierReward.from_pretrained(name, label=label, batch_size=batch_size)
    except OSError as error:
        raise OSError(
            f"{name!r} is neither a folder here nor a function (module:function or "
            f"file.py:function), and is not loaded from the Hub: {error}"
        ) from error


def check_rewards(rewards: Any, count: int, who: str = "reward_fn") -> list[float]:
    """What a reward function returned, as numbers.

    Args:
        who: returned it, for messages.

    Raises:
        ValueError: not ``count`` finite numbers; names the first that is wrong.
    """
    if not hasattr(rewards, "__len__"):
        raise ValueError(f"{who} returned {rewards!r}: it must return a list of numbers")
    if len(rewards) != count:
        raise ValueError(
            f"{who} returned {len(rewards)} rewards for {count} completions: it must return one "
            "number each"
        )
    values = []
    for i, reward in enumerate(rewards):
        value = as_number(reward)
        if not math.isfinite(value):
            raise ValueError(
                f"{who} returned {reward!r} for completion {i}: rewards must be finite numbers"
            )
        values.append(value)
    return values


def check_preferences(said: Any, count: int, who: str) -> list[float | None]:
    """What ``who`` returned for pairs, as numbers.

    Raises:
        ValueError: not ``count`` numbers in [0, 1] or None; names the first that is wrong.
    """
    if not hasattr(said, "__len__") or len(said) != count:
        got = f"{len(said)} numbers" if hasattr(said, "__len__") else repr(said)
        raise ValueError(f"{who} returned {got} for {count} pairs: it must return one number each")
    preferences: list[float | None] = []
    for i, one in enumerate(said):
        preference = None if one is None else as_number(one)
        if preference is not None and not 0 <= preference <= 1:  # NaN is not either
            raise ValueError(
                f"{who} returned {one!r} for pair {i}: it must be 1.0 where the first response is "
                "preferred, 0.0 where the second is, something between, or None to leave it out"
            )
        preferences.append(preference)
    return preferences


def as_number(value: Any) -> float:
    """A value as a float; NaN for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        return math.nan


def load_function(name: str) -> Callable[..., Any]:
    """The function that "module:function" or "path/to/file.py:function" stands for.

    What it raises, and what its file raises when it is read, says so: see :mod:`fastrl.user_code`.

    Raises:
        ValueError: no function's name.
        TypeError: a name that does not stand for a function.
        ImportError, FileNotFoundError: a module, function or file that is not there.
    """
    if ":" not in name:
        raise ValueError(f"name a function as module:function or file.py:function, not {name!r}")
    location, function_name = name.rsplit(":", 1)
    relative = location.startswith(".") and not location.endswith(".py")
    if not location or not function_name or relative:
        raise ValueError(f"name a function as module:function or file.py:function, not {name!r}")
    module = _load_file(Path(location)) if location.endswith(".py") else _load_module(location)
    try:
        function = getattr(module, function_name)
    except AttributeError:
        raise ImportError(f"{location} has no function {function_name!r}") from None
    if not callable(function):
        raise TypeError(f"{name} is not a function but {type(function).__name__}")
    return named(name, function)


def _load_module(name: str) -> Any:
    # A console script has its own folder on the path, and not the one it was called from.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with running(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            raise ImportError(f"there is no module {name!r}") from error
        raise


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with running(str(path)):
        spec.loader.exec_module(module)
    return module
