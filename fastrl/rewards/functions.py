"""Reward functions by name: a ready one, a sequence classifier, or a Python function.

A reward function is called as ``reward_fn(prompts=, completions=, completion_ids=, **columns)`` and
returns one number per completion, or for each a list of one number for each of its tokens;
``columns`` are the other columns of the data set. Prompts and completions are texts; where prompts
are chats, both are lists of messages, as in TRL 1.x. The function may be an ``async def``, and
return None for a completion that it does not judge. A run calls its functions through
:class:`fastrl.rewards.weighted.Rewards`.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from fastrl.data.chat import as_text
from fastrl.rewards.classifier import ClassifierReward
from fastrl.rewards.code_reward import make_code_reward
from fastrl.rewards.json_reward import make_json_schema_reward
from fastrl.rewards.math_reward import load_math_reward
from fastrl.rewards.text_rewards import (
    get_soft_overlong_punishment,
    make_format_reward,
    make_length_reward,
    make_regex_reward,
)
from fastrl.user_code import load_function

_Returned = Sequence[float | Sequence[float] | Tensor | None]
RewardFunction = Callable[..., _Returned | Awaitable[_Returned]]

_TEXT = (str, bytes)  # which float() may read as a number
_SHOWN = 80  # characters of a prompt in a message

# Functions that make fastrl's ready rewards from parameters, by name. A classifier's folder of such
# a name is written ./name.
READY: dict[str, Callable[..., RewardFunction]] = {
    "code": make_code_reward,
    "format": make_format_reward,
    "json_schema": make_json_schema_reward,
    "length": make_length_reward,
    "math": load_math_reward,
    "regex": make_regex_reward,
    "soft_overlong": get_soft_overlong_punishment,
}


def load_ready(name: str) -> RewardFunction | None:
    """The ready reward that a name such as ``format`` or ``length:{"target": 200}`` means, or None.

    Raises:
        ValueError: parameters that are no JSON object, or that the reward does not take.
        ImportError: a package that the reward needs is not installed.
    """
    kind, _, tail = name.partition(":")
    if kind not in READY or (tail and not tail.lstrip().startswith("{")):  # module:function
        return None
    try:
        parameters = json.loads(tail or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"the parameters of the reward {name!r} are not JSON: {error}") from None
    signature = inspect.signature(READY[kind])
    try:
        signature.bind(**parameters)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "no parameters"
        raise ValueError(
            f"the reward {kind} takes {takes} ({error}), given as {kind}:{{JSON}}, got {name!r}"
        ) from None
    return READY[kind](**parameters)


def load_reward(
    name: str, *, label: int | str | None = None, batch_size: int = 64
) -> RewardFunction:
    """Loads the reward function that a name stands for.

    Args:
        name: a ready reward's, with its parameters as JSON ("math", 'length:{"target": 200}'; see
            :data:`READY`), "module:function", "path/to/file.py:function", or a sequence
            classifier's directory or Hub id.
        label, batch_size: see :class:`ClassifierReward`; ignored for a function.

    Raises:
        ValueError: a file without a function's name, parameters that a ready reward does not take.
        TypeError: the name of something that is not a function.
        ImportError, FileNotFoundError: a module, function or file that does not exist; a package
            that a ready reward needs is not installed.
        OSError: an id that cannot be loaded from the Hub.
    """
    if (ready := load_ready(name)) is not None:
        return ready
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


def read_rewards(returned: Any, completions: Sequence[int], who: str) -> list[float | None]:
    """Reads the rewards that a function returned for some completions.

    Args:
        completions: the completions' indices, for messages.
        who: the function's name, for messages.

    Returns:
        for each completion a number, which may be NaN or infinite, or None where the function
        returned None.

    Raises:
        ValueError: not one number or None for each; names the first wrong one.
    """
    if inspect.iscoroutine(returned):
        returned.close()
        raise ValueError(
            f"{who} returned a coroutine, and does not look like an async function: is it a lambda "
            "or a wrapper around one? Make it an async def"
        )
    if isinstance(returned, (str, Mapping, Set)) or not hasattr(returned, "__len__"):
        raise ValueError(f"{who} returned {returned!r}: it must return a list of numbers")
    if len(returned) != len(completions):
        raise ValueError(
            f"{who} returned {len(returned)} rewards for {len(completions)} completions: it must "
            "return one number each"
        )
    rewards: list[float | None] = []
    for i, reward in zip(completions, returned, strict=True):
        if isinstance(reward, _TEXT):
            raise _not_finite(reward, i, who)
        try:
            rewards.append(None if reward is None else float(reward))
        except (TypeError, ValueError, RuntimeError, OverflowError):  # of float()
            if _is_of_tokens(reward):
                raise ValueError(
                    f"{who} returned {len(reward)} numbers for completion {i}: it must return one "
                    "for each completion; rewards of tokens are for PPOTrainer"
                ) from None
            raise _not_finite(reward, i, who) from None
    return rewards


def read_token_rewards(
    returned: Any, completions: Sequence[int], lengths: Sequence[int] | None, who: str
) -> list[float | Tensor | None]:
    """Reads the rewards that a function returned for some completions, or for their tokens.

    Args:
        completions: the completions' indices, for messages.
        lengths: how many tokens each completion has; None: rewards are of completions alone.
        who: the function's name, for messages.

    Returns:
        what :func:`read_rewards` does; for completions whose reward is a list, an array or a tensor
        with a number for each token, these numbers [L], fp64, on the CPU.

    Raises:
        ValueError: see :func:`read_rewards`; numbers for completions beside numbers for tokens, not
            one number for each token; names the first that is wrong.
    """
    of_tokens = [] if not hasattr(returned, "__len__") else list(map(_is_of_tokens, returned))
    if lengths is None or not any(of_tokens) or len(returned) != len(completions):
        return list(read_rewards(returned, completions, who))
    first = completions[of_tokens.index(True)]
    rewards: list[float | Tensor | None] = []
    for i, length, reward in zip(completions, lengths, returned, strict=True):
        if reward is None:
            rewards.append(None)
            continue
        try:
            numbers = torch.as_tensor(reward, dtype=torch.float64).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise _not_finite(reward, i, who) from None
        if numbers.dim() == 0:
            raise ValueError(
                f"{who} returned one number for completion {i}, and several for completion {first}:"
                " it must return one number for each completion, or for each a list of one number "
                "for each token"
            )
        if numbers.shape != (length,):
            raise ValueError(
                f"{who} returned rewards of shape {tuple(numbers.shape)} for completion {i}, which "
                f"has {length} tokens: it must return one number for each of its completion_ids, "
                "or one for the whole completion"
            )
        rewards.append(numbers)
    return rewards


def _is_of_tokens(reward: Any) -> bool:
    """Whether a function's reward of a completion is a list, or an array that is not one number."""
    if isinstance(reward, (list, tuple)):
        return True
    shape = getattr(reward, "shape", ())
    return len(shape) > 0 and math.prod(shape) != 1


