#!/usr/bin/env bash
# PEFT's start init_lora_weights="pissa_niter_N" takes a low-rank part out of the base's weights by a
# decomposition that draws random numbers. What is saved is the adapter and that setting: loading it
# decomposes the base anew, with other numbers, so that the adapter is added to other weights than it
# was trained beside. The logits differ as soon as another seed is set, and nothing is said. With
# "pissa", which draws nothing, they are the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet --disable-pip-version-check install \
    torch==2.13.0 transformers==5.23.0 peft==0.21.2
cat > "$folder/reload.py" <<'PROGRAM'
import sys
import warnings

import peft
import torch
import transformers

print("peft", peft.__version__, "transformers", transformers.__version__, "torch", torch.__version__)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
ids = torch.arange(8)[None]


def logits(model):
    with torch.no_grad():
        return model.eval()(ids).logits


def off(start):
    folder = f"{sys.argv[1]}/{start}"
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, initializer_range=0.3,
        )
    )
    base.save_pretrained(f"{folder}/base")
    base = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=start)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(f"{folder}/adapter")
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/base"), f"{folder}/adapter"
        )
    told = [str(each.message) for each in said if "pissa" in str(each.message).lower()]
    difference = (logits(again) - logits(model)).abs().max().item()
    print(f"{start}: logits off by {difference:.1e} after save and load; warnings: {told}")
    return difference, told


exact, _ = off("pissa")
drawn, told = off("pissa_niter_2")
raise SystemExit(not (exact < 1e-4 and drawn > 1e-2 and not told))
PROGRAM
"$folder/venv/bin/python" "$folder/reload.py" "$folder"
