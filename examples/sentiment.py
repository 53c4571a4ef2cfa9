"""PPO for positive sentiment: the classic quick start, on local models.

python examples/sentiment.py --model path/to/lm --classifier path/to/classifier --texts reviews.txt
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, pipeline

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from fastrl.core import LengthSampler


def build_dataset(tokenizer, texts: list[str], least: int = 2, most: int = 8) -> Dataset:
    """The first few tokens of each text are its query."""
    length = LengthSampler(least, most)

    def tokenize(sample):
        sample["input_ids"] = tokenizer.encode(sample["review"])[: length()]
        sample["query"] = tokenizer.decode(sample["input_ids"])
        return sample

    return Dataset.from_dict({"review": texts}).map(tokenize, batched=False)


def train(model: str, classifier: str, texts: list[str], output: str, **settings) -> dict:
    """One pass over the queries; the reward is the classifier's logit of its last label."""
    config = PPOConfig(model_name=model, learning_rate=1.41e-5, **settings)
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.eos_token
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
    dataset = build_dataset(tokenizer, texts)
    # ref_model=None: a frozen copy of the policy
    ppo_trainer = PPOTrainer(config, policy, None, tokenizer, dataset=dataset)

    sentiment = pipeline("text-classification", model=classifier, tokenizer=classifier)
    sentiment_kwargs = {"top_k": None, "function_to_apply": "none", "batch_size": 16}
    generation_kwargs = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True}
    output_length = LengthSampler(4, 16)

    stats = {}
    for batch in ppo_trainer.dataloader:
        query_tensors = batch["input_ids"]
        response_tensors = ppo_trainer.generate(
            query_tensors,
            return_prompt=False,
            length_sampler=output_length,
            pad_token_id=tokenizer.eos_token_id,
            **generation_kwargs,
        )
        batch["response"] = tokenizer.batch_decode(response_tensors)
        texts = [q + r for q, r in zip(batch["query"], batch["response"], strict=True)]
        scores = [sorted(s, key=lambda x: x["label"]) for s in sentiment(texts, **sentiment_kwargs)]
        rewards = [torch.tensor(labels[-1]["score"]) for labels in scores]
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
    ppo_trainer.save_pretrained(output)
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory or Hub id of a causal LM")
    parser.add_argument("--classifier", required=True, help="directory or Hub id of a classifier")
    parser.add_argument("--texts", required=True, help="a file with a text in each line")
    parser.add_argument("--output", default="my_sentiment_model")
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    lines = [line for line in Path(args.texts).read_text().splitlines() if line.strip()]
    train(args.model, args.classifier, lines, args.output, batch_size=args.batch_size)


if __name__ == "__main__":
    main()
