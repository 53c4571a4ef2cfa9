"""Supervised fine-tuning on prompts and completions, several in a row, none seeing another.

python examples/sft_packing.py --model path/to/lm --data examples.jsonl --output tuned
"""

import argparse

from datasets import Dataset, load_dataset
from transformers import AutoTokenizer

from fastrl import SFTConfig, SFTTrainer


def train(model: str, examples: Dataset, output: str, row: int = 1024, **settings) -> dict:
    """Learns completions, not prompts; rows of ``row`` tokens hold as many examples as fit."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    data = examples.train_test_split(test_size=0.1, seed=0)
    arguments = {
        "output_dir": output,
        "packing": True,
        "max_length": row,
        "eval_strategy": "epoch",
        "logging_steps": 10,
        **settings,
    }
    trainer = SFTTrainer(
        model,  # a path, or a model
        args=SFTConfig(**arguments),
        processing_class=tokenizer,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train()
    trainer.save_model(output)
    return trainer.evaluate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory or Hub id of a causal LM")
    parser.add_argument("--data", required=True, help="JSONL: prompt, completion")
    parser.add_argument("--output", default="tuned")
    parser.add_argument("--row", type=int, default=1024, help="tokens in a row")
    args = parser.parse_args()
    examples = load_dataset("json", data_files=args.data, split="train")
    print(train(args.model, examples, args.output, args.row))


if __name__ == "__main__":
    main()
