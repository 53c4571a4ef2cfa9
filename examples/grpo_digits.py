"""A tiny model learns sums of two digits, by a little SFT and GRPO: three minutes on a CPU core.

python examples/grpo_digits.py --advantage rloo --output digits
"""

import argparse
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from tokenizers.decoders import Fuse
from tokenizers.pre_tokenizers import Split
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from fastrl import PPOConfig, PPOTrainer, SFTConfig, SFTTrainer, set_seed

ANSWERS = {f"{a}+{b}=": str(a + b) for a in range(10) for b in range(10)}
WAYS = {"sampled": True, "greedy": False}
SAMPLING = {"do_sample": True, "max_new_tokens": 3, "top_k": 0, "top_p": 1.0}


def make_model() -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    """A GPT-2 of two layers, and one token per character."""
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Split("", "isolated"), Fuse()
    shape = {"vocab_size": len(vocabulary), "n_embd": 64, "n_layer": 2, "n_head": 4}
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_positions=16, **shape, **ids))
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def reward(prompts: list[str], completions: list[str], **_) -> list[float]:
    """1 for the sum, else 0."""
    return [float(c == ANSWERS[p]) for p, c in zip(prompts, completions, strict=True)]


def exact_match(trainer: PPOTrainer, prompts: list[str], do_sample: bool) -> float:
    """Share of sums that are right."""
    ids = [torch.tensor(trainer.tokenizer(p).input_ids) for p in prompts]
    sequences = trainer.rollouts.sample(ids, {**SAMPLING, "do_sample": do_sample}).sequences
    given = trainer.tokenizer.batch_decode(sequences, skip_special_tokens=True)
    return sum(reward(prompts, given)) / len(prompts)


def train(
    output: str, prompts: list[str], advantage: str, sft_epochs: int = 50, steps=120, **settings
) -> dict[str, float]:
    set_seed(0)
    model, tokenizer = make_model()
    sums = Dataset.from_list([{"prompt": p, "completion": ANSWERS[p]} for p in prompts])
    arguments = {"learning_rate": 1e-3, "num_train_epochs": sft_epochs, "report_to": "none"}
    arguments |= {"per_device_train_batch_size": 20, "save_strategy": "no", "disable_tqdm": True}
    begin = time.perf_counter()
    sft = SFTConfig(output_dir=output, **arguments)
    SFTTrainer(model, sft, train_dataset=sums, processing_class=tokenizer).train()
    fitted = time.perf_counter()
    config = {"batch_size": 400, "group_size": 8, "mini_batch_size": 200, "rollout_slots": 400}
    config |= {"ppo_epochs": 2, "learning_rate": 5e-4, "init_kl_coef": 0.0}
    config |= {"max_grad_norm": 1.0, **settings}
    trainer = PPOTrainer(PPOConfig(advantage=advantage, **config), model, tokenizer=tokenizer)
    result = {f"{k}_before": exact_match(trainer, 8 * prompts, s) for k, s in WAYS.items()}
    trainer.train(reward, steps=steps, prompts=prompts, generation_kwargs=SAMPLING)
    result |= {f"{k}_after": exact_match(trainer, 8 * prompts, s) for k, s in WAYS.items()}
    trainer.save_pretrained(output)
    return {**result, "sft_s": fitted - begin, "rl_s": time.perf_counter() - fitted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--advantage", default="grpo", help="grpo, dr_grpo or rloo")
    parser.add_argument("--output", default="digits")
    args = parser.parse_args()
    print({k: round(v, 2) for k, v in train(args.output, [*ANSWERS], args.advantage).items()})


if __name__ == "__main__":
    main()
