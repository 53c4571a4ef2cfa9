"""A weight for every sample by a rule of one's own: pairs that a labeller was sure of count more.

python examples/custom_reweighter.py --model path/to/lm --pairs pairs.jsonl --output tuned

The pairs have a column "votes", how many of five labellers preferred the chosen side. A reweighter
is any function of a batch that returns a number of 0 or more per sample; 0 leaves a pair out. It
sees the batch's texts, tokens, rewards and the data's other columns.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl.alignment import (
    DPO,
    AlignmentConfig,
    BatchFactory,
    ByFunction,
    DatasLoader,
    Trainer,
)


def by_votes(batch) -> list[float]:
    """0 where the labellers were split, 1 where all five agreed."""
    return [max(0.0, (votes - 2.5) / 2.5) for votes in batch.columns["votes"]]


def train(model: str, pairs, output: str, reweighter=by_votes, **settings):
    """Returns the trainer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model, use_safetensors=True),
        AlignmentConfig(output_dir=f"{output}/checkpoints", **settings),
        BatchFactory("offline-pairwise", DatasLoader(pairs, tokenizer), batch_size=16),
        DPO(beta=0.1),
        reweighter=ByFunction(reweighter),
    )
    trainer.train()
    trainer.save_model(output)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory or Hub id of a causal LM")
    parser.add_argument("--pairs", required=True, help="a .jsonl file, or a Hub id")
    parser.add_argument("--output", default="tuned")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    args = parser.parse_args()
    train(args.model, args.pairs, args.output, learning_rate=args.learning_rate)


if __name__ == "__main__":
    main()
