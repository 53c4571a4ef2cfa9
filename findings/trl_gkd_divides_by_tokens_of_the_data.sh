#!/usr/bin/env bash
# TRL 1.16.0 with transformers 5.23.0: GKDTrainer with lmbda=1 learns nothing but what the student
# samples, and still divides its loss by the number of tokens of the data's completions, which it
# has replaced: transformers counts `num_items_in_batch` in the batch as it was loaded. The same
# prompts, the same sampled tokens, the same weights: with completions of 4 words in the data a step
# of SGD is ten times as long as with completions of 40 words that nobody reads.
# Exits 0 while that is so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.0.0
"$folder/venv/bin/python" - "$folder" <<'PY'
import copy, sys, warnings

import torch, transformers, trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer

warnings.simplefilter("ignore")
print("torch", torch.__version__, "transformers", transformers.__version__, "trl", trl.__version__)
words = ["<pad>", "<eos>", "<s>", "</s>", *"abcdefghijklmnop"]
plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
tokenizer.chat_template = (
    "{% for m in messages %}{{ '<s> ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> ' }}{% endif %}"
)
shape = {
    "vocab_size": len(words), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "pad_token_id": 0, "eos_token_id": 1,
}
torch.manual_seed(0)
student, teacher = (LlamaForCausalLM(LlamaConfig(**shape)) for _ in range(2))


def learned(length):
    """The logged loss, how far a step moves the weights, and the tokens that were sampled, where
    the data's completions, which lmbda=1 never learns, have ``length`` words."""
    rows = [
        [{"role": "user", "content": x}, {"role": "assistant", "content": " ".join("d" * length)}]
        for x in "abcd"
    ]
    policy = copy.deepcopy(student)
    args = GKDConfig(
        f"{sys.argv[1]}/{length}", lmbda=1.0, max_new_tokens=8, max_length=64, max_steps=1,
        per_device_train_batch_size=4, learning_rate=1.0, lr_scheduler_type="constant",
        max_grad_norm=1e9, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        logging_steps=1, save_strategy="no", seed=1, gradient_checkpointing=False,
    )
    trainer = GKDTrainer(
        policy, teacher, args, train_dataset=Dataset.from_dict({"messages": rows}),
        processing_class=tokenizer,
        optimizers=(torch.optim.SGD(policy.parameters(), lr=1.0), None),
    )
    sampled = []
    generate = trainer.generate_on_policy_outputs

    def noted(*args, **kwargs):
        torch.manual_seed(2)
        found = generate(*args, **kwargs)
        sampled.append(found[0].clone())
        return found

    trainer.generate_on_policy_outputs = noted
    trainer.train()
    pairs = zip(policy.parameters(), student.parameters())
    moved = sum(float((x - y).square().sum()) for x, y in pairs) ** 0.5
    return trainer.state.log_history[0]["loss"], moved, sampled[0]


found = {length: learned(length) for length in (4, 40)}
for length, (loss, moved, _) in found.items():
    print(f"data's completions of {length} words: loss {float(loss):.5f}, moved by {moved:.5f}")
same = torch.equal(found[4][2], found[40][2])
ratio = found[4][1] / found[40][1]
print(f"the same texts were sampled: {same}; the steps' lengths differ {ratio:.3f} times")
sys.exit(not (same and 9.9 < ratio < 10.1))
PY
