"""PPO for an encoder–decoder: a T5 or BART model learns to please a reward function.

python examples/t5_ppo.py --model path/to/t5 --prompts prompts.txt --output tuned
"""

import argparse
from pathlib import Path

from transformers import AutoTokenizer

from fastrl import AutoModelForSeq2SeqLMWithValueHead, PPOConfig, PPOTrainer


def variety(prompts, completions, completion_ids, **columns) -> list[float]:
    """Likes completions whose tokens do not repeat."""
    return [len(set(ids)) / max(len(ids), 1) for ids in completion_ids]


def train(model: str, prompts: list[str], output: str, steps: int = 50, **settings):
    """Queries go to the encoder; every generated token counts."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = PPOTrainer(
        PPOConfig(**settings),
        AutoModelForSeq2SeqLMWithValueHead.from_pretrained(model),
        tokenizer=tokenizer,
    )
    result = trainer.train(
        variety,
        steps=steps,
        prompts=prompts,
        generation_kwargs={"do_sample": True, "top_k": 0, "max_new_tokens": 16},
    )
    trainer.save_pretrained(output)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory or Hub id of a T5 or BART model")
    parser.add_argument("--prompts", required=True, help="a file with a prompt in each line")
    parser.add_argument("--output", default="tuned")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    lines = [line for line in Path(args.prompts).read_text().splitlines() if line.strip()]
    train(args.model, lines, args.output, args.steps, batch_size=args.batch_size)


if __name__ == "__main__":
    main()
