"""Tiny random encoder–decoders, T5 tied and untied and BART, and value heads on them."""

from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from fastrl import AutoModelForSeq2SeqLMWithValueHead
from tests import tiny_models
from tests.golden import tiny

CONTEXT = 24  # of BART; T5 has none
_SPECIAL = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD, "vocab_size": tiny.VOCABULARY}
_T5 = {
    "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "decoder_start_token_id": tiny.PAD, "dropout_rate": 0.0,
}  # fmt: skip
_BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_position_embeddings": CONTEXT, "bos_token_id": tiny.BOS,
    "decoder_start_token_id": tiny.EOS,  # as in the published models
    "forced_eos_token_id": None,
    "dropout": 0.0,
}  # fmt: skip
FAMILIES = ("t5_tied", "t5_untied", "bart")
START = {"t5_tied": tiny.PAD, "t5_untied": tiny.PAD, "bart": tiny.EOS}


@torch.no_grad()
def language_model(family: str = "t5_tied", perturbation: float = 0.0, **changes: Any) -> Any:
    """One whose weights, far from uniform, follow `tests.golden.tiny.rule`."""
    if family == "bart":
        config: Any = BartConfig(**{**_SPECIAL, **_BART, **changes})
        model: Any = BartForConditionalGeneration(config)
    else:
        tied = {"tie_word_embeddings": family == "t5_tied"}
        config = T5Config(**{**_SPECIAL, **_T5, **tied, **changes})
        model = T5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        weights = tiny.rule(name, tuple(parameter.shape), perturbation)
        # What a model knows of positions is to change what it says.
        parameter.copy_(weights * (5 if "position" in name or "relative" in name else 1))
    if family == "t5_tied":  # which divides by 4 what its head is given
        model.shared.weight.mul_(4)
    return model.eval()


@torch.no_grad()
def policy(
    family: str = "t5_tied", perturbation: float = 0.0, **changes: Any
) -> AutoModelForSeq2SeqLMWithValueHead:
    """The same with a value head, filled by the same rule, in evaluation mode."""
    model = AutoModelForSeq2SeqLMWithValueHead(language_model(family, perturbation, **changes))
    for name, parameter in model.v_head.named_parameters():
        parameter.copy_(tiny.rule(f"v_head.{name}", tuple(parameter.shape), perturbation))
    return model.eval()


@torch.no_grad()
def by_hand(model: Any, query: torch.Tensor, response: torch.Tensor, start: int) -> dict[str, Any]:
    """Log-probs and values of one response, every token of it, from a plain forward in which there
    is no padding, in float64."""
    device = next(model.parameters()).device
    query, response = query.to(device), response.to(device)
    read = torch.cat([response.new_tensor([start]), response])[None, :-1]
    out = model.pretrained_model(
        input_ids=query[None], decoder_input_ids=read, output_hidden_states=True
    )
    logprobs = out.logits[0].double().log_softmax(-1)
    hidden = out.decoder_hidden_states[-1][0].double()
    head = model.v_head.summary
    return {
        "logprobs": logprobs.gather(1, response[:, None])[:, 0],
        "entropies": torch.special.entr(logprobs.exp()).sum(-1),
        "values": hidden @ head.weight[0].double() + head.bias.double(),
    }


def lora(**changes: Any) -> Any:
    """LoRA on T5's attention, with weights that already change the outputs."""
    own = {"target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM", "fan_in_fan_out": False}
    return tiny_models.lora(**{**own, **changes})
