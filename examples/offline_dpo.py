"""Direct preference optimisation from a file of pairs: prompt, chosen, rejected.

python examples/offline_dpo.py --model path/to/lm --pairs pairs.jsonl --output tuned

The reference is the model as training begins: its log-probs of the pairs are computed once, before
the first step, and no second model is kept. `fastrl align --loss dpo` does the same, with a report;
other losses on pairs are a name away: cdpo, robust, hinge, ipo, simpo, orpo, slic.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl.alignment import AlignmentConfig, BatchFactory, DatasLoader, Trainer, make_loss


def train(model: str, pairs, output: str, loss: str = "dpo", held_out=None, **settings):
    """Returns the trainer, and the held-out metrics before and after."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    size, epochs = settings.pop("batch_size", 16), settings.pop("epochs", 1)

    def factory(source, **options):
        loader = DatasLoader(source, tokenizer, max_length=512)
        return BatchFactory("offline-pairwise", loader, batch_size=size, **options)

    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model, use_safetensors=True),
        AlignmentConfig(output_dir=f"{output}/checkpoints", **settings),
        factory(pairs, epochs=epochs),
        make_loss(loss),
        eval_factory=None if held_out is None else factory(held_out),
    )
    before = {} if held_out is None else trainer.evaluate()
    trainer.train()
    after = {} if held_out is None else trainer.evaluate()
    trainer.save_model(output)
    return trainer, before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory or Hub id of a causal LM")
    parser.add_argument("--pairs", required=True, help="a .jsonl file, or a Hub id")
    parser.add_argument("--held-out", help="the same, to evaluate on")
    parser.add_argument("--output", default="tuned")
    parser.add_argument("--loss", default="dpo")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    args = parser.parse_args()
    _, before, after = train(
        args.model,
        args.pairs,
        args.output,
        args.loss,
        args.held_out,
        learning_rate=args.learning_rate,
    )
    for name in before:
        print(f"{name}: {before[name]:.3f} -> {after[name]:.3f}")


if __name__ == "__main__":
    main()
