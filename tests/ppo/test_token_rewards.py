"""Rewards of tokens, in ``step()`` and in ``train()``."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastrl_kernels.reference as exact
from fastrl import PPOConfig, PPOTrainer
from fastrl.run.ledger import read_ledger
from fastrl.trainers.ppo.replay import replay
from tests import seq2seq_models, tiny_models
from tests.golden import tiny
from tests.ppo.conftest import BATCH, descending, make_batch, make_policy, make_trainer, perturbed
from tests.ppo.exact_ppo import exact_step

TEXTS = ["w3 w4", "w5 w6 w7", "w8", "w9 w10", "w11 w12", "w13 w14 w15 w16"]
SAMPLING = {"max_new_tokens": 6, "top_k": 0}

pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
]


def per_token(responses: list[Tensor], seed: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(len(r), generator=g) for r in responses]


def batch_of_tokens(**changes: Any) -> dict[str, Any]:
    batch = make_batch()
    return {**batch, "scores": per_token(batch["responses"]), **changes}


ONE_BATCH = {"batch_size": BATCH, "mini_batch_size": BATCH}
ONE_BATCH |= {"init_kl_coef": 0.3, "adap_kl_ctrl": False}


def test_a_step_follows_the_formulas_in_float64() -> None:
    rate, epochs = 1e-2, 2
    trainer = descending(rate, **ONE_BATCH, ppo_epochs=epochs)
    start = {k: p.detach().clone().cpu() for k, p in trainer.model.named_parameters()}
    batch = batch_of_tokens()
    stats = trainer.step(**batch)
    totals = torch.stack([s.double().sum() for s in batch["scores"]])
    assert stats["ppo/mean_scores"] == pytest.approx(float(totals.mean()), rel=1e-5)
    assert stats["ppo/std_scores"] == pytest.approx(float(totals.std()), rel=1e-5)

    policy, reference = make_policy().double().eval(), perturbed(make_policy()).double().eval()
    exact_step(policy, reference, batch, rate=rate, epochs=epochs)
    expected = dict(policy.named_parameters())
    for name, p in trainer.model.named_parameters():
        # parameters of size 1 are rounded to 6e-8 in each epoch, and that is divided by the rate
        got, wanted = (
            (x.detach().cpu() - start[name]) / rate for x in (p.double(), expected[name])
        )
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=3e-5, msg=name)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("advantage", ["gae", "reinforce++"])
def test_advantages_and_returns_are_those_of_the_tokens_rewards(advantage: str, side: str) -> None:
    settings = {"init_kl_coef": 0.3, "advantage": advantage, "gamma": 0.9, "padding_side": side}
    trainer = make_trainer(reference=perturbed(make_policy()), **settings)
    batch = batch_of_tokens()
    batch["response_masks"] = [torch.ones_like(r) for r in batch["responses"]]
    batch["response_masks"][1][1] = 0  # a hole, which gets no reward
    batch["scores"][1][1] = 0.0
    seen: list[tuple[Tensor, ...]] = []
    compute = trainer.compute_advantages
    trainer.compute_advantages = lambda *a: seen.append((*a, *(f := compute(*a)))) or f  # type: ignore[method-assign]
    stats = trainer.step(**batch)
    values, rewards, mask, _, advantages, returns = (x.cpu() for x in seen[0])
    counts = [m.sum() for m in batch["response_masks"]]
    pairs = zip(batch["scores"], batch["response_masks"], strict=True)
    counted = torch.cat([s[m.bool()] for s, m in pairs])
    where = mask.clone()
    assert mask.sum(-1).tolist() == [int(n) for n in counts]
    kls = torch.from_numpy(stats["objective/logprobs"] - stats["objective/ref_logprobs"]).double()
    expected = -0.3 * kls
    expected[where] += counted
    torch.testing.assert_close(rewards.double(), torch.where(mask, expected, 0.0))
    lam = 0.95 if advantage == "gae" else 1.0
    baseline = values.double() if advantage == "gae" else torch.zeros_like(expected)
    found = exact.gae(expected, baseline, mask, gamma=0.9, lam=lam, whiten=True)
    for got, wanted in zip((advantages, returns), found, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_reward_of_the_last_token_is_the_score_of_the_response() -> None:
    batch = make_batch()
    dense = [torch.zeros(len(r)) for r in batch["responses"]]
    for row, score in zip(dense, batch["scores"], strict=True):
        row[-1] = score
    one, other = (make_trainer(reference=perturbed(make_policy())) for _ in range(2))
    stats, of_tokens = one.step(**batch), other.step(**{**batch, "scores": dense})
    for name, p in one.model.named_parameters():
        assert torch.equal(p, dict(other.model.named_parameters())[name]), name
    assert stats["ppo/mean_scores"] == of_tokens["ppo/mean_scores"]


def test_group_baselines_read_the_sum() -> None:
    settings = {"advantage": "grpo", "group_size": 2, "init_kl_coef": 0.0, "score_clip": 0.5}
    batch = batch_of_tokens()
    batch["queries"] = [batch["queries"][i // 2 * 2] for i in range(BATCH)]
    sums = [s.double().sum().float() for s in batch["scores"]]
    one, other = (make_trainer(**settings) for _ in range(2))
    one.step(**batch)
    other.step(**{**batch, "scores": sums})
    for name, p in one.model.named_parameters():
        assert torch.equal(p, dict(other.model.named_parameters())[name]), name


@pytest.mark.parametrize(("place", "number", "message"), [
    (2, torch.ones(3), r"scores\[2\] has 3 numbers, responses\[2\] has \d tokens: pass one"),
    (1, torch.tensor(1.0), r"scores\[1\] is one number, and scores\[0\] has shape \(\d,\)"),
    (3, torch.ones(2, 2), r"scores\[3\] must be one number \(0-D\), or a number for each"),
], ids=["length", "mixed", "2-D"])  # fmt: skip
def test_wrong_shapes_are_refused(unchanged, place, number, message) -> None:
    trainer, batch = make_trainer(), batch_of_tokens()
    if number.dim() == 1:
        batch["responses"][place] = torch.tensor([5, 6, 7, 8])
    batch["scores"][place] = number
    with unchanged(trainer), pytest.raises(ValueError, match=message):
        trainer.step(**batch)


def test_a_reward_of_a_token_that_does_not_count_is_refused(unchanged) -> None:
    trainer, batch = make_trainer(), batch_of_tokens()
    masks = [torch.ones_like(r) for r in batch["responses"]]
    masks[2][1] = 0
    with (
        unchanged(trainer),
        pytest.raises(ValueError, match=r"scores\[2\]\[1\] is .*, but response_masks\[2\] leaves"),
    ):
        trainer.step(**batch, response_masks=masks)


@pytest.mark.parametrize(("settings", "name"), [
    ({"score_clip": 1.0}, "score_clip"),
    ({"use_score_scaling": True, "use_score_norm": True}, "use_score_norm"),
])  # fmt: skip
def test_what_changes_whole_scores_is_refused(unchanged, settings, name) -> None:
    trainer = make_trainer(**settings)
    with unchanged(trainer), pytest.raises(ValueError, match=f"{name} changes the score of a"):
        trainer.step(**batch_of_tokens())


def test_scaling_divides_by_the_deviation_of_the_sums() -> None:
    trainer = make_trainer(use_score_scaling=True, init_kl_coef=0.0)
    batch = batch_of_tokens()
    seen: list[Tensor] = []
    compute = trainer.compute_rewards
    trainer.compute_rewards = lambda s, *a: seen.append(s) or compute(s, *a)  # type: ignore[method-assign]
    trainer.step(**batch)
    std = torch.stack([s.double().sum() for s in batch["scores"]]).std()
    assert trainer.running.std == pytest.approx(float(std), rel=1e-6)
    expected = torch.cat(batch["scores"]).double() / std
    torch.testing.assert_close(seen[0][seen[0] != 0].cpu().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_sample_with_a_reward_that_is_not_finite_is_left_out(wrong: float) -> None:
    batch = batch_of_tokens()
    batch["scores"][1][0] = wrong
    trainer = make_trainer()
    with pytest.warns(UserWarning, match=r"scores\[1\] is (nan|inf) .*left out of the step"):
        stats = trainer.step(**batch)
    assert stats["ppo/nonfinite_samples"] == 1
    rest = torch.stack([s.double().sum() for i, s in enumerate(batch["scores"]) if i != 1])
    assert stats["ppo/mean_scores"] == pytest.approx(float(rest.mean()), rel=1e-5)
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    with pytest.raises(ValueError, match=r"scores\[1\] is (nan|inf)"):
        make_trainer(on_nonfinite="raise").step(**batch)


def test_an_encoder_decoders_start_token_has_no_reward() -> None:
    def make() -> PPOTrainer:
        config = PPOConfig(batch_size=BATCH, learning_rate=1e-3, init_kl_coef=0.0)
        return PPOTrainer(config, seq2seq_models.policy("bart"), None, tiny.tokenizer())

    batch, clean, raw = batch_of_tokens(), make(), make()
    clean.step(**batch)
    start = torch.tensor([seq2seq_models.START["bart"]])
    started = [torch.cat([start, r]) for r in batch["responses"]]
    with pytest.warns(UserWarning, match="begin with the decoder's start token"):
        raw.step(**{**batch, "responses": started})
    for name, p in clean.model.named_parameters():
        assert torch.equal(p, dict(raw.model.named_parameters())[name]), name
    with pytest.raises(ValueError, match=r"responses\[0\] has \d tokens without its start token"):
        raw.step(batch["queries"], started, [torch.ones(len(r)) for r in started])


def dense(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    return [[(token % 7) / 7 - 0.4 for token in ids] for ids in completion_ids]


def brevity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-float(len(ids)) for ids in completion_ids]


def train(trainer: PPOTrainer, output: Any = None, reward: Any = dense, **arguments: Any) -> Any:
    settings = {"prompts": TEXTS, "generation_kwargs": SAMPLING, "progress": False, **arguments}
    return trainer.train(reward, output=output, **{"steps": 3, **settings})


def test_train_gives_each_token_the_functions_weighted_rewards(tmp_path) -> None:
    trainer = make_trainer(policy=tiny_models.policy())
    given: list[tuple[list[Tensor], list[Tensor]]] = []
    step = trainer.step
    trainer.step = lambda q, r, s, **k: given.append((r, s)) or step(q, r, s, **k)  # type: ignore[method-assign]
    result = train(
        trainer, tmp_path, {"dense": dense, "brevity": brevity}, reward_weights=[2.0, 0.1],
        missing_eos_penalty=0.5, eval_prompts=TEXTS[:2],
    )  # fmt: skip
    rows = read_ledger(tmp_path / "ledger").to_pylist()
    expected = []
    for responses, scores in given:
        for response, of_tokens in zip(responses, scores, strict=True):
            ids = response.tolist()
            own = 2.0 * np.array(dense([ids])[0])
            own[-1] += 0.1 * -len(ids) - 0.5 * (ids[-1] != tiny.EOS)
            np.testing.assert_allclose(of_tokens.numpy(), own, rtol=1e-6, atol=1e-6)
            expected.append(own)
    for row, own in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row["token_scores"], own, rtol=1e-6, atol=1e-6)
        assert row["score"] == pytest.approx(own.sum(), abs=1e-5)
        assert row["reward/dense"] == pytest.approx(
            sum(dense([row["completion_ids"]])[0]), abs=1e-5
        )
    means = [step["reward/mean"] for step in result.history]
    found = [np.mean([row["reward"] for row in rows if row["step"] == i + 1]) for i in range(3)]
    np.testing.assert_allclose(means, found, rtol=1e-5)
    assert len(result.evaluations[-1].rewards) == 2


def test_a_function_may_leave_out_completions_and_numbers_then_count_alone() -> None:
    trainer = make_trainer(policy=tiny_models.policy())
    given: list[list[Tensor]] = []
    step = trainer.step
    trainer.step = lambda q, r, s, **k: given.append(s) or step(q, r, s, **k)  # type: ignore[method-assign]

    def some(completion_ids, **_):
        return [None if i % 2 else x for i, x in enumerate(dense(completion_ids))]

    train(trainer, reward=[some, brevity], steps=1)
    for i, scores in enumerate(given[0]):
        assert len(scores) > 1
        assert bool(scores[:-1].any()) == (i % 2 == 0)
        if i % 2:
            assert float(scores[-1]) == -len(scores)


@pytest.mark.parametrize(("reward", "message"), [
    (lambda completion_ids, **_: [[1.0]] * len(completion_ids), r"rewards of shape \(1,\) for"),
    (lambda completion_ids, **_: [1.0, *dense(completion_ids)[1:]],
     "returned one number for completion 0, and several for completion 1"),
    (lambda completion_ids, **_: [["x"] * len(ids) for ids in completion_ids],
     "for completion 0: rewards must be finite numbers"),
], ids=["length", "mixed", "no number"])  # fmt: skip
def test_a_functions_wrong_rewards_of_tokens_are_refused(unchanged, reward, message) -> None:
    trainer = make_trainer(policy=tiny_models.policy())
    with unchanged(trainer), pytest.raises(ValueError, match=message):
        train(trainer, reward=reward, steps=1)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_functions_nan_leaves_the_sample_out(wrong: float, tmp_path) -> None:
    def reward(completion_ids, **_):
        found = dense(completion_ids)
        found[2][0] = wrong
        return found

    trainer = make_trainer(policy=tiny_models.policy())
    with pytest.warns(UserWarning, match=r"returned (nan|-inf) for completion 2.*left out"):
        result = train(trainer, tmp_path, reward, steps=1)
    assert result.history[0]["reward/nonfinite"] == 1
    rows = read_ledger(tmp_path / "ledger").to_pylist()
    assert math.isnan(rows[2]["score"])
    assert rows[2]["advantages"] == []


def test_a_run_is_resumed_and_replayed_with_rewards_of_tokens(tmp_path) -> None:
    def make() -> PPOTrainer:
        return make_trainer(policy=tiny_models.policy(), use_score_scaling=True)

    train(make(), tmp_path / "whole", save_every=1, keep_last=0)
    train(make(), tmp_path / "two", steps=1)
    train(make(), tmp_path / "two", resume=True)
    whole, two = (read_ledger(tmp_path / x / "ledger").to_pylist() for x in ("whole", "two"))
    assert whole == two
    # Walked from the beginning, each update is the run's: by its tokens' rewards.
    for checkpoint in (tmp_path / "whole" / "checkpoints").glob("checkpoint-*"):
        checkpoint.rename(tmp_path / checkpoint.name)
    found = replay(make(), tmp_path / "whole", 3)
    assert found.begun_at == 0
    assert found.identical
    assert found.strayed is None
