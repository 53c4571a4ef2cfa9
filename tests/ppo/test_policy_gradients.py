"""Advantages from groups, the KL in the loss, asymmetric clips, aggregations, samples' weights."""

import math
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset

import fastrl_kernels
from fastrl import PPOConfig, PPOTrainer
from fastrl.learn.baselines import EPS
from fastrl.trainers.ppo.method import advantages_of
from fastrl_kernels.ppo_loss import AGGREGATES
from tests import tiny_models
from tests.golden import tiny
from tests.ppo.conftest import make_policy
from tests.ppo.test_reuse import policy_scores  # noqa: F401, a fixture

GROUP = {"advantage": "grpo", "group_size": 2, "batch_size": 4, "mini_batch_size": 4}
SAMPLING = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "top_p": 1.0}


def make_trainer(model=None, ref_model=None, optimizer=None, **settings):
    model = tiny_models.language_model("gpt2") if model is None else model
    settings = {"ppo_epochs": 1, "learning_rate": 1e-3, **GROUP, **settings}
    if optimizer is None:  # gradients show in what a step adds
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return PPOTrainer(PPOConfig(**settings), model, ref_model, tiny.tokenizer(), None, optimizer)


def groups(n: int = 2, size: int = 2, seed: int = 0):
    """Queries in groups, ragged responses and scores."""
    g = torch.Generator().manual_seed(seed)
    queries = [q for q in tiny_models.prompts(3, 6, 2, 4)[:n] for _ in range(size)]
    responses = tiny_models.prompts(*torch.randint(2, 9, (n * size,), generator=g).tolist(), seed=1)
    return queries, responses, list(torch.randn(n * size, generator=g))


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return {k: p.detach().clone() for k, p in trainer.model.named_parameters()}


def gradients(trainer, *batch, **options) -> tuple[dict[str, torch.Tensor], dict]:
    """Of one step with SGD at a rate of 1."""
    before = weights_of(trainer)
    result = trainer.step(*batch, **options)
    return {k: before[k] - p for k, p in weights_of(trainer).items()}, result


def of_pretrained(moved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = "pretrained_model."
    return {k.removeprefix(prefix): v for k, v in moved.items() if k.startswith(prefix)}


def logprobs_of(model, queries, responses) -> list[torch.Tensor]:
    """Of each response's tokens, from the model's own logits."""
    told = []
    for q, r in zip(queries, responses, strict=True):
        logits = model(torch.cat([q, r])[None]).logits[0, len(q) - 1 : -1]
        told.append(logits.log_softmax(-1).gather(-1, r[:, None])[:, 0])
    return told


def by_formula(name: str, totals: torch.Tensor) -> torch.Tensor:
    """A group's advantages, from its R in float64."""
    n, mean = len(totals), totals.mean()
    if name == "rloo":
        others = [totals[[j for j in range(n) if j != i]].mean() for i in range(n)]
        return totals - torch.stack(others)
    deviation = math.sqrt(float(((totals - mean) ** 2).sum()) / (n - 1))
    return (totals - mean) / (deviation + EPS if name == "grpo" else 1)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_advantages_are_the_formulas(name):
    g = torch.Generator().manual_seed(0)
    rewards = torch.randn(6, 5, generator=g)
    mask = torch.rand(6, 5, generator=g) > 0.3
    config = PPOConfig(advantage=name, group_size=3, batch_size=6)
    values, advantages, returns = advantages_of(config)(torch.ones(6, 5), rewards, mask)
    totals = (rewards.double() * mask).sum(-1)
    expected = torch.cat([by_formula(name, totals[:3]), by_formula(name, totals[3:])])
    assert values.abs().max() == 0
    torch.testing.assert_close(advantages.double(), expected[:, None] * mask, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(returns.double(), totals[:, None] * mask, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("size", [3, 7])
def test_equal_rewards_have_no_advantage_to_the_bit(name, size):
    rewards = torch.tensor([[0.1], [1e-3], [-7.3], [1 / 3]]).repeat_interleave(size, 0)
    config = PPOConfig(advantage=name, group_size=size, batch_size=4 * size)
    advantages = advantages_of(config)(rewards, rewards, torch.ones_like(rewards).bool())[1]
    assert torch.equal(advantages, torch.zeros_like(rewards))


def test_rows_that_are_no_whole_groups_are_refused():
    trainer = make_trainer(init_kl_coef=0.0)
    rewards = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="3 samples are not whole groups of 2"):
        trainer.compute_advantages(rewards, rewards, rewards == 0)


def exact_loss(model, reference, old, batch, *, aggregate, kl_in, coef, clip, weights=None):
    """The loss of one update in float64, sample by sample."""
    queries, responses, scores = batch
    new = logprobs_of(model, queries, responses)
    with torch.no_grad():
        ref = logprobs_of(reference, queries, responses)
    totals = torch.stack(scores).double()
    if kl_in == "reward":
        totals -= coef * torch.stack([(o - r).sum() for o, r in zip(old, ref, strict=True)])
    advantages = by_formula("grpo", totals)
    sums = []
    for lp, o, r, a in zip(new, old, ref, advantages, strict=True):
        ratio = (lp - o).exp()
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip[0], 1 + clip[1]))
        if kl_in == "loss":
            d = lp - r
            loss = loss + coef * ((-d).exp() - 1 + d)
        sums.append(loss.sum())
    given = [1.0] * 4 if weights is None else weights
    lengths = [len(r) for r in responses]
    weighted = [w * s for w, s in zip(given, sums, strict=True)]
    if aggregate == "token-mean":
        return sum(weighted) / sum(w * n for w, n in zip(given, lengths, strict=True))
    if aggregate == "seq-mean-token-mean":
        return sum(s / n for s, n in zip(weighted, lengths, strict=True)) / sum(given)
    return sum(weighted) / sum(given) / (max(lengths) if aggregate.endswith("norm") else 1)


