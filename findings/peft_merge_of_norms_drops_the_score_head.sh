#!/usr/bin/env bash
# peft 0.21.2: `merge_and_unload()` of an LN-tuning adapter on a classifier leaves the score head in
# PEFT's wrapper. The merged model says the right thing in memory; saved, its head goes by the names
# `score.modules_to_save.default.weight` and `score.original_module.weight`, so that the folder
# loads with a new, random head. With LoRA the same steps give back what was merged.
# Exits 0 while that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys, warnings

import peft, torch, transformers
from peft import LNTuningConfig, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForSequenceClassification

warnings.simplefilter("ignore")
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_labels=1, pad_token_id=0,
)
ids = torch.arange(1, 9)[None]


@torch.no_grad()
def lost(adapter):
    torch.manual_seed(0)
    model = get_peft_model(LlamaForSequenceClassification(config), adapter).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter))
    said = model(ids).logits
    merged = model.merge_and_unload()
    in_memory = float((merged(ids).logits - said).abs())
    place = f"{sys.argv[1]}/{adapter.peft_type.value}"
    merged.save_pretrained(place)
    again = LlamaForSequenceClassification.from_pretrained(place).eval()
    loaded = float((again(ids).logits - said).abs())
    print(adapter.peft_type.value, "in memory off by", in_memory, "saved and loaded", loaded)
    return in_memory < 1e-4, loaded > 0.1


norms = lost(LNTuningConfig(task_type="SEQ_CLS", target_modules=["input_layernorm"]))
lora = lost(LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
sys.exit(0 if norms == (True, True) and lora == (True, False) else 1)
PY
