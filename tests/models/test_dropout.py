"""Dropout is switched off wherever a model keeps its probability."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fastrl.models.utils import without_dropout
from tests import tiny_models
from tests.golden import tiny

_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff"), 32),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    "num_key_value_heads": 2,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
}
_OWN: dict[str, dict[str, Any]] = {
    "falcon": {"parallel_attn": False, "bias": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "prophetnet": {"is_decoder": True, "is_encoder_decoder": False},
}
_KINDS = (
    *("bart", "biogpt", "bloom", "ctrl", "falcon", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox", "gptj", "llama", "openai-gpt", "opt", "persimmon", "phi", "prophetnet"),
    *("qwen2", "stablelm", "starcoder2", "trocr", "xglm"),
)


def dropping(kind: str) -> Any:
    """A tiny causal language model whose every dropout of a setting is 0.3, in training mode."""
    make = CONFIG_MAPPING[kind]
    usual = make()
    names = {*usual.to_dict(), *usual.attribute_map}
    sizes = {k: v for k, v in _SIZES.items() if k in names}
    drops = {k: 0.3 for k in names if "drop" in k and isinstance(getattr(usual, k), float)}
    given = {"vocab_size": tiny.VOCABULARY, "pad_token_id": tiny.PAD, **sizes, **drops}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make(**given | _OWN.get(kind, {}))).train()


@torch.no_grad()
@pytest.mark.parametrize("kind", _KINDS)
def test_a_model_without_dropout_says_the_same_twice(kind: str) -> None:
    model, ids = dropping(kind), torch.arange(5, 13)[None]
    before = model.config.to_dict()
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    without_dropout(model)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    left = [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if "drop" in attribute and isinstance(value, float) and value
    ]
    assert not left
    assert not [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p]
    assert model.config.to_dict() == before  # what is saved


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
def test_an_adapters_dropout_is_switched_off_and_its_configuration_kept() -> None:
    import peft

    for family, config in (
        ("gpt2", tiny_models.lora(lora_dropout=0.3)),
        ("llama", peft.LoKrConfig(target_modules=["q_proj"], rank_dropout=0.3, init_weights=False)),
    ):
        model = peft.get_peft_model(tiny_models.language_model(family), config).train()
        ids = torch.arange(5, 13)[None]
        assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        without_dropout(model)
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        assert model.config is model.get_base_model().config
        kept = model.peft_config["default"]
        assert 0.3 in (getattr(kept, "lora_dropout", None), getattr(kept, "rank_dropout", None))
