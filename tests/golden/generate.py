"""Records what TRL 0.11.4's classic PPO computes on tiny models: `tests/golden/cases`.

Run it with an interpreter that has trl==0.11.4 (see README.md beside this file):

    python tests/golden/generate.py --output tests/golden/cases
"""

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from safetensors.torch import save_file
from tiny import EOS, FIRST_WORD, VOCABULARY, fill_by_rule, language_model, named_parameters
from tiny import tokenizer as build_tokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.trainer import ppo_trainer

BATCH = 8
REFERENCE_PERTURBATION = 0.05
COMMON = {
    "batch_size": BATCH, "mini_batch_size": BATCH, "gradient_accumulation_steps": 1,
    "ppo_epochs": 4, "learning_rate": 2e-3, "seed": 0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "default_gpt2": {"arch": "gpt2", "steps": 2},
    "minibatch_gpt2": {"arch": "gpt2", "steps": 2,
     "config": {"mini_batch_size": 2, "gradient_accumulation_steps": 2, "ppo_epochs": 3}},
    "abs_score_norm_gpt2": {
        "arch": "gpt2",
        "steps": 3,
        "config": {"kl_penalty": "abs", "use_score_scaling": True, "use_score_norm": True,
         "score_clip": 0.7},
    },
    "full_kl_llama": {"arch": "llama", "steps": 2,
     "config": {"kl_penalty": "full", "adap_kl_ctrl": False, "init_kl_coef": 0.1}},
    "whiten_qwen2": {"arch": "qwen2", "steps": 2,
     "config": {"whiten_rewards": True, "gamma": 0.97, "lam": 0.9}},
}  # fmt: skip


class TensorLikeFloat(float):
    """A float that answers `.to`, which `step` calls on the running moments."""

    def to(self, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(float(self), **kwargs)


def mend_score_scaling(trainer: PPOTrainer) -> None:
    """`use_score_scaling` raises AttributeError in 0.11.4: it calls `.to` on a plain float."""
    update = trainer.running.update

    def update_and_wrap(scores: torch.Tensor) -> tuple[float, float]:
        moments = update(scores)
        trainer.running.mean = TensorLikeFloat(trainer.running.mean)
        trainer.running.std = TensorLikeFloat(trainer.running.std)
        return moments

    trainer.running.update = update_and_wrap


def mend_whitened_rewards() -> None:
    """Whitening shifts the zeros outside the mask, which GAE then carries into the response."""
    whiten: Callable[..., torch.Tensor] = ppo_trainer.masked_whiten

    def whiten_and_mask(
        values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True
    ) -> torch.Tensor:
        whitened = whiten(values, mask, shift_mean=shift_mean)
        return whitened if shift_mean else whitened * mask

    ppo_trainer.masked_whiten = whiten_and_mask


def draw_batch(rng: np.random.RandomState) -> dict[str, list[torch.Tensor]]:
    """Queries of 2 to 8 tokens, responses of 3 to 12 of which some end with EOS, and scores."""
    queries, responses = [], []
    for i in range(BATCH):
        queries.append(rng.randint(FIRST_WORD, VOCABULARY, rng.randint(2, 9)))
        response = rng.randint(FIRST_WORD, VOCABULARY, rng.randint(3, 13))
        if i % 3 == 0:
            response[-1] = EOS
        responses.append(response)
    scores = (2.0 * rng.standard_normal(BATCH)).astype(np.float32)
    return {
        "queries": [torch.from_numpy(q) for q in queries],
        "responses": [torch.from_numpy(r) for r in responses],
        "scores": [torch.tensor(s) for s in scores],
    }


def build_trainer(architecture: str, settings: dict[str, Any]) -> PPOTrainer:
    """A trainer on the rule's weights, with its mini-batch shuffle drawn from `seed` alone."""
    policy, reference = (
        AutoModelForCausalLMWithValueHead.from_pretrained(
            language_model(architecture), summary_dropout_prob=0.0
        )
        for _ in range(2)
    )
    fill_by_rule(policy)
    fill_by_rule(reference, REFERENCE_PERTURBATION)
    trainer = PPOTrainer(
        config=PPOConfig(**settings), model=policy, ref_model=reference, tokenizer=build_tokenizer()
    )
    mend_score_scaling(trainer)
    np.random.permutation = np.random.RandomState(settings["seed"]).permutation
    return trainer


class FirstStep:
    """Keeps the per-token figures that the trainer computes within its first `step`."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self.figures: dict[str, torch.Tensor] = {}
        rewards, advantages = trainer.compute_rewards, trainer.compute_advantages

        def compute_rewards(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result = rewards(*args)
            self._keep(zip(("rewards", "non_score", "kls"), result, strict=True))
            return result

        def compute_advantages(
            values: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            result = advantages(values, rewards, mask)
            self._keep([("mask", mask)])
            self._keep(zip(("values", "advantages", "returns"), result, strict=True))
            return result

        trainer.compute_rewards, trainer.compute_advantages = compute_rewards, compute_advantages

    def _keep(self, named: Any) -> None:
        for name, figure in named:
            self.figures.setdefault(f"step0.{name}", figure.float().clone().contiguous())


def record(name: str, case: dict[str, Any], output: Path) -> None:
    """Runs one case and writes `<name>.json` and `<name>.safetensors`."""
    settings = COMMON | case.get("config", {})
    trainer = build_trainer(case["arch"], settings)
    first = FirstStep(trainer)
    rng = np.random.RandomState(sum(name.encode()))
    tensors: dict[str, torch.Tensor] = {}
    statistics = []
    for step in range(case["steps"]):
        batch = draw_batch(rng)
        for i in range(BATCH):
            tensors[f"step{step}.query{i}"] = batch["queries"][i]
            tensors[f"step{step}.response{i}"] = batch["responses"][i]
        tensors[f"step{step}.scores"] = torch.stack(batch["scores"])
        stats = trainer.step(batch["queries"], batch["responses"], batch["scores"])
        statistics.append(
            {
                key: float(value)
                for key, value in stats.items()
                if np.ndim(value) == 0 and not key.startswith("time/")
            }
        )
    tensors |= first.figures
    final = named_parameters(trainer.model)
    tensors |= {f"final.{key}": parameter.detach().clone() for key, parameter in final.items()}
    description = {
        "arch": case["arch"],
        "steps": case["steps"],
        "reference_perturbation": REFERENCE_PERTURBATION,
        "config": settings,
        "stats": statistics,
        "source": f"trl {trl.__version__}, transformers {transformers.__version__}, CPU float32",
    }
    (output / f"{name}.json").write_text(json.dumps(description, indent=1) + "\n")
    save_file(tensors, output / f"{name}.safetensors")
    print(f"{name}: {len(tensors)} tensors, kl {statistics[0]['objective/kl']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the cases")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")  # TRL's notice that this trainer is deprecated, and others
    torch.manual_seed(0)
    mend_whitened_rewards()
    for name, case in CASES.items():
        record(name, case, output)


if __name__ == "__main__":
    main()
