"""Token ids of prompts and of judged conversations, by TRL 1.x's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.data.chat import has_role, is_chat, render


def encode_prompts(
    prompts: Sequence[Any], tokenizer: Any, chat_template_kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Token ids of texts, or of chats by the tokenizer's template up to where the answer begins.

    Raises:
        ValueError: a prompt that is neither; messages without a role; a tokenizer without a chat
            template.
    """
    encoded: list[Tensor] = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = tokenizer(text=prompt)["input_ids"]
        elif is_chat(prompt):
            for message in prompt:
                if not has_role(message):
                    raise ValueError(
                        f"prompt {i} holds {message!r:.80}: chat messages are dicts with a role "
                        "and a content"
                    )
            if tokenizer.chat_template is None:
                raise ValueError(
                    f"prompt {i} is a chat, and the tokenizer has no chat template: set "
                    "tokenizer.chat_template, or bring texts"
                )
            ids = tokenizer.apply_chat_template(
                prompt,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **chat_template_kwargs,
            )["input_ids"]
        else:
            raise ValueError(
                f"prompt {i} is {prompt!r:.80}: the column prompt holds texts, or lists of messages"
            )
        if not len(ids):
            raise ValueError(f"prompt {i} is empty: it needs at least one token")
        encoded.append(torch.tensor(ids, dtype=torch.long))
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
