"""The ledger and the table of responses that the policy writes, and responses drawn again."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from fastrl.alignment import AlignmentConfig, ByImportance, ByMargin, Trainer, make_loss
from fastrl.alignment.replay import replay
from fastrl.alignment.tasks import find_task
from fastrl.rollout import SamplingParams
from fastrl.run.ledger import read_facts, read_ledger
from fastrl.trainers import replay_walk
from tests import tiny_models
from tests.alignment.conftest import SETTINGS, LikesHigh, examples, make_factory, worth
from tests.resuming import with_dropout

ROWS, BATCHES = 6, 4


class Undecided(LikesHigh):
    """Compares alone, and has no opinion of some pairs."""

    def __getattribute__(self, name: str) -> Any:
        if name == "last_scores":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def compare(
        self, prompts: list[str], firsts: list[str], seconds: list[str], **columns: Any
    ) -> list[float | None]:
        pairs = zip(map(worth, firsts), map(worth, seconds), strict=True)
        return [None if (a + b) % 3 == 0 else float(a > b) for a, b in pairs]


class Watches:
    """Notes the batches that are learned from, as a reweighter."""

    def __init__(self, inner: Any = None):
        self.inner, self.seen = inner, list[Any]()

    def __call__(self, batch: Any, policy: Any) -> None:
        if self.inner is not None:
            self.inner(batch, policy)
        self.seen.append(batch)


CASES: dict[str, dict[str, Any]] = {
    "scored pairs": {"reweighter": ByMargin, "gradient_accumulation_steps": 2},
    "compared pairs": {"annotator": Undecided},
    "single responses": {"task": "online-pointwise", "loss": "kto", "reweighter": ByImportance,
     "temperature": 0.8},
    "PPO": {"task": "reinforcement-learning", "loss": "ppo",
     "options": {"epochs": 2, "mini_batches": 2, "temperature": 0.7}, "temperature": 0.7},
}  # fmt: skip


def make(folder: Path, name: str = "scored pairs", model: Any = None, **settings: Any) -> Trainer:
    case = CASES[name]
    task, accumulated = case.get("task", "online-pairwise"), case.get("gradient_accumulation_steps")
    loss = make_loss(case.get("loss", "dpo"), **case.get("options", {}))
    passes = loss.minibatches_per_batch
    if model is None:
        model = tiny_models.policy() if loss.learns != "policy" else tiny_models.language_model()
    args = AlignmentConfig(
        str(folder), ledger=True, **{
            **SETTINGS, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": passes,
            "max_steps": BATCHES * passes // (accumulated or 1), "logging_steps": passes,
            "gradient_accumulation_steps": accumulated or 1, **settings,
        },
    )  # fmt: skip
    return Trainer(
        with_dropout(model),
        args,
        make_factory(
            task, examples(find_task(task).data, ROWS), batch_size=4, shuffle=True,
            annotator=case.get("annotator", LikesHigh)(),
            params=SamplingParams(max_new_tokens=5, temperature=case.get("temperature", 1.0)),
        ),
        loss,
        eval_factory=make_factory(task, examples(find_task(task).data, 7, seed=1), batch_size=7),
        reweighter=Watches(case["reweighter"]() if "reweighter" in case else None),
    )  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_ledger(folder / "ledger").to_pylist()


@pytest.mark.parametrize("name", CASES)
def test_rows_are_what_was_learned(name: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, name, save_strategy="no")
    trainer.train()
    rows, size = rows_of(tmp_path), 4 * trainer.factory.task.generations
    places = [(n, i) for n in range(1, BATCHES + 1) for i in range(size)]
    assert [(x["step"], x["sample"]) for x in rows] == places
    per_batch = trainer.state.max_steps / BATCHES
    versions = [int(i * per_batch) for i in range(BATCHES)]
    assert [x["weights_version"] for x in rows[::size]] == versions
    for n, batch in enumerate(trainer.reweighter.seen):
        own = iter(rows[n * size : (n + 1) * size])
        for i, example in enumerate(batch.examples):
            for side, response in enumerate(example.responses):
                row = next(own)
                assert row["prompt_ids"] == list(example.prompt_ids)
                assert row["completion_ids"] == list(response.ids)
                assert row["completion"] == response.text
                if name == "compared pairs" and not any(example.weights):
                    assert math.isnan(row["reward"])
                    continue
                assert row["reward"] == np.float32(example.rewards[side])
                logprobs = batch.rollout_logprobs[side][i].tolist()
                assert row["logprobs"] == logprobs
                scores = {k: x for k, x in row.items() if k.startswith("reward/")}
                assert set(scores) == (set() if "compared" in name else {"reward/LikesHigh"})
                texts = {each.text for each in example.responses}
                asked = len(texts) == len(example.responses)
                for score in scores.values():
                    assert score == worth(response.text) if asked else math.isnan(score)
    if name == "compared pairs":
        assert any(math.isnan(x["reward"]) for x in rows)


@pytest.mark.parametrize("name", CASES)
def test_any_batch_is_drawn_again(name: str, tmp_path: Path) -> None:
    """From a checkpoint or the beginning; the annotator is not asked."""
    whole = make(tmp_path / "run", name)
    whole.evaluate()
    whole.train()
    before = sorted(tmp_path.rglob("*"))
    for batch in (1, 2, BATCHES):
        trainer = make(tmp_path.parent / "other", name)
        found = replay(trainer, tmp_path / "run", batch)
        assert found.identical, found.samples[0].differences()
        assert found.strayed is None
        assert not trainer.factory.annotator.asked
        assert (found.begun_at > 0) == (found.walked < batch - 1)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is left behind
    for path in (tmp_path / "run").glob("checkpoint-*"):
        path.rename(tmp_path / f"no-{path.name}")
    found = replay(make(tmp_path.parent / "other", name), tmp_path / "run", BATCHES)
    assert (found.begun_at, found.walked) == (0, BATCHES - 1)
    assert found.identical, found.samples[0].differences()


def test_the_tolerance_is_that_of_the_models_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast's, where float32 weights compute in bfloat16; a run of several processes has one."""

    def of_two(*arguments: Any) -> list[dict[str, Any]]:
        facts = read_facts(*arguments)
        return [{**x, "settings": {**x["settings"], "processes": 2}} for x in facts]

    make(tmp_path, bf16=True).train()
    monkeypatch.setattr(replay_walk, "read_facts", of_two)
    found = replay(make(tmp_path.parent / "other", bf16=True), tmp_path, 1)
    assert found.tolerance == torch.finfo(torch.bfloat16).eps ** 0.5


