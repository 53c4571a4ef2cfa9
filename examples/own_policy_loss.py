"""A policy loss of one's own beside PPO's clip: a tiny model learns by each to repeat a word.

python examples/own_policy_loss.py --output runs/own_policy_loss

Ten seconds on a CPU core. It prints the mean reward of the first and of the last steps, and how far
an update's ratios go from 1: SPO pulls them back.
"""

import argparse
from statistics import mean

from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import fastrl
from fastrl.tools.demo.models import build_tokenizer

WORDS = ["red", "green", "blue", "white", "black", "grey"]


# --8<-- [start:own]
@fastrl.register_policy_loss("spo", "|A|·(ρ - 1)²/(2ε) - A·ρ", "Xie et al., 2024 (SPO)")
def spo(log_ratio, advantages, cliprange):
    """Each token's loss, from log ρ = log π - log π_old and A, [...]; ε is the clip range.

    The clip takes the gradient away outside of 1 ± ε; this one points back to there.
    """
    ratio, (_, high) = log_ratio.exp(), cliprange  # of the range below and above 1
    return advantages.abs() * (ratio - 1).square() / (2 * high) - advantages * ratio


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


def train(output: str, steps: int = 30) -> dict[str, list[dict[str, float]]]:
    """The statistics of each step, by policy loss."""
    found = {}
    for name in ("clip", "spo"):  # a file's function may also be named: "own_policy_loss.py:spo"
        fastrl.set_seed(0)
        model, tokenizer = tiny_model()
        config = fastrl.PPOConfig(
            policy_loss=name, cliprange=0.2, ppo_epochs=4, learning_rate=3e-3, init_kl_coef=0.0,
            batch_size=48, mini_batch_size=48, advantage="grpo", group_size=8,
        )  # fmt: skip
        trainer = fastrl.PPOTrainer(config, model, tokenizer=tokenizer)
        result = trainer.train(
            repeats, prompts=WORDS, steps=steps, generation_kwargs={"max_new_tokens": 4},
            output=f"{output}/{name}", overwrite=True, progress=False,
        )  # fmt: skip
        found[name] = result.history
    for name, rows in found.items():
        first, last = (mean(row["reward/mean"] for row in x) for x in (rows[:5], rows[-5:]))
        moved = mean(row["ppo/policy/approxkl"] for row in rows)
        print(f"{name}: reward {first:.2f} → {last:.2f}, ½·(log ρ)² {moved:.4f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/own_policy_loss")
    train(parser.parse_args().output)


if __name__ == "__main__":
    main()
