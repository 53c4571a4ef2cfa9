"""A loss of pairs of one's own beside DPO's: which of them keeps the preferred text likely.

python examples/own_pair_loss.py --output runs/own_pair_loss

Ten seconds on a CPU core. The texts of each pair differ in a word. It prints the margin of their
implicit rewards, which both losses raise, and the log-prob that the preferred text gained.
"""

import argparse

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import fastrl
from fastrl.alignment import loss_of_pairs
from fastrl.tools.demo.models import build_tokenizer

WORDS = ["red", "green", "blue", "white", "black", "grey"]
DEFAULTS = {"per_device_train_batch_size": 6, "learning_rate": 3e-3, "beta": 0.5}
DEFAULTS |= {"lr_scheduler_type": "constant", "logging_steps": 10, "bf16": False}


# --8<-- [start:own]
@loss_of_pairs("Pal et al., 2024 (DPO-Positive)")
def dpop(chosen, rejected, beta=0.1, lam=5.0):
    """ℓ(β(h - λ·max(0, -r_w))): the preferred is to be no less likely than the reference has it.

    r = log π - log ref of each pair's preferred and other side, [B]; h = r_w - r_l.
    """
    less_likely = torch.relu(-chosen.ratio)
    margin = chosen.ratio - rejected.ratio - lam * less_likely
    return -torch.nn.functional.logsigmoid(beta * margin)


# --8<-- [end:own]
def tiny_model() -> tuple[GPT2LMHeadModel, PreTrainedTokenizerFast]:
    tokenizer = build_tokenizer([" ".join(WORDS)])
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": len(tokenizer)}
    config = GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=2, **ids)
    return GPT2LMHeadModel(config), tokenizer


def train(output: str, steps: int = 60) -> dict[str, list[dict[str, float]]]:
    """What was logged, means of ten steps each, by loss."""
    found = {}
    pairs = [(f"{a} {b} {a}", f"{a} {b} {b}") for a in WORDS for b in WORDS if a != b]
    rows = [{"prompt": a.split()[0], "chosen": f" {a}", "rejected": f" {b}"} for a, b in pairs]
    for name in ("dpo", "dpop"):  # or a file's function: "own_pair_loss.py:dpop"
        fastrl.set_seed(0)
        model, tokenizer = tiny_model()
        args = fastrl.DPOConfig(f"{output}/{name}", loss_type=name, max_steps=steps, **DEFAULTS)
        data = Dataset.from_list(rows)
        trainer = fastrl.DPOTrainer(
            model, args=args, train_dataset=data, processing_class=tokenizer
        )
        trainer.train()
        found[name] = [log for log in trainer.state.log_history if "rewards/margins" in log]
    for name, logs in found.items():
        gained = logs[-1]["rewards/chosen"] / DEFAULTS["beta"]
        print(f"{name}: margin {logs[-1]['rewards/margins']:.2f}, preferred {gained:+.2f} nats")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/own_pair_loss")
    train(parser.parse_args().output)


if __name__ == "__main__":
    main()
