"""KTOTrainer: one step against float64 formulas, its KL, metrics, data, resuming."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from fastrl import KTOConfig, KTOTrainer
from fastrl_kernels import reference as formulas
from tests import tiny_models
from tests.trainers.conftest import GRADIENT_STEP, pairs
from tests.trl import test_dpo

LABELS = (True, False, True, True)


def completions(labels: Any = LABELS, seed: int = 0) -> Dataset:
    rows = pairs(len(labels), seed)
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": label}
            for row, label in zip(rows, labels, strict=True)
        ]
    )


def trainer(folder: Path, model: Any = None, **settings: Any) -> KTOTrainer:
    settings = {"train_dataset": completions(), **settings}
    return test_dpo.trainer(folder, model, (KTOTrainer, KTOConfig), **settings)


def sums(model: Any, rows: Any, column: str) -> Tensor:
    """[B] log-probs of whole completions, in float64."""
    of_tokens = test_dpo.token_logprobs(model, rows, column.removesuffix("_ids"))
    return torch.stack([x.sum() for x in of_tokens])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_a_steps_loss_and_metrics_follow_the_formula(tmp_path, kind, packed):
    model = tiny_models.language_model("llama")
    other = tiny_models.language_model("llama", perturbation=0.05)
    options = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    made = trainer(
        tmp_path, model, ref_model=other, loss_type=kind, padding_free=packed,
        **GRADIENT_STEP, **options,
    )  # fmt: skip
    rows, desirable = made.train_dataset, torch.tensor(LABELS)
    exact, theirs = copy.deepcopy(model).double(), copy.deepcopy(other).double()
    policy = sums(exact, rows, "completion_ids")
    with torch.no_grad():
        ref = sums(theirs, rows, "completion_ids")
        kl = torch.zeros(())
        if kind == "kto":
            ours, others = (sums(each, rows, "KL_completion_ids") for each in (exact, theirs))
            kl = (ours - others).mean()
    loss = formulas.kto_loss(policy, ref, desirable, kl, **options).mean()
    made.train()
    log = made.state.log_history[0]
    rewards = 0.5 * (policy.detach() - ref)
    expected = {
        "loss": float(loss.detach()),
        "kl": max(0.0, float(kl)),
        "rewards/chosen": float(rewards[desirable].mean()),
        "rewards/rejected": float(rewards[~desirable].mean()),
        "rewards/margins": float(rewards[desirable].mean() - rewards[~desirable].mean()),
        "logps/chosen": float(policy[desirable].detach().mean()),
        "logps/rejected": float(policy[~desirable].detach().mean()),
    }
    for name, value in expected.items():
        assert log[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name


def test_prompts_are_compared_with_the_completion_of_the_row_before_in_their_batch(tmp_path):
    made = trainer(
        tmp_path, per_device_train_batch_size=3, train_dataset=completions([True, False] * 3)
    )
    own, other = (made.train_dataset[name] for name in ("completion_ids", "KL_completion_ids"))
    assert [*other] == [own[i] for i in (2, 0, 1, 5, 3, 4)]


def test_pairs_become_two_completions(tmp_path):
    made = trainer(tmp_path, train_dataset=pairs(3))
    assert list(made.train_dataset["label"]) == [True] * 3 + [False] * 3
    assert made.train_dataset[0]["prompt_ids"] == made.train_dataset[3]["prompt_ids"]


def test_batches_of_one_kind_leave_out_the_other_kinds_metrics(tmp_path):
    made = trainer(tmp_path, train_dataset=completions([True] * 4))
    made.train()
    assert "rewards/chosen" in made.state.log_history[0]
    assert not {"rewards/rejected", "rewards/margins"} & set(made.state.log_history[0])


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_a_reference_computed_before_gives_the_same_loss(tmp_path, kind):
    logs = []
    for precompute in (False, True):
        made = trainer(
            tmp_path, loss_type=kind, precompute_ref_log_probs=precompute, max_steps=3,
            learning_rate=1e-2, eval_dataset=completions(seed=1), save_strategy="no",
        )  # fmt: skip
        made.train()
        logs.append((made.state.log_history[2]["loss"], made.evaluate()["eval_loss"]))
    assert logs[0] == pytest.approx(logs[1], rel=1e-4)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a loss": ({"loss_type": "bco"}, "unknown loss_type 'bco'"),
    "an order": ({"train_sampling_strategy": "random"}, "train_sampling_strategy='random' would"),
    "a weight": ({"desirable_weight": -1.0}, "desirable_weight must be 0 or more"),
    "passes": ({"micro_batch_tokens": 99}, "the KL of kto is one of the whole batch"),
    "single examples": ({"per_device_train_batch_size": 1}, "must be at least 2 for kto"),
}


@pytest.mark.parametrize("name", BAD)
def test_settings_that_cannot_be_are_refused(tmp_path, name):
    settings, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **settings)


def test_completions_without_a_label_are_refused(tmp_path):
    with pytest.raises(ValueError, match="lacks label"):
        trainer(tmp_path, train_dataset=completions().remove_columns("label"))


@pytest.mark.filterwarnings("ignore:the last row of a stream is dropped")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [3, 4, 5])
def test_no_row_is_paired_with_its_own_completion(tmp_path, count, stream):
    data = completions([True] * count)
    if stream:
        data = data.to_iterable_dataset()
    options = {"per_device_train_batch_size": 2, "max_steps": 1}
    rows = list(trainer(tmp_path, train_dataset=data, **options).train_dataset)
    assert len(rows) == (count // 2 * 2 if stream else count)
    assert all(row["KL_completion_ids"] != row["completion_ids"] for row in rows)
    said = [tuple(row["completion_ids"]) for row in rows]
    assert sorted(said) == sorted(tuple(row["KL_completion_ids"]) for row in rows)


def test_a_row_alone_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"one row has no other.*apo_zero_unpaired"):
        trainer(tmp_path, train_dataset=completions([True]))
