"""Kahneman–Tversky optimisation from single responses with a thumb up or down.

python examples/kto_feedback.py --model path/to/lm --feedback feedback.jsonl --output tuned

Each line has a prompt, a response and a label, true where the response is a desired one. Where one
kind is rarer, its weight makes up for that: the script sets both so that the two kinds count alike.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl.alignment import KTO, AlignmentConfig, BatchFactory, DatasLoader, Trainer


def train(model: str, feedback, output: str, beta: float = 0.1, **settings):
    """Returns the trainer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    loader = DatasLoader(feedback, tokenizer, "feedback", max_length=512)
    desired = sum(bool(example.desired) for example in loader)
    share = desired / len(loader)
    if not 0 < share < 1:
        raise SystemExit(f"{desired} of {len(loader)} responses are desired: both kinds are needed")
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model, use_safetensors=True),
        AlignmentConfig(output_dir=f"{output}/checkpoints", **settings),
        BatchFactory("offline-pointwise", loader, batch_size=16, epochs=2),
        KTO(beta=beta, desirable_weight=0.5 / share, undesirable_weight=0.5 / (1 - share)),
    )
    trainer.train()
    trainer.save_model(output)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory or Hub id of a causal LM")
    parser.add_argument("--feedback", required=True, help="a .jsonl file, or a Hub id")
    parser.add_argument("--output", default="tuned")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    args = parser.parse_args()
    train(args.model, args.feedback, args.output, learning_rate=args.learning_rate)


if __name__ == "__main__":
    main()
