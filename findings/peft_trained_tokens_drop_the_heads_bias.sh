#!/usr/bin/env bash
# peft 0.21.2: `trainable_token_indices` of a head that has a bias (GPT-J, Phi). While the adapter is
# on, the head is computed without its bias, so that a new adapter, which has changed nothing yet,
# has other logits than its base; the merged model has the bias again.
# Exits 0 while that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
"$folder/venv/bin/python" - <<'PY'
import sys, warnings

import peft, torch, transformers
from peft import LoraConfig, get_peft_model
from transformers import GPTJConfig, GPTJForCausalLM

warnings.simplefilter("ignore")
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
torch.manual_seed(0)
model = GPTJForCausalLM(
    GPTJConfig(vocab_size=64, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=32)
).eval()
ids = torch.arange(1, 9)[None]
with torch.no_grad():
    model.lm_head.bias.normal_()
    before = model(ids).logits
    config = LoraConfig(
        r=2, target_modules=["q_proj"], trainable_token_indices={"lm_head": [5]},
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config).eval()
    new = float((adapted(ids).logits - before).abs().max())
    merged = float((adapted.merge_and_unload()(ids).logits - before).abs().max())
print(f"logits: off by {new:.3g} under a new adapter, by {merged:.3g} once it is merged")
sys.exit(0 if new > 0.1 and merged < 1e-4 else 1)
PY
