"""Token ids of prompts and of judged conversations, by TRL 1.x's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.data.chat import chat_ids, check_messages, check_unicode, is_chat, render


def check_prompt(prompt: Any, where: str) -> None:
    """
    Raises:
        ValueError: neither a text nor chat messages, or messages that
            :func:`fastrl.data.chat.check_messages` refuses; names where the prompt is from.
    """
    if isinstance(prompt, str):
        return
    if not is_chat(prompt):
        raise ValueError(
            f"{where} is {prompt!r:.80}: the column prompt holds texts, or lists of messages"
        )
    check_messages(prompt, where)


def encode_prompts(
    prompts: Sequence[Any],
    tokenizer: Any,
    chat_template_kwargs: Mapping[str, Any],
    names: Sequence[str] = (),
    longest: int | None = None,
) -> list[Tensor]:
    """Token ids of texts, or of chats by the tokenizer's template up to where the answer begins.

    Args:
        names: of the prompts, for messages; by default their places.
        longest: of longer ones the last tokens are kept.

    Raises:
        ValueError: a prompt that :func:`check_prompt` refuses, or without a token; chats and a
            tokenizer without a chat template.
    """
    names = names or [f"prompt {i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        check_prompt(prompt, name)
    texts = [
        check_unicode(prompt, f"{name} holds")
        for name, prompt in zip(names, prompts, strict=True)
        if isinstance(prompt, str)
    ]
    of_texts = iter(tokenizer(text=texts)["input_ids"] if texts else ())
    encoded: list[Tensor] = []
    for name, prompt in zip(names, prompts, strict=True):
        if isinstance(prompt, str):
            ids = next(of_texts)
        else:
            ids = chat_ids(prompt, tokenizer, answered=False, template=chat_template_kwargs)
        if not len(ids):
            raise ValueError(f"{name} is empty: it needs at least one token")
        kept = ids if longest is None else ids[-longest:]
        encoded.append(torch.tensor(kept, dtype=torch.long))
    return encoded


def classifier_inputs(
    prompts: Sequence[Any], completions: Sequence[Any], tokenizer: Any, **options: Any
) -> dict[str, Tensor]:
    """A classifier's inputs [B, T] for texts and what follows them, or for chats and their answers
    in its own template, padded on the right. ``options`` are further arguments of the template."""
    texts = [
        p + c if isinstance(p, str) else render([*p, *c], tokenizer, template=options)
        for p, c in zip(prompts, completions, strict=True)
    ]
    return dict(
        tokenizer(
            text=texts,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        )
    )
