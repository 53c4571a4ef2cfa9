"""Responses in which a policy calls tools: turns of sampling and of running what it calls."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
)

from fastrl.data.chat import is_chat
from fastrl.data.prompt_ids import ids_of_prompts
from fastrl.data.tool_calls import ToolChat
from fastrl.rewards.calls import EventLoop, await_within
from fastrl.samples import Samples, ToolCalls
from fastrl_kernels import TokenSets

NEED_CHATS = (
    "need prompts that are lists of messages, as the chat template tells the policy of them"
)
# Samples responses to prompts, from their token ids, the responses' numbers, the number of the turn
# and the most new tokens of each response; None: as many as the trainer's settings allow.
Sample = Callable[[list[Tensor], list[int], int, list[int] | None], Samples]


class Toolbox:
    """Tools by name.

    Args:
        functions: functions with type hints and a docstring in Google's format that describes them
            and their arguments; ``async def`` too.

    Attributes:
        functions: the functions by name.
        schemas: the functions' JSON schemas, as chat templates take them.

    Raises:
        TypeError: something that is no function.
        ValueError: a function that is not described, or two of one name.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]):
        self.functions: dict[str, Callable[..., Any]] = {}
        self.schemas: list[dict[str, Any]] = []
        for function in functions:
            name = getattr(function, "__name__", None)
            if not callable(function) or name is None:
                raise TypeError(f"tools holds {function!r:.80}: pass functions with a name")
            if name in self.functions:
                raise ValueError(
                    f"two tools have the name {name!r}, and the policy calls them by that: rename "
                    "one of them (methods of an environment are tools too)"
                )
            self.functions[name] = function
            self.schemas.append(_schema(name, function))

    def of(self, owner: Any, names: Iterable[str]) -> Toolbox:
        """A toolbox with this one's functions and schemas, and the methods ``names`` of ``owner``,
        whose schemas this one has."""
        box = Toolbox(())
        box.functions = {**self.functions, **{name: getattr(owner, name) for name in names}}
        box.schemas = self.schemas
        return box


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            f"the tool {name} is not described: {error} It needs type hints, and a docstring that "
            "says what it does and, below 'Args:', what each argument is"
        ) from error


def check_chats(rows: Any) -> None:
    """Warns of a data set's column ``tools``, which is not read: prompts get the tools that can be
    called.

    Raises:
        ValueError: the first row's prompt is a text; streams are not checked.
    """
    warn_of_schemas(getattr(rows, "column_names", None) or ())
    prompt = rows[0].get("prompt") if isinstance(rows, Dataset) and len(rows) else None
    if isinstance(prompt, str):
        raise ValueError(
            f"train_dataset has the prompt {prompt!r:.80}: tools and environments {NEED_CHATS}"
        )


def warn_of_schemas(columns: Iterable[str]) -> None:
    """Warns where ``tools`` is among a data set's columns."""
    if "tools" in columns:
        warnings.warn(
            "the column tools is not read beside tools or an environment_factory: the policy is "
            "told of those that it can call; remove the column, or rename it",
            stacklevel=5,
        )


def outcomes(calls: Sequence[Callable[[], Any]], loop: Callable[[], EventLoop]) -> list[Any]:
    """The results, or exceptions, of functions without arguments: they run one after the other, and
    then the coroutines among their results at the same time.

    Args:
        loop: makes the event loop for coroutines.
    """
    results: list[Any] = []
    for call in calls:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)
    waiting = [i for i, result in enumerate(results) if inspect.iscoroutine(result)]
    if waiting:
        tasks = [_caught(results[i]) for i in waiting]
        for i, result in zip(waiting, loop().gather(tasks), strict=True):
            results[i] = result
    return results


