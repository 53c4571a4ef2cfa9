"""Folders of tiny checkpoints that read images and texts, with their tokenizers and processors."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from tests import chat_tokenizer
from tests.golden import tiny

ROWS = 288  # of the embeddings; the tokenizer knows a token for each byte, and a few others
_IMAGE = {"boi_token": "<|boi|>", "eoi_token": "<|eoi|>", "image_token": "<|image|>"}
_TEXT = {
    "vocab_size": ROWS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 1, "out_hidden_size": 16,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
_HYBRID = {
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **_TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "vision_config": {**_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "hidden_size": 32, "rope_parameters": _ROPE},
        "vision_config": {
            **_TOWER, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [0],
        },
    },
    "qwen3_5": {
        "text_config": {
            **_TEXT,
            **_HYBRID,
            "rope_parameters": {
                **_ROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True,
            },
        },
        "vision_config": {**_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "intermediate_size_mlp": 32,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 64,
        },
        "vision_config": {
            **_SIGLIP,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "pixel_shuffle_ratio": 0.5,
        },
    },
}  # fmt: skip
FAMILIES = tuple(_SETTINGS)


def tokenizer() -> Any:
    """A token for each byte, and those of pictures."""
    plain = chat_tokenizer.tokenizer()
    found: Any = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        extra_special_tokens=_IMAGE,
    )
    found.chat_template = plain.chat_template
    return found


@torch.no_grad()
def save(folder: Path, family: str = "gemma3", dtype: torch.dtype = torch.float32) -> Path:
    """Writes weights by `tests.golden.tiny.rule`, a tokenizer with a chat template, and a
    processor: Gemma 3's own, or for the others, whose image processors need torchvision, files by
    hand."""
    words = tokenizer()
    special = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    settings = dict(_SETTINGS[family])
    settings["text_config"] = {**settings["text_config"], **special}
    config = CONFIG_MAPPING[family](**settings, image_token_id=words.image_token_id, **special)
    model: Any = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.copy_(tiny.rule(name, tuple(parameter.shape)))
    model.to(dtype).save_pretrained(folder)
    if family == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
        Gemma3Processor(images, words, image_seq_length=4).save_pretrained(folder)
    else:
        words.save_pretrained(folder)
        for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
            (folder / name).write_text(json.dumps({"patch_size": 4, "of": family}) + "\n \n")
    return folder
