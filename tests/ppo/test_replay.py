"""Samples of a run's past, drawn again: the same bits, from any checkpoint, without rewards."""

import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from fastrl.run.ledger import Ledger, read_facts, read_ledger
from fastrl.trainers.ppo.replay import replay
from tests import seq2seq_models, tiny_models
from tests.golden import tiny

TEXTS = ["w3 w4", "w5 w6 w7", "w8", "w9 w10", "w11 w12", "w13 w14 w15 w16"]
STEPS = 5
# What a step's update depends on besides its samples: moments of scores, the KL coefficient, the
# schedule, the samples' order over epochs, a reference that moves.
PPO = {
    "use_score_scaling": True, "use_score_norm": True, "whiten_rewards": True, "target": 0.01,
    "horizon": 20, "sync_ref_every": 2, "ppo_epochs": 2,
}  # fmt: skip
GRPO = {"advantage": "grpo", "group_size": 2, "kl_in": "loss", "temperature": 0.7}

pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
    pytest.mark.filterwarnings("ignore:generation_kwargs. "),
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
]


def make_trainer(policy=tiny_models.policy, schedule=False, **settings):
    settings = {"batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-2, **settings}
    model, options = policy(), {}
    if schedule:
        weights = [p for p in model.parameters() if p.requires_grad]
        options["optimizer"] = torch.optim.Adam(weights, lr=1e-2)
        options["lr_scheduler"] = torch.optim.lr_scheduler.ExponentialLR(options["optimizer"], 0.5)
    return PPOTrainer(PPOConfig(**settings), model, None, tiny.tokenizer(), **options)


def with_adapter():
    torch.manual_seed(1)  # of the adapter and the value head
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        tiny_models.language_model(), peft_config=tiny_models.lora()
    )


def lengths(completion_ids, **_):
    return [float(len(ids)) for ids in completion_ids]


def train(trainer, output, reward=lengths, **arguments):
    settings = {
        "steps": STEPS,
        "prompts": TEXTS,
        "generation_kwargs": {"max_new_tokens": 6, "top_k": 0},
        "missing_eos_penalty": 0.5,
        "eval_prompts": TEXTS,  # more than a batch: the engine's room grows
        "eval_every": 2,
        "save_every": 2,
        "keep_last": 0,
        "progress": False,
        **arguments,
    }
    return trainer.train(reward, output=output, **settings)


def check(output, make, steps=range(1, STEPS + 1), begun_at=lambda step: (step - 1) // 2 * 2):
    """Each step is replayed, by another trainer, and is the recorded one."""
    for step in steps:
        trainer = make()
        found = replay(trainer, output, step)
        lines = [line for sample in found.samples for line in sample.differences()]
        assert (found.strayed, lines, found.begun_at) == (None, [], begun_at(step))
        assert found.identical
        assert trainer.current_step == step - 1
        rows = read_ledger(output / "ledger", None, step, step).to_pylist()
        assert len(found.samples) == len(rows) == 4
        for sample, row in zip(found.samples, rows, strict=True):
            assert sample.completion_ids == row["completion_ids"]
            if sample.logprobs is not None:
                np.testing.assert_array_equal(sample.logprobs, row["logprobs"])
        yield found


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({**PPO, "schedule": True}, (1, 2, 3, 4, 5)),
        (GRPO, (1, 2, 3, 4, 5)),
        ({"old_logprobs": "recompute", "rollout_sleep": True}, (4,)),
        ({"sampler_correction": "sequence-truncate"}, (4,)),
        ({"policy": with_adapter}, (4,)),
        ({"rollout_backend": "generate"}, (4,)),
        ({"policy": lambda: seq2seq_models.policy("bart")}, (4,)),
    ],
    ids=["ppo", "grpo", "recomputed", "sampler", "adapter", "generate", "encoder-decoder"],
)
def test_all_samples_of_a_run_are_drawn_again(tmp_path, settings, steps):
    """From its checkpoints, and from its beginning."""

    def make():
        return make_trainer(**settings)

    train(make(), tmp_path)
    found = list(check(tmp_path, make, steps))
    engine = found[0].samples[0].recorded["slots"] > 0
    assert (found[0].samples[0].logprobs is not None) is engine
    tokens = [tuple(sample.completion_ids) for step in found for sample in step.samples]
    assert len(set(tokens)) > len(steps)  # not of a policy that says one thing
    shutil.rmtree(tmp_path / "checkpoints")
    list(check(tmp_path, make, [4], begun_at=lambda step: 0))


