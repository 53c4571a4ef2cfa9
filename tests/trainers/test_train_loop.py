"""``PPOTrainer.train``: what the reward function, the callbacks and the result get."""

import json
import math

import pytest
import torch
from datasets import Dataset

from fastrl import JsonlCallback, PPOConfig, PPOTrainer, ProgressCallback, TrainCallback
from fastrl.trainers.loop import Prompts
from tests import tiny_models
from tests.golden import tiny

TEXTS = ["w3 w4", "w5 w6 w7", "w8", "w9 w10", "w11 w12", "w13 w14 w15 w16"]
SAMPLING = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, "top_p": 1.0}

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


def make_trainer(dataset=None, **settings):
    config = PPOConfig(**{"batch_size": 2, "ppo_epochs": 1, "learning_rate": 1e-3, **settings})
    return PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer(), dataset=dataset)


@pytest.fixture(scope="module")
def trainer():
    """For tests that do not mind where training stands."""
    return make_trainer()


def run(trainer, reward_fn, **arguments):
    return trainer.train(
        reward_fn,
        **{
            "steps": 1,
            "prompts": TEXTS,
            "generation_kwargs": SAMPLING,
            "progress": False,
            **arguments,
        },
    )


def zero(completions, **_):
    return [0.0] * len(completions)


class Recorder:
    """A reward function that keeps its arguments."""

    def __init__(self, reward=lambda ids: float(len(ids))):
        self.calls = []
        self.reward = reward

    def __call__(self, **arguments):
        self.calls.append(arguments)
        return [self.reward(ids) for ids in arguments["completion_ids"]]


# ---------------------------------------------------------------------- rewards


def test_the_reward_function_gets_prompts_completions_and_their_tokens(trainer):
    reward = Recorder()
    run(trainer, reward, steps=2)
    assert len(reward.calls) == 2
    tokenizer = trainer.tokenizer
    for call in reward.calls:
        assert set(call) == {"prompts", "completions", "completion_ids"}
        assert set(call["prompts"]) <= set(TEXTS)
        columns = (call["prompts"], call["completions"], call["completion_ids"])
        for prompt, text, ids in zip(*columns, strict=True):
            assert isinstance(ids, list)
            assert 1 <= len(ids) <= 4
            whole = tokenizer(prompt).input_ids + ids
            assert prompt + text == tokenizer.decode(whole, skip_special_tokens=True)


def test_the_reward_function_gets_the_other_columns_row_by_row(trainer):
    dataset = Dataset.from_dict(
        {"prompt": TEXTS, "answer": [t[::-1] for t in TEXTS], "level": list(range(6))}
    )
    reward = Recorder()
    run(trainer, reward, steps=3, prompts=None, dataset=dataset)
    seen = []
    for call in reward.calls:
        assert call["answer"] == [p[::-1] for p in call["prompts"]]
        assert [TEXTS[level] for level in call["level"]] == call["prompts"]
        seen += call["prompts"]
    assert sorted(seen) == sorted(TEXTS)  # one pass in batches of two


def test_rewards_reach_the_step_and_the_history(trainer):
    result = run(trainer, lambda completions, **_: [1.0, torch.tensor([4.0])], steps=2)
    assert len(result.history) == 2
    for metrics in result.history:
        assert metrics["reward/mean"] == metrics["ppo/mean_scores"] == 2.5
        assert metrics["reward/std"] == pytest.approx(math.sqrt(4.5))
        assert metrics["perf/rollout_tokens_per_second"] > 0
        parts = ("time/rollout", "time/reward", "time/ppo/total")
        assert metrics["time/step"] == pytest.approx(sum(metrics[p] for p in parts))
        assert all(isinstance(value, (int, float)) for value in metrics.values())