async def _caught(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def call() -> Any:
        return await coroutine

    try:
        return await await_within(None, call)
    except (Exception, asyncio.CancelledError) as error:
        return error


@dataclass
class _Conversation:
    """One response as it grows."""

    prompt: Tensor
    box: Toolbox
    template: Mapping[str, Any]  # further arguments of the chat template
    ids: list[int] = field(default_factory=list)  # with the tools' results
    mask: list[bool] = field(default_factory=list)  # which of ids the policy wrote
    logprobs: list[Tensor] = field(default_factory=list)  # of ids, 0 for the tools' results
    supports: list[TokenSets] = field(default_factory=list)  # of ids, whole for the tools' results
    messages: list[dict[str, Any]] = field(default_factory=list)
    readable: bool = True  # whether the latest turn could be parsed
    finish_reason: str = ""  # why the latest turn ended
    called: int = 0  # calls that were run
    failed: int = 0  # of these, calls that raised

    @property
    def sequence(self) -> Tensor:
        return torch.cat([self.prompt, torch.tensor(self.ids, dtype=torch.long)])

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of tools in the latest message."""
        return self.messages[-1].get("tool_calls", [])

    def add(self, ids: list[int], by_policy: bool, logprobs: Tensor | None) -> None:
        self.ids += ids
        self.mask += [by_policy] * len(ids)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def add_supports(self, sets: TokenSets) -> None:
        """Adds the sets of the turn that was added last, and of the results before it."""
        known = sum(map(len, self.supports))
        results = TokenSets.whole(len(self.ids) - known - len(sets), sets.vocabulary)
        self.supports += [results, sets]


class ToolLoop:
    """Turns of a conversation: the policy writes, the tools that it calls run, their results follow
    the policy's text, and the policy writes on, until it calls none, or a limit is reached.

    Results that leave no room for an answer are left out, and end the response. The tools of a
    turn run one after the other, but for coroutines, which run at the same time. What a tool raises
    is its result, as {'error': text}. A call that cannot be read ends a response.

    Args:
        event_loop: makes the event loop that coroutines run on.
        most_turns: how many turns of a response may run tools; None: any number.
        most_tokens: the most tokens of a response, the tools' results included.
        context: positions of the model; None: any number.
        temperature: the temperature of the log-probs.
        longest: tokens of a prompt; longer ones keep BOS and their last tokens. None: any number.
    """

    def __init__(
        self,
        chat: ToolChat,
        event_loop: Callable[[], EventLoop],
        most_turns: int | None,
        most_tokens: int,
        context: int | None,
        temperature: float,
        longest: int | None = None,
    ):
        self.longest = longest
        self.chat, self.event_loop, self.temperature = chat, event_loop, temperature
        self.most_turns, self.most_tokens, self.context = most_turns, most_tokens, context

    def __call__(
        self,
        sample: Sample,
        prompts: Sequence[Any],
        boxes: Sequence[Toolbox],
        templates: Sequence[Mapping[str, Any]] = (),
    ) -> Samples:
        """Returns a response to each prompt, with tools' results in it, where log-probs are 0 and
        masks False. Finish reasons are those of the last turns; calls that are unreadable, unknown
        or raise count as failed.

        Args:
            prompts: chats.
            boxes: the tools of each prompt, in place of a column ``tools``.
            templates: each prompt's further arguments of the chat template; by default ``chat``'s.

        Raises:
            ValueError: a prompt that is no chat; a tool's result with blocks that are no texts.
        """
        templates = templates or [self.chat.template] * len(prompts)
        talks = [
            self._begin(i, *each)
            for i, each in enumerate(zip(prompts, boxes, templates, strict=True))
        ]
        going = list(range(len(talks)))
        output = sample([talk.prompt for talk in talks], going, 0, None)
        has_logprobs = self._add(talks, output)
        turn = 0
        while turn != self.most_turns and (going := [i for i in going if talks[i].calls]):
            results = self._run([talks[i] for i in going])
            limits = {}
            for i, result in zip(going, results, strict=True):
                ids = self.chat.results(talks[i].ids, result, talks[i].template)
                room = self._room(talks[i]) - len(ids)
                if room >= 1:
                    talks[i].add(ids, False, torch.zeros(len(ids)))
                    talks[i].messages += result
                    limits[i] = room
            turn, going = turn + 1, list(limits)
            if going:
                sequences = [talks[i].sequence for i in going]
                output = sample(sequences, going, turn, list(limits.values()))
                has_logprobs = self._add([talks[i] for i in going], output) and has_logprobs
        return Samples(
            prompt_ids=[talk.prompt for talk in talks],
            sequences=[torch.tensor(talk.ids, dtype=torch.long) for talk in talks],
            completions=[talk.messages for talk in talks],
            masks=[torch.tensor(talk.mask, dtype=torch.bool) for talk in talks],
            logprobs=[torch.cat(talk.logprobs) for talk in talks] if has_logprobs else None,
            supports=_supports(talks),
            temperature=self.temperature,
            finish_reasons=[talk.finish_reason for talk in talks],
            tool_calls=[
                ToolCalls(talk.called + (not talk.readable), talk.failed + (not talk.readable))
                for talk in talks
            ],
        )

    def _begin(
        self, i: int, prompt: Any, box: Toolbox, template: Mapping[str, Any]
    ) -> _Conversation:
        if not is_chat(prompt):
            raise ValueError(f"prompt {i} is {prompt!r:.80}: tools {NEED_CHATS}")
        # None in place of an empty list: some templates write of tools as soon as there is a list.
        with_tools = {**template, "tools": box.schemas or None}
        names = [f"prompt {i}"]
        (ids,) = ids_of_prompts([prompt], self.chat.tokenizer, [with_tools], names, self.longest)
        options = {name: x for name, x in template.items() if name != "tools"}
        return _Conversation(ids, box, options)

    def _room(self, talk: _Conversation) -> int:
        """How many more tokens the response may have."""
        room = self.most_tokens - len(talk.ids)
        if self.context is not None:
            room = min(room, self.context - len(talk.prompt) - len(talk.ids))
        return room

    def _add(self, talks: Sequence[_Conversation], output: Samples) -> bool:
        """Adds a sampled turn to each response, and returns whether log-probs are known."""
        logprobs = output.logprobs_at(self.temperature)
        for i, (talk, response) in enumerate(zip(talks, output.sequences, strict=True)):
            ids, prompt = response.tolist(), talk.sequence.tolist()
            message, talk.readable = self.chat.read(prompt, ids, talk.box.schemas)
            talk.messages.append(message)
            talk.finish_reason = output.finish_reasons[i]
            talk.add(ids, True, None if logprobs is None else logprobs[i].float().cpu())
            if output.supports is not None:
                talk.add_supports(output.supports[i])
        return logprobs is not None

    def _run(self, talks: Sequence[_Conversation]) -> list[list[dict[str, Any]]]:
        """Runs the calls of the latest messages; returns a message of the role tool for each call,
        by response."""
        requests = [(talk, call) for talk in talks for call in talk.calls]
        calls = [functools.partial(_call, talk.box, call) for talk, call in requests]
        results = iter(outcomes(calls, self.event_loop))
        messages: list[list[dict[str, Any]]] = []
        for talk in talks:
            messages.append([])
            talk.called += len(talk.calls)
            for call in talk.calls:
                result, name = next(results), call["function"]["name"]
                if isinstance(result, Exception):
                    talk.failed, result = talk.failed + 1, {"error": str(result)}
                messages[-1].append({"role": "tool", "name": name, "content": _text(name, result)})
        return messages


def _supports(talks: Sequence[_Conversation]) -> list[TokenSets] | None:
    """The sets that the responses' tokens were drawn from; None where they are not known."""
    if not all(talk.supports for talk in talks):
        return None
    whole = [
        TokenSets.whole(len(talk.ids) - sum(map(len, talk.supports)), talk.supports[0].vocabulary)
        for talk in talks
    ]
    return [
        TokenSets.joined([*talk.supports, last]) for talk, last in zip(talks, whole, strict=True)
    ]


def _call(box: Toolbox, call: Mapping[str, Any]) -> Any:
    """Runs a tool, and returns its result, or the coroutine of an ``async def``.

    Raises:
        ValueError: a type other than "function", no tool of the name, arguments that are no dict.
    """
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if call["type"] != "function":
        raise ValueError(f"Unsupported tool call type: {call['type']}")
    if name not in box.functions:
        raise ValueError(f"Tool {name} not found.")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"The arguments of {name} must be an object, got {arguments!r:.80}")
    return box.functions[name](**copy.deepcopy(dict(arguments)))


def _text(name: str, result: Any) -> str:
    """A tool's result as text; a list of content blocks becomes their joined texts, and raises
    ValueError where a block is no text, such as an image."""
    if not isinstance(result, list) or not result:
        return str(result)
    if not all(isinstance(block, Mapping) and "type" in block for block in result):
        return str(result)
    if any(block["type"] != "text" for block in result):
        kinds = ", ".join(sorted({str(block["type"]) for block in result}))
        raise ValueError(f"the tool {name} returned blocks of the types {kinds}: return texts")
    return "".join(str(block.get("text", "")) for block in result)
