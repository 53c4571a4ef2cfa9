"""Online preferences: the policy writes two responses to each prompt, a judge says which is better.

python examples/online_judge.py --model path/to/lm --prompts prompts.jsonl --judge path/to/judge

The judge is a language model, asked about every pair in both orders: where the two answers disagree
the pair is a tie. Any function from a list of questions to a list of answers does as well, such as
a call of somebody's service. Answers that say neither are left out, and counted in the log.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl import SamplingParams
from fastrl.alignment import (
    DPO,
    AlignmentConfig,
    BatchFactory,
    DatasLoader,
    JudgeAnnotator,
    ModelJudge,
    Trainer,
)


def train(model: str, prompts, judge, output: str, held_out=None, **settings):
    """``judge`` answers a list of questions; returns the trainer and its evaluations, the share of
    prompts where the judge prefers the policy's response to that of the policy at the start."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    annotator = JudgeAnnotator(judge, unparsed="skip")
    params = SamplingParams(max_new_tokens=settings.pop("max_new_tokens", 64))

    def factory(source, size, **options):
        loader = DatasLoader(source, tokenizer, "prompts")
        common = {"annotator": annotator, "params": params, **options}
        return BatchFactory("online-pairwise", loader, batch_size=size, **common)

    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(model, use_safetensors=True),
        AlignmentConfig(output_dir=f"{output}/checkpoints", **settings),
        factory(prompts, 16),
        DPO(beta=0.1),
        eval_factory=None if held_out is None else factory(held_out, 64),
    )
    evaluations = [] if held_out is None else [trainer.evaluate()]
    trainer.train()
    evaluations += [] if held_out is None else [trainer.evaluate()]
    trainer.save_model(output)
    return trainer, evaluations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory or Hub id of a causal LM")
    parser.add_argument("--prompts", required=True, help="a .jsonl file, or a Hub id")
    parser.add_argument("--judge", required=True, help="directory or Hub id of a causal LM")
    parser.add_argument("--output", default="tuned")
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    args = parser.parse_args()
    judge = ModelJudge.from_pretrained(args.judge)
    train(args.model, args.prompts, judge, args.output, learning_rate=args.learning_rate)


if __name__ == "__main__":
    main()
