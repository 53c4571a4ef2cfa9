"""PPO and RLOO with a reward model, by the names of TRL 0.10 to 1.9."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, DataCollatorWithPadding, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from fastrl import PPOv2Config, PPOv2Trainer, RLOOv1Config, RLOOv1Trainer
from fastrl.data import reads_eos
from fastrl.run.folder import RunFolder
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import reward_model, weights

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "total_episodes": 8,
    "response_length": 5, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none",
    "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "stop_token": "eos",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


def prompts(count: int = 64) -> Dataset:
    return Dataset.from_dict({"input_ids": [[3 + i, 4, 5][: 2 + i % 2] for i in range(count)]})


def made(folder: Path, **changes: Any) -> Any:
    given = {
        name: changes.pop(name)
        for name in ("eval_dataset", "callbacks", "data_collator")
        if name in changes
    }
    kind, config = (
        (RLOOv1Trainer, RLOOv1Config) if "rloo_k" in changes else (PPOv2Trainer, PPOv2Config)
    )
    values = {} if "rloo_k" in changes else {"value_model": reward_model("gpt2")}
    return kind(
        config(output_dir=str(folder), **{**SETTINGS, **changes}),
        tiny.tokenizer(),
        tiny_models.language_model(),
        None,
        reward_model("gpt2"),
        prompts(),
        **values,
        **given,
    )


class Seen(TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.events.append(f"begin of {state.max_steps}")

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.events.append(f"step {state.global_step}")

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.logs.append(logs)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.events.append("end")


def test_policy_and_values_learn_and_the_reward_does_not(tmp_path: Path, capsys: Any) -> None:
    seen = Seen()
    trainer = made(tmp_path, eval_dataset=prompts(3), num_sample_generations=1, callbacks=[seen])
    values = trainer.ppo.critic.unwrapped.pretrained_model
    before = [weights(x) for x in (trainer.model, values, trainer.reward_model)]
    trainer.train()
    after = [weights(x) for x in (trainer.model, values, trainer.reward_model)]
    moved = [
        any(not torch.equal(x[n], y[n]) for n in x) for x, y in zip(before, after, strict=True)
    ]
    assert moved == [True, True, False]
    assert seen.events == ["begin of 2", "step 1", "step 2", "end"]
    assert [log["episode"] for log in seen.logs] == [4, 8]
    assert "model response" in capsys.readouterr().out
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, weight in weights(loaded).items():
        assert torch.equal(weight, after[0][name])


def test_scores_are_the_reward_models_of_these_ids(tmp_path: Path) -> None:
    trainer = made(tmp_path, local_rollout_forward_batch_size=2)
    queries, said = [[3, 4, 5], [6, 7], [8, 9, 10]], [[11, 12], [13, 14, 15, 1], [16]]
    found = trainer.score([], [], said, query_ids=queries)
    for score, query, response in zip(found, queries, said, strict=True):
        ids = torch.tensor([query + response])
        assert score == pytest.approx(trainer.reward_model(ids).logits.item(), abs=1e-5)


@pytest.mark.parametrize("rloo", [{}, {"rloo_k": 2}], ids=["ppo", "rloo"])
def test_a_reward_model_reads_eos_where_it_was_trained_to(rloo: Any, tmp_path: Path) -> None:
    """By its record; a response that was cut has no end to read."""
    trainer = made(tmp_path, stop_token=None, stop_token_id=5, **rloo)
    said = [[11, tiny.EOS], [12, 5], [13, 14], [tiny.EOS]]
    read = {
        None: said,
        False: [[11], [12, 5], [13, 14], []],
        True: [[11, tiny.EOS], [12, 5, tiny.EOS], [13, 14], [tiny.EOS]],
    }
    for recorded, responses in read.items():
        reads_eos.record(trainer.reward_model, recorded)
        scores = trainer.score([], [], said, query_ids=[[3, 4]] * 4)
        for score, response in zip(scores, responses, strict=True):
            exact = trainer.reward_model(torch.tensor([[3, 4, *response]])).logits.item()
            assert score == pytest.approx(exact, abs=1e-5), recorded


def test_responses_end_at_the_stop_token(tmp_path: Path) -> None:
    settings = {"stop_token": None, "total_episodes": 64, "per_device_train_batch_size": 32}
    lengths = []
    for stop in (None, 5):
        (row,) = (
            made(
                tmp_path / str(stop), stop_token_id=stop, gradient_accumulation_steps=2, **settings
            )
            .train()
            .history
        )
        lengths.append(row["tokens/responses_len_mean"])
    assert lengths[1] < lengths[0]


def test_responses_without_an_end_lose_their_penalty(tmp_path: Path) -> None:
    settings = {"total_episodes": 4, "stop_token": None, "response_length": 1}
    scores = []
    for penalty in (None, 100.0):
        trainer = made(tmp_path / str(penalty), missing_eos_penalty=penalty, **settings)
        (row,) = trainer.train().history
        scores.append(row["ppo/mean_scores"])
    assert scores[0] - scores[1] == pytest.approx(100, abs=1e-3)  # none of one token ends


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 4), (2, 4), (1, 3)])
def test_a_batch_is_learned_from_in_its_mini_batches(
    minibatches: int, epochs: int, tmp_path: Path
) -> None:
    given = {"num_mini_batches": minibatches, "num_ppo_epochs": epochs}
    trainer = made(tmp_path, total_episodes=4, **given)
    (row,) = trainer.train().history
    assert row["ppo/optimizer_steps"] == minibatches * epochs
    config = trainer.ppo.config
    assert (config.batch_size, config.adap_kl_ctrl, config.init_kl_coef) == (4, False, 0.05)
    assert (config.vf_coef, config.temperature, config.max_grad_norm) == (0.1, 0.7, None)


def test_the_value_model_follows_the_schedule(tmp_path: Path) -> None:
    trainer = made(tmp_path, lr_scheduler_type="linear")
    trainer.train()
    rates = [x.param_groups[0]["lr"] for x in (trainer.ppo.optimizer, trainer.ppo.critic.optimizer)]
    assert rates == [0.0, 0.0]


def test_groups_without_a_value_model(tmp_path: Path) -> None:
    trainer = made(tmp_path, rloo_k=2)
    config = trainer.ppo.config
    assert (config.advantage, config.group_size, config.ratio_level) == ("rloo", 2, "product")
    before = weights(trainer.model)
    trainer.train()
    assert any(not torch.equal(before[n], x) for n, x in weights(trainer.model).items())
    assert trainer.ppo.critic is None


def test_names_of_before(tmp_path: Path) -> None:
    model, own = tiny_models.language_model(), tiny.tokenizer()
    trainer = RLOOv1Trainer(
        config=RLOOv1Config(output_dir=str(tmp_path), **SETTINGS),
        tokenizer=own,
        policy=model,
        ref_policy=copy.deepcopy(model),
        reward_model=reward_model("gpt2"),
        train_dataset=prompts(),
    )
    assert trainer.processing_class is own
    with pytest.raises(TypeError, match="PPOv2Trainer got an unexpected keyword argument 'polici'"):
        PPOv2Trainer(polici=model)


def test_settings_that_change_nothing_are_said_to(tmp_path: Path) -> None:
    told = "settings that change nothing in PPOv2Config: dataloader_num_workers=2 .*; max_grad"
    with pytest.warns(UserWarning, match=told):
        made(tmp_path, dataloader_num_workers=2, dataloader_drop_last=True, max_grad_norm=0.5)


def test_a_collator_that_is_not_called_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="PPOv2Trainer calls no data_collator"):
        made(tmp_path, data_collator=lambda rows: rows)
    made(tmp_path, data_collator=DataCollatorWithPadding(tiny.tokenizer()))  # as TRL pads


def test_one_process_shows_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = made(tmp_path, eval_dataset=prompts())
    for is_main in (True, False):
        monkeypatch.setattr(type(trainer.ppo.processes), "is_main", is_main)
        trainer.generate_completions(sampling=True)
        assert ("model response" in "".join(capsys.readouterr())) == is_main


def test_the_optimizers_have_their_settings(tmp_path: Path) -> None:
    settings = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3}
    trainer = made(tmp_path, **settings)
    for optimizer in (trainer.ppo.optimizer, trainer.ppo.critic.optimizer):
        (group,) = optimizer.param_groups
        assert (group["weight_decay"], group["betas"], group["eps"]) == (0.1, (0.8, 0.9), 1e-3)
    trainer = made(tmp_path, optim="sgd", weight_decay=0.1, optim_args="momentum=0.5")
    for optimizer in (trainer.ppo.optimizer, trainer.ppo.critic.optimizer):
        (group,) = optimizer.param_groups
        assert (group["weight_decay"], group["momentum"]) == (0.1, 0.5)


class Stopping(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_a_callback_ends_training(tmp_path: Path) -> None:
    seen = Seen()
    trainer = made(tmp_path, total_episodes=16, callbacks=[Stopping(), seen])
    assert len(trainer.train().history) == 2
    assert seen.events == ["begin of 4", "step 1", "step 2", "end"]


@pytest.mark.parametrize(("settings", "steps"), [
    ({"logging_steps": 0.5}, [2, 4]),
    ({"logging_steps": 3, "logging_first_step": True}, [1, 3]),
    ({"logging_strategy": "no"}, []),
])  # fmt: skip
def test_metrics_are_logged_as_often_as_was_asked(
    settings: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    seen = Seen()
    made(tmp_path, total_episodes=16, callbacks=[seen], **settings).train()
    assert [log["step"] for log in seen.logs] == steps


def test_metrics_go_to_every_tracker(tmp_path: Path, monkeypatch: Any) -> None:
    logged: dict[str, list[int]] = {"first": [], "second": []}
    for name, steps in logged.items():

        class Tracker(TrainerCallback):
            own = steps

            def on_log(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
                self.own.append(state.global_step)

        monkeypatch.setitem(INTEGRATION_TO_CALLBACK, name, Tracker)
    made(tmp_path, report_to=["first", "second"]).train()
    assert logged == {"first": [1, 2], "second": [1, 2]}


def test_runs_keep_what_is_in_their_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        made(tmp_path, save_strategy="steps", save_steps=0.5).train()
    runs = [sorted((tmp_path / f"run-{n}/checkpoints").glob("*")) for n in (1, 2)]
    assert [len(found) for found in runs] == [2, 2]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    made(tmp_path / "new").train()
    assert RunFolder.open(tmp_path / "new").config["command"] == "PPOv2Trainer"


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for changes, said in (
        ({"num_mini_batches": 3}, "must be a multiple of num_mini_batches"),
        ({"rloo_k": 3}, "must be a multiple of rloo_k"),
        ({"rloo_k": 2, "token_level_kl": True}, "token_level_kl=True is not supported"),
        ({"stop_token": "eos", "stop_token_id": 1}, "exclude each other"),
        ({"kl_estimator": "k3"}, "kl_estimator='k3' is not supported"),
        ({"ref_adapter_name": "b"}, "ref_adapter_name='b' is not supported"),
        ({"neftune_noise_alpha": 1.0}, "neftune_noise_alpha=1.0 is not supported by PPOv2Config"),
        ({"save_strategy": "epoch"}, "save_strategy='epoch' is not supported: choose one of no"),
        ({"stop_token": "period"}, "unknown stop_token 'period'"),
    ):
        with pytest.raises(ValueError, match=said):
            made(tmp_path, **changes)
    args = PPOv2Config(output_dir=str(tmp_path), **SETTINGS)
    model, tokenizer = tiny_models.language_model(), tiny.tokenizer()
    with pytest.raises(TypeError, match="PPOv2Trainer needs args"):
        PPOv2Trainer(None, tokenizer, model, None, reward_model("gpt2"), prompts())
    with pytest.raises(TypeError, match="PPOv2Trainer needs a value_model"):
        PPOv2Trainer(args, tokenizer, model, None, reward_model("gpt2"), prompts())
    both = reward_model("gpt2")
    with pytest.raises(ValueError, match="are one object"):
        PPOv2Trainer(args, tokenizer, model, None, both, prompts(), both)
    texts = Dataset.from_dict({"text": ["w3"]})
    with pytest.raises(ValueError, match="train_dataset needs a column input_ids of prompts"):
        PPOv2Trainer(
            args, tokenizer, model, None, reward_model("gpt2"), texts, reward_model("gpt2")
        )
