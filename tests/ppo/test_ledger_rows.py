"""The ledger of ``train()``: what each sample was, what it was given, and how it is drawn again."""

import shutil

import numpy as np
import pytest
import torch

from fastrl import PPOConfig, PPOTrainer, TrainCallback
from fastrl.rollout import RolloutOutput
from fastrl.run.ledger import Ledger, read_facts, read_ledger
from tests import seq2seq_models, tiny_models
from tests.golden import tiny

TEXTS = ["w3 w4", "w5 w6 w7", "w8", "w9 w10", "w11 w12", "w13 w14 w15 w16"]
SAMPLING = {"max_new_tokens": 4, "top_k": 0}
GRPO = {"advantage": "grpo", "group_size": 2, "kl_in": "loss"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
]


def make_trainer(policy=None, **settings):
    settings = {"batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-3, **settings}
    return PPOTrainer(PPOConfig(**settings), policy or tiny_models.policy(), None, tiny.tokenizer())


def lengths(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def train(trainer, folder, reward=lengths, **arguments):
    settings = {"steps": 3, "prompts": TEXTS, "generation_kwargs": SAMPLING, "progress": False}
    return trainer.train(reward, ledger=folder, **{**settings, **arguments})


class Callback(TrainCallback):
    def __init__(self, function):
        self.function = function

    def on_step(self, trainer, step, metrics):
        self.function(trainer)


class Watched:
    """Notes what a trainer's ``step`` is given, and what it learns from."""

    def __init__(self, trainer):
        self.given, self.learned, self.steps = [], [], []
        step, scored = trainer.step, trainer.compute_advantages

        def noted_step(queries, responses, scores, rollout):
            self.given.append((queries, responses, scores, rollout))
            stats = step(queries, responses, scores, rollout=rollout)
            self.steps.append(stats["ppo/optimizer_steps"])
            return stats

        def noted_advantages(values, rewards, mask):
            found = scored(values, rewards, mask)
            self.learned.append((mask, found[1]))
            return found

        trainer.step, trainer.compute_advantages = noted_step, noted_advantages


@pytest.mark.parametrize("settings", [{}, {**GRPO, "temperature": 0.7}], ids=["ppo", "grpo"])
def test_rows_are_what_the_steps_learned_from(tmp_path, settings):
    trainer = make_trainer(**settings)
    watched = Watched(trainer)
    sampling = {**SAMPLING, "eos_token_id": list(range(40, tiny.VOCABULARY))}
    result = train(trainer, tmp_path, missing_eos_penalty=0.5, generation_kwargs=sampling)
    rows = read_ledger(tmp_path).to_pylist()
    assert [(row["step"], row["sample"]) for row in rows] == [
        (step, sample) for step in (1, 2, 3) for sample in range(4)
    ]
    for row in rows:
        i, j = row["step"] - 1, row["sample"]
        queries, responses, scores, rollout = watched.given[i]
        assert row["prompt"] == TEXTS[row["prompt_row"]]
        assert row["prompt_ids"] == queries[j].tolist()
        assert row["completion_ids"] == responses[j].tolist()
        ids = row["prompt_ids"] + row["completion_ids"]
        whole = trainer.tokenizer.decode(ids, skip_special_tokens=True)
        assert row["prompt"] + row["completion"] == whole
        assert row["finish_reason"] == rollout.finish_reasons[j]
        assert row["reward"] == row["reward/lengths"] == len(responses[j])
        assert row["score"] == float(scores[j])
        assert row["score"] == row["reward"] - 0.5 * (row["finish_reason"] == "length")
        np.testing.assert_array_equal(row["logprobs"], rollout.logprobs[j].numpy())
        np.testing.assert_array_equal(row["values"], rollout.values[j].numpy())
        mask, advantages = watched.learned[i]
        np.testing.assert_array_equal(row["advantages"], advantages[j][mask[j]].cpu().numpy())
        assert row["weights_version"] == sum(watched.steps[:i])
        assert (row["slots"], row["slot_length"]) == (4, 48)
        size = trainer.config.group_size
        assert (row["sample_id"], row["number"]) == (j // size, j % size)
    assert len({row["seed"] for row in rows}) == 3
    assert len({len(row["completion_ids"]) for row in rows}) > 2
    assert all(metrics["time/ledger"] > 0 for metrics in result.history)
    (facts,) = read_facts(tmp_path, 2, 2)
    assert facts["settings"]["temperature"] == trainer.config.temperature
    assert facts["generation_kwargs"]["max_new_tokens"] == 4


@pytest.mark.parametrize("backend", ["engine", "generate"])
def test_samples_are_drawn_again_from_the_weights_and_what_is_noted(tmp_path, backend):
    """In another order of steps, by another trainer, whatever torch's generator."""
    settings = {"rollout_backend": backend, "learning_rate": 0.0, "temperature": 0.8, **GRPO}
    train(make_trainer(**settings), tmp_path)
    other = make_trainer(**settings)
    torch.manual_seed(99)
    for step in (3, 1, 2):
        rows = read_ledger(tmp_path, None, step, step).to_pylist()
        room = {"slots": rows[0]["slots"], "length": rows[0]["slot_length"]}
        other.rollouts.load_state_dict({"rooms": {"policy": room}})
        prompts = [torch.tensor(row["prompt_ids"]) for row in rows[::2]]
        before = torch.get_rng_state()
        out = other.rollouts.sample(prompts, SAMPLING, 2, rows[0]["seed"])
        assert torch.equal(torch.get_rng_state(), before)
        assert [x.tolist() for x in out.sequences] == [row["completion_ids"] for row in rows]
        assert out.finish_reasons == [row["finish_reason"] for row in rows]
        assert (out.sample_ids, out.numbers) == ([0, 0, 1, 1], [0, 1, 0, 1])
        if backend == "engine":
            for row, logprobs in zip(rows, out.logprobs_at(0.8), strict=True):
                np.testing.assert_array_equal(row["logprobs"], logprobs.numpy())
        else:  # model.generate computes none
            assert all(row["logprobs"] is row["values"] is None for row in rows)


@pytest.mark.parametrize("backend", ["engine", "generate"])
def test_a_run_with_a_ledger_is_the_run_without(tmp_path, backend):
    histories, weights = [], []
    for folder in (False, tmp_path):
        trainer = make_trainer(rollout_backend=backend)
        histories.append(train(trainer, folder, eval_prompts=TEXTS[:3], eval_every=1).history)
        weights.append(trainer.model.state_dict())
    for name, number in histories[0][-1].items():
        if not name.startswith(("time/", "perf/")):
            assert histories[1][-1][name] == number, name
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-5, atol=1e-5)
    assert "time/ledger" not in histories[0][0]


def test_a_prompts_column_of_an_encoder_decoder_is_what_the_encoder_reads(tmp_path):
    trainer = make_trainer(seq2seq_models.policy("bart"))
    watched = Watched(trainer)
    train(trainer, tmp_path, steps=1)
    queries, responses, _, _ = watched.given[0]
    rows = read_ledger(tmp_path).to_pylist()
    assert [row["prompt_ids"] for row in rows] == [x.tolist() for x in queries]
    assert [row["completion_ids"] for row in rows] == [x.tolist() for x in responses]
    assert [len(row["advantages"]) for row in rows] == [len(x) for x in responses]


@pytest.mark.filterwarnings("ignore:NaN logits in")
def test_a_sample_that_was_left_out_has_no_advantages_and_no_score(tmp_path, monkeypatch):
    trainer = make_trainer()
    sample = trainer.rollouts.run

    def broken(*arguments) -> RolloutOutput:
        out = sample(*arguments)
        out.finish_reasons[1] = "nan"
        for column in (out.sequences, out.logprobs, out.logprobs_t1, out.entropies, out.values):
            column[1] = column[1][:0]
        return out

    monkeypatch.setattr(trainer.rollouts, "run", broken)
    train(trainer, tmp_path, steps=1)
    rows = read_ledger(tmp_path).to_pylist()
    assert np.isnan([row["score"] for row in rows]).tolist() == [False, True, False, False]
    assert np.isnan([row["reward/lengths"] for row in rows]).tolist() == [False, True, False, False]
    assert rows[1]["finish_reason"] == "nan"
    assert rows[1]["completion_ids"] == rows[1]["advantages"] == []
    assert [len(row["advantages"]) for row in rows] == [len(row["completion_ids"]) for row in rows]


def test_steps_before_an_error_are_in_the_ledger(tmp_path):
    calls = []

    def failing(completions, **_):
        calls.append(completions)
        if len(calls) == 3:
            raise RuntimeError("no reward")
        return [0.0] * len(completions)

    trainer = make_trainer()
    with pytest.raises(RuntimeError, match="no reward"):
        train(trainer, tmp_path, failing)
    rows = read_ledger(tmp_path, ["step", "completion"]).to_pylist()
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4
    assert [row["completion"] for row in rows] == [*calls[0], *calls[1]]
    train(trainer, tmp_path, steps=1)
    assert read_ledger(tmp_path, ["step"])["step"].to_pylist()[-4:] == [3] * 4


def test_a_folder_of_another_run_is_refused(tmp_path):
    train(make_trainer(), Ledger(tmp_path, every=2), steps=2)
    trainer, asked = make_trainer(), []
    with pytest.raises(ValueError, match=r"has step 2 already, .* step 1: name another folder"):
        train(trainer, tmp_path, asked.append, eval_prompts=TEXTS)
    assert asked == []
    train(trainer, Ledger(tmp_path / "other", every=2), steps=3)
    names = sorted(path.name for path in (tmp_path / "other").iterdir())
    assert names == ["steps-000001-000002.parquet", "steps-000003-000003.parquet"]


@pytest.mark.parametrize("settings", [{}, GRPO], ids=["ppo", "grpo"])
def test_a_resumed_run_has_the_ledger_of_the_straight_one(tmp_path, settings):
    """And the steps that were done again are beside it."""
    arguments = {"steps": 7, "save_every": 3, "eval_prompts": TEXTS, "eval_every": 2}

    def stopping(trainer):
        if trainer.current_step == 5:
            raise RuntimeError("power failure")

    train(make_trainer(**settings), True, output=tmp_path / "straight", **arguments)
    stopped = {**arguments, "output": tmp_path / "run", "callbacks": [Callback(stopping)]}
    saved = pytest.warns(UserWarning, match="after RuntimeError the state is saved")
    with saved, pytest.raises(RuntimeError, match="power"):
        train(make_trainer(**settings), True, **stopped)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-5")  # as if it had been killed
    expected = read_ledger(tmp_path / "straight" / "ledger")
    ledger = tmp_path / "run" / "ledger"
    assert read_ledger(ledger).equals(expected.slice(0, 5 * 4))
    train(make_trainer(**settings), True, output=tmp_path / "run", resume=True, **arguments)
    assert read_ledger(ledger).equals(expected)
    assert read_ledger(ledger / "superseded-1").equals(expected.slice(3 * 4, 2 * 4))


def test_rollouts_go_on_with_the_room_of_others():
    trainer = make_trainer()
    assert trainer.rollouts.state_dict() == {"rooms": {}}
    train(trainer, False, steps=1, eval_prompts=TEXTS)  # six prompts, more than a batch
    state = trainer.rollouts.state_dict()
    assert state == {"rooms": {"policy": {"slots": 6, "length": 48}}}
    other = make_trainer()
    other.rollouts.load_state_dict(state)
    assert other.rollouts.state_dict() == state
    assert other.rollouts.sample(tiny_models.prompts(3), SAMPLING).room == (6, 48)
    assert other.rollouts.state_dict() == state
    other.rollouts.load_state_dict({"rooms": {}})
    assert other.rollouts.sample(tiny_models.prompts(3), SAMPLING).room == (1, 48)