@pytest.mark.parametrize(("ends", "score"), [(True, 1.0), (False, -2.0)])
def test_a_missing_eos_is_penalised_in_the_score_alone(trainer, monkeypatch, ends, score):
    rollout = trainer.rollout

    def ending(*arguments):
        out = rollout(*arguments)
        out.finish_reasons = ["eos" if ends else "length"] * len(out.sequences)
        return out

    monkeypatch.setattr(trainer, "rollout", ending)
    result = run(trainer, lambda completions, **_: [1.0] * 2, missing_eos_penalty=3.0)
    assert result.history[0]["reward/mean"] == 1.0
    assert result.history[0]["ppo/mean_scores"] == score


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], r"reward_fn returned 1 rewards for 2 completions"),
        ([1.0] * 3, r"reward_fn returned 3 rewards for 2 completions"),
        ([1.0, math.nan], r"reward_fn returned nan for completion 1"),
        ([-math.inf, 1.0], r"reward_fn returned -inf for completion 0"),
        ([1.0, None], r"reward_fn returned None for completion 1"),
        ([[1.0, 2.0], 1.0], r"reward_fn returned \[1\.0, 2\.0\] for completion 0"),
        (["good", 1.0], r"reward_fn returned 'good' for completion 0"),
        (None, r"reward_fn returned None"),
    ],
)
def test_wrong_rewards_are_refused(trainer, rewards, message):
    before = trainer.current_step
    with pytest.raises(ValueError, match=message):
        run(trainer, lambda **_: rewards)
    assert trainer.current_step == before


# ---------------------------------------------------------------------- prompts


def test_prompts_may_be_token_ids(trainer):
    reward = Recorder()
    run(trainer, reward, prompts=[torch.tensor([3, 4]), torch.tensor([5, 6])])
    assert sorted(reward.calls[0]["prompts"]) == ["w3 w4", "w5 w6"]


@pytest.mark.parametrize("column", ["prompt", "query", "input_ids", "question"])
def test_the_prompts_column_is_found_or_named(trainer, column):
    values = [[3, 4], [5], [6, 7]] if column == "input_ids" else TEXTS[:3]
    dataset = Dataset.from_dict({column: values, "other": list("abc")})
    reward = Recorder()
    name = {"prompt_column": column} if column == "question" else {}
    run(trainer, reward, prompts=None, dataset=dataset, **name)
    assert set(reward.calls[0]) == {"prompts", "completions", "completion_ids", "other"}
    expected = ["w3 w4", "w5", "w6 w7"] if column == "input_ids" else TEXTS[:3]
    assert set(reward.calls[0]["prompts"]) <= set(expected)


def test_the_trainers_own_dataset_is_used_without_another():
    dataset = Dataset.from_dict({"query": TEXTS, "input_ids": [[3]] * len(TEXTS)})
    reward = Recorder()
    run(make_trainer(dataset), reward, prompts=None)
    assert set(reward.calls[0]["prompts"]) <= set(TEXTS)


@pytest.mark.parametrize("name", [None, "question"])
def test_a_missing_column_is_refused_with_those_there_are(trainer, name):
    dataset = Dataset.from_dict({"text": TEXTS, "label": [0] * len(TEXTS)})
    with pytest.raises(ValueError, match=r"columns are text, label: .*prompt_column"):
        run(trainer, zero, prompts=None, dataset=dataset, prompt_column=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"prompts": TEXTS[:1]}, "1 prompts are fewer than batch_size=2"),
        ({"prompts": None}, "nothing to train on"),
        ({"dataset": Dataset.from_dict({"prompt": TEXTS})}, "prompts or dataset, not both"),
        ({"prompts": "w3 w4"}, "prompts must be a list of texts, got the text 'w3 w4'"),
        ({"prompts": ["w3", ""]}, r"prompts\[1\] is empty"),
        ({"eval_prompts": ["w3", "w4", ""]}, r"prompts\[2\] is empty"),
    ],
)
def test_impossible_runs_are_refused(trainer, arguments, message):
    with pytest.raises(ValueError, match=message):
        run(trainer, zero, **arguments)


def test_batches_are_whole_seeded_and_pass_over_all_prompts():
    prompts = Prompts.from_list(TEXTS[:5], tiny.tokenizer())

    def drawn(seed, count):
        batches = prompts.batches(2, seed)
        return [next(batches).texts for _ in range(count)]

    passes = drawn(0, 40)
    assert all(len(batch) == 2 for batch in passes)
    for first, second in zip(passes[::2], passes[1::2], strict=True):
        assert len({*first, *second}) == 4
    assert {text for batch in passes for text in batch} == set(TEXTS[:5])
    assert drawn(0, 40) == passes
    assert drawn(1, 40) != passes


