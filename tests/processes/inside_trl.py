"""TRL's own GRPOTrainer on fastrl's rollouts, on several processes."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.tensor import DTensor

from fastrl import TRLRollouts
from fastrl.run.launcher import process_count
from tests import tiny_models
from tests.golden import tiny
from tests.processes.jobs import fsdp, weights_of
from tests.processes.launch import keep

SEED = 3


def even_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def make(folder: Path, rollouts: Any, reward: Any = even_words, **settings: Any) -> Any:
    """TRL's trainer; responses end early, and so at other lengths in each process."""
    from trl import GRPOConfig, GRPOTrainer

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    common: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 4, "num_generations": 4, "num_generations_eval": 2,
        "max_completion_length": 9,
        "generation_kwargs": {"eos_token_id": [tiny.EOS, *range(10, 24)]},
        "max_steps": 3, "eval_strategy": "no", "eval_on_start": True, "learning_rate": 1e-2,
        "seed": SEED, "bf16": False, "use_cpu": True, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    prompts = settings.pop("prompts", None)
    if prompts is None:
        prompts = [f"w{3 + i} w4" + " w5" * (i % 3) for i in range(16)]
    return GRPOTrainer(
        tiny_models.language_model("qwen2"),
        reward,
        GRPOConfig(**{**common, **settings}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        # Its last batch is filled up.
        eval_dataset=Dataset.from_dict({"prompt": [f"w{3 + i} w6" for i in range(7)]}),
        processing_class=tiny.tokenizer("left"),
        rollout_func=rollouts,
    )


class Noted:
    """Rollouts with their results, and how far their log-probs are from those that TRL computes."""

    def __init__(self, rollouts: TRLRollouts):
        self.rollouts = rollouts
        self.seen: list[dict[str, Any]] = []
        self.off: list[float] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = self.rollouts(prompts, trainer)
        kept = {name: found[name] for name in ("prompt_ids", "completion_ids")}
        self.seen.append({**kept, "training": trainer.model.training})
        for one in zip(*found.values(), strict=True):
            self.off.append(self._apart(trainer, *one))
        return found

    @torch.no_grad()
    def _apart(self, trainer: Any, prompt: list, response: list, logprobs: list) -> float:
        ids = torch.tensor([prompt + response])
        found, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), len(response)
        )
        return float((found[0] - torch.tensor(logprobs)).abs().max())


def trained(folder: Path, sharded: bool = False, **settings: Any) -> dict[str, Any]:
    """A run between two evaluations."""
    with fsdp() if sharded and process_count() > 1 else nullcontext():
        noted = Noted(TRLRollouts())
        trainer = make(folder, noted, **settings)
        start = weights_of(trainer.accelerator.unwrap_model(trainer.model))
        trainer.train()
        model = trainer.accelerator.unwrap_model(trainer.model)
        if sharded and process_count() > 1:
            assert all(isinstance(p, DTensor) for p in model.parameters())
        trainer.evaluate()
        end = weights_of(model)
    return {
        "seen": noted.seen,
        "off": noted.off,
        "weights": end,
        "moved": max(float((end[name] - x).abs().max()) for name, x in start.items()),
        "rewards": [x["eval_reward"] for x in trainer.state.log_history if "eval_reward" in x],
    }


def drawn_alike(folder: Path) -> dict[str, Any]:
    """Responses of the processes to other numbers of the same prompt, of which some have groups,
    where torch's generators are in the same state."""
    rollouts = TRLRollouts()
    trainer = make(folder, rollouts)
    trainer.model.train()
    torch.manual_seed(0)
    count = 3 if trainer.accelerator.is_main_process else 8
    return {"seen": rollouts(["w3 w4"] * count, trainer)["completion_ids"]}


class _FailsInProcess1:
    """A reward function whose second call raises an exception there."""

    __name__ = "fails"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.calls += 1
        if self.calls == 2 and os.environ.get("RANK") == "1":
            raise LookupError("the judge is gone")
        return even_words(completion_ids)


def _with_a_long_prompt(folder: Path, sharded: bool) -> None:
    """Which is process 1's first."""
    prompts = ["w3 w4"] * 2 + ["w5 " * 400] + ["w3 w4"] * 13
    with fsdp() if sharded else nullcontext():
        make(folder, TRLRollouts(), prompts=prompts, shuffle_dataset=False).train()


def _evaluated_first(folder: Path) -> None:
    trainer = make(folder, TRLRollouts())
    trainer.evaluate()
    trainer.train()


JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ddp": trained,
    "ddp, groups across processes": lambda folder: trained(
        folder, num_generations=8, per_device_train_batch_size=4
    ),
    "fsdp2": lambda folder: trained(folder, sharded=True),
    "drawn alike": drawn_alike,
}
FAILING: dict[str, Callable[[Path], None]] = {
    "a reward": lambda folder: make(folder, TRLRollouts(), _FailsInProcess1()).train(),
    "a prompt": lambda folder: _with_a_long_prompt(folder, sharded=False),
    "a prompt, fsdp2": lambda folder: _with_a_long_prompt(folder, sharded=True),
    "evaluated first": _evaluated_first,
}


def run(folder: Path, *names: str) -> None:
    """Saves what some jobs did, of each process in a folder of its own; or fails."""
    for name in names:
        if name in FAILING:
            FAILING[name](folder / "unused")
        else:
            keep(JOBS[name](folder / "unused"), name, folder)
