"""Policies with value heads, references, and the path that scores tokens with them."""

from fastrl.models.value_head import AutoModelForCausalLMWithValueHead, ValueHead

__all__ = ["AutoModelForCausalLMWithValueHead", "ValueHead"]
