"""Environments: objects that a response acts on, by methods that the policy calls as tools."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from fastrl.collect.tools import Toolbox, outcomes
from fastrl.data.chat import is_chat
from fastrl.rewards.calls import EventLoop, is_async
from fastrl.user_code import own_copy, running

_COLUMN = "environment"
_NOTHING_ASKED = ({"role": "user", "content": ""},)


class Environments:
    """Makes environments, one for each response of a batch, and resets them for the next.

    Methods without an underscore in front are tools, but for ``reset`` and ``get_reward``.
    ``reset`` gets a row's columns as keywords; the text that it returns is added to the row's
    last message, and None adds nothing. ``get_reward`` is called after each response and returns a
    number or None: it is a reward function of weight 1, by the name of the class. Both may be
    ``async def``.

    Args:
        factory: makes an environment; or a dict of factories, by names in column ``environment``.
        tools: further tools, which all environments have.

    Attributes:
        boxes: the tools by the environment's name, which is None for a single factory.
        pool: the environments that were made, by the same names.
        methods: the names of the environments' methods that are tools, by the same names.
        rewards: the reward functions of the environments' classes.
        current: the environment of each response of the latest batch; None before the first.

    Raises:
        ValueError: an environment without ``reset``, or with a tool that is not described or has
            the name of another one.
        TypeError: something that makes no environments.
    """

    def __init__(self, factory: Any, tools: Sequence[Callable[..., Any]]):
        self.several = isinstance(factory, Mapping)
        self.factories: dict[Any, Any] = dict(factory) if self.several else {None: factory}
        if not self.factories:
            raise ValueError("environment_factory is an empty dict: leave it out")
        self.pool: dict[Any, list[Any]] = {}
        self.methods: dict[Any, list[str]] = {}
        self.boxes: dict[Any, Toolbox] = {}
        self.rewards: list[Callable[..., Any]] = []
        self.current: list[Any] | None = None
        self._names: list[Any] = []  # the names of the current environments
        rewarding: list[type] = []
        for name, make in self.factories.items():
            if not callable(make):
                raise TypeError(
                    f"environment_factory holds {make!r:.80}: pass functions or classes"
                )
            first = make()
            kind = type(first)
            if not callable(getattr(first, "reset", None)):
                raise ValueError(
                    f"environment_factory made a {kind.__name__} without a method reset: define "
                    "one, which gets a row's columns as keywords"
                )
            # Read from the class: reading from the object would evaluate its properties.
            methods = [
                method
                for method, _ in inspect.getmembers(kind, inspect.isfunction)
                if not method.startswith("_") and method not in ("reset", "get_reward")
            ]
            self.pool[name], self.methods[name] = [first], methods
            self.boxes[name] = Toolbox([*tools, *(getattr(first, method) for method in methods)])
            if callable(getattr(kind, "get_reward", None)) and kind not in rewarding:
                rewarding.append(kind)
                self.rewards.append(_reward_of(kind))

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The tools of all environments, each once."""
        tools: list[Callable[..., Any]] = []
        for box in self.boxes.values():
            tools += [tool for tool in box.functions.values() if tool not in tools]
        return tools

    def placeholder(self, args: Any | None) -> Dataset:
        """Makes rows of empty prompts, for environments whose ``reset`` returns the task.

        Args:
            args: a :class:`fastrl.trainers.groups.online_config.OnlineConfig`; None: the defaults.

        Raises:
            ValueError: several environments, or training without an end.
        """
        if self.several:
            raise ValueError(
                "environment_factory is a dict, which requires a `train_dataset`: its column "
                f"{_COLUMN} names the environment of each row"
            )
        if args is None or args.max_steps <= 0:
            raise ValueError(
                "without a train_dataset nothing says how long to train: set max_steps"
            )
        count = args.generation_batch_size // args.num_generations
        return Dataset.from_list([{"prompt": [dict(m) for m in _NOTHING_ASKED]}] * count)

    def begin(
        self, rows: Sequence[Mapping[str, Any]], loop: Callable[[], EventLoop]
    ) -> list[list[dict[str, Any]]]:
        """Resets an environment for each row; returns the prompts with the texts of ``reset``.

        Args:
            loop: makes the event loop for an ``async def reset``.

        Raises:
            ValueError: a row that names no environment, or whose prompt is no chat.
            TypeError: ``reset`` returned something else than a text, content blocks or None.
        """
        prompts = [row.get("prompt", [dict(m) for m in _NOTHING_ASKED]) for row in rows]
        names = [row.get(_COLUMN) if self.several else None for row in rows]
        for i, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            if name not in self.factories:
                raise ValueError(
                    f"row {i} has {_COLUMN}={name!r}, which is not among the environments of "
                    f"environment_factory: {', '.join(map(str, self.factories))}"
                )
            if not is_chat(prompt):
                raise ValueError(
                    f"prompt {i} is {prompt!r:.80}: environments need prompts that are lists of "
                    "messages"
                )
        self._names, self.current = names, self._taken(names)
        calls = []
        for row, environment in zip(rows, self.current, strict=True):
            columns = {k: v for k, v in row.items() if not (self.several and k == _COLUMN)}
            calls.append(functools.partial(environment.reset, **own_copy(columns)))
        for i, observation in enumerate(outcomes(calls, loop)):
            kind = type(self.current[i]).__name__
            if isinstance(observation, BaseException):
                with running(f"{kind}.reset"):
                    raise observation
            if observation is not None:
                prompts[i] = _with(prompts[i], observation, kind)
        return prompts

    def current_boxes(self) -> list[Toolbox]:
        """The tools of each response of the latest batch."""
        assert self.current is not None
        return [
            self.boxes[name].of(environment, self.methods[name])
            for name, environment in zip(self._names, self.current, strict=True)
        ]

    def _taken(self, names: Sequence[Any]) -> list[Any]:
        """Returns an environment for each name, from the pool as far as it goes."""
        used = dict.fromkeys(self.factories, 0)
        environments = []
        for name in names:
            pool = self.pool[name]
            if used[name] == len(pool):
                pool.append(self.factories[name]())
            environments.append(pool[used[name]])
            used[name] += 1
        return environments


def _with(prompt: Sequence[dict[str, Any]], observation: Any, kind: str) -> list[dict[str, Any]]:
    """Returns a prompt with what ``reset`` returned added to its last message."""
    last = dict(prompt[-1])
    content = last.get("content")
    content = "" if content is None else content
    if not isinstance(observation, str | list):
        raise TypeError(
            f"{kind}.reset returned {observation!r:.80}: return the text that the prompt goes on "
            "with, or None"
        )
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**last, "content": content + observation}]


def _reward_of(kind: type) -> Callable[..., Any]:
    """Makes the reward function of a class of environments; it returns None for those of others."""
    method: Callable[..., Any] = kind.get_reward  # type: ignore[attr-defined]

    def places_of_kind(environments: Sequence[Any]) -> list[int]:
        return [i for i, environment in enumerate(environments) if type(environment) is kind]

    reward: Callable[..., Any]
    if is_async(method):

        async def reward(environments: Sequence[Any], **_: Any) -> list[Any]:
            places = places_of_kind(environments)
            answers = await asyncio.gather(*(environments[i].get_reward() for i in places))
            rewards = dict(zip(places, answers, strict=True))
            return [rewards.get(i) for i in range(len(environments))]

    else:

        def reward(environments: Sequence[Any], **_: Any) -> list[Any]:
            places = set(places_of_kind(environments))
            return [e.get_reward() if i in places else None for i, e in enumerate(environments)]

    reward.__name__ = reward.__qualname__ = kind.__name__
    return reward
