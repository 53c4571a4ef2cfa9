#!/usr/bin/env bash
# transformers 5.24.0 wants PEFT 0.22.0 in its own methods for adapters, and the newest PEFT at its
# release was 0.21.2, which pip installs beside it without a word. So from_pretrained loads a folder
# with an adapter, and then the model can neither be saved nor have the adapter switched off.
# With transformers 5.23.0, which wants 0.20.0, the same PEFT can do both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
env/bin/python -m pip check
cat > use.py <<'PYTHON'
import sys

import peft, torch, transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
LlamaForCausalLM(config).save_pretrained("base")
base = LlamaForCausalLM.from_pretrained("base")
peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM")).save_pretrained("adapter")
model = AutoModelForCausalLM.from_pretrained("adapter")
refused = 0
for name, call in (
    ("disable_adapters", model.disable_adapters),
    ("save_pretrained", lambda: model.save_pretrained("copy")),
):
    try:
        call()
        print(name, "works")
    except ValueError as error:
        print(name, "raises:", error)
        assert "0.22.0" in str(error)
        refused += 1
assert refused == int(sys.argv[1]), refused
PYTHON
env/bin/python use.py 2
env/bin/python -m pip install --quiet transformers==5.23.0
env/bin/python use.py 0
