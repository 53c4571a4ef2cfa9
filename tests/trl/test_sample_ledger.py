"""The ledger of GRPOTrainer and RLOOTrainer, and responses that are drawn again by it."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from fastrl.run.ledger import read_ledger
from fastrl.trainers.groups.replay import replay
from tests import tiny_models
from tests.trl.test_online import make, prompts

MANY: dict[str, Any] = {
    "ledger": True, "max_steps": 6, "num_iterations": 2, "learning_rate": 1e-2,
    "save_strategy": "steps", "save_steps": 2, "save_total_limit": None,
    "missing_eos_penalty": 0.5, "temperature": 0.7,
}  # fmt: skip


def long_ones(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) / 3 + ids[0] % 3 for ids in completion_ids]


class Watched(TrainerCallback):
    """Notes what is learned from in each generation."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.seen: list[Any] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        buffer = self.trainer._generations.buffer
        if not self.seen or self.seen[-1] is not buffer:
            self.seen.append(buffer)


def few_ones(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that are often the same in a whole group."""
    return [float(ids[0] % 7 == 0) for ids in completion_ids]


def learning(folder: Path, kind: str = "grpo", **settings: Any) -> Any:
    reward = few_ones if "dynamic_sampling_rounds" in settings else long_ones
    return make(folder, kind, reward, **{**MANY, **settings})


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rows_are_what_was_learned(kind: str, tmp_path: Path) -> None:
    trainer, watched = learning(tmp_path, kind, log_completions=True), Watched()
    watched.trainer = trainer
    trainer.add_callback(watched)
    trainer.train()
    rows = read_ledger(tmp_path / "ledger").to_pylist()
    size = trainer.args.generation_batch_size
    assert [(x["step"], x["sample"]) for x in rows] == [
        (g, i) for g in range(1, 4) for i in range(size)
    ]
    assert [x["weights_version"] for x in rows[::size]] == [0, 2, 4]
    for g, parts in enumerate(watched.seen):
        own = rows[g * size : (g + 1) * size]
        learned = [
            (ids.tolist(), float(a))
            for part in parts
            for ids, a in zip(part.sequences, part.advantages, strict=True)
        ]
        kept = [(x["completion_ids"], x["advantages"][0]) for x in own]
        assert sorted(kept) == sorted(learned)
        for row in own:
            assert row["reward"] == np.float32(long_ones([row["completion_ids"]])[0])
            ended = row["finish_reason"] == "eos"
            assert row["score"] == np.float32(row["reward"]) - np.float32(0.0 if ended else 0.5)
            assert len(row["logprobs"]) == len(row["completion_ids"]) == len(row["advantages"])


STOPS = {"generation_kwargs": {"stop": [[i] for i in range(3, 20)]}}


@pytest.mark.parametrize("settings", [
    {}, {"dynamic_sampling_rounds": 2}, {"beta": 0.1},
    {"mask_truncated_completions": True, **STOPS},
    {"policy_support": "sampled", "top_p": 0.8},
    {"dynamic_sampling_rounds": 2, "bf16": True},
], ids=["plain", "resampled", "kl", "stops", "sets", "resampled in bf16"])  # fmt: skip
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_any_generation_is_drawn_again(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    learning(tmp_path, kind, **settings).train()
    before, resampled = sorted(tmp_path.rglob("*")), False
    for generation, begun_at in ((1, 0), (2, 2), (3, 4)):
        trainer = learning(tmp_path.parent / "other", kind, **settings)
        found = replay(trainer, tmp_path, generation)
        keys = [x.recorded["sample_id"] for x in found.samples][:: trainer.num_generations]
        replaced = keys != list(range(len(keys)))  # which are computed in batches of other sizes
        dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
        assert found.tolerance == (torch.finfo(dtype).eps ** 0.5 if replaced else 0.0)
        resampled |= replaced
        assert found.begun_at == begun_at
        assert found.identical, found.samples[0].differences()
        assert found.strayed is None
        assert sorted(tmp_path.rglob("*")) == before  # nothing is left behind
    assert resampled == ("dynamic_sampling_rounds" in settings)
    for path in tmp_path.glob("checkpoint-*"):
        path.rename(tmp_path / f"no-{path.name}")
    found = replay(learning(tmp_path.parent / "other", kind, **settings), tmp_path, 3)
    assert found.begun_at == 0
    assert found.identical, found.samples[0].differences()


def test_a_replay_does_no_evaluation_that_is_due(tmp_path: Path) -> None:
    evaluating: dict[str, Any] = {
        "eval_dataset": prompts(2), "eval_strategy": "steps", "eval_steps": 2,
        "num_generations_eval": 2, "per_device_eval_batch_size": 4,
    }  # fmt: skip

    class Fails(TrainerCallback):
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("no room")

    fails = learning(tmp_path, **evaluating)
    fails.add_callback(Fails())
    with pytest.warns(UserWarning, match="the state is saved"), pytest.raises(RuntimeError):
        fails.train()
    due = tmp_path / "checkpoint-2"
    shutil.copytree(due, tmp_path.parent / "due")
    learning(tmp_path, **evaluating).train(resume_from_checkpoint=True)
    shutil.rmtree(due)
    (tmp_path.parent / "due").rename(due)
    replayed = learning(tmp_path.parent / "other", **evaluating)
    replayed.add_callback(Fails())
    found = replay(replayed, tmp_path, 2)
    assert (found.begun_at, found.walked, found.strayed) == (2, 0, None)
    assert found.identical, found.samples[0].differences()


def test_another_model_is_told(tmp_path: Path) -> None:
    learning(tmp_path, save_strategy="no").train()
    other = make(
        tmp_path / "other", "grpo", long_ones, **MANY,
        model=tiny_models.language_model(perturbation=0.5),
    )  # fmt: skip
    assert not replay(other, tmp_path, 2).identical
    with pytest.raises(ValueError, match="does not have step 9: it has the steps 1 to 3"):
        replay(learning(tmp_path / "other"), tmp_path, 9)
    with pytest.raises(ValueError, match=r"the trainer has temperature=1.0, the run 0.7"):
        replay(learning(tmp_path / "other", temperature=1.0), tmp_path, 2)


@pytest.mark.filterwarnings("ignore:output_dir .* holds checkpoints")
def test_a_resumed_run_has_each_generation_once(tmp_path: Path) -> None:
    learning(tmp_path / "whole").train()

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("stopped")

    broken = learning(tmp_path / "broken")
    broken.add_callback(Stops())
    with pytest.raises(RuntimeError, match="stopped"), pytest.warns(UserWarning, match="saved in"):
        broken.train()
    learning(tmp_path / "broken").train(
        resume_from_checkpoint=str(tmp_path / "broken/checkpoint-2")
    )
    one, other = (read_ledger(tmp_path / x / "ledger").to_pylist() for x in ("whole", "broken"))
    assert one == other
    learning(tmp_path / "broken").train()  # anew: what was there is put aside
    assert read_ledger(tmp_path / "broken" / "ledger").to_pylist() == one
    assert (tmp_path / "broken" / "ledger" / "superseded-1").is_dir()
