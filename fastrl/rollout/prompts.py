"""Checks of prompts before anything is generated from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.data.chat import TextOrMessages, is_chat
from fastrl.data.encode import encode_prompt
from fastrl.models.layout import EncoderDecoder, layout_of
from fastrl.rollout.sampling_params import SamplingParams

Prompt = TextOrMessages | Tensor | Sequence[int]


def need_pad_token(lengths: Iterable[int], pad_token_id: int | None, tokenizer: Any) -> None:
    """Refuse to pad without a pad token; samples of one length need none.

    Raises:
        ValueError: lengths differ and the tokenizer has no pad token.
    """
    if pad_token_id is None and len(set(lengths)) > 1:
        raise ValueError(
            f"{type(tokenizer).__name__} has no pad token and the samples differ in length: set "
            "tokenizer.pad_token = tokenizer.eos_token, say, before making the trainer"
        )


def end_tokens(model: Any, tokenizer: Any, asked: Any = None) -> Tensor:
    """Ids that end a response: those asked for, by default those at which the model's ``generate``
    stops; and the tokenizer's EOS."""
    if asked is None:
        asked = getattr(model, "pretrained_model", model).generation_config.eos_token_id
    ids = [*(asked if isinstance(asked, Sequence) else [asked]), tokenizer.eos_token_id]
    return torch.tensor(sorted({int(i) for i in ids if i is not None and i >= 0}), dtype=torch.long)


def check_tensors(prompts: Sequence[Any]) -> None:
    """
    Raises:
        ValueError: a prompt that is not a tensor, named by its index.
    """
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
    """Refuse prompts that cannot be continued, by their index.

    Raises:
        ValueError: a prompt that is empty or not 1-D integers, or leaves no room to generate.
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
    """A prompt's 1-D token ids on the host: those of a text with the special tokens that the
    tokenizer puts in front, those of chat messages by its template, or the ids themselves.

    Args:
        closed: for encoders, see :func:`fastrl.data.encode.encode_prompt`.

    Raises:
        ValueError: as :func:`fastrl.data.chat.prompt_text`.
    """
    if isinstance(prompt, str) or is_chat(prompt):
        _, ids = encode_prompt(prompt, tokenizer, name, closed=closed)  # type: ignore[arg-type]
        return torch.tensor(ids, dtype=torch.long)
    return torch.as_tensor(prompt).cpu()


def checked_call(
    prompts: Sequence[Prompt],
    params: SamplingParams,
    sample_ids: Sequence[int] | None,
    model: Any,
    tokenizer: Any,
) -> tuple[list[Tensor], list[int], list[int]]:
    """What both engines' ``generate`` begins with: prompts as tensors on the host, the most new
    tokens and the sample id of each.

    Raises:
        ValueError: as :func:`check_prompts` and :func:`token_ids`; lists that have not one number
            per prompt.
    """
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Mapping)):
        raise ValueError("prompts must be a list, got a single one: pass [prompt]")
    closed = isinstance(layout_of(model), EncoderDecoder)
    tokens = [
        token_ids(p, tokenizer, f"prompts[{i}]", closed=closed) for i, p in enumerate(prompts)
    ]
    limits = params.limits(len(tokens))
    check_prompts(tokens, model, limits)
    ids = list(range(len(tokens))) if sample_ids is None else list(sample_ids)
    if len(ids) != len(tokens):
        raise ValueError(f"sample_ids has {len(ids)} entries for {len(tokens)} prompts")
    return tokens, limits, ids
