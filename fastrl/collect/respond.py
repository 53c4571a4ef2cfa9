"""Who answers prompts: the policy, the policy with tools, or a function of the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastrl.collect.environments import Environments
from fastrl.collect.rollout_func import rolled_out
from fastrl.collect.tools import Toolbox, ToolLoop
from fastrl.config import FULL
from fastrl.data.chat import TextOrMessages, as_answer, check_prompt, templates_of
from fastrl.data.prompts import with_prompt_ids
from fastrl.rewards.calls import EventLoop
from fastrl.rollout.backends import Request
from fastrl.samples import Samples


class Asked(NamedTuple):
    """Prompts that are to be answered."""

    prompts: Samples  # the prompt of each response
    size: int  # responses to a prompt, one after the other
    keys: Sequence[int]  # each group's number in the batch of all processes, which keys its draws
    seed: int


class Respond(Protocol):
    """Answers prompts.

    Attributes:
        keeps_prompts: whether the samples have the prompts of the call, unchanged.
    """

    keeps_prompts: bool

    def __call__(self, asked: Asked) -> Samples:
        """Returns a response to each prompt."""


def as_texts(
    decode: Callable[[Tensor, Tensor], str],
    said: Sequence[TextOrMessages],
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
) -> list[str]:
    """Decodes responses: where the prompt is a text, as its continuation; where it is a chat, whose
    template writes what is between messages, as a text of its own.

    Args:
        decode: returns a response's text, from prompt and response ids.
        said, prompts: the prompts, and their token ids.
    """
    pairs = zip(said, prompts, strict=True)
    before = [ids if isinstance(prompt, str) else ids[:0] for prompt, ids in pairs]
    return list(map(decode, before, responses))


@dataclass(frozen=True)
class Sampled:
    """Answers prompts by the policy; the responses to a prompt share its prefill.

    Args:
        run: samples the responses of a request.
        arguments: keyword arguments of ``model.generate``.
        decode: see :func:`as_texts`.
        encode: adds token ids to prompts that come without.
    """

    run: Callable[[Request], Samples]
    arguments: Mapping[str, Any]
    decode: Callable[[Tensor, Tensor], str]
    encode: Callable[[Samples], Samples] | None = None
    batch_size: int | None = None  # responses per call of ``model.generate``; None: all

    keeps_prompts = True

    def __call__(self, asked: Asked) -> Samples:
        if self.encode is not None:
            asked = asked._replace(prompts=self.encode(asked.prompts))
        prompts = asked.prompts
        output = self.sample(prompts.prompt_ids, asked.size, asked.keys, asked.seed)
        responses = [x.cpu() for x in output.sequences]
        texts = as_texts(self.decode, prompts.prompts, prompts.prompt_ids, responses)
        return replace(
            output,
            **prompts.known(),
            sequences=responses,
            texts=texts,
            completions=list(map(as_answer, prompts.prompts, texts)),
        )

    def sample(
        self,
        prompts: Sequence[Tensor],
        size: int,
        keys: Sequence[int],
        seed: int,
        changed: Mapping[str, Any] = MappingProxyType({}),
    ) -> Samples:
        """Samples a response to each prompt's ids; further arguments: see :class:`Asked`.

        Args:
            changed: arguments of ``generate`` in place of those of the same names.
        """
        samples = samples_per_prompt(prompts, size)
        ids = keys if samples == size else [k * size + j for k in keys for j in range(size)]
        own = replace(self, arguments={**self.arguments, **changed})
        return own._run(prompts[::samples], ids, seed, samples=samples)

    def further(
        self, prompts: Sequence[Tensor], numbers: Sequence[int], limits: Sequence[int], seed: int
    ) -> Samples:
        """Samples further turns of responses, each behind a prompt of its own.

        Args:
            numbers: the responses' numbers in the batch of all processes.
            limits: the most tokens of each turn.
            seed: a seed that no earlier turn had, so that no draw comes twice.
        """
        longest = self.arguments.get("max_new_tokens")
        limits = [limit if longest is None else min(limit, longest) for limit in limits]
        return self._run(prompts, numbers, seed, limits=limits)

    def _run(
        self, prompts: Sequence[Tensor], ids: Sequence[int], seed: int, **options: Any
    ) -> Samples:
        size = self.batch_size or len(prompts) * options.get("samples", 1)
        request = Request(prompts, ids, dict(self.arguments), size, seed=seed, **options)
        with torch.no_grad():
            return self.run(request)


@dataclass(frozen=True)
class RolloutFunction:
    """Answers prompts by a ``rollout_func``.

    Args:
        function: the ``rollout_func``, called with prompts and trainer.
        trainer: the trainer that the function gets.
        model: the model that is trained on the function's responses.
        decode: see :func:`as_texts`.
        ends: ids of the tokens that end a response.
        stops: token sequences at which responses end, too.
        reserved: names of what reward functions get by keyword, which no column may have.
        temperature: the temperature of the log-probs that the function may return.
        policy_support: see :func:`fastrl.collect.rollout_func.rolled_out`.
    """

    function: Callable[[list[Any], Any], dict[str, Any]]
    trainer: Any
    model: Any
    tokenizer: Any
    decode: Callable[[Tensor, Tensor], str]
    ends: Collection[int]
    stops: Sequence[Sequence[int]]
    reserved: Sequence[str]
    temperature: float
    policy_support: str = FULL

    keeps_prompts = False

    def __call__(self, asked: Asked) -> Samples:
        contents = asked.prompts.prompts
        for i, prompt in enumerate(contents):
            check_prompt(prompt, f"prompt {i}")
        result = self.function(copy.deepcopy(contents), self.trainer)
        options = self.model, self.reserved, self.policy_support
        answer = rolled_out(result, len(contents), *options)
        texts = as_texts(self.decode, contents, answer.prompt_ids, answer.sequences)
        prompts = with_prompt_ids(asked.prompts, answer.prompt_ids, self.tokenizer)
        prompts = replace(prompts, columns={**prompts.columns, **answer.columns})
        return replace(
            answer,
            **prompts.known(),
            finish_reasons=[self._finish_reason(ids.tolist()) for ids in answer.sequences],
            temperature=self.temperature,
            texts=texts,
            completions=list(map(as_answer, contents, texts)),
        )

    def _finish_reason(self, ids: list[int]) -> str:
        if ids and ids[-1] in self.ends:
            return "eos"
        return "stop" if any(ids[-len(x) :] == list(map(int, x)) for x in self.stops) else "length"


@dataclass(frozen=True)
class Conversations:
    """Answers prompts by the policy's turns and the results of the tools that it calls.

    Args:
        sampled: writes the policy's turns.
        loop: runs the tools.
        box: the tools, where there are no environments.
        environments: the environments, with their tools: their methods, and further ones.
        first_turn: arguments of ``generate`` for the first turn alone.
    """

    sampled: Sampled
    loop: ToolLoop
    box: Toolbox
    environments: Environments | None = None
    first_turn: Mapping[str, Any] = field(default_factory=dict)

    keeps_prompts = False

    def __call__(self, asked: Asked) -> Samples:
        prompts, boxes = asked.prompts, [self.box] * len(asked.prompts)
        if self.environments is not None:
            boxes = self.environments.current_boxes()
        numbers = [k * asked.size + j for k in asked.keys for j in range(asked.size)]

        def sample(
            ids: list[Tensor], which: list[int], turn: int, limits: list[int] | None
        ) -> Samples:
            if limits is None:
                return self.sampled.sample(ids, asked.size, asked.keys, asked.seed, self.first_turn)
            # A response's number keys its draws in every turn: another seed makes them differ.
            seed = asked.seed ^ turn << 32
            return self.sampled.further(ids, [numbers[i] for i in which], limits, seed)

        chat, contents = self.loop.chat, prompts.prompts
        templates = templates_of(contents, prompts.columns, prompts.prompt_rows, chat.template)
        answer = self.loop(sample, contents, boxes, templates)
        prompts = with_prompt_ids(prompts, answer.prompt_ids, chat.tokenizer)
        texts = list(map(self.sampled.decode, answer.prompt_ids, answer.sequences))
        return replace(answer, **prompts.known(), texts=texts)


@dataclass(frozen=True)
class InEnvironments:
    """Answers prompts, each with what the ``reset`` of its environment returned behind it.

    Args:
        respond: answers the prompts with what was added to them.
        event_loop: makes the event loop for an ``async def reset``.
    """

    respond: Respond
    environments: Environments
    event_loop: Callable[[], EventLoop]

    keeps_prompts = False

    def __call__(self, asked: Asked) -> Samples:
        prompts, columns = asked.prompts, asked.prompts.columns
        rows = [
            {
                **({} if prompt is None else {"prompt": prompt}),
                **{name: values[i] for name, values in columns.items()},
            }
            for i, prompt in enumerate(prompts.prompts)
        ]
        contents: list[Any] = self.environments.begin(rows, self.event_loop)
        columns = {**columns, "environments": list(self.environments.current or ())}
        prompts = replace(prompts, prompts=contents, columns=columns)
        return self.respond(asked._replace(prompts=prompts))


def samples_per_prompt(prompts: Sequence[Tensor], group: int) -> int:
    """Returns ``group`` where each ``group`` prompts in a row are the same, so that their responses
    can share a prefill; else 1."""
    same = len(prompts) % group == 0 and all(
        torch.equal(prompts[i], prompts[i - i % group]) for i in range(len(prompts))
    )
    return group if same else 1
