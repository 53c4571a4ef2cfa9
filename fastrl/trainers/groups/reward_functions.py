"""The reward functions of a trainer, by TRL 1.x's rules: functions, coroutines and classifiers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.data.reads_eos import load_from_adapter
from fastrl.models.fast_tokenizer import as_fast
from fastrl.models.load import load_classifier, load_tokenizer
from fastrl.rewards.calls import EventLoop
from fastrl.rewards.classifier import ClassifierReward
from fastrl.rewards.functions import load_ready
from fastrl.rewards.weighted import RewardBatch, Rewards, numbered

_NOT_COLUMNS = ("completion", "completion_ids")


class RewardFunctions:
    """K reward functions, called as ``function(prompts=, completions=, completion_ids=, **columns,
    trainer_state=, log_extra=, log_metric=)``, see :class:`fastrl.rewards.weighted.Rewards`.

    A function returns a number for each completion, or for each of its tokens, or None where it
    does not apply. Coroutine functions run at the same time, on one event loop. A sequence
    classifier's reward is its first logit, read as :class:`fastrl.rewards.ClassifierReward` does.

    Args:
        reward_funcs: a function, a classifier, a classifier's path or Hub id, the name of a ready
            reward ("math"; see :func:`fastrl.rewards.functions.load_ready`), or a list of these.
        processing_classes: tokenizers in the order of ``reward_funcs``; None: the classifiers' own.
        load: keyword arguments to load a classifier with.
        further: functions of weight 1, behind ``reward_funcs``.
        needed: whether there must be a function.
        args: has ``reward_weights``, ``chat_template_kwargs`` of classifiers, ``on_nonfinite``, and
            the time limit, retries and completions of a call.

    Attributes:
        functions, names, processing_classes: lists of K.
        weights: [K] fp32.

    Raises:
        ValueError: no function, lists that differ in length, a setting out of range.
        TypeError: something that is no reward function.
    """

    def __init__(
        self,
        reward_funcs: Any,
        processing_classes: Any,
        load: dict[str, Any],
        further: Sequence[Callable[..., Any]],
        args: Any,
        needed: bool = True,
    ):
        functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        if reward_funcs is None:
            functions = []
        if needed and not functions and not further:
            raise ValueError("No reward source provided: pass reward_funcs, a function or a list")
        count, weights = len(functions), args.reward_weights
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
        functions, tokenizers = [*functions, *further], [*tokenizers, *[None] * len(further)]
        for function in functions:
            if not isinstance(function, str | nn.Module) and not callable(function):
                raise TypeError(
                    f"reward_funcs holds {function!r:.80}: pass functions, classifiers or their "
                    "paths"
                )
        self.functions = [_loaded(f, load) if isinstance(f, str) else f for f in functions]
        self.processing_classes = [
            _reader_of(function, tokenizer) if isinstance(function, nn.Module) else tokenizer
            for function, tokenizer in zip(self.functions, tokenizers, strict=True)
        ]
        self.names = numbered(map(_name, self.functions, functions))
        all_weights = [1.0] * count if weights is None else list(weights)
        all_weights += [1.0] * len(further)
        self.weights = torch.tensor(all_weights, dtype=torch.float32)
        chat = dict(args.chat_template_kwargs or {})
        self._rewards = Rewards(
            [_nothing]
            if not self.functions
            else [
                ClassifierReward(function, reader, label=0, name=name, template=chat)
                if isinstance(function, nn.Module)
                else function
                for name, function, reader in zip(
                    self.names, self.functions, self.processing_classes, strict=True
                )
            ],
            all_weights or None,
            reward_timeout=args.reward_timeout,
            reward_retries=args.reward_retries,
            reward_batch_size=args.reward_batch_size,
            on_nonfinite=args.on_nonfinite,
            judges_all=False,
            counted_as="",
        )

    def to(self, device: torch.device) -> None:
        """Moves classifiers to a device, frozen and in evaluation mode."""
        for function in self.functions:
            if isinstance(function, nn.Module):
                function.requires_grad_(False).eval().to(device)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        columns: Mapping[str, Sequence[Any]],
        **options: Any,
    ) -> RewardBatch:
        """Rewards of B samples, see :class:`fastrl.rewards.weighted.Rewards`; functions do not get
        the data's columns completion and completion_ids, which would be taken for the responses."""
        columns = {name: x for name, x in columns.items() if name not in _NOT_COLUMNS}
        return self._rewards(prompts, completions, completion_ids, columns, **options)

    def batch_of(self, table: Tensor, left_out: Sequence[int] = ()) -> RewardBatch:
        """Weighted sums of K functions' rewards, ``table`` [B, K]. NaN: a function does not apply;
        infinite numbers, and all numbers of samples with indices ``left_out``, are read as NaN."""
        values = table.double().t().clone()
        values[:, list(left_out)] = torch.nan
        values[values.isinf()] = torch.nan
        weights = self.weights.double()[:, None]
        decides = (weights != 0) | (weights == 0).all()
        none = (values.isnan() | ~decides).all(0)
        total = (weights * values).nansum(0).masked_fill(none, torch.nan)
        unjudged = sorted({*none.nonzero()[:, 0].tolist()} - {*left_out})
        by_function = dict(zip(self.names, values, strict=True))
        return RewardBatch(total, by_function, {}, 0, 0, [None] * len(total), unjudged)

    def event_loop(self) -> EventLoop:
        """The event loop that coroutine functions run on, the same for all calls."""
        return self._rewards.event_loop()


def _nothing(completions: Sequence[Any], **_: Any) -> list[float]:
    """No reward, where a policy learns of its teachers alone."""
    return [0.0] * len(completions)


def _loaded(name: str, options: dict[str, Any]) -> Any:
    ready = load_ready(name)
    if ready is not None:
        return ready
    model = load_classifier(name, **options)
    load_from_adapter(model, name)
    return model


def _reader_of(model: Any, passed: Any) -> Any:
    tokenizer = load_tokenizer(model.config.name_or_path) if passed is None else as_fast(passed)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # Classifiers find the last token by the padding behind it.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer


def _name(function: Any, source: Any) -> str:
    if isinstance(function, nn.Module):
        config: Any = function.config
        path = source if isinstance(source, str) else str(config.name_or_path)
        return PurePath(path).name or type(function).__name__
    unwrapped: Callable[..., Any] = function
    while isinstance(unwrapped, functools.partial):
        unwrapped = unwrapped.func
    return getattr(unwrapped, "__name__", type(unwrapped).__name__)
