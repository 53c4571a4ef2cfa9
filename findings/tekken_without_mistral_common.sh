#!/usr/bin/env bash
# What AutoTokenizer makes of a folder with a tekken.json depends on whether mistral-common is
# installed (not older than 1.11.5). Without it the same folder has a tokenizer with neither BOS,
# EOS nor padding: texts begin without BOS, and a model trained on them never learns to stop. And
# "[INST]" in a text is one control token here, and six letters there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet transformers==5.23.0 mistral-common==1.13.1 'numpy<2.4' pillow jinja2 tiktoken
env/bin/python - <<'PYTHON'
import base64, json, pathlib

pieces = [bytes([i]) for i in range(256)] + [b"he", b"hel", b"hell", b"hello"]
control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
control += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"]
control += ["[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
control += ["[TOOL_CONTENT]"]
config = {
    "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
    "num_vocab_tokens": len(pieces), "default_vocab_size": len(pieces) + 20,
    "default_num_special_tokens": 20, "version": "v7",
}
vocab = [
    {"rank": i, "token_bytes": base64.b64encode(x).decode(), "token_str": None}
    for i, x in enumerate(pieces)
]
special = [{"rank": i, "token_str": x, "is_control": True} for i, x in enumerate(control)]
folder = pathlib.Path("model")
folder.mkdir()
said = {"config": config, "vocab": vocab, "special_tokens": special}
(folder / "tekken.json").write_text(json.dumps(said))
(folder / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": 280}))

import mistral_common, transformers
from transformers import AutoTokenizer

print("transformers", transformers.__version__, "mistral-common", mistral_common.__version__)
found = {}
for native in (True, False):  # False: also what is loaded where mistral-common is missing
    tokenizer = AutoTokenizer.from_pretrained(folder, mistral_format=native)
    ends = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
    ids = [tokenizer(text)["input_ids"] for text in ("hello", "[INST]")]
    found[native] = ends, ids
    print(type(tokenizer).__name__, ends, ids)
assert found[True][0] == ("<s>", "</s>", "<pad>") and found[True][1][0][0] == 1
assert found[False][0] == (None, None, None), "the converted tokenizer has its special tokens now"
assert found[True][1] != found[False][1]
PYTHON
