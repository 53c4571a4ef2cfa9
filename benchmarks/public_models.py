"""What the configurations of public models say of their sizes, so that no hub is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN2 = {"model_type": "qwen2", "vocab_size": 151936, "num_key_value_heads": 2}
_QWEN2 |= {"tie_word_embeddings": True, "max_position_embeddings": 32768}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
_QWEN3 |= {"tie_word_embeddings": True, "max_position_embeddings": 40960}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _sized(of: dict[str, Any], *sizes: int, **others: Any) -> dict[str, Any]:
    return {**of, **dict(zip(_SIZES, sizes, strict=True)), **others}


_QWEN2_05B = _sized(_QWEN2, 896, 4864, 24, 14)
_QWEN3_06B = _sized(_QWEN3, 1024, 3072, 28, 16)
_UNTIED = {"tie_word_embeddings": False, "num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _QWEN2_05B,
    "Qwen/Qwen2.5-1.5B": _sized(_QWEN2, 1536, 8960, 28, 12),
    "Qwen/Qwen2.5-3B": _sized(_QWEN2, 2048, 11008, 36, 16),
    "Qwen/Qwen2.5-7B": _sized(
        _QWEN2, 3584, 18944, 28, 28, **_UNTIED | {"num_key_value_heads": 4}, vocab_size=152064
    ),
    "Qwen/Qwen3-0.6B": _QWEN3_06B,
    "Qwen/Qwen3-4B": _sized(_QWEN3, 2560, 9728, 36, 32),
    "Qwen/Qwen3-14B": _sized(_QWEN3, 5120, 17408, 40, 40, tie_word_embeddings=False),
    "meta-llama/Llama-3.1-8B": _sized(
        {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072},
        *(4096, 14336, 32, 32),
        **_UNTIED,
    ),
    "alignment-handbook/zephyr-7b-sft-full": _sized(
        {"model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768},
        *(4096, 14336, 32, 32),
        **_UNTIED,
        sliding_window=4096,
    ),
    # Reward models, and the dtype of their weights.
    "trl-lib/Qwen2-0.5B-Reward": _QWEN2_05B | {"dtype": "float32"},
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": _QWEN3_06B | {"dtype": "bfloat16"},
}


def write_config(name: str, folder: Path) -> str:
    """Writes a model's configuration into the folder, which it returns; base and instruction models
    have one shape."""
    shape = MODELS[name.removesuffix("-Instruct").removesuffix("-Base")]
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)
