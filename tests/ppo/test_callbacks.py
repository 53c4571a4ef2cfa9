"""Hooks of ``train`` when it does not come to its end, and what results look like."""

import json

import pytest
from tqdm.auto import tqdm

from fastrl import PPOConfig, PPOTrainer, TrainCallback, TrainResult
from fastrl.run.callbacks import Evaluation
from tests import tiny_models
from tests.golden import tiny

TEXTS = ["w3 w4", "w5 w6 w7", "w8", "w9 w10"]

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


class Closing(TrainCallback):
    closed = 0

    def close(self):
        self.closed += 1


class Failing:
    """A reward function that raises at its second call."""

    def __init__(self, error):
        self.error = error
        self.calls = 0

    def __call__(self, completions, **_):
        self.calls += 1
        if self.calls > 1:
            raise self.error
        return [0.0] * len(completions)


@pytest.fixture(scope="module")
def trainer():
    config = PPOConfig(batch_size=2, ppo_epochs=1)
    return PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer())


def train(trainer, reward_fn, **arguments):
    settings = {"max_new_tokens": 2, "do_sample": True, "top_k": 0, "top_p": 1.0}
    return trainer.train(
        reward_fn, prompts=TEXTS, generation_kwargs=settings, **{"steps": 3, **arguments}
    )


@pytest.mark.parametrize("error", [RuntimeError("late"), KeyboardInterrupt()])
def test_an_exception_leaves_no_bar_and_closes_every_callback(trainer, capsys, error):
    callback, before = Closing(), trainer.current_step
    with pytest.raises(type(error)):
        train(trainer, Failing(error), callbacks=[callback])
    assert not tqdm._instances
    assert callback.closed == 1
    err = capsys.readouterr().err
    line = f"PPO: stopped after {before + 1} of {before + 3} steps"
    assert err.endswith(f"{line}\n")
    assert err.replace("\r", "\n").split("\n")[-2] == line


def test_a_whole_run_closes_its_callbacks_and_keeps_its_bar(trainer, capsys):
    callback = Closing()
    train(trainer, lambda completions, **_: [0.0] * len(completions), steps=1, callbacks=[callback])
    assert callback.closed == 1
    err = capsys.readouterr().err
    assert "100%" in err.replace("\r", "\n").rstrip("\n").split("\n")[-1]
    assert "stopped" not in err


def evaluation(step: int, mean: float) -> Evaluation:
    return Evaluation(step, mean, 0.01, 0.5, [mean] * 256, ["a prompt"] * 256, ["text"] * 256)


def test_results_are_shown_in_a_line():
    assert repr(evaluation(0, 0.12)) == (
        "Evaluation(step=0, reward 0.120 ± 0.010, KL 0.50, prompts=256)"
    )
    history = [{"reward/mean": 0.1 + i, "ppo/loss": 1.0} for i in range(100)]
    result = TrainResult(history, [evaluation(0, 0.12), evaluation(100, 0.8)])
    assert repr(result) == "TrainResult(steps=100, reward 0.120 → 0.800, evaluations=2)"
    assert repr(TrainResult(history)) == (
        "TrainResult(steps=100, reward 0.100 → 99.100, evaluations=0)"
    )
    assert repr(TrainResult()) == "TrainResult(steps=0, evaluations=0)"


def test_a_history_is_bounded_and_says_so(monkeypatch):
    monkeypatch.setattr("fastrl.run.callbacks.KEPT_STEPS", 3)
    result = TrainResult()
    for step in range(3):
        result.add_step({"step": step})
    with pytest.warns(UserWarning, match="keeps the latest 3 steps; metrics.jsonl"):
        result.add_step({"step": 3})
    result.add_step({"step": 4})
    assert [row["step"] for row in result.history] == [2, 3, 4]
    assert repr(result) == "TrainResult(steps=5, evaluations=0)"


@pytest.mark.filterwarnings("ignore:after ConnectionError the state is saved")
@pytest.mark.parametrize("event", ["on_samples", "on_step", "on_eval"])
def test_metrics_are_written_though_a_callback_fails(tmp_path, event):
    """The file is written by the last of the callbacks."""
    rows = {}
    for name, fails in (("whole", False), ("run", True)):
        broken, calls = TrainCallback(), []

        def tired(*_, calls=calls, fails=fails):
            calls.append(1)
            if fails and len(calls) == 2:
                raise ConnectionError("a service is down")

        setattr(broken, event, tired)
        arguments = {"output": str(tmp_path / name), "save_every": 3, "eval_every": 1}
        arguments |= {"eval_prompts": ["w4"], "callbacks": [broken]}
        for resume in (False, True)[: 1 + fails]:
            policy = tiny_models.policy()
            one = PPOTrainer(PPOConfig(batch_size=2, ppo_epochs=1), policy, None, tiny.tokenizer())
            try:
                train(
                    one,
                    lambda completions, **_: [1.0] * len(completions),
                    **arguments,
                    resume=resume,
                )
            except ConnectionError:
                assert not resume
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [(x["step"], sorted(x)) for x in map(json.loads, lines)]
    assert rows["run"] == rows["whole"]
