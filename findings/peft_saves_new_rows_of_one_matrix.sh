#!/usr/bin/env bash
# peft 0.21.2: a model's embedding and head (not tied) get rows for new tokens, and LoRA is put on
# the head, say. `save_pretrained` says that embedding layers are saved, and saves the resized
# weight of the head alone: the embedding's new rows are in no file. AutoPeftModelForCausalLM
# resizes the base by the tokenizer beside the adapter, draws new rows, and loads without a word.
# With LoRA on neither of the two both are saved, and the model is loaded as it was.
# Exits 0 while that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys, warnings

import peft, torch, transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

print("torch", torch.__version__, "transformers", transformers.__version__, "peft", peft.__version__)
base = f"{sys.argv[1]}/base"
torch.manual_seed(0)
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.2, tie_word_embeddings=False,
    )
).save_pretrained(base)
words = models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w1")
tokenizer.add_tokens(["<new>"])
ids = torch.tensor([[5, 64, 7]])


@torch.no_grad()
def off(*targets):
    model = LlamaForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(65)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight[64] = torch.randn(32)  # as a program starts a new token
    model = get_peft_model(model, LoraConfig(target_modules=[*targets], task_type="CAUSAL_LM"))
    said = model.eval()(ids).logits
    place = f"{sys.argv[1]}/{targets[-1]}"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    print([str(w.message)[:80] for w in told])
    loaded = AutoPeftModelForCausalLM.from_pretrained(place).eval()
    found = float((loaded(ids).logits - said).abs().max())
    print(f"LoRA on {targets}: loaded logits off by {found:.3g}")
    return found


sys.exit(0 if off("q_proj", "lm_head") > 0.1 and off("q_proj") < 1e-4 else 1)
PY
