"""Statistics reach the console, a tracker, and the model card."""

import sys
import types

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from transformers import AutoTokenizer

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from fastrl.trainers import tracking
from tests import tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")

STATS = {"objective/kl": 1.25, "objective/kl_dist": np.array([1.0, 1.5], dtype=np.float32)}
BATCH = {"query": ["first", "second"], "response": ["alpha", "beta"], "label": [0, 1]}
REWARDS = [torch.tensor(1.0), torch.tensor(2.0)]


class Tracker(GeneralTracker):
    """Keeps what accelerate hands it."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.config = None
        self.logged = []

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **kwargs):
        self.logged.append((step, values))


def make_trainer(**settings):
    config = PPOConfig(**{"batch_size": 2, "ppo_epochs": 1, **settings})
    return PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer())


def log(log_with=None, accelerator=None, step=3, stats=STATS, batch=BATCH, rewards=REWARDS, **rest):
    rest.setdefault("columns_to_log", ("query", "response"))
    accelerator = accelerator or Accelerator()
    return tracking.log_stats(accelerator, log_with, step, stats, batch, rewards, **rest)


def test_the_console_gets_a_table_of_samples(capsys):
    make_trainer().log_stats(STATS, BATCH, REWARDS)
    text = capsys.readouterr().out
    assert "reward 1.500 ± 0.707, KL 1.250" in text
    for cell in ("query", "response", "reward", "first", "beta", "1.000", "2.000"):
        assert cell in text
    assert "label" not in text


def test_the_console_shows_other_columns_and_few_rows(capsys):
    batch = {"query": [f"q{i}" for i in range(9)], "label": list(range(9))}
    log(batch=batch, rewards=[0.5] * 9, columns_to_log=["query", "label", "absent"])
    text = capsys.readouterr().out
    assert "label" in text
    assert "q3" in text
    assert "q4" not in text
    assert "absent" not in text


def test_without_columns_the_title_is_still_there(capsys):
    log(batch={})
    assert "reward 1.500 ± 0.707" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "rewards", [REWARDS, [1.0, 2.0], torch.tensor([1.0, 2.0]), [torch.tensor([1.0]), 2]]
)
def test_rewards_of_any_kind_are_summarised(rewards, capsys):
    logs = log(rewards=rewards)
    assert logs["env/reward_mean"] == 1.5
    assert logs["env/reward_std"] == pytest.approx(0.5**0.5)
    assert logs["env/reward_dist"].tolist() == [1.0, 2.0]
    assert logs["objective/kl"] == 1.25


def test_one_reward_has_no_deviation(capsys):
    assert log(batch={"query": ["q"]}, rewards=[3.0])["env/reward_std"] == 0.0


def test_statistics_are_left_as_they_are(capsys):
    stats = dict(STATS)
    log(stats=stats)
    assert set(stats) == set(STATS)


def test_wandb_gets_distributions_and_its_own_table(monkeypatch):
    class Table:
        def __init__(self, columns, rows):
            self.columns, self.rows = columns, rows

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Table=Table))
    accelerator, logged = Accelerator(), []
    monkeypatch.setattr(accelerator, "log", lambda values, step: logged.append((step, values)))
    log("wandb", accelerator)
    ((step, values),) = logged
    assert step == 3
    assert values["game_log"].columns == ["query", "response", "reward"]
    assert values["game_log"].rows == [["first", "alpha", 1.0], ["second", "beta", 2.0]]
    assert values["objective/kl_dist"].tolist() == [1.0, 1.5]


def test_another_process_than_the_main_one_logs_nothing(monkeypatch, capsys):
    monkeypatch.setattr(Accelerator, "is_main_process", property(lambda self: False))
    assert log() == {}
    assert capsys.readouterr().out == ""


def test_a_tracker_gets_the_settings_and_the_numbers_of_a_step(capsys):
    tracker = Tracker()
    trainer = make_trainer(log_with=tracker, tracker_project_name="here", learning_rate=2e-5)
    assert tracker.config["learning_rate"] == 2e-5
    assert tracker.config["batch_size"] == 2
    queries, responses = tiny_models.prompts(3, 2), tiny_models.prompts(2, 4, seed=1)
    stats = trainer.step(queries, responses, REWARDS)
    trainer.log_stats(stats, {"query": ["a", "b"], "response": ["c", "d"]}, REWARDS)
    ((step, values),) = tracker.logged
    assert step == 1
    assert values["env/reward_mean"] == 1.5
    assert values["ppo/mean_scores"] == 1.5
    assert all(isinstance(value, (int, float)) for value in values.values())
    assert capsys.readouterr().out == ""


def test_a_saved_trainer_loads_with_tokenizer_and_model_card(tmp_path):
    trainer = make_trainer(model_name="org/base")
    folder = tmp_path / "tuned"
    trainer.save_pretrained(folder)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# tuned" in card
    assert "`org/base`" in card
    assert 'from_pretrained("tuned")' in card
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == tiny.EOS
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    state = loaded.state_dict()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(state[name], value.cpu()), name


def test_a_model_card_that_is_there_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    trainer = make_trainer()
    trainer.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    trainer.create_model_card(tmp_path / "other", "org/tuned")
    assert "# org/tuned" in (tmp_path / "other" / "README.md").read_text()
