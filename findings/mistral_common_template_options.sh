#!/usr/bin/env bash
# apply_chat_template of the tokenizers of mistral-common takes any option: one that it does not
# know (enable_thinking, documents, a misspelt reasoning_effort) is dropped without a word, where all
# other methods of the class refuse unknown arguments.
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
tokenizer = AutoTokenizer.from_pretrained(folder)
chat = [{"role": "user", "content": "hello"}]
plain = tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"]
for options in ({"enable_thinking": True}, {"reasoning_efort": "high"}, {"documents": ["hello"]}):
    ids = tokenizer.apply_chat_template(chat, tokenize=True, **options)["input_ids"]
    print(options, ids == plain)
    assert ids == plain, "the option acts now"
PYTHON