def test_a_run_over_the_sets_of_its_draws_is_replayed_by_drawing_them_again(tmp_path):
    """A ledger has hashes of sets, by which what is drawn again is known to be the same."""
    cut = {"max_new_tokens": 6, "top_p": 0.8}

    def make():
        return make_trainer(policy_support="sampled", ppo_epochs=2)

    train(make(), tmp_path, generation_kwargs=cut)
    rows = read_ledger(tmp_path / "ledger", ["support"]).to_pylist()
    assert len({row["support"] for row in rows}) > 10
    shutil.rmtree(tmp_path / "checkpoints")
    list(check(tmp_path, make, [4], begun_at=lambda step: 0))
    with pytest.raises(ValueError, match="drawn again for them, it is not what was recorded"):
        replay(make(), tmp_path, 4, generation_kwargs={**cut, "top_p": 0.7})
    found = replay(make(), tmp_path, 1, generation_kwargs={**cut, "top_p": 0.799})
    lines = [line for sample in found.samples for line in sample.differences()]
    assert any("sets: what tokens were drawn from" in line for line in lines)


def test_samples_of_a_run_that_was_killed_and_resumed_are_drawn_again(tmp_path):
    train(make_trainer(**PPO), tmp_path, steps=3, save_every=2)
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-3")  # the last step was not saved
    train(make_trainer(**PPO), tmp_path, resume=True)
    list(check(tmp_path, lambda: make_trainer(**PPO)))


