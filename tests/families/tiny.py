"""A tiny model of every family of causal language models that transformers has."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, WINDOW = 160, 16
# They draw for another model, and read its hidden states.
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
_LAYERS = 4
_LARGEST = 20_000_000  # parameters of a tiny model

# By the names that families give their sizes; a configuration gets those that it has.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY
    ),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "lru_width"),
        64,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_inner"), 96
    ),
    **dict.fromkeys(("n_inner", "dim_ff", "dff", "mlp_hidden_size"), 96),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers"), _LAYERS
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "topk_method_groups"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "dim_head", "d_kv"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "laurel_rank"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
        ),
        32,
    ),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "index_head_dim", "hidden_size_per_layer_input"), 16
    ),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "index_topk": 64,
    "first_k_dense_replace": 1,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": None,  # as the family has it
}

_LATENT = {"num_key_value_heads": 4, "head_dim": None}
_EYES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 16,
}  # fmt: skip
_ROUNDED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
# What the names above do not say of a family.
_OWN: dict[str, dict[str, Any]] = {
    "cpmant": {"prompt_types": 4, "prompt_length": 4, "segment_types": 4},
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "local_attention_window_len": WINDOW,
        **{
            f"{part}_config": {
                "vocab_size": VOCABULARY,
                "hidden_size": 64,
                "hidden_size_global": 128,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 256,
            }
            for part in ("patcher", "encoder", "decoder")
        },
        "global_config": {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROUNDED["rope_parameters"]}},
    "ctrl": {"dff": 96},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
     "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "ffn_act_fn": {"name": "silu"}},
     "n_heads": 4, "n_layers": _LAYERS, "max_seq_len": 256},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
     "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8,
     "swa_v_head_dim": 16, "num_shared_experts": 1},
    "falcon": {"head_dim": None},
    "gemma3n_text": {"num_kv_shared_layers": 0,
     "layer_types": ["sliding_attention", "full_attention"] * 2,
     "activation_sparsity_pattern": [0.0] * 4},
    "gemma3": {"vision_config": _EYES},
    "git": {"vision_config": _EYES},
    "got_ocr2": {
        "vision_config": _EYES | {"output_channels": 16, "mlp_dim": 32, "global_attn_indexes": [0]},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "longcat_flash": {"head_dim": 8, "ffn_hidden_size": 96, "zero_expert_num": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 1},
    "phi4_multimodal": {
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 2,
         "num_attention_heads": 2, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
         "nemo_conv_channels": 32},
        "vision_config": _EYES | {"num_hidden_layers": 2, "crop_size": 32},
    },
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2,
     "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "full_attention"] * 2, "hc_lowrank": 16,
     "split_ngram_parts": 1, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
     "indexer_budget": 64, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"block_types": ("recurrent", "attention"), "attention_window_size": 8},
    "reformer": {"is_decoder": True, "attention_head_size": 16, "attn_layers": ["local", "lsh"] * 2,
     "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32], "num_buckets": 4,
     "feed_forward_size": 96},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16,
     "pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "rwkv": {"attention_hidden_size": 64},
    "xlnet": {"max_position_embeddings": None, "d_inner": 96},
    "xlstm": {"v_head_dim": None, "qk_dim_factor": 1.0, "autocast_kernel_dtype": "float32"},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 128,
     "attention_head_dim": 32, "mamba_d_state": 8},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8,
     "mamba_d_state": 16, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def names() -> list[str]:
    """The model types of all causal language models of transformers that stand by themselves, in
    order."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*_ASSISTANTS})


def tiny(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A tiny model of a family, whose logits are far from uniform, in evaluation mode.

    Args:
        name: its ``model_type``.
        settings: of its configuration, in place of those here.

    Raises:
        Exception: whatever its family says of sizes that it cannot be built with.
    """
    torch.manual_seed(0)
    config = _config(name, settings)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size:,} parameters are not tiny")
    model = AutoModelForCausalLM.from_config(config)
    spread(model)
    return model.to(dtype).eval()


def _config(name: str, settings: dict[str, Any]) -> Any:
    plain = AutoConfig.for_model(name)
    kind = type(plain)
    parts = getattr(kind, "sub_configs", {})
    own = _OWN.get(name, {}) | settings
    if "text_config" in parts:
        text = _config(plain.text_config.model_type, {})
        return kind(**{"text_config": text.to_dict(), **_fitting(plain, own)})
    return kind(**_fitting(plain, own))


def _fitting(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    """The sizes that a configuration has, and those of the family; None leaves one out."""
    names = {*inspect.signature(type(config).__init__).parameters, *vars(config)}
    names |= set(type(config).attribute_map)
    if "qk_rope_head_dim" in names:
        own = _LATENT | own
    sizes = {name: value for name, value in _SIZES.items() if name in names}
    return {name: value for name, value in (sizes | own).items() if value is not None}


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """Gives matrices a spread by which what a layer reads changes what the model says."""
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if not weight.is_floating_point():
            continue
        spread = weight.std() if weight.numel() > 1 else weight.abs()
        if weight.dim() >= 2 and spread.isfinite() and spread > 0:
            weight.mul_(0.15 / spread)
        elif not weight.isfinite().all() or (weight.dim() >= 2 and not spread > 0):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight.nan_to_num(0, 0, 0) + 0.1 * noise)