# ---------------------------------------------------------------------- evaluation


def test_an_unchanged_policy_evaluates_the_same_every_time():
    trainer = make_trainer(learning_rate=0.0)
    result = run(trainer, Recorder(), steps=2, eval_prompts=TEXTS[:3], eval_every=1)
    first, *others = result.evaluations
    assert [e.step for e in result.evaluations] == [0, 1, 2]
    for other in others:
        assert (other.completions, other.rewards) == (first.completions, first.rewards)
    assert first.kl == pytest.approx(0.0, abs=1e-6)
    assert first.prompts == TEXTS[:3]
    assert first.mean == pytest.approx(sum(first.rewards) / 3)
    squares = sum((r - first.mean) ** 2 for r in first.rewards)
    assert first.sem == pytest.approx(math.sqrt(squares / 2 / 3))


def test_evaluating_does_not_change_training():
    histories = []
    for settings in ({}, {"eval_prompts": TEXTS[:3], "eval_every": 1}):
        result = run(make_trainer(), Recorder(), steps=2, **settings)
        histories.append([m["objective/kl"] for m in result.history])
    assert histories[0] == pytest.approx(histories[1], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("every", "expected"), [(0, [0, 3]), (2, [0, 2, 3]), (3, [0, 3])])
def test_evaluations_come_before_after_and_in_between(trainer, every, expected):
    result = run(trainer, zero, steps=3, eval_prompts=["w3"], eval_every=every)
    assert [e.step for e in result.evaluations] == expected
    assert result.evaluations[0].sem == 0.0  # of one prompt


def test_without_evaluation_prompts_there_is_no_evaluation(trainer):
    assert run(trainer, zero, eval_every=1).evaluations == []


# ---------------------------------------------------------------------- callbacks


class Events(TrainCallback):
    def __init__(self, name, events):
        self.name = name
        self.events = events

    def on_train_begin(self, trainer, total_steps):
        self.events.append((self.name, "begin", total_steps))

    def on_step(self, trainer, step, metrics):
        assert "reward/mean" in metrics
        self.events.append((self.name, "step", step))

    def on_eval(self, trainer, step, evaluation):
        assert evaluation.step == step
        self.events.append((self.name, "eval", step))

    def on_train_end(self, trainer, result):
        self.events.append((self.name, "end", len(result.history)))


def test_callbacks_are_told_in_order(trainer):
    events = []
    run(
        trainer,
        zero,
        steps=2,
        eval_prompts=["w3"],
        eval_every=1,
        callbacks=[Events("a", events), TrainCallback(), Events("b", events)],
    )
    expected = [("begin", 2), ("eval", 0), ("step", 1), ("eval", 1), ("step", 2), ("eval", 2)]
    assert events == [(name, *what) for what in [*expected, ("end", 2)] for name in "ab"]


def test_metrics_go_to_a_file_line_by_line(trainer, tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    for _ in range(2):  # a second run starts the file anew
        result = run(
            trainer,
            zero,
            steps=2,
            eval_prompts=["w3", "w4"],
            callbacks=[JsonlCallback(path)],
        )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2]
    assert set(lines[0]) == {"step", "eval/reward_mean", "eval/reward_sem", "eval/kl"}
    assert lines[1] == {"step": 1, **result.history[0]}
    assert lines[3]["eval/kl"] == result.evaluations[1].kl


def test_progress_shows_reward_kl_and_speed(trainer, capfd):
    run(trainer, lambda **_: [1.25] * 2, eval_prompts=["w3", "w4"], progress=True)
    out, err = capfd.readouterr()
    assert "PPO step 0: held-out reward +1.250 ± 0.000, KL" in out + err
    assert "reward +1.250" in err
    assert "tok/s" in err


def test_a_progress_bar_names_its_run(trainer, capfd):
    run(trainer, zero, callbacks=[ProgressCallback("sentiment")])
    assert "sentiment: 100%" in capfd.readouterr().err
