"""Groups without spread are replaced; long and truncated responses; whitened returns."""

import pytest
import torch

from fastrl import PPOConfig
from fastrl.learn.dynamic_sampling import without_spread
from fastrl.learn.penalties import OverlongPenalty
from fastrl.rollout import RolloutOutput
from fastrl.trainers.ppo.method import advantages_of
from tests.ppo.test_policy_gradients import SAMPLING, groups, make_trainer, weights_of

PROMPTS = ["w3 w4", "w5", "w6 w7", "w8", "w9 w3", "w4 w4"]


class Judge:
    """Equal rewards for all responses to some prompts."""

    def __init__(self, flat):
        self.flat, self.asked = flat, []

    def __call__(self, prompts, completions, completion_ids, **_):
        self.asked.append(list(prompts))
        given = zip(prompts, range(len(prompts)), strict=True)
        return [1.0 if prompt in self.flat else float(i) for prompt, i in given]


def train(judge, rounds, steps=1, **settings):
    trainer = make_trainer(
        init_kl_coef=0.0, batch_size=4, dynamic_sampling_rounds=rounds, **settings
    )
    seen = []
    step = trainer.step
    trainer.step = lambda queries, *rest, **named: (
        seen.append(queries) or step(queries, *rest, **named)
    )
    result = trainer.train(
        judge, steps=steps, prompts=PROMPTS, generation_kwargs=SAMPLING, progress=False
    )
    return trainer, result.history, seen


@pytest.mark.parametrize("backend", ["engine", "generate"])
def test_groups_without_spread_give_way_to_new_prompts(backend):
    plain = Judge(())
    train(plain, 0, rollout_backend=backend)
    first = plain.asked[0][::2]
    judge = Judge({first[0]})
    trainer, history, seen = train(judge, 3, rollout_backend=backend)
    assert judge.asked[0][::2] == first
    assert len(judge.asked) == 2
    assert judge.asked[1][0] == judge.asked[1][1]
    assert judge.asked[1][0] not in first, "the next prompt of the stream"
    assert history[0]["groups/replaced"] == history[0]["groups/sampling_rounds"] == 1
    assert history[0]["groups/no_spread"] == 0
    texts = [trainer.tokenizer.decode(query) for query in seen[0]]
    assert texts == [judge.asked[1][0]] * 2 + [first[1]] * 2


def test_rounds_are_bounded_and_what_is_left_is_learned_from():
    judge = Judge(set(PROMPTS))
    _, history, _ = train(judge, 2)
    assert [len(asked) for asked in judge.asked] == [4, 4, 4]
    assert history[0]["groups/replaced"] == 4
    assert history[0]["groups/sampling_rounds"] == 2
    assert history[0]["groups/no_spread"] == 1


def test_without_rounds_nothing_is_replaced():
    judge = Judge(set(PROMPTS))
    _, history, _ = train(judge, 0)
    assert len(judge.asked) == 1
    assert "groups/replaced" not in history[0]


def test_which_groups_have_no_spread():
    nan = torch.nan
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, nan, 2.0, nan, nan, 3.0, 3.0])
    assert without_spread(scores, 2) == [0, 2, 3, 4]


def test_the_penalty_of_overlong_responses():
    """DAPO's equation 13 with a longest of 10 and a buffer of 4, and half of it."""
    found = OverlongPenalty(10, 4, 0.5)([1, 6, 7, 9, 10])
    assert found.tolist() == [0.0, 0.0, 0.125, 0.375, 0.5]


def test_the_penalty_is_taken_off_the_scores():
    lengths = []

    def reward_fn(completion_ids, **_):
        lengths.extend(map(len, completion_ids))
        return [3.0] * len(completion_ids)

    result = make_trainer(init_kl_coef=0.0, overlong_buffer=6).train(
        reward_fn, steps=1, prompts=PROMPTS, generation_kwargs=SAMPLING, progress=False
    )
    expected = 3.0 - sum(lengths) / len(lengths) / SAMPLING["max_new_tokens"]
    assert result.history[0]["reward/mean"] == 3.0
    assert result.history[0]["ppo/mean_scores"] == pytest.approx(expected, rel=1e-6)


def test_a_buffer_longer_than_responses_is_refused():
    trainer = make_trainer(init_kl_coef=0.0, overlong_buffer=7)
    with pytest.raises(ValueError, match="overlong_buffer=7 is the last part of max_new_tokens"):
        trainer.train(
            lambda **_: [], steps=1, prompts=PROMPTS, generation_kwargs=SAMPLING, progress=False
        )


def test_truncated_responses_teach_nothing_but_count_in_their_group():
    queries, responses, scores = groups()
    reasons = ["eos", "length", "stop", "eos"]
    rollout = RolloutOutput(responses, reasons)
    moved = []
    for settings, options in (
        ({"mask_truncated_completions": True}, {"rollout": rollout}),
        ({}, {"rollout": rollout, "weights": [1.0, 0.0, 1.0, 1.0]}),
    ):
        trainer = make_trainer(init_kl_coef=0.0, old_logprobs="recompute", **settings)
        trainer.step(queries, responses, scores, **options)
        moved.append(weights_of(trainer))
    assert all(torch.equal(moved[0][k], moved[1][k]) for k in moved[0])


def test_how_responses_ended_must_be_known(unchanged):
    trainer = make_trainer(init_kl_coef=0.0, mask_truncated_completions=True)
    with unchanged(trainer), pytest.raises(ValueError, match="pass rollout= to step"):
        trainer.step(*groups())


def test_reinforce_plus_plus_whitens_the_rewards_to_come():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(4, 6, generator=generator)
    mask = torch.arange(6) < torch.tensor([[6], [2], [5], [3]])
    config = PPOConfig(advantage="reinforce++", batch_size=4, gamma=0.9)
    values, advantages, returns = advantages_of(config)(rewards, rewards, mask)
    exact = torch.zeros(4, 6, dtype=torch.float64)
    for i in range(4):
        for t in range(6):
            terms = [0.9 ** (u - t) * float(rewards[i, u]) for u in range(t, 6) if mask[i, u]]
            exact[i, t] = sum(terms)
    counted = exact[mask]
    expected = (exact - counted.mean()) / (counted.var() + 1e-8).sqrt()
    assert not config.needs_values
    assert not values.any()
    torch.testing.assert_close(returns[mask].double(), counted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(advantages[mask].double(), expected[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group_size", [1, 2])
def test_reinforce_plus_plus_trains_without_values(group_size):
    settings = {"advantage": "reinforce++", "group_size": group_size, "init_kl_coef": 0.1}
    trainer = make_trainer(None, None, **settings)
    result = trainer.step(*groups(4 // group_size, group_size))
    assert result["ppo/optimizer_steps"] == 1
    assert "ppo/loss/value" not in result
    assert result["ppo/policy/advantages_mean"] == pytest.approx(0, abs=1e-5)
