"""An advantage of one's own beside GRPO's: a tiny model learns by each to repeat a word.

python examples/own_advantage.py --output runs/own_advantage

Fifteen seconds on a CPU core. It prints the mean reward of each ten steps.
"""

import argparse

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import fastrl
from fastrl.tools.demo.models import build_tokenizer

WORDS = ["red", "green", "blue", "white", "black", "grey"]
DEFAULTS = {"per_device_train_batch_size": 48, "num_generations": 8, "learning_rate": 5e-3}
DEFAULTS |= {"max_completion_length": 4, "beta": 0.0, "gradient_checkpointing": False}
DEFAULTS |= {"lr_scheduler_type": "constant", "logging_steps": 10, "bf16": False}


# --8<-- [start:own]
@fastrl.group_advantage("ranks")
def ranks(rewards, counts):
    """The share of the others that a response beats, less the share that it is beaten by.

    From the rewards of the responses to each prompt, and which of them count: [groups, size].
    """
    beats = (rewards[:, :, None] - rewards[:, None, :]).sign() * counts[:, None, :]
    others = (counts.sum(-1, keepdim=True) - 1).clamp(min=1)
    return beats.sum(-1) / others


# --8<-- [end:own]
def repeats(prompts: list[str], completions: list[str], **columns) -> list[float]:
    """The share of a completion's four words that are the prompt's."""
    pairs = zip(prompts, completions, strict=True)
    return [said.split().count(word.strip()) / 4 for word, said in pairs]


def tiny_model() -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    tokenizer = build_tokenizer([" ".join(WORDS)])
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": len(tokenizer)}
    config = GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=2, **ids)
    return GPT2LMHeadModel(config), tokenizer


def train(output: str, steps: int = 40) -> dict[str, list[dict[str, float]]]:
    """What was logged, means of ten steps each, by advantage."""
    found = {}
    for name in ("grpo", "ranks"):  # or a file's function: "own_advantage.py:ranks"
        fastrl.set_seed(0)
        model, tokenizer = tiny_model()
        args = fastrl.GRPOConfig(f"{output}/{name}", advantage=name, max_steps=steps, **DEFAULTS)
        data = Dataset.from_dict({"prompt": WORDS})
        trainer = fastrl.GRPOTrainer(model, repeats, args, data, processing_class=tokenizer)
        trainer.train()
        found[name] = [log for log in trainer.state.log_history if "reward" in log]
    for name, logs in found.items():
        said = " → ".join(f"{log['reward']:.2f}" for log in logs)
        print(f"{name}: {said}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/own_advantage")
    train(parser.parse_args().output)


if __name__ == "__main__":
    main()
