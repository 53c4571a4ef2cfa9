"""Self-checks on texts longer than the windows of a model, and heads of unusual models."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastrl.data.sft_packing import choose_collator
from fastrl.models.probes import narrowed, reach
from fastrl.models.quantised import refuse_compressed
from fastrl.models.scorer import TokenScorer
from fastrl.models.scoring import ScoringRequest
from tests.golden import tiny

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16,
    "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0,
    "num_local_experts": 2, "num_experts_per_tok": 1,
}  # fmt: skip
ALTUP = {
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 2,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def model(name, **settings):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **settings)).eval()


def test_packing_that_loses_a_window_is_refused():
    with pytest.raises(ValueError, match="packed texts"):
        choose_collator(model("gpt_oss"), tiny.tokenizer())


def test_windows_are_narrow_in_the_context_alone():
    made = model("gpt_oss")
    with narrowed(made):
        assert made.config.sliding_window == 4
    assert made.config.sliding_window == 16
    assert reach(made) == 0


@torch.no_grad()
def test_log_probs_of_a_model_with_several_streams_are_its_own():
    made = model("gemma3n_text", **ALTUP)
    ids = torch.arange(5, 25)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    rows, labels = torch.arange(19), ids[0, 1:]
    found = TokenScorer()(made, inputs, ScoringRequest(rows, labels)).logprobs
    wanted = made(ids).logits[0, :-1].double().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    assert (found - wanted).abs().max() < 1e-5


def test_compressed_weights_are_refused_by_name():
    layer = torch.nn.Linear(2, 2)
    del layer.weight
    with pytest.raises(ValueError, match=r"0 has a compressed weight .*compressed-tensors"):
        refuse_compressed(torch.nn.Sequential(layer))
