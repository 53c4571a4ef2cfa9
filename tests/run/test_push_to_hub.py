"""Uploads: one commit, and never a public repository where a private one was asked for."""

import types
from pathlib import Path

import huggingface_hub
import pytest
import torch

from fastrl import PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from fastrl.alignment import AlignmentConfig, Trainer
from tests import tiny_models
from tests.alignment.conftest import make_factory
from tests.golden import tiny
from tests.trl import test_ppo_v2

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)


@pytest.fixture
def calls(monkeypatch):
    """What reaches the Hub, in order; nothing leaves the machine."""
    calls = []

    class HfApi:
        public = False

        def __init__(self, token=None, **_):
            self.token = token

        def create_repo(self, repo_id, *, private=None, exist_ok=False, token=None, **_):
            calls.append(("create", repo_id, private))
            return types.SimpleNamespace(repo_id=repo_id)

        def repo_info(self, repo_id, **_):
            return types.SimpleNamespace(private=not self.public)

        def upload_folder(self, *, repo_id, folder_path, **options):
            files = sorted(p.name for p in Path(folder_path).iterdir())
            card = (Path(folder_path) / "README.md").read_text()
            calls.append(("upload", repo_id, files, card, options))
            return "commit"

        def __getattr__(self, name):
            raise AssertionError(f"HfApi.{name} was called")

    monkeypatch.setattr(huggingface_hub, "HfApi", HfApi)
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *_, **__: HfApi(), raising=False)
    monkeypatch.setattr("transformers.utils.hub.create_repo", HfApi().create_repo, raising=False)
    calls.append(HfApi)
    return calls


def make_trainer(**settings):
    config = PPOConfig(**{"batch_size": 2, "ppo_epochs": 1, **settings})
    return PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer())


def test_a_private_push_is_one_private_commit(calls):
    trainer = make_trainer()
    assert trainer.push_to_hub("org/tuned", private=True, commit_message="first") == "commit"
    _, created, uploaded = calls
    assert created == ("create", "org/tuned", True)
    _, repo, files, card, options = uploaded
    assert repo == "org/tuned"
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= set(files)
    assert "# org/tuned" in card
    assert 'from_pretrained("org/tuned")' in card
    assert options == {"commit_message": "first"}


def test_a_model_is_pushed_with_its_card(calls):
    tiny_models.policy().push_to_hub("org/model", private=True)
    _, created, uploaded = calls
    assert created == ("create", "org/model", True)
    assert "trained with fastrl" in uploaded[3]
    assert "model.safetensors" in uploaded[2]


@pytest.mark.parametrize("kind", ["trainer", "model"])
def test_arguments_that_nobody_knows_are_refused_before_anything_is_created(calls, kind):
    pushed = make_trainer() if kind == "trainer" else tiny_models.policy()
    with pytest.raises(TypeError, match="push_to_hub has no argument 'privat'"):
        pushed.push_to_hub("org/tuned", privat=True)
    assert len(calls) == 1


def test_a_public_repository_is_not_taken_for_a_private_one(calls):
    calls[0].public = True
    with pytest.raises(ValueError, match="org/tuned exists and is public"):
        make_trainer().push_to_hub("org/tuned", private=True)
    assert [call[0] for call in calls[1:]] == ["create"]
    make_trainer().push_to_hub("org/tuned")
    assert calls[-1][0] == "upload"


def test_the_best_model_is_pushed_as_privately_as_asked_for(calls):
    where = {"repo_id": "org/best", "private": True}
    trainer = make_trainer(push_to_hub_if_best_kwargs=where)
    prompts, responses = tiny_models.prompts(3, 2), tiny_models.prompts(2, 4, seed=1)
    trainer.step(prompts, responses, [torch.tensor(1.0), torch.tensor(2.0)])
    assert [call[0] for call in calls[1:]] == ["create", "upload"]
    assert calls[1][2] is True


def test_a_step_that_fails_before_its_update_pushes_nothing(calls, monkeypatch):
    trainer = make_trainer(push_to_hub_if_best_kwargs={"repo_id": "org/best"})
    prompts, responses = tiny_models.prompts(3, 2), tiny_models.prompts(2, 4, seed=1)
    samples = prompts, responses, [torch.tensor(1.0), torch.tensor(2.0)]
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "compute_advantages", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.step(*samples)
    assert len(calls) == 1
    trainer.step(*samples)
    assert [call[0] for call in calls[1:]] == ["create", "upload"]


@pytest.fixture
def sft(tmp_path):
    return SFTTrainer(
        tiny_models.language_model(),
        SFTConfig(
            output_dir=str(tmp_path / "sft"),
            report_to="none",
            use_cpu=True,
            hub_model_id="org/sft",
            hub_private_repo=True,
        ),
        train_dataset=[{"text": "w3 w4"}] * 2,
        processing_class=tiny.tokenizer(),
    )


def test_a_supervised_trainer_pushes_fastrls_card_to_a_private_repository(calls, sft):
    sft.push_to_hub()
    _, created, uploaded = calls
    assert created == ("create", "org/sft", True)
    assert "supervised fine-tuning (SFT)" in uploaded[3]
    assert 'from_pretrained("org/sft")' in uploaded[3]


@pytest.mark.parametrize("name", ["dataset_name", "dataset_tags"])
def test_a_pushed_card_names_the_data_set_that_push_to_hub_is_given(calls, sft, name):
    sft.push_to_hub(**{name: "org/texts"})
    assert "datasets:\n- org/texts" in calls[-1][3]


def test_a_card_warns_by_name_of_what_it_does_not_show(calls, sft):
    with pytest.warns(UserWarning, match="does not show tasks and dataset_args"):
        sft.create_model_card(tasks="text-generation", dataset_args="train")
    with pytest.raises(TypeError, match="licence"):
        sft.create_model_card(licence="mit")


def test_a_pushed_checkpoint_has_its_value_head(calls, tmp_path):
    factory = make_factory("reinforcement-learning")
    args = AlignmentConfig(str(tmp_path), use_cpu=True, report_to="none", hub_model_id="org/x")
    trainer = Trainer(tiny_models.policy(), args, factory, "ppo")
    trainer.create_model_card()
    trainer.save_model(str(tmp_path / "checkpoint-1"))
    trainer.hub_model_id = "org/x"
    trainer.push_in_progress = None
    trainer.push_checkpoint(tmp_path / "checkpoint-1")
    assert {"model.safetensors", "value_head.safetensors"} <= set(calls[-1][2])


def test_the_trainer_of_rewards_by_a_model_pushes_what_it_saves(calls, tmp_path):
    where = {"hub_model_id": "org/ppo", "hub_private_repo": True, "hub_revision": "next"}
    test_ppo_v2.made(tmp_path / "local").save_model()
    assert len(calls) == 1
    test_ppo_v2.made(tmp_path / "run", push_to_hub=True, **where).save_model()
    _, created, uploaded = calls
    assert created == ("create", "org/ppo", True)
    assert uploaded[-1] == {"revision": "next"}
