"""Metrics of an evaluation are of its examples, however these are batched."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from fastrl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import SETTINGS, pairs
from tests.trl.test_online import KINDS, make, prompts

ROWS = 5
_UNPAIRED = [
    {"prompt": f"w5 w{6 + i} ", "completion": f"w{7 + i} w9 " + "w3 " * i, "label": i in (0, 4)}
    for i in range(ROWS)
]


def evaluated(folder: Path, kind: str, size: int) -> dict[str, float]:
    trainer, config, rows = {
        "dpo": (DPOTrainer, DPOConfig, pairs(ROWS)),
        "kto": (KTOTrainer, KTOConfig, Dataset.from_list(_UNPAIRED)),
    }[kind]
    own = {} if kind == "dpo" else {"loss_type": "apo_zero_unpaired"}
    args = config(str(folder), **{**SETTINGS, **own, "per_device_eval_batch_size": size})
    made = trainer(
        tiny_models.language_model("llama"),
        ref_model=tiny_models.language_model("llama", perturbation=0.05),
        args=args, train_dataset=rows, eval_dataset=rows, processing_class=tiny.tokenizer(),
    )  # fmt: skip
    return {k: x for k, x in made.evaluate().items() if "second" not in k and "runtime" not in k}


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_metrics_of_preferences_are_those_of_one_batch(kind: str, tmp_path: Path) -> None:
    """Also where a batch has no rejected completion."""
    whole = evaluated(tmp_path, kind, ROWS)
    assert {"eval_rewards/margins", "eval_logps/chosen", "eval_entropy"} <= whole.keys()
    for size in (4, 1):
        found = evaluated(tmp_path, kind, size)
        assert found == pytest.approx(whole, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_responses_are_those_of_all(kind: str, tmp_path: Path) -> None:
    said: list[tuple[float, int, bool]] = []

    def judge(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        said.extend(
            (float(i**2), len(ids), ids[-1] != tiny.EOS)
            for i, ids in zip(index, completion_ids, strict=True)
        )
        return [float(i**2) for i in index]

    trainer = make(
        tmp_path, kind, judge, eval_dataset=prompts(ROWS), num_generations_eval=2,
        per_device_eval_batch_size=8, max_completion_length=30, temperature=3.0,
    )  # fmt: skip
    found = trainer.evaluate()
    rewards, lengths, cut = zip(*said, strict=True)
    ended = [n for n, is_cut in zip(lengths, cut, strict=True) if not is_cut]
    assert len(said) == 2 * ROWS
    assert len(ended) > 1
    expected = {
        "reward": sum(rewards) / len(said),
        "rewards/judge/mean": sum(rewards) / len(said),
        "completions/mean_length": sum(lengths) / len(said),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/mean_terminated_length": sum(ended) / len(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
        "completions/clipped_ratio": sum(cut) / len(said),
    }
    assert {k: found[f"eval_{k}"] for k in expected} == pytest.approx(expected, rel=1e-6)
