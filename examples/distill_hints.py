"""A model is its own teacher: it learns to answer without the hint that its teacher reads.

python examples/distill_hints.py --output runs/distill_hints

Five minutes on a CPU core. A model learns to add with hints, and a few sums without; then, at each
token of its answers, what it would say with a hint. It prints the shares right without hints.
"""

import argparse
from random import Random

from datasets import Dataset
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

import fastrl
from fastrl.tools.demo.models import build_tokenizer

ADAPTER = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", fan_in_fan_out=True)
GREEDY = fastrl.SamplingParams(max_new_tokens=4, temperature=0.0)
TEMPLATE = "( {privileged_context} ) {prompt}"  # what the teacher reads
DEFAULTS = {"lr_scheduler_type": "constant", "per_device_train_batch_size": 64, "bf16": False}
DEFAULTS |= {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 100}


def tiny_model(rows: list[dict[str, str]], output: str, steps: int):
    """A model that has learned the sums of rows with hints, and a tenth of them without."""
    tokenizer = build_tokenizer([" ".join("0123456789+=()")])
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=64, n_layer=2, n_head=4, **ids))
    data = [{"prompt": TEMPLATE.format(**row), "completion": row["completion"]} for row in rows]
    data += 10 * [{k: row[k] for k in ("prompt", "completion")} for row in rows[::10]]
    args = fastrl.SFTConfig(f"{output}/sft", max_steps=steps, learning_rate=2e-3, **DEFAULTS)
    told = {"train_dataset": Dataset.from_list(data), "processing_class": tokenizer}
    fastrl.SFTTrainer(model, args, **told).train()
    return model, tokenizer


class Answers(TrainerCallback):
    """Keeps the shares of right answers, the likeliest token each time."""

    def __init__(self, tokenizer, **parts: list[dict[str, str]]):
        self.tokenizer, self.parts, self.found = tokenizer, parts, []

    def on_log(self, args, state, control, model=None, **kwargs):
        self.found.append({"step": state.global_step})
        for name, rows in self.parts.items():
            prompts, answers = ([row[x] for row in rows] for x in ("prompt", "completion"))
            said = fastrl.RolloutEngine(model, self.tokenizer).generate(prompts, GREEDY).sequences
            texts = self.tokenizer.batch_decode(said, skip_special_tokens=True)
            self.found[-1][name] = sum(map(str.__eq__, texts, answers)) / len(rows)
        print(self.found[-1], flush=True)

    on_train_begin = on_log


def train(output: str, seed: int = 0, sft_steps: int = 1500, steps: int = 1000):
    """The shares of right answers, by step."""
    fastrl.set_seed(seed)
    pairs = Random(seed).sample([(a, b) for a in range(100) for b in range(100)], 3500)
    texts = [(" ".join(f"{a:02}+{b:02}="), " ".join(f"{a + b:03}")) for a, b in pairs]
    rows = [{"prompt": x, "privileged_context": y, "completion": f" {y}"} for x, y in texts]
    model, tokenizer = tiny_model(rows[:1000], output, sft_steps)
    settings = DEFAULTS | {"lr_scheduler_type": "linear", "teacher_prompt_template": TEMPLATE}
    settings |= {"max_steps": steps, "learning_rate": 3e-3, "seed": seed}
    args = fastrl.DistillationConfig(output, max_completion_length=4, **settings)
    answers = Answers(tokenizer, learned=(learned := rows[1000:3000]), held_out=rows[3000:3500])
    given = {"processing_class": tokenizer, "callbacks": [answers], "peft_config": ADAPTER}
    fastrl.DistillationTrainer(model, None, args, Dataset.from_list(learned), **given).train()
    return answers.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/distill_hints")
    train(parser.parse_args().output)


if __name__ == "__main__":
    main()
