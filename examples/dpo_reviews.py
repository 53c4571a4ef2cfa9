"""A DPO script of TRL 1.x with its import changed: film reviews that are more favourable.

python examples/dpo_reviews.py --output_dir tuned --model_name_or_path runs/demo/sft/model

The model is the demo's (`fastrl demo --quick` leaves it in runs/demo) or, without a path, one that
is taught such reviews first, in a minute on a CPU core. The pairs' labeller is sometimes wrong.
It prints how often the chosen of held-out reviews has the higher implicit reward β·log π/ref.
"""

import random
from dataclasses import dataclass, field

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser

from fastrl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer, set_seed  # was: from trl
from fastrl.tools.demo.models import build_tokenizer
from fastrl.tools.demo.text import OPENERS, preference_pairs, reviews

QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
DEFAULTS = {"output_dir": "tuned", "per_device_train_batch_size": 32, "learning_rate": 1e-3}
DEFAULTS |= {"max_steps": 200, "per_device_eval_batch_size": 256, "beta": 0.1, "bf16": False}
DEFAULTS |= {"logging_steps": 20, **QUIET}


@dataclass
class ScriptArguments:
    model_name_or_path: str | None = None
    pairs: int = 6144
    held_out: int = 1024
    sft_steps: int = field(default=80, metadata={"help": "of a model that is made"})


def make_model(folder: str, steps: int) -> str:
    """The folder of a small GPT-2 that writes reviews."""
    texts = [review.text for review in reviews(4096, seed=0)]
    tokenizer = build_tokenizer(texts)
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=64, n_layer=2, n_head=2, **ids))
    settings = {"per_device_train_batch_size": 32, "learning_rate": 4e-3, "bf16": False, **QUIET}
    args = SFTConfig(f"{folder}/sft", max_steps=steps, **settings)
    data = Dataset.from_dict({"text": texts})
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    return str(args.output_dir)


def pairs(count: int, seed: int) -> Dataset:
    """Pairs of reviews with the same opening, the preferred one first."""
    rng = random.Random(seed)
    rows = []
    for two in preference_pairs(count, seed):
        for opener in OPENERS:
            two = [text.removeprefix(f"{opener} ") for text in two]
        rows.append({"prompt": rng.choice(OPENERS), "chosen": two[0], "rejected": two[1]})
    return Dataset.from_list(rows)


def train(script_args: ScriptArguments, training_args: DPOConfig) -> dict[str, float]:
    set_seed(training_args.seed)
    path = script_args.model_name_or_path
    path = path or make_model(str(training_args.output_dir), script_args.sft_steps)
    data, held_out = pairs(script_args.pairs, seed=1), pairs(script_args.held_out, seed=2)
    trainer = DPOTrainer(path, None, training_args, train_dataset=data, eval_dataset=held_out)
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    print(f"accuracy on {len(held_out)} held-out pairs: {found['eval_rewards/accuracies']:.3f}")
    return found


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, DPOConfig), description=__doc__)
    parser.set_defaults(**DEFAULTS)
    train(*parser.parse_args_into_dataclasses())


if __name__ == "__main__":
    main()
