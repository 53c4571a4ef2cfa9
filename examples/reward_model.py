"""A reward model from instructions with a chosen and a rejected response.

python examples/reward_model.py --model path/to/encoder --data pairs.jsonl --output reward_model

Each line has an instruction, a chosen_response and a rejected_response.
"""

import argparse

from datasets import Dataset, load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fastrl import RewardConfig, RewardTrainer


def train(model_name: str, pairs: Dataset, output: str, max_length: int = 512, **settings) -> dict:
    """Fits a model with one label; returns what it scores on a tenth of the pairs, held out."""
    model = AutoModelForSequenceClassification.from_pretrained(model_name, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id

    def tokenize(example):
        columns = {}
        for side in ("chosen", "rejected"):
            text = example["instruction"] + "\n" + example[f"{side}_response"]
            tokens = tokenizer(text, truncation=True, max_length=max_length)
            columns[f"input_ids_{side}"] = tokens["input_ids"]
            columns[f"attention_mask_{side}"] = tokens["attention_mask"]
        return columns

    data = pairs.map(tokenize).train_test_split(test_size=0.1, seed=0)
    arguments = {
        "output_dir": output,
        "eval_strategy": "epoch",
        "logging_steps": 10,
        "max_length": max_length,
        **settings,
    }
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**arguments),
        processing_class=tokenizer,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train()
    trainer.save_model(output)
    return trainer.evaluate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory or Hub id of an encoder")
    parser.add_argument(
        "--data", required=True, help="JSONL: instruction, chosen_response, rejected_response"
    )
    parser.add_argument("--output", default="reward_model")
    parser.add_argument("--epochs", type=float, default=3)
    args = parser.parse_args()
    pairs = load_dataset("json", data_files=args.data, split="train")
    print(train(args.model, pairs, args.output, num_train_epochs=args.epochs))


if __name__ == "__main__":
    main()
