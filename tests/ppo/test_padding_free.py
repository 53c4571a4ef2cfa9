"""step() without padding: each prompt once, in passes of a bounded number of tokens, to the same
result."""

import warnings

import pytest
import torch

from fastrl.data.padding_free import PaddingFree
from fastrl.data.token_batch import Padded
from fastrl.models.trunk import layer_stack
from tests import tiny_models
from tests.models.conftest import counted, deep
from tests.ppo.conftest import make_batch, make_trainer
from tests.ppo.updates import apart, watch_gradients

GROUPED = {"advantage": "grpo", "group_size": 4, "batch_size": 8, "mini_batch_size": 8}
SAME = 2e-6  # of gradients in fp32, relative


def grouped_batch(size=4):
    """Two prompts, four responses to each."""
    batch = make_batch(8)
    batch["queries"] = [batch["queries"][i // size * size] for i in range(8)]
    return batch


def tokens_of(batch, once=True):
    """P + ΣR, or Σ (P + R)."""
    queries = batch["queries"]
    if once:
        queries = list({tuple(q.tolist()): q for q in queries}.values())
    return sum(map(len, queries)) + sum(map(len, batch["responses"]))


def scalars(stats):
    skipped = ("time/", "perf/")
    return {k: v for k, v in stats.items() if isinstance(v, float) and not k.startswith(skipped)}


def stepped_alike(settings, others, batch):
    """Both steps have the same gradients and statistics."""
    trainers = [make_trainer(**settings, **more) for more in ({}, others)]
    seen = [watch_gradients(trainer) for trainer in trainers]
    stats = [scalars(trainer.step(**batch)) for trainer in trainers]
    assert len(seen[0]) == len(seen[1])
    assert apart(seen[1][0], seen[0][0]) < SAME
    for name, value in stats[0].items():
        assert stats[1][name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name
    return trainers


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("settings", [
    {"ppo_epochs": 2}, {**GROUPED, "ppo_epochs": 2}, {"kl_in": "loss", "kl_penalty": "abs"},
], ids=["gae", "grpo", "kl in loss"])  # fmt: skip
def test_a_step_is_that_of_padded_batches(settings, padding_side):
    batch = grouped_batch() if "group_size" in settings else make_batch()
    settings = {**settings, "padding_side": padding_side}
    free, padded = stepped_alike(settings, {"padding_free": False}, batch)
    assert isinstance(free.padding, PaddingFree)
    assert isinstance(padded.padding, Padded)


def test_prompts_of_groups_run_once_in_scoring_and_update():
    policy = deep("llama")
    trainer = make_trainer(policy, **GROUPED, ppo_epochs=3)
    batch = grouped_batch()
    ours, theirs = counted(trainer.model), counted(trainer.ref_model)
    stats = trainer.step(**batch)
    once = tokens_of(batch)
    assert once < 0.8 * tokens_of(batch, once=False)
    assert stats["perf/positions_per_token"] == once / tokens_of(batch, once=False)
    assert ours == {i: (1 + 3) * once for i in range(4)}
    assert theirs == {i: once for i in range(4)}


def test_prompts_of_groups_run_once_through_layers_that_are_shared():
    policy = deep("llama")
    trainer = make_trainer(policy, **GROUPED, ppo_epochs=3, num_shared_layers=2)
    batch = grouped_batch()
    ours, theirs = counted(trainer.model), counted(trainer.ref_model)
    trainer.step(**batch)
    once = tokens_of(batch)
    assert ours == {0: once, 1: once, 2: 4 * once, 3: 4 * once}
    assert theirs == {2: once, 3: once}


@pytest.mark.parametrize("mini_batch_size", [4, 2])
def test_minibatches_take_whole_groups_or_pieces_of_one(mini_batch_size):
    trainer = make_trainer(**{**GROUPED, "mini_batch_size": mini_batch_size}, ppo_epochs=4)
    seen = []
    update = trainer.update
    steps = update.epochs.steps
    update.epochs.steps = lambda *args: (seen.append(x) or x for x in steps(*args))
    trainer.step(**grouped_batch())
    taken = [indices for step in seen for indices in step]
    assert len(taken) == 4 * 8 // mini_batch_size
    assert all(len({i // 4 for i in indices}) == 1 for indices in taken)
    epochs = [
        [i for indices in taken[k : k + 8 // mini_batch_size] for i in indices]
        for k in range(0, len(taken), 8 // mini_batch_size)
    ]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 2, "in both orders of the groups"


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_passes_of_fewer_tokens_give_the_same_step(grouped, padding_free):
    settings = {**GROUPED} if grouped else {"batch_size": 8, "mini_batch_size": 8, "ppo_epochs": 1}
    settings |= {"ppo_epochs": 1, "padding_free": padding_free}
    batch = grouped_batch() if grouped else make_batch(8)
    _, parts = stepped_alike(settings, {"micro_batch_tokens": 24}, batch)
    seen = []
    parts.model.register_forward_pre_hook(
        lambda _m, _args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    parts.step(**batch)
    assert max(seen) <= 24
    assert len(seen) > 4
    if grouped and padding_free:  # in scoring and in the update
        pieces = len(seen) // 2
        assert tokens_of(batch) < sum(seen) / 2 < tokens_of(batch, once=False), "P once per piece"
        assert pieces < 8


def test_ratios_and_advantages_of_parts_are_of_the_same_tokens():
    """Parts keep samples with a prompt together, which need not lie together in a mini-batch."""
    batch = make_batch(8)
    batch["queries"] = batch["queries"][:2] * 4
    found = []
    for tokens in (None, 24):
        trainer = make_trainer(
            batch_size=8, mini_batch_size=8, ppo_epochs=2, micro_batch_tokens=tokens
        )
        stats = trainer.step(**batch)
        pairs = zip(stats["ppo/policy/ratio"], stats["ppo/policy/advantages"], strict=True)
        found.append(sorted((float(advantage), float(ratio)) for ratio, advantage in pairs))
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-4, atol=1e-5)


def test_a_sample_beyond_the_tokens_of_a_pass_is_refused_before_anything_changes(unchanged):
    trainer = make_trainer(micro_batch_tokens=9)
    with (
        unchanged(trainer),
        pytest.raises(ValueError, match=r"micro_batch_tokens=9, but queries\[\d\] and responses"),
    ):
        trainer.step(**make_batch())


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("what", ["audit", "batched_forward_pass", "shared layers"])
def test_every_pass_keeps_to_the_tokens(what, padding_free):
    shared = {"num_shared_layers": 2} if what == "shared layers" else {}
    settings = {"micro_batch_tokens": 24, "padding_free": padding_free, **shared}
    trainer = make_trainer(deep("llama"), batch_size=8, mini_batch_size=8, **settings)
    batch = make_batch(8)
    seen = []
    layer_stack(trainer.model.pretrained_model)[0].register_forward_pre_hook(
        lambda _m, args: seen.append(args[0].shape[:2].numel())
    )
    if what == "audit":
        tokens = trainer.make_batch(batch["queries"], batch["responses"], None)
        trainer.scorer.policy_scores(tokens)
    elif what == "shared layers":
        trainer.step(**batch)
    else:
        inputs = trainer.prepare_model_inputs(batch["queries"], batch["responses"])
        trainer.batched_forward_pass(trainer.model, batch["queries"], batch["responses"], inputs)
    assert len(seen) > 1
    assert max(seen) <= 24


@pytest.mark.parametrize("of", ["prompts", "eval_prompts"])
def test_train_refuses_prompts_that_no_pass_can_hold_before_it_generates(of, unchanged):
    trainer = make_trainer(micro_batch_tokens=12, batch_size=2)
    prompts = {"prompts": tiny_models.prompts(3, 4), "eval_prompts": tiny_models.prompts(3, 4)}
    prompts[of] = tiny_models.prompts(3, 8)
    with (
        unchanged(trainer),
        pytest.raises(
            ValueError,
            match=rf"micro_batch_tokens=12, but {of}\[1\] and 5 new tokens have 13 tokens: raise",
        ),
    ):
        trainer.train(
            lambda **_: pytest.fail("generated"),
            steps=1,
            generation_kwargs={"max_new_tokens": 5},
            **prompts,
        )


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "opt"])
def test_nothing_moved_is_a_ratio_of_one(family):
    """Scoring and the first optimizer step run the same passes."""
    trainer = make_trainer(deep(family), ppo_epochs=1, mini_batch_size=4)
    ratios = trainer.step(**make_batch())["ppo/policy/ratio"]
    assert abs(torch.as_tensor(ratios) - 1).max() <= 1e-6


def test_padding_is_counted():
    batch = make_batch()
    stats = [
        make_trainer(padding_free=free, mini_batch_size=4).step(**batch) for free in (True, False)
    ]
    lengths = [len(q) + len(r) for q, r in zip(batch["queries"], batch["responses"], strict=True)]
    assert stats[0]["perf/positions_per_token"] == 1
    assert stats[1]["perf/positions_per_token"] == 4 * max(lengths) / sum(lengths)


def test_a_model_that_cannot_is_said_once_and_learns_padded():
    with pytest.warns(UserWarning, match="BloomForCausalLM: batches are padded"):
        trainer = make_trainer(tiny_models.policy("bloom"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(**make_batch())
