"""Tiny random models by family, with heads that differ in kind, and value heads on them."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fastrl import AutoModelForCausalLMWithValueHead
from tests.golden import tiny

CONTEXT = 48

# PEFT 0.21 reads an attribute that transformers 5.23 has renamed.
PEFT_WARNING = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
_SPECIAL = {"bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}
_ROTARY = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
}  # fmt: skip
_OPT = {
    "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT, "dropout": 0.0, "word_embed_proj_dim": 16,
}  # fmt: skip
_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "gpt2",
        {
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": CONTEXT,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gpt_neox": ("gpt_neox", {k: v for k, v in _ROTARY.items() if k != "num_key_value_heads"}),
    "opt": ("opt", _OPT),
    # Its last hidden state is narrower than the rest of the model.
    "opt_projected": ("opt", _OPT | {"word_embed_proj_dim": 8, "do_layer_norm_before": False}),
    "llama": ("llama", _ROTARY),
    "mistral": ("mistral", _ROTARY | {"head_dim": 4}),
    "qwen2": ("qwen2", _ROTARY),
    "qwen3": ("qwen3", _ROTARY | {"head_dim": 4}),
    # A soft cap low enough to matter: logits are changed after the head. Attention is capped too,
    # which SDPA, the default in transformers 5.17, leaves out.
    "gemma2": (
        "gemma2",
        _ROTARY | {"head_dim": 4, "final_logit_softcapping": 2.0, "attn_implementation": "eager"},
    ),
    "gemma3": ("gemma3_text", _ROTARY | {"head_dim": 4, "final_logit_softcapping": 1.5}),
    "phi3": ("phi3", _ROTARY),
    # Its logits are divided where Cohere's are multiplied.
    "granite": ("granite", _ROTARY | {"logits_scaling": 0.4}),
    "cohere": ("cohere", _ROTARY | {"logit_scale": 3.0}),
}
FAMILIES = tuple(_SETTINGS)
# Layers that do not attend through the attention interface: BLOOM's, and GPT-J's before 5.24.
_SETTINGS |= {
    "gptj": (
        "gptj",
        {
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "rotary_dim": 4,
            "n_positions": CONTEXT,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": False,
        },
    ),
    "bloom": ("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
}
WITHOUT_INTERFACE = ("bloom",)
# Layers of other kinds: sinks, chunks and layers without RoPE, latents, states. Their mixtures have
# one expert, or none, so that a token's results do not depend on how many others it has.
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 5,
}  # fmt: skip
_ONE_EXPERT = {
    "num_experts": 1, "num_local_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
_DELTA = {
    "head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
_OF_KIND: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", _ROTARY | _DELTA),
    "kimi_linear": (
        "kimi_linear",
        _ROTARY
        | _LATENT
        | {
            "linear_head_dim": 4,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        _ROTARY
        | {
            "head_dim": 4,
            "num_hidden_layers": 3,
            "layers_block_type": ["attention", "mlp", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 6,
            "time_step_min": 0.5,
            "n_groups": 2,
            "chunk_size": 16,
            "expand": 2,
        },
    ),
    "falcon_h1": ("falcon_h1", _ROTARY | _MAMBA | {"head_dim": 4, "mamba_d_ssm": 32}),
    "lfm2": ("lfm2", _ROTARY | {"layer_types": ["full_attention", "conv"]}),
    "gpt_oss": (
        "gpt_oss",
        _ROTARY
        | {"head_dim": 4, "sliding_window": 4, "num_local_experts": 1, "num_experts_per_tok": 1},
    ),
    "llama4": (
        "llama4_text",
        _ROTARY
        | {
            "head_dim": 4,
            "intermediate_size_mlp": 32,
            "attention_chunk_size": 5,
            "no_rope_layers": [1, 0],
            "moe_layers": [],
            "floor_scale": 3,
            "attn_scale": 0.3,
        },
    ),
    "deepseek_v3": ("deepseek_v3", _ROTARY | _LATENT | {"first_k_dense_replace": 2}),
}
KINDS = tuple(_OF_KIND)
_MORE_OF_KIND: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", _ROTARY | _DELTA | _ONE_EXPERT),
    "qwen3_5_moe": ("qwen3_5_moe_text", _ROTARY | _DELTA | _ONE_EXPERT),
    "olmo_hybrid": ("olmo_hybrid", _ROTARY | _DELTA),
    "granitemoehybrid": (
        "granitemoehybrid",
        _ROTARY
        | _MAMBA
        | _ONE_EXPERT
        | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 8},
    ),
    "bamba": ("bamba", _ROTARY | _MAMBA | {"attn_layer_indices": [1]}),
    "lfm2_moe": (
        "lfm2_moe",
        _ROTARY | _ONE_EXPERT | {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    ),
}
MORE_KINDS = tuple(_MORE_OF_KIND)
# Attention alone, in the forms that models of the last years have.
_OF_ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("qwen2_moe", _ROTARY | _ONE_EXPERT),
    "qwen3_moe": ("qwen3_moe", _ROTARY | _ONE_EXPERT | {"head_dim": 4}),
    "glm4_moe": (
        "glm4_moe",
        _ROTARY
        | {
            "head_dim": 4,
            "moe_intermediate_size": 8,
            "n_routed_experts": 2,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "olmo3": (
        "olmo3",
        _ROTARY | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "smollm3": ("smollm3", _ROTARY | {"no_rope_layers": [1, 0]}),
    "ministral3": ("ministral3", _ROTARY | {"head_dim": 4}),
    "hunyuan": ("hunyuan_v1_dense", _ROTARY | {"head_dim": 4}),
    "gemma4": (
        "gemma4_text",
        _ROTARY
        | {
            "head_dim": 4,
            "global_head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": tiny.VOCABULARY,
            "hidden_size_per_layer_input": 4,
            "num_kv_shared_layers": 0,
        },
    ),
}
OF_ATTENTION = tuple(_OF_ATTENTION)
_SETTINGS |= _OF_KIND | _MORE_OF_KIND | _OF_ATTENTION


def config(family: str, **changes: Any) -> Any:
    """The family's configuration: two layers of width 16."""
    kind, settings = _SETTINGS[family]
    return CONFIG_MAPPING[kind](
        **{"vocab_size": tiny.VOCABULARY, **_SPECIAL, **settings, **changes}
    )


