"""The libraries of a run's CPU products: in its record, and kept when it is resumed."""

import json

import pytest
import torch

from fastrl import PPOConfig, PPOTrainer
from fastrl.trainers.ppo.replay import replay
from fastrl_kernels import gemm
from tests import tiny_models
from tests.golden import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.skipif(
        gemm.OneDnn.absent() is not None, reason="torch has no oneDNN operator here"
    ),
]
TEXTS = [f"w{i} w{i + 1}" for i in range(3, 11)]


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Sets the library of fp32 products that a new process would take."""
    monkeypatch.setenv(gemm.TABLE_VARIABLE, str(tmp_path / "none.json"))
    return lambda name: monkeypatch.setenv(gemm.LIBRARY_VARIABLE, name)


def make_trainer() -> PPOTrainer:
    torch.manual_seed(0)
    config = PPOConfig(
        batch_size=4, mini_batch_size=2, ppo_epochs=2, learning_rate=1e-2,
        accelerator_kwargs={"cpu": True},
    )  # fmt: skip
    return PPOTrainer(config, tiny_models.policy("gpt2"), tokenizer=tiny.tokenizer())


def train(trainer, folder, steps, **options):
    def reward(prompts, completions, completion_ids, **_):
        return [float(ids[0] % 3) for ids in completion_ids]

    return trainer.train(
        reward, steps=steps, prompts=TEXTS, output=folder, progress=False,
        generation_kwargs={"max_new_tokens": 4}, save_every=1, keep_last=0, **options,
    )  # fmt: skip


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_a_run_goes_on_with_the_libraries_that_it_began_with(library, tmp_path):
    library("onednn")
    straight = make_trainer()
    train(straight, tmp_path / "straight", 3)
    train(make_trainer(), tmp_path / "run", 2)
    manifest = json.loads((tmp_path / "run/checkpoints/checkpoint-2/manifest.json").read_text())
    assert manifest["machine"]["products"]["float32"] == ["onednn", 0]

    library("mm")
    other = make_trainer()
    train(other, tmp_path / "other", 3)
    resumed = make_trainer()
    with pytest.warns(UserWarning, match="PRODUCTS=mm is not used: the run keeps the libraries"):
        train(resumed, tmp_path / "run", 3, resume=True)
    assert resumed.products.choices["float32"] == gemm.Choice("onednn", 0)
    expected, found, elsewhere = map(weights, (straight, resumed, other))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert any(not torch.equal(expected[name], elsewhere[name]) for name in expected)

    with pytest.warns(UserWarning, match="PRODUCTS=mm is not used: the run keeps the libraries"):
        replayed = replay(make_trainer(), tmp_path / "run", 3)
    assert replayed.strayed is None
    assert all(sample.identical for sample in replayed.samples)


def test_a_library_that_is_missing_on_resume_is_replaced_with_a_warning(
    library, tmp_path, monkeypatch
):
    library("onednn")
    train(make_trainer(), tmp_path, 1)
    library("mm")
    monkeypatch.setattr(gemm.OneDnn, "absent", staticmethod(lambda: "torch has no oneDNN"))
    with pytest.warns(UserWarning, match="products|PRODUCTS") as told:
        train(make_trainer(), tmp_path, 2, resume=True)
    said = [str(warning.message) for warning in told]
    assert sum("go to torch.mm instead of onednn: torch has no oneDNN" in x for x in said) == 1
    assert sum("saved under other conditions (products:" in x for x in said) == 1
