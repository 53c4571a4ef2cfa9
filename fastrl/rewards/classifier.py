"""Rewards from a sequence classifier."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import PurePath
from typing import Any

import torch

from fastrl.data.batch import pad
from fastrl.data.chat import render, templates_of
from fastrl.data.choose_padding import classifier_side
from fastrl.data.encode import Encoder, encode_jointly
from fastrl.data.reads_eos import load_from_adapter, recorded
from fastrl.models.fast_tokenizer import as_fast
from fastrl.models.load import load_classifier, load_tokenizer
from fastrl.models.reward_head import give_padding, padding_of, rewards_of_padded
from fastrl.models.utils import NO_LIMIT, context_length


class ClassifierReward:
    """The logit of one label of a sequence classifier for "prompt + completion"; for chats, for the
    whole conversation in the classifier's own chat template, to which the data's columns ``tools``
    and ``chat_template_kwargs`` go.

    A reward model that fastrl trained gets the token ids that it was trained on: prompt and
    completion tokenised apart, and EOS after a whole completion if it was trained with it, see
    :mod:`fastrl.data.reads_eos`. Longer inputs than the model's context lose the prompt's beginning
    first. Other classifiers get prompt and completion as one text, tokenised and truncated by their
    tokenizer.

    Args:
        model: a sequence-classification model; it is frozen and put into evaluation mode.
        tokenizer: its tokenizer.
        label: index or name of the label; None is the last one (the only one of num_labels=1).
        batch_size: texts per forward pass.
        name: its name in statistics, beside other reward functions.
        template: further arguments of the chat template, for all completions.

    Attributes:
        wants_finished: whether it needs to know which completions are whole (``finished``).

    Raises:
        ValueError: an unknown label, a batch size below 1, a tokenizer with neither pad nor EOS.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        label: int | str | None = None,
        batch_size: int = 64,
        name: str = "ClassifierReward",
        template: Mapping[str, Any] | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"the reward's batch size must be positive, got {batch_size}")
        self.__name__ = name
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer = as_fast(tokenizer)
        self.label = _label_index(model.config, label)
        self.batch_size = batch_size
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ValueError(
                    "the reward model's tokenizer has neither a padding nor an EOS token: set one"
                )
            tokenizer.pad_token = tokenizer.eos_token
        give_padding(model, tokenizer)
        self.max_length = _max_length(model, tokenizer)
        reads_eos = recorded(model)
        self.wants_finished = reads_eos is not None
        self._warned = False
        self._template = dict(template or {})
        self._encoder = Encoder(tokenizer, self.max_length, add_eos=bool(reads_eos))

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, *, label: int | str | None = None, batch_size: int = 64
    ) -> ClassifierReward:
        """Loads a classifier from a directory, a run's folder or the Hub, from safetensors only; an
        adapter with its base. The reward's name is the last part of the path or id, or the run's
        name for a run's ``model/``.

        Raises:
            FileNotFoundError: a folder without a model, or without a tokenizer.
            ValueError: a checkpoint or an adapter without a classification head, a tokenizer that
                cannot be read.
        """
        model = load_classifier(name_or_path)
        tokenizer = load_tokenizer(name_or_path)
        load_from_adapter(model, name_or_path)
        path = PurePath(name_or_path)
        name = (path.parent if path.name == "model" else path).name or "ClassifierReward"
        return cls(model, tokenizer, label=label, batch_size=batch_size, name=name)

    def to(self, device: torch.device | str) -> ClassifierReward:
        self.model.to(device)
        return self

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *_: Any,
        finished: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Returns the rewards of completions: of texts, or of messages that answer chats.

        Args:
            finished: False for a completion that was cut by its length, which gets no EOS; None
                means that all are whole.
            columns: the data's columns; ``tools`` and ``chat_template_kwargs`` are read.

        Raises:
            ValueError: chats, and the classifier's tokenizer has no chat template.
        """
        pairs = list(zip(prompts, completions, strict=True))
        templates = templates_of(prompts, columns, range(len(pairs)), self._template)
        if not all(isinstance(prompt, str) for prompt in prompts):
            self._check_template()
        if self.wants_finished:
            if finished is None and "completion_ids" in columns:
                self._warn_of_the_untold()
            whole = [True] * len(pairs) if finished is None else finished
            joined = [
                self._encoder.with_template(template).joined(p, c, finished=end)[0]
                for (p, c), template, end in zip(pairs, templates, whole, strict=True)
            ]
            return self._score(joined, self._padded)
        texts = [
            p + c if isinstance(p, str) else render([*p, *c], self.tokenizer, template=template)
            for (p, c), template in zip(pairs, templates, strict=True)
        ]
        scores = torch.empty(len(texts))
        # A chat template writes the special tokens, the tokenizer adds them to a text.
        for chat in (False, True):
            chosen = [i for i, (p, _) in enumerate(pairs) if isinstance(p, str) is not chat]
            if chosen:
                scores[chosen] = torch.tensor(self.score([texts[i] for i in chosen], chat=chat))
        return scores.tolist()

    def _warn_of_the_untold(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.__name__} is not told which responses were cut by their length, and reads "
                "all as complete, with EOS if it was trained with it: where a function of yours "
                "calls it, name a parameter `finished` there, which fastrl fills, and pass it on",
                stacklevel=3,
            )

    def _check_template(self) -> None:
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"the reward model's tokenizer ({type(self.tokenizer).__name__} "
                f"{self.tokenizer.name_or_path!r}) has no chat template, and the prompts are "
                "chats: set its chat_template to the one that the model was trained with, or pass "
                "a function as the reward"
            )

    def score(self, texts: Sequence[str], *, chat: bool = False) -> list[float]:
        """The label's logit for each text; with ``chat`` the texts contain their special tokens,
        else the tokenizer adds them."""
        return self._score(
            texts,
            lambda part: encode_jointly(
                part, self.tokenizer, chat=chat, max_length=self.max_length
            ),
        )

    def _padded(self, ids: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        tensors = [torch.tensor(row, dtype=torch.long) for row in ids]
        return pad(tensors, self.tokenizer.pad_token_id, "right")

    @torch.inference_mode()
    def _score(
        self, rows: Sequence[Any], batch_of: Callable[[list[Any]], Mapping[str, torch.Tensor]]
    ) -> list[float]:
        # Rows of similar length share a batch, so that there is little padding.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores = torch.empty(len(rows))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            batch = batch_of([rows[i] for i in chosen])
            inputs = {name: tensor.to(self._device) for name, tensor in batch.items()}
            side = "right" if batch["attention_mask"].all() else self._side
            rewards = rewards_of_padded(self.model, inputs, side, padding_of(self.model))
            scores[chosen] = rewards[:, self.label].float().cpu()
        return scores.tolist()

    @cached_property
    def _side(self) -> str | None:
        """The side of padding, found at the first padded batch, with the model on its device."""
        dtype = next(self.model.parameters()).dtype
        return classifier_side(self.model, self._device, dtype, stacklevel=4)

    @property
    def _device(self) -> torch.device:
        device = getattr(self.model, "device", None)  # a module of the user's may have none
        return next(self.model.parameters()).device if device is None else device


def _label_index(config: Any, label: int | str | None) -> int:
    if label is None:
        return config.num_labels - 1
    names = {str(name): index for name, index in (config.label2id or {}).items()}
    if str(label) in names:
        return int(names[str(label)])
    if str(label).isdecimal() and int(label) < config.num_labels:
        return int(label)
    raise ValueError(
        f"the reward model has no label {label!r}: choose one of {', '.join(names)}, "
        f"or an index below {config.num_labels}"
    )


def _max_length(model: Any, tokenizer: Any) -> int | None:
    stated = (context_length(model), tokenizer.model_max_length)
    limits = [limit for limit in stated if limit is not None and 0 < limit < NO_LIMIT]
    return min(limits) if limits else None
