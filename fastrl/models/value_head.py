"""Language models with a scalar value for every token: causal ones, and encoder–decoders."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fastrl.models.wrapper import PreTrainedModelWrapper, ValueHead

__all__ = [
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