def test_another_model_is_told(tmp_path: Path) -> None:
    make(tmp_path, save_strategy="no").train()
    other = make(tmp_path.parent / "other", model=tiny_models.language_model(perturbation=0.5))
    assert not replay(other, tmp_path, 2).identical
    with pytest.raises(ValueError, match="does not have step 9: it has the steps 1 to 4"):
        replay(make(tmp_path.parent / "other"), tmp_path, 9)
    with pytest.raises(ValueError, match="the trainer has seed=5, the run 42"):
        replay(make(tmp_path.parent / "other", seed=5), tmp_path, 2)


@pytest.mark.filterwarnings("ignore:output_dir .* holds checkpoints")
def test_a_resumed_run_has_each_batch_once(tmp_path: Path) -> None:
    """With the room in which it was drawn, which an evaluation of more prompts had made."""
    whole = make(tmp_path / "whole", "single responses")
    whole.evaluate()
    whole.train()

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("stopped")

    broken = make(tmp_path / "broken", "single responses")
    broken.evaluate()
    broken.add_callback(Stops())
    with pytest.raises(RuntimeError, match="stopped"), pytest.warns(UserWarning, match="saved in"):
        broken.train()
    make(tmp_path / "broken", "single responses").train(
        resume_from_checkpoint=str(tmp_path / "broken/checkpoint-2")
    )
    one, other = (rows_of(tmp_path / x) for x in ("whole", "broken"))
    assert one == other
    assert (tmp_path / "broken" / "ledger" / "superseded-1").is_dir()


def test_the_table_has_the_latest_batch(tmp_path: Path, capsys: Any) -> None:
    settings = {"log_completions": True, "num_completions_to_print": 1, "logging_steps": 1}
    trainer = make(tmp_path, save_strategy="no", **settings)
    trainer.train()
    tables = sorted((tmp_path / "completions").glob("*.parquet"))
    assert [path.name for path in tables] == [
        f"completions_{step:05d}.parquet" for step in range(1, trainer.state.max_steps + 1)
    ]
    found = Dataset.from_parquet(str(tables[-1]), cache_dir=str(tmp_path / "cache")).to_list()
    latest = [row for row in rows_of(tmp_path) if row["step"] == BATCHES]
    columns = ("prompt", "completion", "reward")
    assert [[row[x] for x in columns] for row in found] == [
        [row[x] for x in columns] for row in latest
    ]
    said = capsys.readouterr().out
    assert re.findall(r"Step (\d+)", said) == [str(n + 1) for n in range(trainer.state.max_steps)]
