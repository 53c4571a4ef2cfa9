"""What responses may act on: tools that they call, and environments with tools of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastrl.collect.environments import Environments
from fastrl.collect.respond import Conversations, InEnvironments, Respond, Sampled
from fastrl.collect.tools import NEED_CHATS, Toolbox, ToolLoop, warn_of_schemas
from fastrl.data.chat import is_chat
from fastrl.data.prompts import Prompts
from fastrl.data.tool_calls import Reader, ToolChat, call_grammar, find_reader
from fastrl.rewards.calls import EventLoop


class Interaction:
    """Tools, environments, or both.

    Args:
        tools: functions with type hints and docstrings in Google's format, see :class:`Toolbox`.
        environment_factory: see :class:`Environments`; None: there are none.

    Attributes:
        tools: all tools, the environments' methods too.
        loop: runs the tools; None where there are none, or until :meth:`respond` is called.
        first_turn: arguments of ``generate`` for the first turn of responses, if it has its own.

    Raises:
        TypeError, ValueError: see :class:`Toolbox` and :class:`Environments`.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]] | None, environment_factory: Any):
        self.tools = list(tools or ())
        self.box = Toolbox(self.tools)
        self.environments: Environments | None = None
        if environment_factory is not None:
            self.environments = Environments(environment_factory, self.tools)
            self.tools = self.environments.tools
        self.loop: ToolLoop | None = None
        self.first_turn: dict[str, Any] = {}
        self._reader: Reader | None = None

    def __bool__(self) -> bool:
        return bool(self.tools) or self.environments is not None

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """The reward functions of environments."""
        return [] if self.environments is None else self.environments.rewards

    def refuse_beside(self, rollout_func: Any) -> None:
        """Raises ValueError for a ``rollout_func`` beside tools or environments."""
        if rollout_func is not None and self:
            raise ValueError(
                "rollout_func takes the place of sampling, and tools and environment_factory are "
                "part of it: leave them out, and mark the policy's tokens by an env_mask"
            )

    def read_by(self, tokenizer: Any, template: Mapping[str, Any]) -> None:
        """Finds out how the tokenizer's model calls tools.

        Args:
            template: further arguments of the chat template.

        Raises:
            ValueError: see :func:`fastrl.data.tool_calls.find_reader`.
        """
        if self.tools:
            self._reader = find_reader(tokenizer, template)

    def check(self, prompts: Prompts) -> None:
        """If there are tools or environments, warns of a column ``tools``, and checks the prompts.

        Raises:
            ValueError: a prompt that is no chat; the message names it.
        """
        if self:
            warn_of_schemas(prompts.samples.columns)
        for prompt, row in zip(prompts.samples.prompts, prompts.samples.prompt_rows, strict=True):
            if self and not is_chat(prompt):
                name = prompts.name_of(row)
                raise ValueError(f"{name} is {prompt!r:.80}: tools and environments {NEED_CHATS}")

    def respond(
        self,
        sampled: Sampled,
        tokenizer: Any,
        template: Mapping[str, Any],
        ends: Sequence[int],
        event_loop: Callable[[], EventLoop],
        most_turns: int | None,
        most_tokens: int,
        context: int | None,
        temperature: float,
        longest: int | None = None,
        *,
        calls_first: bool = False,
    ) -> Respond:
        """Makes the object that answers prompts.

        Args:
            sampled: writes the policy's turns.
            template: further arguments of the chat template.
            ends: ids of the tokens that end a turn.
            event_loop: makes the event loop that coroutines run on.
            most_turns, most_tokens, context, temperature, longest: see :class:`ToolLoop`.
            calls_first: whether a response begins with a call of a tool.

        Raises:
            ValueError: ``calls_first`` without tools, or where no grammar can say so.
        """
        respond: Respond = sampled
        if calls_first and self._reader is None:
            raise ValueError("tool_choice='required' needs tools: pass tools, or set 'auto'")
        if self._reader is not None:
            chat = ToolChat(tokenizer, self._reader, list(ends), dict(template))
            limits = most_turns, most_tokens, context, temperature, longest
            self.loop = ToolLoop(chat, event_loop, *limits)
            written = replace(sampled, encode=None)
            if calls_first:
                lark = call_grammar(tokenizer, template, Toolbox(self.tools).schemas)
                self.first_turn = {"response_format": {"lark": lark}}
            parts = self.loop, self.box, self.environments, self.first_turn
            respond = Conversations(written, *parts)
        if self.environments is not None:
            respond = InEnvironments(respond, self.environments, event_loop)
        return respond
