"""A language model as a policy without values."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from fastrl.models.wrapper import PreTrainedModelWrapper


class CausalLMPolicy(PreTrainedModelWrapper):
    """Any Hugging Face causal LM (``.pretrained_model``) for trainers that learn no values: with
    baselines from groups, or from preferences.

    Every value is 0. Checkpoints are the language model's own; arguments and errors are those of
    :class:`PreTrainedModelWrapper`.
    """

    transformers_parent_class = AutoModelForCausalLM
    is_encoder_decoder = False
    has_values = False

    @classmethod
    def _check_kind(cls, model: Any) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(model).__name__} is an encoder–decoder: a policy without values is for "
                "causal language models"
            )
