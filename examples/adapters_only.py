"""RLHF with adapters alone: one base model, an adapter for the policy, another for the reward.

The base with both adapters off is the reference: nothing large is stored twice.

python examples/adapters_only.py --base path/to/lm --reward-adapter path/to/adapter \
    --prompts prompts.txt --output tuned
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoTokenizer

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer


def train(base: str, reward_adapter: str, prompts: list[str], output: str, steps: int, **settings):
    """The reward is the score that the reward adapter gives to prompt and completion."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(
        base,
        peft_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"),
        reward_adapter=reward_adapter,
    )
    trainer = PPOTrainer(PPOConfig(**settings), policy, tokenizer=tokenizer)

    def reward(prompts, completions, completion_ids, **columns) -> list[float]:
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        batch = batch.to(trainer.current_device)
        scores = policy.compute_reward_score(batch["input_ids"], batch["attention_mask"])
        last = batch["attention_mask"].sum(1) - 1
        return scores[torch.arange(len(texts)), last, 0].tolist()

    result = trainer.train(
        reward,
        steps=steps,
        prompts=prompts,
        generation_kwargs={"do_sample": True, "top_k": 0, "max_new_tokens": 24},
    )
    trainer.save_pretrained(output)  # the policy's adapter and value head
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="directory or Hub id of a causal LM")
    parser.add_argument("--reward-adapter", required=True, help="of task SEQ_CLS, on that base")
    parser.add_argument("--prompts", required=True, help="a file with a prompt in each line")
    parser.add_argument("--output", default="tuned")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    lines = [line for line in Path(args.prompts).read_text().splitlines() if line.strip()]
    settings = {"batch_size": args.batch_size}
    train(args.base, args.reward_adapter, lines, args.output, args.steps, **settings)


if __name__ == "__main__":
    main()
