"""A reward of one's own, which reads a column of the data, beside one that is ready.

python examples/own_reward.py --output runs/own_reward

Ten seconds on a CPU core. A tiny model learns to write the colour that its row wants. It prints
each reward at the start and at the end.
"""

import argparse

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import fastrl
from fastrl.tools.demo.models import build_tokenizer

COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "?": ""}
WORDS = [*COLOURS, *COLOURS.values()]
DEFAULTS = {"per_device_train_batch_size": 40, "num_generations": 8, "learning_rate": 5e-3}
DEFAULTS |= {"max_completion_length": 4, "beta": 0.0, "gradient_checkpointing": False}
DEFAULTS |= {"lr_scheduler_type": "constant", "logging_steps": 10, "bf16": False}


# --8<-- [start:own]
def wanted(prompts, completions, completion_ids, colour, **columns):
    """The share of a completion's words that are its row's colour; None where the row has none.

    One number for each completion: ``colour`` is the data's column, a value for each of them.
    """
    rewards = []
    for text, right in zip(completions, colour, strict=True):
        words = text.split() or [""]
        rewards.append(words.count(right) / len(words) if right else None)
    return rewards


# --8<-- [end:own]
def tiny_model() -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    tokenizer = build_tokenizer([" ".join(WORDS)])
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": len(tokenizer)}
    config = GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=2, **ids)
    return GPT2LMHeadModel(config), tokenizer


def train(output: str, steps: int = 40) -> list[dict[str, float]]:
    """What was logged, means of ten steps each."""
    fastrl.set_seed(0)
    model, tokenizer = tiny_model()
    rows = [{"prompt": thing, "colour": colour} for thing, colour in COLOURS.items()]
    rewards = [wanted, 'regex:{"pattern": "\\\\w+"}']  # or "own_reward.py:wanted"
    args = fastrl.GRPOConfig(output, reward_weights=[1.0, 0.1], max_steps=steps, **DEFAULTS)
    trainer = fastrl.GRPOTrainer(
        model, rewards, args, Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    for name in (key for key in logs[0] if key.startswith("rewards/") and key.endswith("/mean")):
        print(f"{name}: {logs[0][name]:.2f} → {logs[-1][name]:.2f}")
    return logs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/own_reward")
    train(parser.parse_args().output)


if __name__ == "__main__":
    main()
