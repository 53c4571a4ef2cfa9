"""Tiny models, examples, factories and trainers of the alignment framework."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fastrl.alignment import AlignmentConfig, BatchFactory, Trainer, make_loss
from fastrl.alignment.tasks import Task, find_task
from fastrl.data.columns import FEEDBACK, PAIRS, PROMPTS
from fastrl.data.examples import Example, Response
from fastrl.rollout import SamplingParams
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import GRADIENT_STEP, reward_model

__all__ = ["GRADIENT_STEP"]

Make = Callable[..., Any]
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "use_cpu": True,
}  # fmt: skip
_FACTORYS = ("batch_size", "epochs", "examples", "seed", "shuffle", "annotator", "params")


def response(rng: random.Random, low: int = 1, high: int = 7) -> Response:
    ids = tuple(rng.randrange(3, 97) for _ in range(rng.randint(low, high)))
    return Response(" ".join(f"w{i}" for i in ids), (*ids, tiny.EOS))


def examples(kind: str, count: int = 4, seed: int = 0) -> list[Example]:
    """Ragged ones; every second single response is a desired one."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt = response(rng, 1, 5)
        prompt_ids = prompt.ids[:-1]
        sides = tuple(response(rng) for _ in range({PROMPTS: 0, PAIRS: 2}.get(kind, 1)))
        desired = i % 2 == 0 if kind == FEEDBACK else None
        made.append(Example(prompt.text + " ", prompt_ids, sides, desired, {"number": i}))
    return made


class Examples:
    """A loader of examples that are there already."""

    def __init__(self, rows: Sequence[Example], tokenizer: Any = None):
        self.rows, self.tokenizer = list(rows), tokenizer or tiny.tokenizer()

    def as_kind(self, kind: str) -> Examples:
        return self

    def limited(self, max_length: int, of_prompt: int | None = None) -> Examples:
        return self

    def uncut(self) -> Examples:
        return self

    def warn_of_cuts(self) -> None:
        pass

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Example:
        return self.rows[i]


def worth(response: str) -> float:
    """Of words such as w17."""
    return max((float(word[1:]) for word in response.split() if word[1:].isdigit()), default=0.0)


class LikesHigh:
    """An annotator: a response is worth the highest number among its words."""

    last_scores: Any = None

    def __init__(self) -> None:
        self.asked: list[str] = []

    def score(self, prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        self.asked += prompts
        return [worth(response) for response in responses]

    def compare(
        self, prompts: list[str], firsts: list[str], seconds: list[str], **columns: Any
    ) -> list[float | None]:
        one, two = self.last_scores = self.score(prompts, firsts), self.score(prompts, seconds)
        return [float(a > b) if a != b else 0.5 for a, b in zip(one, two, strict=True)]

    def statistics(self) -> dict[str, float]:
        return {}


def make_factory(task: str | Task, rows: Sequence[Example] | None = None, **given: Any) -> Any:
    """Of four examples in one batch, in their order."""
    task = find_task(task)
    if task.online:
        given = {"annotator": LikesHigh(), "params": SamplingParams(max_new_tokens=5), **given}
    loader = Examples(examples(task.data) if rows is None else rows)
    return BatchFactory(task, loader, **{"batch_size": 4, "shuffle": False, **given})


def model_of(loss: Any) -> Any:
    return reward_model("gpt2") if loss.learns == "reward model" else tiny_models.language_model()


@pytest.fixture
def make_trainer(tmp_path: Path) -> Make:
    """A trainer by its loss's name, for the first task that it fits unless another is named."""

    def make(loss: Any, model: Any = None, rows: Any = None, **given: Any) -> Trainer:
        loss = make_loss(loss) if isinstance(loss, str) else loss
        task = given.pop("task", loss.tasks[0])
        factorys = {k: given.pop(k) for k in _FACTORYS if k in given}
        own = {
            k: given.pop(k)
            for k in ("eval_factory", "reweighter", "ref_model", "peft_config", "callbacks")
            if k in given
        }
        factory = given.pop("factory", None) or make_factory(task, rows, **factorys)
        args = AlignmentConfig(**{"output_dir": str(tmp_path), **SETTINGS, **given})
        return Trainer(model_of(loss) if model is None else model, args, factory, loss, **own)

    return make


def losses_of(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def trained(make_trainer: Make, model: Any = None, **given: Any) -> tuple[list[float], Any]:
    settings = {"epochs": 3, "logging_steps": 1, "learning_rate": 1e-2, **given}
    trainer = make_trainer("dpo", model, **settings)
    trainer.train()
    return losses_of(trainer), trainer