CASES = {
    "reward": {"kl_in": "reward"},
    "loss": {"kl_in": "loss"},
    "clip": {"kl_in": "loss", "cliprange": 0.01, "cliprange_high": 0.03},
    **{f"weights, {name}": {"kl_in": "loss", "loss_aggregate": name} for name in AGGREGATES},
    **{aggregate: {"kl_in": "loss", "loss_aggregate": aggregate} for aggregate in AGGREGATES[1:]},
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "rows"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_follows_the_formulas_gradient(case, fused, monkeypatch):
    settings = {"init_kl_coef": 0.3, "adap_kl_ctrl": False, "group_size": 4, **CASES[case]}
    weights = [0.5, 2.0, 0.0, 0.25] if case.startswith("weights") else None
    if not fused:
        monkeypatch.setattr("fastrl.models.lm_head._why_not_linear", lambda _: "it is asked for")
    reference = tiny_models.language_model("gpt2", 0.05)
    batch = groups(1, 4)  # of two rewards, GRPO would see no more than which is higher
    # The first step goes a little way, so that ratios differ from 1 in the second epoch.
    rate, epochs = 1e-2, 2
    model = tiny_models.language_model("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    warned = nullcontext() if fused else pytest.warns(UserWarning, match="it is asked for")
    with warned:
        trainer = make_trainer(model, reference, optimizer, ppo_epochs=epochs, **settings)
    result = trainer.step(*batch, weights=weights)
    assert case != "clip" or 0 < result["ppo/policy/clipfrac"] < 0.5

    exact = tiny_models.language_model("gpt2").double()
    exact_reference = tiny_models.language_model("gpt2", 0.05).double()
    start = {k: p.detach().clone() for k, p in exact.named_parameters()}
    with torch.no_grad():
        old = logprobs_of(exact, *batch[:2])
    clip = (settings.get("cliprange", 0.2), settings.get("cliprange_high", 0.2))
    aggregate = settings.get("loss_aggregate", "token-mean")
    for _ in range(epochs):
        exact.zero_grad()
        exact_loss(
            exact, exact_reference, old, batch, aggregate=aggregate, kl_in=settings["kl_in"],
            coef=0.3, clip=clip, weights=weights,
        ).backward()  # fmt: skip
        with torch.no_grad():
            for p in exact.parameters():
                p -= rate * p.grad
    moved = {k: (p.detach() - start[k]) / rate for k, p in exact.named_parameters()}
    for name, p in model.named_parameters():
        got = (p.detach().cpu().double() - start[name]) / rate
        # parameters of size 1 are rounded to 6e-8 twice, and that is divided by the rate
        torch.testing.assert_close(got, moved[name], rtol=1e-4, atol=3e-5, msg=name)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_the_classic_loss_agrees_with_the_kernels_aggregate(aggregate):
    """What a step computes on flat rows has the kernels' name for it on rows of sequences."""
    trainer = make_trainer(
        init_kl_coef=0.0, loss_aggregate=aggregate, loss_norm_length=7, cliprange_high=0.3
    )
    g = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(2, 4, 7, generator=g)
    logprobs = (old + 0.3 * torch.randn(4, 7, generator=g)).requires_grad_()
    mask = torch.rand(4, 7, generator=g) > 0.4
    mask[:, 0] = False  # the longest response is shorter than the fixed length
    zeros = torch.zeros(4, 7)
    policy_loss, value_loss, statistics = trainer.loss(
        old, zeros, None, zeros, logprobs, mask, advantages, zeros
    )
    (got,) = torch.autograd.grad(policy_loss + value_loss, logprobs)
    loss, _ = fastrl_kernels.ppo_loss(
        logprobs, old, advantages, mask, cliprange=(0.2, 0.3), aggregate=aggregate
    )
    (expected,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(policy_loss, loss)
    torch.testing.assert_close(got, expected)
    assert value_loss == 0
    assert "loss/value" not in statistics


def test_a_steps_loss_is_that_of_its_statistics():
    _, result = gradients(make_trainer(kl_in="loss", init_kl_coef=0.5), *groups())
    expected = result["ppo/loss/policy"] + 0.5 * result["ppo/loss/kl"]
    assert result["ppo/loss/total"] == pytest.approx(expected, rel=1e-5)


def test_statistics_without_values_and_of_groups():
    queries, responses, _ = groups()
    scores = [torch.tensor(x) for x in (1.0, 1.0, 0.0, 3.0)]
    result = make_trainer(kl_in="loss").step(queries, responses, scores)
    assert result["groups/no_spread"] == 0.5
    assert result["groups/reward_std"] == pytest.approx(math.sqrt(4.5) / 2)
    assert not [k for k in result if k.startswith("ppo/val/") or k == "ppo/loss/value"]
    assert result["ppo/mean_non_score_reward"] == 0


@pytest.mark.filterwarnings("ignore:the KL estimate is negative")
def test_a_coefficient_of_the_loss_adapts():
    trainer = make_trainer(kl_in="loss", init_kl_coef=0.5, target=1e-3, horizon=10)
    trainer.step(*groups())
    assert trainer.kl_ctl.value != 0.5
    before = trainer.kl_ctl.value
    result = trainer.step(*groups(seed=1))
    assert result["objective/kl_coef"] == before


def test_a_group_must_have_one_query(unchanged):
    trainer = make_trainer(init_kl_coef=0.0)
    queries, responses, scores = groups()
    mixed = [queries[i] for i in (0, 2, 1, 3)]
    with (
        unchanged(trainer),
        pytest.raises(ValueError, match=r"group 0: queries\[1\] is not queries\[0\]; with group_"),
    ):
        trainer.step(mixed, responses, scores)
    queries[3] = queries[3][:-1]
    with pytest.raises(ValueError, match=r"group 1: queries\[3\] is not queries\[2\]"):
        trainer.step(queries, responses, scores)


@pytest.mark.parametrize("backend", ["engine", "generate"])
def test_train_gives_each_prompt_a_group(backend):
    trainer = make_trainer(init_kl_coef=0.0, rollout_backend=backend, batch_size=6, group_size=3,
                           mini_batch_size=6)  # fmt: skip
    seen = []

    def reward_fn(prompts, completions, completion_ids, tag):
        seen.append((prompts, tag))
        return [float(sum(ids)) for ids in completion_ids]

    rows = Dataset.from_dict({"prompt": ["w3 w4", "w5", "w6 w7"], "tag": [0, 1, 2]})
    result = trainer.train(
        reward_fn, steps=2, dataset=rows, generation_kwargs=SAMPLING, progress=False
    )
    for prompts, tags in seen:
        assert len(set(prompts)) == len(set(tags)) == 2
        assert prompts[0] == prompts[1] == prompts[2]
        assert tags[3] == tags[4] == tags[5]
    assert result.history[0]["groups/reward_std"] > 0
    with pytest.raises(ValueError, match="1 prompts are fewer than batch_size=6 / group_size=3"):
        trainer.train(reward_fn, steps=1, prompts=["w3"], progress=False)


def test_the_dataloader_gives_the_prompts_of_whole_groups():
    rows = [{"input_ids": [3 + i]} for i in range(8)]
    model = tiny_models.language_model("gpt2")
    config = PPOConfig(**GROUP, init_kl_coef=0.0)
    trainer = PPOTrainer(config, model, tokenizer=tiny.tokenizer(), dataset=rows)
    assert len(next(iter(trainer.dataloader))["input_ids"]) == 2


@pytest.mark.parametrize("advantage", ["gae", "dr_grpo"])
def test_a_weight_of_two_is_a_sample_twice_and_of_zero_none(advantage):
    """With a mean over tokens, and responses of one length."""
    settings = {"kl_in": "loss", "init_kl_coef": 0.2, "advantage": advantage}
    settings["group_size"] = 1 if advantage == "gae" else 2
    queries = tiny_models.prompts(4) * 4
    a, b = tiny_models.prompts(5, 5, seed=3)

    def step(responses, weights, advantages):
        model = make_policy() if advantage == "gae" else None
        trainer = make_trainer(model, reference(advantage), **settings)
        trainer.advantages = _Fixed(advantages)
        scores = [torch.tensor(0.0)] * 4
        return gradients(trainer, queries, responses, scores, weights=weights)[0]

    weighted = step([a, a, b, b], [1.0, 3.0, 0.0, 0.0], [0.7, -0.4, 9.0, 1.0])
    copied = step([a, a, a, a], None, [0.7, -0.4, -0.4, -0.4])
    for name, gradient in copied.items():
        torch.testing.assert_close(weighted[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert max(g.abs().max() for g in copied.values()) > 1e-3


def reference(advantage):
    if advantage == "gae":
        policy = make_policy()
        tiny.fill_by_rule(policy, 0.05)
        return policy
    return tiny_models.language_model("gpt2", 0.05)


class _Fixed:
    """Advantages that are given, and returns to learn."""

    per_token = True

    def __init__(self, advantages):
        self.advantages = torch.tensor(advantages)[:, None]

    def check(self, queries):
        pass

    def statistics(self, scores):
        return {}

    def __call__(self, values, rewards, mask):
        advantages = torch.where(mask, self.advantages.to(mask.device), 0.0)
        return torch.where(mask, values, 0.0), advantages, advantages


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_weight_of_zero_takes_a_samples_gradient_to_the_bit(aggregate):
    """Another response in its place changes nothing then: 0 times its gradient is 0, and the rest
    is the same operations on the same numbers, in storage that torch aligns alike."""
    queries, responses, scores = groups()
    moved = []
    for last in (responses[3], responses[3].flip(0)):
        reference = tiny_models.language_model("gpt2", 0.05)
        trainer = make_trainer(None, reference, kl_in="loss", loss_aggregate=aggregate)
        batch = queries, [*responses[:3], last], scores
        moved.append(gradients(trainer, *batch, weights=torch.tensor([1.0, 0.5, 2.0, 0.0]))[0])
    assert all(torch.equal(moved[0][k], g) for k, g in moved[1].items())
    assert max(g.abs().max() for g in moved[0].values()) > 1e-3


@pytest.mark.parametrize(("weights", "message"), [
    ([1.0, 2.0], r"weights has shape \(2,\): pass one number per sample, \[4\]"),
    ([1.0, 2.0, -1.0, 0.0], r"weights\[2\] is -1.0"),
    ([1.0, math.nan, 1.0, 0.0], r"weights\[1\] is nan"),
])  # fmt: skip
def test_wrong_weights_are_named(weights, message, unchanged):
    trainer = make_trainer(init_kl_coef=0.0)
    with unchanged(trainer), pytest.raises(ValueError, match=message):
        trainer.step(*groups(), weights=weights)
