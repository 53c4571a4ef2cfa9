"""Rewards from a sequence classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastrl.models.load import load_classifier, load_tokenizer

_LONGEST_INPUT = 1_000_000  # tokenizers without a limit state one beyond this


class ClassifierReward:
    """The logit that a sequence classifier gives to one label of "prompt + completion"; of chats,
    to the whole conversation as the classifier's own chat template writes it.

    Args:
        model: a sequence-classification model; it is frozen and put into evaluation mode.
        tokenizer: its tokenizer.
        label: index or name of the label; None is the last one (the only one of num_labels=1).
        batch_size: texts per forward pass.

    Raises:
        ValueError: an unknown label, or a tokenizer with neither a padding nor an EOS token.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, label: int | str | None = None, batch_size: int = 64
    ):
        if batch_size < 1:
            raise ValueError(f"the reward's batch size must be positive, got {batch_size}")
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.label = _label_index(model.config, label)
        self.batch_size = batch_size
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ValueError(
                    "the reward model's tokenizer has neither a padding nor an EOS token: set one"
                )
            tokenizer.pad_token = tokenizer.eos_token
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        self.max_length = _max_length(model.config, tokenizer)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, *, label: int | str | None = None, batch_size: int = 64
    ) -> ClassifierReward:
        """Load a classifier from a directory, a run's folder or the Hub, from safetensors only; an
        adapter of one with its base.

        Raises:
            FileNotFoundError: a folder without a model, or without a tokenizer.
            ValueError: a checkpoint or an adapter without a classification head, a tokenizer that
                cannot be read.
        """
        model = load_classifier(name_or_path)
        tokenizer = load_tokenizer(name_or_path)
        return cls(model, tokenizer, label=label, batch_size=batch_size)

    def to(self, device: torch.device | str) -> ClassifierReward:
        self.model.to(device)
        return self

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *_: Any, **__: Any
    ) -> list[float]:
        """Of texts, or of chat messages and the messages that answer them.

        Raises:
            ValueError: chats, and the classifier's tokenizer has no chat template.
        """
        pairs = list(zip(prompts, completions, strict=True))
        texts = [p + c if isinstance(p, str) else self._conversation(p, c) for p, c in pairs]
        scores = torch.empty(len(texts))
        # A template brings the special tokens, the tokenizer puts them around a text.
        for chat in (False, True):
            chosen = [i for i, (p, _) in enumerate(pairs) if isinstance(p, str) is not chat]
            if chosen:
                scores[chosen] = torch.tensor(self.score([texts[i] for i in chosen], chat=chat))
        return scores.tolist()

    def _conversation(self, prompt: Any, completion: Any) -> str:
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"the reward model's tokenizer ({type(self.tokenizer).__name__} "
                f"{self.tokenizer.name_or_path!r}) has no chat template, and the prompts are "
                "chats: set its chat_template to the one that the model was trained with, or bring "
                "a function as the reward"
            )
        said = [*prompt, *completion]
        return self.tokenizer.apply_chat_template(said, tokenize=False)

    @torch.inference_mode()
    def score(self, texts: Sequence[str], *, chat: bool = False) -> list[float]:
        """The label's logit for each text; with ``chat`` they bring their special tokens along."""
        # Texts of like length share a batch, so that little of it is padding.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        scores = torch.empty(len(texts))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            batch = self.tokenizer(
                [texts[i] for i in chosen],
                padding=True,
                add_special_tokens=not chat,
                truncation=self.max_length is not None,
                max_length=self.max_length,
                return_tensors="pt",
            ).to(self.model.device)
            scores[chosen] = self.model(**batch).logits[:, self.label].float().cpu()
        return scores.tolist()


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


def _max_length(config: Any, tokenizer: Any) -> int | None:
    """The longest input of model and tokenizer; None where neither states a limit."""
    stated = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
    limits = [limit for limit in stated if limit is not None and limit < _LONGEST_INPUT]
    return min(limits) if limits else None
