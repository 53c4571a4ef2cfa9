#!/usr/bin/env bash
# peft 0.21.2: LoRA on an embedding and a head that are tied, with `ensure_weight_tying=True`, which
# PEFT's own warning recommends for merging. The adapter is loaded as it was saved, and
# `merge_and_unload()` gives another model: each of the two layers adds the change to the one weight
# that they share, so that it is there twice. Moved to another dtype (`model.double()`) before it is
# trained, the adapter's two parts no longer share memory, and are trained apart.
# Exits 0 while that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys, warnings

import peft, torch, transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
base = f"{sys.argv[1]}/base"
torch.manual_seed(0)
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.2, tie_word_embeddings=True,
    )
).save_pretrained(base)
ids = torch.arange(1, 9)[None]
config = LoraConfig(
    r=2, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True, task_type="CAUSAL_LM"
)


def adapted():
    return get_peft_model(LlamaForCausalLM.from_pretrained(base), config).eval()


def parts(model):
    """The two parts that are to stay equal: B of the head, and A of the embedding."""
    found = dict(model.named_parameters())
    return (
        next(x for name, x in found.items() if "lm_head.lora_B" in name),
        next(x for name, x in found.items() if "lora_embedding_A" in name).T,
    )


with torch.no_grad():
    model = adapted()
    for name, x in model.named_parameters():
        if "lora_embedding" in name:
            x.normal_(std=0.3)
    assert torch.equal(*parts(model)), "the adapter is not tied"
    said, before = model(ids).logits, LlamaForCausalLM.from_pretrained(base)(ids).logits
    model.save_pretrained(f"{sys.argv[1]}/adapter")
    again = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), f"{sys.argv[1]}/adapter")
    loaded = float((again.eval()(ids).logits - said).abs().max())
    merged = float((model.merge_and_unload()(ids).logits - said).abs().max())
print(f"changed by {float((said - before).abs().max()):.3g}, loaded off by {loaded:.3g}, merged off by {merged:.3g}")
model = adapted().double()
optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
apart = float((parts(model)[0] - parts(model)[1]).detach().abs().max())
print(f"trained behind double(): the two parts are apart by {apart:.3g}")
sys.exit(0 if loaded < 1e-4 and merged > 0.1 and apart > 1e-4 else 1)
PY
