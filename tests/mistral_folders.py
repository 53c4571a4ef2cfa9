"""Tiny models with a tekken.json, as mistral-common reads them."""

import base64
import json
from pathlib import Path

import torch
from transformers import MistralConfig, MistralForCausalLM

_WORDS = ("hello", " world", " the", " is", "ing")
_CONTROL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]"),
)
_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ROOM = 24  # for control tokens


def save(folder: Path, version: str = "v7") -> Path:
    """A folder with a Mistral of one layer and a tekken.json of bytes and a few words."""
    parts = {word[:end].encode() for word in _WORDS for end in range(2, len(word) + 1)}
    pieces = [bytes([i]) for i in range(256)] + sorted(parts, key=lambda x: (len(x), x))
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=_ROOM + len(pieces), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=1, eos_token_id=2,
        pad_token_id=11,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(folder)
    said = {
        "config": {"pattern": _PATTERN, "num_vocab_tokens": len(pieces),
         "default_vocab_size": len(pieces) + _ROOM, "default_num_special_tokens": _ROOM,
         "version": version},
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for i, piece in enumerate(pieces)
        ],
        "special_tokens": [{"rank": i, "token_str": token, "is_control": True} for i,
         token in enumerate(_CONTROL)],
    }  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps(said))
    return folder
