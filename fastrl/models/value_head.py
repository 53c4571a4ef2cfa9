"""Language models with a scalar value for every token: causal ones, and encoder–decoders."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fastrl.models.adapters import REFERENCE_ADAPTER
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.wrapper import PreTrainedModelWrapper, ValueHead

__all__ = [
    "REFERENCE_ADAPTER",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "ValueHead",
]


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """Any Hugging Face causal LM (``.pretrained_model``) with a value head (``.v_head``).

    ``forward(input_ids, …)`` returns (logits in fp32 [B, T, V], the LM loss or None, values
    [B, T][, past_key_values]). Arguments, checkpoints and errors are those of
    :class:`PreTrainedModelWrapper`.
    """

    transformers_parent_class = AutoModelForCausalLM
    is_encoder_decoder = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        scoring: ScoringRequest | None = None,
        boundary: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple | TokenScores:
        """Logits, loss and values of all tokens; with ``scoring``, TokenScores of those.

        ``boundary`` [B, T, H] is what leaves the trunk's layers for these tokens: with it they do
        not run.
        """
        if scoring is not None:
            self._scoring_head({"input_ids": input_ids, **kwargs})  # it looks at whole forwards
        with self._starting_at(boundary):
            return super().forward(
                input_ids,
                past_key_values,
                attention_mask,
                return_past_key_values,
                scoring,
                **kwargs,
            )

    def _starting_at(self, boundary: Tensor | None) -> contextlib.AbstractContextManager:
        if boundary is None:
            return contextlib.nullcontext()
        if self.trunk is None:
            raise ValueError("boundary was given, but the model shares no layers: leave it out")
        return self.trunk.skipped(boundary)

    @classmethod
    def _check_kind(cls, model: Any) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(model).__name__} is an encoder–decoder: wrap it with "
                "AutoModelForSeq2SeqLMWithValueHead"
            )


class AutoModelForSeq2SeqLMWithValueHead(PreTrainedModelWrapper):
    """Any Hugging Face encoder–decoder, such as T5 or BART, with a value head on its decoder.

    ``forward(input_ids, attention_mask=…, decoder_input_ids=…, …)`` returns (logits in fp32
    [B, T, V], the LM loss or None, values [B, T][, past_key_values]) of the decoder's tokens.
    Arguments, checkpoints and errors are those of :class:`PreTrainedModelWrapper`.
    """

    transformers_parent_class = AutoModelForSeq2SeqLM
    is_encoder_decoder = True

    @classmethod
    def _check_kind(cls, model: Any) -> None:
        name = type(model).__name__
        if not getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{name} is not an encoder–decoder: wrap it with AutoModelForCausalLMWithValueHead"
            )
        given = getattr(model, "main_input_name", "input_ids")
        if given != "input_ids":
            raise ValueError(
                f"{name} reads {given}, not token ids, which PPO does not support: use an "
                "encoder–decoder of texts"
            )
