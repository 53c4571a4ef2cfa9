"""How a model reads a prompt and a response: as one sequence if it is decoder-only, as two if it is
an encoder–decoder. :func:`layout_of` chooses."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.models.utils import context_length

Pair = tuple[Tensor, Tensor]  # a prompt and its response, token ids on the host
Inputs = dict[str, Tensor]


class Layout:
    """How prompts and responses become inputs of a causal model, which reads one sequence: the
    prompt and then the response."""

    prompts_padded = "left"  # or "right": the side on which ``generate`` needs prompts padded

    def __init__(self, model: Any):
        self.context = context_length(model)

    def exceeded(self, prompt: int, response: int) -> str | None:
        """The limit that so many tokens exceed, in words; None where they fit."""
        if self.context is None or prompt + response <= self.context:
            return None
        return f"model's context of {self.context}"

    def check_generation(self, kwargs: Mapping[str, Any]) -> None:
        """Raises ValueError if arguments of ``generate`` move a response's start; here, never."""

    def in_front(self, width: int) -> int:
        """Columns in front of the response in what ``generate`` returns for prompts [B, width]."""
        return width

    def with_prompt(self, prompt: Tensor, response: Tensor) -> Tensor:
        """A response as the model's sequences contain it: here behind its prompt."""
        return torch.cat([prompt, response])

    def shape(self, prompt: int, response: int) -> Hashable:
        """A key that is equal for pairs that can share a forward without padding."""
        return prompt + response

    def inputs(self, pairs: Sequence[Pair]) -> tuple[Inputs, Tensor]:
        """Inputs [b, T] of pairs of one shape; the indices in b·T that predict responses, [N]."""
        tokens = torch.stack([torch.cat(pair)[:-1] for pair in pairs])
        width = tokens.shape[1]
        starts = [i * width + len(prompt) - 1 for i, (prompt, _) in enumerate(pairs)]
        rows = [torch.arange(s, (i + 1) * width) for i, s in enumerate(starts)]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, torch.cat(rows)

    def decode(self, tokenizer: Any, prompt: Tensor, response: Tensor) -> str:
        """A response as text."""
        # Decoded behind its prompt: SentencePiece drops the first token's leading space.
        before = tokenizer.decode(prompt, skip_special_tokens=True)
        whole = tokenizer.decode(torch.cat([prompt, response]), skip_special_tokens=True)
        if whole.startswith(before):
            return whole[len(before) :]
        return tokenizer.decode(response, skip_special_tokens=True)


class EncoderDecoder(Layout):
    """The encoder reads the prompt; the decoder its start token, then the response.

    Both sequences are padded at the end: many encoders count positions from the first column, and
    take no other positions.

    Raises:
        ValueError: no start token in the model's configuration.
    """

    prompts_padded = "right"

    def __init__(self, model: Any):
        config = model.config
        self.start = _start_token(model)
        context = context_length(model)
        self.encoder_context = getattr(config, "max_encoder_position_embeddings", context)
        self.decoder_context = getattr(config, "max_decoder_position_embeddings", context)

    def exceeded(self, prompt: int, response: int) -> str | None:
        if self.encoder_context is not None and prompt > self.encoder_context:
            return f"encoder's context of {self.encoder_context}"
        if self.decoder_context is not None and 1 + response > self.decoder_context:
            return f"decoder's context of {self.decoder_context}, its start token included"
        return None

    def check_generation(self, kwargs: Mapping[str, Any]) -> None:
        for name in ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} is not supported here: every response begins behind the decoder's "
                    "start token alone"
                )
        start = kwargs.get("decoder_start_token_id")
        if start is not None and start != self.start:
            raise ValueError(
                f"decoder_start_token_id is {start}, the model's own is {self.start}: set it in "
                "model.generation_config, before making the trainer, so that responses are scored "
                "behind the same token"
            )

    def in_front(self, width: int) -> int:
        return 1

    def with_prompt(self, prompt: Tensor, response: Tensor) -> Tensor:
        return response

    def shape(self, prompt: int, response: int) -> Hashable:
        return prompt, response

    def inputs(self, pairs: Sequence[Pair]) -> tuple[Inputs, Tensor]:
        prompts = torch.stack([prompt for prompt, _ in pairs])
        decoder_ids = torch.stack([self.started(response)[:-1] for _, response in pairs])
        inputs = {
            "input_ids": prompts,
            "attention_mask": torch.ones_like(prompts),
            "decoder_input_ids": decoder_ids,
            "decoder_attention_mask": torch.ones_like(decoder_ids),
        }
        return inputs, torch.arange(decoder_ids.numel())

    def decode(self, tokenizer: Any, prompt: Tensor, response: Tensor) -> str:
        return tokenizer.decode(response, skip_special_tokens=True)

    def started(self, response: Tensor) -> Tensor:
        """The decoder's start token, then the response."""
        return torch.cat([response.new_tensor([self.start]), response])


def layout_of(model: Any) -> Layout:
    """The layout of a language model, with or without a value head."""
    has_encoder = getattr(model.config, "is_encoder_decoder", False)
    return EncoderDecoder(model) if has_encoder else Layout(model)


def _start_token(model: Any) -> int:
    """The token that ``model.generate`` begins a response with."""
    model = getattr(model, "pretrained_model", model)
    settings = getattr(model, "generation_config", None)
    for config, name in (
        (settings, "decoder_start_token_id"),
        (model.config, "decoder_start_token_id"),
        (settings, "bos_token_id"),
    ):
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    raise ValueError(
        f"{type(model).__name__} names no decoder_start_token_id: set it in "
        "model.generation_config, T5's is its pad token"
    )