def test_samples_that_were_left_out_are_left_out_again(tmp_path, monkeypatch):
    def make():
        return make_trainer(on_nonfinite="skip", **PPO)

    trainer = make()
    sample = trainer.rollouts.run

    def broken(*arguments):
        out = sample(*arguments)
        if trainer.current_step == 1 and len(out.sequences) == 4:
            out.finish_reasons[2] = "nan"
            for column in (out.sequences, out.logprobs, out.logprobs_t1, out.values):
                column[2] = column[2][:1]
        return out

    def infinite(completion_ids, **_):
        return [float("inf") if i == 1 else len(x) for i, x in enumerate(completion_ids)]

    monkeypatch.setattr(trainer.rollouts, "run", broken)
    with pytest.warns(UserWarning, match="left out"):
        train(trainer, tmp_path, infinite)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.warns(UserWarning, match="left out"):
        list(check(tmp_path, make, [5], begun_at=lambda step: 0))


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    train(make_trainer(), tmp_path)
    (tmp_path / "checkpoints" / "checkpoint-4" / "policy.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="policy.safetensors is damaged"):
        list(check(tmp_path, make_trainer, [5], begun_at=lambda step: 2))


def read_whole(ledger):
    return read_facts(ledger, 1, STEPS)[0], read_ledger(ledger)


def rewrite(ledger, column, change):
    """Changes a column of the ledger, as nothing but a hand does."""
    facts, table = read_whole(ledger)
    values = change(table[column].to_pylist())
    where = table.column_names.index(column)
    table = table.set_column(where, column, pa.array(values, table[column].type))
    Ledger(ledger)._write(1, STEPS, table, facts)


def test_what_differs_is_told(tmp_path):
    train(make_trainer(), tmp_path)
    ledger = tmp_path / "ledger"

    def other_tokens(tokens):
        tokens[8][2] += 1
        return tokens

    def other_logprobs(logprobs):
        logprobs[9][1] += 0.25
        return logprobs

    rewrite(ledger, "completion_ids", other_tokens)
    rewrite(ledger, "logprobs", other_logprobs)
    found = replay(make_trainer(), tmp_path, 3)
    assert not found.identical
    first, second, *others = found.samples
    assert not first.identical
    assert first.differences()[0].startswith("tokens: the first 2 are the same, of ")
    assert second.differences() == ["logprobs: up to 2.5e-01 apart, in 1 of 6 tokens"]
    assert all(sample.identical for sample in others)
    assert found.strayed is None


def test_an_update_that_is_not_the_runs_is_named(tmp_path):
    train(make_trainer(), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    found = replay(make_trainer(learning_rate=5e-2), tmp_path, 4)
    assert found.strayed.startswith("step 2: advantages: up to ")
    assert not found.identical
    rewrite(tmp_path / "ledger", "weights_version", lambda versions: [x + 1 for x in versions])
    found = replay(make_trainer(), tmp_path, 4)
    assert found.strayed == "step 1: 0 optimizer steps were taken before it, 1 in the run"


def test_another_machine_is_named_before(tmp_path):
    train(make_trainer(), tmp_path)
    ledger = tmp_path / "ledger"
    facts, table = read_whole(ledger)
    facts["machine"]["threads"] = 96
    facts["versions"]["torch"] = "1.0"
    Ledger(ledger)._write(1, STEPS, table, facts)
    with pytest.warns(UserWarning, match=r"torch: 1\.0 → .*threads: 96 → .*last bits may differ"):
        assert replay(make_trainer(), tmp_path, 2).identical


def test_a_replay_of_older_draws_says_so(tmp_path):
    train(make_trainer(), tmp_path)
    ledger = tmp_path / "ledger"
    facts, table = read_whole(ledger)
    del facts["versions"]["draws"]
    Ledger(ledger)._write(1, STEPS, table, facts)
    with pytest.warns(UserWarning, match="tokens are drawn in another way"):
        replay(make_trainer(), tmp_path, 2)


def test_nothing_is_pushed_and_no_reward_asked(tmp_path, monkeypatch):
    train(make_trainer(), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    trainer = make_trainer(push_to_hub_if_best_kwargs={"repo_id": "some/where"})
    monkeypatch.setattr(trainer, "push_to_hub", lambda **_: pytest.fail("pushed"))
    assert replay(trainer, tmp_path, 3).identical


def test_impossible_replays_are_refused(tmp_path):
    run = tmp_path / "run"
    train(make_trainer(), run)
    with pytest.raises(ValueError, match="does not have step 6: it has the steps 1 to 5"):
        replay(make_trainer(), run, 6)
    with pytest.raises(ValueError, match=r"batch_size=2, the ledger .* 4: make it as for the run"):
        replay(make_trainer(batch_size=2), run, 3)
    with pytest.raises(ValueError, match=r"temperature=0\.5, the ledger .* 1\.0"):
        replay(make_trainer(temperature=0.5), run, 3)
    trainer = make_trainer()
    replay(trainer, run, 3)
    with pytest.raises(ValueError, match=r"no checkpoint from before step 1, .* has done 2 steps"):
        replay(trainer, run, 1)
    other = tmp_path / "other"
    trainer = make_trainer()
    trainer.load_checkpoint(run / "checkpoints" / "checkpoint-2")
    train(trainer, other, steps=2, save_every=0)
    with pytest.raises(
        ValueError, match="does not have step 1: it has the steps 3 to 4; the run's"
    ):
        replay(make_trainer(), other, 4)


def test_generation_kwargs_that_json_cannot_hold_are_asked_for(tmp_path):
    from transformers import LogitsProcessor

    class Bias(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores + torch.arange(scores.shape[-1], device=scores.device) / 20

    kwargs = {"max_new_tokens": 5, "top_k": 0, "logits_processor": [Bias()]}
    settings = {"rollout_backend": "generate"}
    train(make_trainer(**settings), tmp_path, generation_kwargs=kwargs)
    with pytest.raises(ValueError, match=r"\(logits_processor\): pass generation_kwargs as in"):
        replay(make_trainer(**settings), tmp_path, 3)
    assert replay(make_trainer(**settings), tmp_path, 3, generation_kwargs=kwargs).identical


def test_samples_that_replaced_others_are_drawn_by_their_own_numbers(tmp_path):
    made = []

    def first_groups_alike(completion_ids, **_):
        made.append(len(completion_ids))
        spread = len(made) % 2 == 0
        return [float(i) if spread or i > 1 else 1.0 for i in range(len(completion_ids))]

    def make():
        return make_trainer(**{**GRPO, "dynamic_sampling_rounds": 2})

    train(make(), tmp_path, first_groups_alike, steps=2, eval_prompts=None)
    for step in (1, 2):
        found = replay(make(), tmp_path, step)
        ids = [sample.recorded["sample_id"] for sample in found.samples]
        assert ids != [0, 0, 1, 1], "a group was replaced"
        assert found.identical, [sample.differences() for sample in found.samples]
        assert found.tolerance > 0