@torch.no_grad()
def language_model(family: str = "gpt2", perturbation: float = 0.0, **changes: Any) -> Any:
    """A causal LM whose weights, far from uniform, follow `tests.golden.tiny.rule`."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config(family, **changes))
    for name, parameter in model.named_parameters():
        parameter.copy_(tiny.rule(name, tuple(parameter.shape), perturbation))
    return model.eval()


@torch.no_grad()
def policy(
    family: str = "gpt2", perturbation: float = 0.0, **changes: Any
) -> AutoModelForCausalLMWithValueHead:
    """The same with a value head, filled by the same rule, in evaluation mode."""
    model = AutoModelForCausalLMWithValueHead(language_model(family, perturbation, **changes))
    for name, parameter in model.v_head.named_parameters():
        parameter.copy_(tiny.rule(f"v_head.{name}", tuple(parameter.shape), perturbation))
    return model.eval()


def generated(policy: Any, prompt: torch.Tensor, **settings: Any) -> torch.Tensor:
    """What ``generate`` of the language model writes behind one prompt by itself."""
    prompt = prompt.to(policy.pretrained_model.device)
    out = policy.pretrained_model.generate(
        input_ids=prompt[None], attention_mask=torch.ones_like(prompt)[None],
        pad_token_id=tiny.PAD, **settings,
    )  # fmt: skip
    return out[0, len(prompt) :]


def lora(**changes: Any) -> Any:
    """LoRA on GPT-2's attention, with weights that already change the outputs."""
    from peft import LoraConfig

    settings = {
        "r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }  # fmt: skip
    return LoraConfig(**{**settings, **changes})


def prompts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random words, no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(tiny.FIRST_WORD, tiny.VOCABULARY, (n,), generator=generator) for n in lengths
    ]
