"""Whatever a trainer runs on a CPU, its linear layers are computed by the run's libraries: policy
and reference alike, before training, in it and after it."""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from fastrl import PPOConfig, PPOTrainer
from fastrl.data.columns import FEEDBACK, PAIRS
from tests.alignment.conftest import Make, examples, make_factory
from tests.alignment.conftest import make_trainer as make_trainer
from tests.golden import tiny
from tests.ppo.conftest import make_batch, make_policy, perturbed
from tests.trainers.conftest import pairs, reward_model
from tests.trl import test_dpo, test_kto, test_online

# They compare ways of computing a model's output, and keep none of what they computed.
CHECKS = {"choose_head", "choose_heads", "runs_packed"}


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who had a linear layer computed by PyTorch's own forward, from now on."""
    seen: list[str] = []
    for kind in (torch.nn.Linear, Conv1D):

        def forward(layer: Any, x: Any, right: Callable = kind.forward) -> Any:
            frames = [f for f in traceback.extract_stack() if "/fastrl/" in f.filename]
            if x.numel() and CHECKS.isdisjoint(f.name for f in frames):
                seen.append(", ".join(f"{f.filename}:{f.lineno}" for f in frames[-4:]))
            return right(layer, x)

        monkeypatch.setattr(kind, "forward", forward)
    return seen


def aligned(task: str, loss: str, columns: Any, **settings: Any) -> Callable[..., Any]:
    def make(folder: Path, make_trainer: Make) -> Any:
        rows = examples(columns, 4)
        held_out = make_factory(task, rows, batch_size=2)
        return make_trainer(
            loss, rows=rows, task=task, batch_size=2, eval_factory=held_out, **settings
        )

    return make


def dpo(folder: Path, _: Any, **settings: Any) -> Any:
    return test_dpo.trainer(folder, eval_dataset=pairs(2), **settings)


def online(kind: str) -> Callable[..., Any]:
    return lambda folder, _: test_online.make(
        folder, kind, beta=0.1, eval_dataset=test_online.prompts(4)
    )


MADE: dict[str, Callable[..., Any]] = {
    "align dpo": aligned("offline-pairwise", "dpo", PAIRS),
    "align dpo, a copy": aligned("offline-pairwise", "dpo", PAIRS, reference="copy"),
    "align kto": aligned("offline-pointwise", "kto", FEEDBACK),
    "align reward model": aligned("reward-modelling", "bradley-terry", PAIRS),
    "dpo": dpo,
    "dpo, precomputed": partial(dpo, precompute_ref_log_probs=True),
    "kto": lambda folder, _: test_kto.trainer(folder, eval_dataset=test_kto.completions()),
    "grpo": online("grpo"),
    "rloo": online("rloo"),
}


@pytest.mark.parametrize("name", MADE)
def test_every_forward_is_the_libraries(
    name: str, past: list[str], make_trainer: Make, tmp_path: Path
) -> None:
    trainer = MADE[name](tmp_path, make_trainer)
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    assert not past


@pytest.mark.parametrize("critic", [False, True])
def test_every_forward_of_ppo_is_the_libraries(past: list[str], critic: bool) -> None:
    values = {"critic": reward_model("gpt2")} if critic else {}
    reference = perturbed(make_policy())
    trainer = PPOTrainer(
        PPOConfig(batch_size=4, mini_batch_size=2, accelerator_kwargs={"cpu": True}),
        make_policy(),
        reference,
        tiny.tokenizer(),
        **values,
    )
    batch = make_batch()
    trainer.generate(batch["queries"], max_new_tokens=4)
    trainer.step(**batch)
    trainer.sequence_kl(batch["queries"], batch["responses"])
    assert not past
