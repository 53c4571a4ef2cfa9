#!/usr/bin/env bash
# TRL 1.16.0 with accelerate 1.15.0: RewardTrainer and DPOTrainer evaluate batches of B pairs as 2·B
# rows, all chosen texts before all rejected ones. `gather_for_metrics`, which transformers' Trainer
# calls on what a batch predicts, keeps of the last batch as many rows as examples are left over: of
# six pairs in batches of four, two rows of the last four. So `compute_metrics` gets 10 rows of 12,
# without the rejected texts of the last batch, in one process and without a word; in batches of six
# or three it gets all.
# Exits 0 while that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.0.0
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys, warnings

import accelerate, torch, transformers, trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

warnings.simplefilter("ignore")
print(
    "torch", torch.__version__, "transformers", transformers.__version__,
    "accelerate", accelerate.__version__, "trl", trl.__version__,
)
words = ["<pad>", "<eos>", *"abcdefghijklmnop"]
plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
rows = [{"prompt": "a b", "chosen": f" c {x}", "rejected": f" d {x}"} for x in "efghij"]
shape = {
    "vocab_size": len(words), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "pad_token_id": 0, "eos_token_id": 1,
}
kinds = {
    "reward": (RewardTrainer, RewardConfig, LlamaForSequenceClassification, {"num_labels": 1}),
    "dpo": (DPOTrainer, DPOConfig, LlamaForCausalLM, {}),
}


def predicted(kind, size):
    """How many rows ``compute_metrics`` gets of six pairs in batches of ``size``."""
    trainer, config, kind_of_model, own = kinds[kind]
    policy, reference = (kind_of_model(LlamaConfig(**shape, **own)) for _ in range(2))
    counts = []
    made = trainer(
        model=policy,
        **({"ref_model": reference} if kind == "dpo" else {}),
        args=config(
            f"{sys.argv[1]}/{kind}", per_device_eval_batch_size=size, report_to="none",
            use_cpu=True, bf16=False, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        compute_metrics=lambda x: counts.append(len(x.predictions)) or {},
    )
    made.evaluate()
    return counts[0]


seen = {kind: {size: predicted(kind, size) for size in (6, 3, 4)} for kind in kinds}
for kind, counts in seen.items():
    print(kind, "rows of 12 that compute_metrics gets, by the size of batches:", counts)
sys.exit(0 if all(x == {6: 12, 3: 12, 4: 10} for x in seen.values()) else 1)
PY
