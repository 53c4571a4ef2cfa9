#!/usr/bin/env bash
# An adapter with lora_bias=True is saved whole by a single process, and PEFT warns that its tensors
# have an invalid shape and are shards which DeepSpeed or FSDP did not gather: the bias of lora_B has
# one dimension, as biases do. The file is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
env/bin/python - <<'PYTHON'
import warnings

import peft, torch, transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
config = LlamaConfig(vocab_size=32, num_attention_heads=2, attention_bias=True, **sizes)
LlamaForCausalLM(config).save_pretrained("base")
base = LlamaForCausalLM.from_pretrained("base")
lora = LoraConfig(target_modules=["q_proj"], lora_bias=True, task_type="CAUSAL_LM")
model = get_peft_model(base, lora).eval()
for name, x in model.named_parameters():
    if "lora" in name:
        torch.nn.init.normal_(x)
ids = torch.arange(8)[None]
before = model(ids).logits
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    model.save_pretrained("adapter")
after = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("base"), "adapter").eval()(ids)
found = [str(w.message) for w in said if "ZeRO-3" in str(w.message)]
print(*found)
assert torch.equal(before, after.logits), "the file is not right"
assert found, "nothing is said now"
PYTHON
