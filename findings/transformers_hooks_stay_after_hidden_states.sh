#!/usr/bin/env bash
# transformers: one forward with output_hidden_states=True leaves a forward hook on each layer and
# attention for as long as the model lives. Plain forwards later keep them, code that takes hooks for
# somebody's watching sees them, and the model, which could be pickled before, no longer can be.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 numpy
env/bin/python - <<'PYTHON'
import pickle

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

print("transformers", transformers.__version__, "torch", torch.__version__)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 31}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
ids = torch.tensor([[3, 4, 5]])


def hooks():
    return sum(len(module._forward_hooks) for module in model.modules())


model(ids)
before, pickled = hooks(), len(pickle.dumps(model))
model(ids, output_hidden_states=True)
model(ids)
after = hooks()
try:
    pickle.dumps(model)
    error = None
except AttributeError as caught:
    error = caught
print(f"{before} hooks and {pickled} pickled bytes before; {after} hooks after; then: {error}")
assert before == 0
assert after == 4, "two layers and their attention"
assert error is not None
PYTHON
