"""Statistics reach the console, a tracker, and the model card."""

import sys
import types

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from transformers import AutoTokenizer

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from fastrl.run import metrics as run_metrics
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
    return run_metrics.log_stats(accelerator, log_with, step, stats, batch, rewards, **rest)


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


def test_a_sample_is_shown_as_plain_text(capsys):
    log(batch={**BATCH, "response": ["\x1b[31mred", "[red]markup[/red] [/b]"]})
    text = capsys.readouterr().out
    assert r"\x1b[31mred" in text
    assert "[red]markup[/red] [/b]" in text


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
    of_tokens = [torch.tensor([0.5, 2.0]), torch.tensor([1.5])]
    trainer.log_stats(stats, {"query": ["a", "b"], "response": ["c", "d"]}, of_tokens)
    assert tracker.logged[-1][1]["env/reward_mean"] == 2.0


SAMPLING = {"max_new_tokens": 3, "do_sample": True}


class TableTracker(Tracker):
    """One with tables, as accelerate's of wandb has."""

    def __init__(self):
        super().__init__()
        self.tables, self.finished = [], 0

    def log_table(self, table_name, columns=None, data=None, dataframe=None, step=None, **kwargs):
        self.tables.append((step, table_name, columns, data))

    def finish(self):
        self.finished += 1


def train(trainer, rewards=(1.0, 3.0), **arguments):
    def reward_fn(prompts, **_):
        return list(rewards)[: len(prompts)]

    return trainer.train(
        reward_fn,
        **{
            "steps": 2,
            "prompts": ["w3 w4", "w5"],
            "generation_kwargs": SAMPLING,
            "progress": False,
            **arguments,
        },
    )


def test_training_sends_every_steps_numbers_and_samples_to_the_tracker():
    tracker = TableTracker()
    trainer = make_trainer(log_with=tracker)
    result = train(trainer, eval_prompts=["w7"])
    assert [step for step, _ in tracker.logged] == [0, 1, 2, 2]
    (_, before), *steps, (_, after) = tracker.logged
    for (_, values), metrics in zip(steps, result.history, strict=True):
        assert values == metrics
        assert values["reward/mean"] == 2.0
    for values, evaluation in ((before, result.evaluations[0]), (after, result.evaluations[1])):
        assert values["eval/reward_mean"] == evaluation.mean == 1.0
    assert [table[:2] for table in tracker.tables] == [
        (0, "eval/samples"),
        (1, "samples"),
        (2, "samples"),
        (2, "eval/samples"),
    ]
    for _, _, columns, rows in tracker.tables[1:3]:
        assert columns == ["query", "response", "reward"]
        assert {query for query, _, _ in rows} == {"w3 w4", "w5"}
        assert [reward for _, _, reward in rows] == [1.0, 3.0]
        assert all(isinstance(response, str) for _, response, _ in rows)
    assert tracker.tables[0][3] == [["w7", result.evaluations[0].completions[0], 1.0]]
    assert tracker.finished == 0  # training may go on
    train(trainer, steps=1)
    assert tracker.logged[-1][0] == 3  # trackers refuse steps that go back


def test_a_tracker_without_tables_gets_the_numbers():
    tracker = Tracker()
    train(make_trainer(log_with=tracker), steps=1)
    ((step, values),) = tracker.logged
    assert step == 1
    assert all(isinstance(value, (int, float)) for value in values.values())


def test_what_is_not_known_is_not_sent():
    tracker = Tracker()
    trainer = make_trainer(log_with=tracker, init_kl_coef=0.0, adap_kl_ctrl=False)
    assert np.isnan(train(trainer, steps=1).history[0]["objective/kl"])
    assert "objective/kl" not in tracker.logged[0][1]


def test_tensorboard_shows_samples_as_a_table_of_text(monkeypatch, tmp_path):
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            self.folder = folder

        def add_scalar(self, name, value, global_step=None):
            written.append((name, global_step, value))

        def add_text(self, name, value, global_step=None):
            written.append((name, global_step, value))

        def add_hparams(self, values, metric_dict):
            pass

        def flush(self):
            pass

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(torch.utils, "tensorboard", module, raising=False)
    trainer = make_trainer(log_with=TensorBoardTracker("run", tmp_path))
    train(trainer, steps=1, prompts=["w3", "w4"])
    ((_, step, table),) = [each for each in written if each[0] == "samples"]
    assert step == 1
    head, line, *rows = table.splitlines()
    assert (head, line) == ("| query | response | reward |", "| --- | --- | --- |")
    assert sorted(row.split(" | ")[0] for row in rows) == ["| w3", "| w4"]
    assert ("reward/mean", 1, 2.0) in written


def test_cells_cannot_break_a_table_of_text():
    assert run_metrics._markdown(["a"], [["x|y\nz"]]).splitlines()[2] == "| x\\|y<br>z |"


def test_wandb_gets_numbers_and_its_own_table_at_one_step(monkeypatch):
    class Run:
        def __init__(self):
            self.logged, self.finished = [], 0

        def log(self, values, step=None):
            self.logged.append((step, values))

        def finish(self):
            self.finished += 1

    class Table:
        def __init__(self, columns=None, data=None, dataframe=None):
            self.columns, self.data = columns, data

    run = Run()
    config = types.SimpleNamespace(update=lambda *a, **k: None)
    module = types.SimpleNamespace(Table=Table, init=lambda **k: run, config=config)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("accelerate.tracking.is_wandb_available", lambda: True)
    trainer = make_trainer(log_with=WandBTracker("here"))
    train(trainer, steps=1)
    steps = [step for step, _ in run.logged]
    assert set(steps) == {1}
    merged = {name: value for _, values in run.logged for name, value in values.items()}
    assert merged["reward/mean"] == 2.0
    assert merged["samples"].columns == ["query", "response", "reward"]
    assert len(merged["samples"].data) == 2
    trainer.accelerator.end_training()
    assert run.finished == 1


def test_a_saved_trainer_loads_with_tokenizer_and_model_card(tmp_path):
    trainer = make_trainer(model_name="org/base")
    folder = tmp_path / "tuned"
    trainer.save_pretrained(folder)
    card = (folder / "README.md").read_text()
    assert "\nlibrary_name: transformers\n" in card
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


def test_trackers_that_transformers_alone_knows_are_left_to_it():
    names = ["wandb", "codecarbon", "tensorboard"]
    assert run_metrics.split_trackers(names) == (["wandb", "tensorboard"], ["codecarbon"])
    with pytest.raises(ValueError, match="unknown tracker log_with='codecarbon'"):
        run_metrics.check_trackers("log_with", ["codecarbon"])
    with pytest.raises(ImportError, match="report_to=codecarbon needs a package"):
        run_metrics.check_trackers("report_to", ["codecarbon"], of_transformers=True)


def test_a_tracker_that_does_not_start_says_so():
    class Broken(Tracker):
        name = "broken"

        def start(self):
            raise RuntimeError("no key.")

    with pytest.raises(OSError, match=r"did not start \(broken\): RuntimeError: no key\. Mend"):
        make_trainer(log_with=Broken())


def test_trackio_gets_its_own_table(monkeypatch):
    class Table:
        def __init__(self, dataframe):
            self.rows = dataframe.to_dict(orient="records")

    class Trackio(Tracker):
        name = "trackio"

    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(Table=Table))
    tracker = Trackio()
    train(make_trainer(log_with=tracker), steps=1)
    (table,) = (values["samples"] for _, values in tracker.logged if "samples" in values)
    assert [row["reward"] for row in table.rows] == [1.0, 3.0]
    assert {row["query"] for row in table.rows} == {"w3 w4", "w5"}
