"""Token ids of prompts to generate from: encoding, and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.data.chat import TextOrMessages, is_chat
from fastrl.data.encode import Encoder, encode_prompt
from fastrl.models.layout import layout_of

Prompt = TextOrMessages | Tensor | Sequence[int]


def check_tensors(prompts: Sequence[Any]) -> None:
    """Raises ValueError for a prompt that is not a tensor, named by its index."""
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, Tensor):
            raise ValueError(
                f"prompts[{i}] must be a 1-D tensor, got {type(prompt).__name__}: tokenise texts, "
                "tokenizer(text, return_tensors='pt').input_ids[0]; train() and the engines take "
                "texts and chats"
            )


def check_prompts(
    prompts: Sequence[Tensor], model: Any, max_new_tokens: int | Sequence[int] | None
) -> None:
    """Checks prompts to generate from; errors name a prompt's index.

    Args:
        max_new_tokens: the tokens to generate, for all or for each prompt; None: at least one.

    Raises:
        ValueError: no prompts; a prompt that is empty, not 1-D integers within the vocabulary, or
            leaves no room to generate.
    """
    if not len(prompts):
        raise ValueError("prompts is empty: pass at least one")
    layout = layout_of(model)
    check_tensors(prompts)
    vocabulary = model.config.get_text_config().vocab_size
    for i, prompt in enumerate(prompts):
        most = max_new_tokens[i] if isinstance(max_new_tokens, Sequence) else max_new_tokens
        new_tokens = most or 1
        if prompt.dim() != 1 or len(prompt) == 0:
            raise ValueError(
                f"prompts[{i}] must be a 1-D tensor of at least one token, got shape "
                f"{tuple(prompt.shape)}"
            )
        if prompt.dtype.is_floating_point or prompt.dtype == torch.bool:
            raise ValueError(f"prompts[{i}] must hold integer token ids, got {prompt.dtype}")
        wrong = prompt[(prompt < 0) | (prompt >= vocabulary)]
        if len(wrong):
            raise ValueError(
                f"prompts[{i}] holds token id {int(wrong[0])}, outside the vocabulary of "
                f"{vocabulary}: was it made by another tokenizer?"
            )
        limit = layout.exceeded(len(prompt), new_tokens)
        if limit is not None:
            raise ValueError(
                f"prompts[{i}] has {len(prompt)} tokens; with {new_tokens} new ones it exceeds the "
                f"{limit}: shorten the prompt or max_new_tokens"
            )


def token_ids(
    prompt: Prompt, tokenizer: Any, name: str = "prompt", *, closed: bool = False
) -> Tensor:
    """A prompt's 1-D token ids on the host. A text gets the special tokens that the tokenizer puts
    in front, chat messages go through its template, and ids stay as they are.

    Args:
        closed: add the special tokens at the end, too, for models whose encoder reads prompts.

    Raises:
        ValueError: see :func:`fastrl.data.chat.prompt_text`; a text without a tokenizer.
    """
    if isinstance(prompt, str) or is_chat(prompt):
        if tokenizer is None:
            raise ValueError(f"{name} is a text, but there is no tokenizer: pass one, or token ids")
        _, ids = encode_prompt(prompt, tokenizer, name, closed=closed)  # type: ignore[arg-type]
        return torch.tensor(ids, dtype=torch.long)
    return torch.as_tensor(prompt).cpu()


def ids_of_prompts(
    prompts: Sequence[Any],
    tokenizer: Any,
    templates: Sequence[Mapping[str, Any]] = (),
    names: Sequence[str] = (),
    longest: int | None = None,
) -> list[Tensor]:
    """The 1-D token ids of texts or chats, see :meth:`fastrl.data.encode.Encoder.prompts`.
    Messages may have contents that are no texts, and the last may be the assistant's.

    Args:
        templates: further arguments of the chat template for each prompt.
        names: the prompts' names, for errors; by default "prompt" and their index.
        longest: longer prompts keep BOS and their last tokens.

    Raises:
        ValueError: see :func:`fastrl.data.chat.prompt_text`; a prompt without a token.
    """
    names = names or [f"prompt {i}" for i in range(len(prompts))]
    encoder = Encoder(tokenizer, max_prompt_length=longest)
    _, rows = encoder.prompts(prompts, names.__getitem__, templates, plain=False)
    for name, ids in zip(names, rows, strict=True):
        if not ids:
            raise ValueError(f"{name} is empty: it needs at least one token")
    return [torch.tensor(ids, dtype=torch.long) for ids in rows]
