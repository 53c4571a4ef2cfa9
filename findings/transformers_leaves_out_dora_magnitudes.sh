#!/usr/bin/env bash
# A DoRA adapter that PEFT has saved is another model where AutoModelForCausalLM.from_pretrained
# loads its folder: the learned magnitudes are listed as unexpected, those that the layer looks for
# as missing, and the layer keeps the magnitudes of the untrained weights. PeftModel.from_pretrained
# loads the same folder right, and an adapter without DoRA is right both ways.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
env/bin/python - <<'PYTHON'
import peft, torch, transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes)).save_pretrained("base")
ids, off = torch.arange(8)[None], {}
for dora in (False, True):
    base = LlamaForCausalLM.from_pretrained("base")
    lora = LoraConfig(target_modules=["q_proj", "o_proj"], use_dora=dora, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora" in name:
                x.add_(torch.rand_like(x))
        saved = model(ids).logits
        model.save_pretrained(f"dora-{dora}")
        base = LlamaForCausalLM.from_pretrained("base")
        by_peft = PeftModel.from_pretrained(base, f"dora-{dora}").eval()(ids).logits
        itself = AutoModelForCausalLM.from_pretrained(f"dora-{dora}").eval()(ids).logits
    off[dora] = [float((x - saved).abs().max()) for x in (by_peft, itself)]
    print(f"use_dora={dora}: logits off by {off[dora][0]} (PEFT), {off[dora][1]} (transformers)")
assert off[False] == [0, 0] and off[True][0] == 0, "PEFT is wrong now"
assert off[True][1] > 1e-3, "transformers is right now"
PYTHON
