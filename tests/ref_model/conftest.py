"""Policies with adapters, and what models take up."""

import torch

from fastrl import AutoModelForCausalLMWithValueHead
from tests import tiny_models


def adapted(**changes):
    torch.manual_seed(1)
    base = tiny_models.language_model()
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        base, peft_config=tiny_models.lora(**changes)
    ).eval()


def storage(*models):
    """Bytes of all weights, each storage once."""
    weights = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for model in models
        if model is not None
        for p in model.parameters()
    }
    return sum(weights.values())
