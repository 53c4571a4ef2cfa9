"""Policies with value heads, critics, adapters, and the path that scores tokens with them.

Names are imported at their first use: commands read settings of models without importing
transformers' models.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

if not TYPE_CHECKING:  # or a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fastrl.models import value_head

        return getattr(value_head, name)