def check_rewards(rewards: Any, count: int, who: str = "reward_fn") -> list[float]:
    """Checks the rewards that a function returned, and converts them to numbers.

    Args:
        who: the function's name, for messages.

    Raises:
        ValueError: not ``count`` finite numbers; names the first that is wrong.
    """
    values = []
    for i, value in enumerate(read_rewards(rewards, range(count), who)):
        if value is None or not math.isfinite(value):
            raise _not_finite(value, i, who)
        values.append(value)
    return values


def _not_finite(reward: Any, completion: int, who: str) -> ValueError:
    text = ", and this is a text: convert it" if isinstance(reward, _TEXT) else ""
    return ValueError(
        f"{who} returned {reward!r} for completion {completion}: rewards must be finite numbers"
        f"{text}"
    )


def say_not_finite(which: Sequence[int], rewards: Any, prompts: Sequence[Any]) -> str:
    """The part of a message behind a reward function's name: the first reward that is not finite,
    its prompt, and the number of further such rewards.

    Args:
        which: the indices of the completions with such rewards.
        rewards, prompts: the rewards and prompts of all completions.
    """
    i = which[0]
    what = f"returned {float(rewards[i])} for completion {i} ({shown(prompts[i])})"
    return what + (f" and {len(which) - 1} more that are not finite" if len(which) > 1 else "")


def shown(prompt: Any) -> str:
    """A prompt in a message: the beginning of its text."""
    text = as_text(prompt)
    return f"prompt {text[:_SHOWN] + '…' if len(text) > _SHOWN else text!r}"


def check_preferences(returned: Any, count: int, who: str) -> list[float | None]:
    """Checks the preferences that ``who`` returned for pairs, and converts them to numbers.

    Raises:
        ValueError: not ``count`` numbers in [0, 1] or None; names the first that is wrong.
    """
    if not hasattr(returned, "__len__") or len(returned) != count:
        got = f"{len(returned)} numbers" if hasattr(returned, "__len__") else repr(returned)
        raise ValueError(f"{who} returned {got} for {count} pairs: it must return one number each")
    preferences: list[float | None] = []
    for i, one in enumerate(returned):
        preference = None if one is None else as_number(one)
        if isinstance(one, _TEXT):
            preference = math.nan
        if preference is not None and not 0 <= preference <= 1:  # NaN, too
            raise ValueError(
                f"{who} returned {one!r} for pair {i}: it must be 1.0 where the first response is "
                "preferred, 0.0 where the second is, something between, or None to leave it out"
            )
        preferences.append(preference)
    return preferences


def as_number(value: Any) -> float:
    """A value, or a text as tables may hold it, as a float; NaN where it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several elements; 10**400
        return math.nan
