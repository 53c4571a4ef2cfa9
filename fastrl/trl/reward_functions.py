"""The reward functions of a trainer, by TRL 1.x's rules: functions, coroutines and classifiers."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.data.chat_prompts import classifier_inputs
from fastrl.data.choose_padding import classifier_side
from fastrl.models.load import load_classifier, load_tokenizer
from fastrl.models.reward_head import padding_of, rewards_of_padded
from fastrl.rewards.calls import EventLoop, await_within, is_async
from fastrl.rewards.functions import READY, read_rewards, say_not_finite
from fastrl.user_code import name_of, own_copy, running


class RewardFunctions:
    """K reward functions, called as ``function(prompts=, completions=, completion_ids=,
    **columns, trainer_state=, log_extra=, log_metric=)``.

    A function returns a number for each completion, or None where it does not apply. Coroutine
    functions run at the same time, on one event loop. A sequence classifier's reward is its first
    logit for the text of prompt and completion, or for the chat in its own template.

    Args:
        reward_funcs: one, or a list, of functions, classifiers, paths and Hub ids of such, or names
            of ready rewards ("math").
        weights: a number for each; None: 1.
        processing_classes: the classifiers' tokenizers, in the same order; None: their own.
        load: keyword arguments to load a classifier with.
        chat_template_kwargs: of the classifiers' chat templates.
        further: functions of weight 1 behind these.
        on_nonfinite: "raise" makes a reward that is not finite an error; "skip" warns of it, once
            for each function.

    Attributes:
        functions, names, processing_classes: lists of K.
        weights: [K] fp32.

    Raises:
        ValueError: no function, lists of other lengths.
        TypeError: something that is no reward function.
    """

    def __init__(
        self,
        reward_funcs: Any,
        weights: Sequence[float] | None,
        processing_classes: Any,
        load: dict[str, Any],
        chat_template_kwargs: dict[str, Any],
        further: Sequence[Callable[..., Any]] = (),
        on_nonfinite: str = "skip",
    ):
        given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        if reward_funcs is None:
            given = []
        if not given and not further:
            raise ValueError("No reward source provided: pass reward_funcs, a function or a list")
        count = len(given)
        if weights is not None and len(weights) != count:
            raise ValueError(
                f"Number of reward weights ({len(weights)}) must match number of reward functions "
                f"({count})"
            )
        tokenizers = processing_classes
        if tokenizers is None:
            tokenizers = [None] * count
        elif not isinstance(tokenizers, list | tuple):
            tokenizers = [tokenizers]
        if len(tokenizers) != count:
            raise ValueError(
                f"The number of reward processing classes ({len(tokenizers)}) must match the "
                f"number of reward functions ({count})"
            )
        given, tokenizers = [*given, *further], [*tokenizers, *[None] * len(further)]
        for function in given:
            if not isinstance(function, str | nn.Module) and not callable(function):
                raise TypeError(
                    f"reward_funcs holds {function!r:.80}: pass functions, classifiers or their "
                    "paths"
                )
        self.functions = [_loaded(f, load) if isinstance(f, str) else f for f in given]
        self.processing_classes = [
            _reader_of(function, tokenizer) if isinstance(function, nn.Module) else tokenizer
            for function, tokenizer in zip(self.functions, tokenizers, strict=True)
        ]
        self.names = [
            _name(function, asked) for function, asked in zip(self.functions, given, strict=True)
        ]
        own = [1.0] * count if weights is None else list(weights)
        self.weights = torch.tensor([*own, *[1.0] * len(further)])
        self._chat = chat_template_kwargs
        self._sides: dict[int, str | None] = {}  # of the classifiers' padding, once they are called
        self._loop: EventLoop | None = None
        self._raises = on_nonfinite == "raise"
        self._warned: set[int] = set()  # functions

    def to(self, device: torch.device) -> None:
        """Moves classifiers there, frozen and in evaluation mode."""
        for function in self.functions:
            if isinstance(function, nn.Module):
                function.requires_grad_(False).eval().to(device)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        columns: dict[str, Any],
    ) -> Tensor:
        """Rewards [B, K] fp32; NaN where a function returned None, inf where it returned a number
        that is not finite.

        Raises:
            ValueError: a function did not return one number or None for each completion; with
                "raise", one that is not finite.
        """
        arguments = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            **columns,
        }
        answers: list[Any] = [None] * len(self.functions)
        waiting = []
        for k, function in enumerate(self.functions):
            if isinstance(function, nn.Module):
                answers[k] = self._classified(k, prompts, completions)
            elif is_async(function):
                waiting.append(k)
            else:
                with running(self._who(k)):
                    answers[k] = function(**own_copy(arguments))
        if waiting:
            calls = [
                await_within(None, functools.partial(self.functions[k], **own_copy(arguments)))
                for k in waiting
            ]
            for k, answer in zip(waiting, self.event_loop().gather(calls), strict=True):
                answers[k] = answer
        rewards = []
        for k, answer in enumerate(answers):
            row = read_rewards(answer, range(len(prompts)), self._who(k))
            numbers = torch.tensor([0.0 if r is None else r for r in row], dtype=torch.float32)
            which = (~numbers.isfinite()).nonzero()[:, 0].tolist()
            if which:
                self._not_finite(k, say_not_finite(which, row, prompts))
            numbers[which] = math.inf
            numbers[[i for i, r in enumerate(row) if r is None]] = math.nan
            rewards.append(numbers)
        return torch.stack(rewards, 1)

    def _not_finite(self, k: int, what: str) -> None:
        what = f"{self._who(k)} {what}"
        if self._raises:
            raise ValueError(f"{what}: rewards must be finite numbers")
        if k not in self._warned:
            self._warned.add(k)
            warnings.warn(
                f"{what}: its response is left out of its group, as any later ones will be; mend "
                "the function, or let it return None for what it cannot judge; "
                "on_nonfinite='raise' makes this an error",
                stacklevel=5,
            )

    def event_loop(self) -> EventLoop:
        """The one that coroutine functions run on, the same for all calls."""
        self._loop = self._loop or EventLoop()
        return self._loop

    def _who(self, k: int) -> str:
        return name_of(self.functions[k], f"the reward function {self.names[k]}")

    @torch.inference_mode()
    def _classified(
        self, k: int, prompts: Sequence[Any], completions: Sequence[Any]
    ) -> list[float]:
        model, tokenizer = self.functions[k], self.processing_classes[k]
        inputs = classifier_inputs(prompts, completions, tokenizer, **self._chat)
        first = next(model.parameters())
        if k not in self._sides:
            self._sides[k] = classifier_side(model, first.device, first.dtype)
        inputs = {name: x.to(first.device) for name, x in inputs.items()}
        rewards = rewards_of_padded(model, inputs, self._sides[k], padding_of(model))
        return rewards[:, 0].float().tolist()


def _loaded(name: str, options: dict[str, Any]) -> Any:
    return READY[name]() if name in READY else load_classifier(name, **options)


def _reader_of(model: Any, given: Any) -> Any:
    found = load_tokenizer(model.config._name_or_path) if given is None else given
    if found.pad_token_id is None:
        found.pad_token = found.eos_token
    # Classifiers find the last token by the padding behind it.
    model.config.get_text_config().pad_token_id = found.pad_token_id
    return found


def _name(function: Any, asked: Any) -> str:
    if isinstance(function, nn.Module):
        config: Any = function.config
        path = asked if isinstance(asked, str) else str(config._name_or_path)
        return PurePath(path).name or type(function).__name__
    unwrapped: Callable[..., Any] = function
    while isinstance(unwrapped, functools.partial):
        unwrapped = unwrapped.func
    return getattr(unwrapped, "__name__", type(unwrapped).__name__)
