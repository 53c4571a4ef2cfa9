"""Policies with value heads, references, and the path that scores tokens with them."""

from fastrl.models.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    CausalLMPolicy,
    PreTrainedModelWrapper,
    ValueHead,
)

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "CausalLMPolicy",
    "PreTrainedModelWrapper",
    "ValueHead",
]
