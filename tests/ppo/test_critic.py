"""The value function's own λ and its warm-up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl_kernels
import fastrl_kernels.reference as exact
from fastrl import PPOConfig, PPOTrainer
from fastrl.ppo.advantages import GAE, discounted_sums, make_advantages
from tests import tiny_models
from tests.golden import tiny
from tests.ppo.conftest import BATCH, make_batch, make_policy, make_trainer, parameters, perturbed
from tests.ppo.exact_ppo import exact_step

TEXTS = ["w3 w4", "w5 w6 w7", "w8", "w9 w10", "w11 w12", "w13 w14 w15 w16"]
RATE = 1e-2

pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
]


def batch_of_tokens(seed: int = 0) -> dict[str, Any]:
    batch = make_batch(seed=seed)
    g = torch.Generator().manual_seed(seed + 3)
    return {**batch, "scores": [torch.randn(len(r), generator=g) for r in batch["responses"]]}


def sgd_trainer(policy: Any = None, **settings: Any) -> PPOTrainer:
    """Of one mini-batch, whose steps are those of ``exact_step``."""
    policy = policy or make_policy()
    settings = {
        "batch_size": BATCH, "mini_batch_size": BATCH, "ppo_epochs": 2, "init_kl_coef": 0.3,
        "adap_kl_ctrl": False, **settings,
    }  # fmt: skip
    optimizer = torch.optim.SGD(policy.parameters(), lr=RATE)
    reference = perturbed(make_policy())
    return PPOTrainer(
        PPOConfig(**settings), policy, reference, tiny.tokenizer(), optimizer=optimizer
    )


def assert_moved_alike(model: Any, start: dict[str, Tensor], expected: Any) -> None:
    wanted = dict(expected.named_parameters())
    for name, p in model.named_parameters():
        # weights of size 1 are rounded to 6e-8 in each epoch, and that is divided by the rate
        got, exactly = ((x.double() - start[name]) / RATE for x in (p.detach(), wanted[name]))
        torch.testing.assert_close(got, exactly.detach(), rtol=1e-4, atol=3e-5, msg=name)


def weights(model: Any) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def ragged(rows: int = 5, width: int = 33) -> tuple[Tensor, Tensor, Tensor]:
    """Values, rewards and a mask with holes, of rows of very different lengths."""
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(rows, width, generator=g) > 0.3
    mask[0, 2:] = False
    mask[1, :] = True
    mask[2, :20] = False
    values, rewards = torch.randn(2, rows, width, generator=g)
    return values, rewards, mask


def test_advantages_and_returns_have_their_own_lambda() -> None:
    values, rewards, mask = ragged()
    config = PPOConfig(lam=0.9, lam_value=0.99, gamma=0.97)
    kept, advantages, returns = make_advantages(config)(values, rewards, mask)
    wide = (rewards.double(), values.double(), mask)
    expected, _ = exact.gae(*wide, gamma=0.97, lam=0.9, whiten=True)
    _, exact_returns = exact.gae(*wide, gamma=0.97, lam=0.99)
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(returns.double(), exact_returns, rtol=1e-5, atol=1e-5)
    assert torch.equal(kept, torch.where(mask, values, 0.0))


@pytest.mark.parametrize("alpha", [0.05, 0.5])
@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_lambda_grows_with_a_responses_length(alpha: float, whiten_rewards: bool) -> None:
    values, rewards, mask = ragged()
    config = PPOConfig(
        lam_length_alpha=alpha, lam_value=1.0, gamma=0.97, whiten_rewards=whiten_rewards
    )
    _, advantages, returns = make_advantages(config)(values, rewards, mask)
    r, v = rewards.double(), values.double()
    if whiten_rewards:
        r = exact.masked_whiten(r, mask, shift_mean=False)
    rows = []
    for i, length in enumerate(mask.sum(-1).tolist()):
        lam = max(0.0, 1 - 1 / (alpha * length))
        rows.append(exact.gae(r[i : i + 1], v[i : i + 1], mask[i : i + 1], gamma=0.97, lam=lam)[0])
    expected = exact.masked_whiten(torch.cat(rows), mask)
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-4, atol=1e-5)
    _, exact_returns = exact.gae(r, v, mask, gamma=0.97, lam=1.0)
    torch.testing.assert_close(returns.double(), exact_returns, rtol=1e-5, atol=2e-5)


def test_discounted_sums_of_a_long_row_are_as_exact_as_a_loop() -> None:
    g = torch.Generator().manual_seed(0)
    x, discounts = torch.randn(3, 1500, generator=g), torch.tensor([0.0, 0.9, 1.0])
    found = discounted_sums(x, torch.ones_like(x).bool(), discounts)
    wide, sums = x.double(), torch.zeros(3, 1500, dtype=torch.float64)
    carry = torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(1500)):
        carry = sums[:, t] = wide[:, t] + discounts.double() * carry
    # each of eleven passes rounds once, to 6e-8 of sums of up to a hundred
    assert (found.double() - sums).abs().max() < 11 * 6e-8 * float(sums.abs().max())


@pytest.mark.parametrize(
    ("settings", "calls"),
    [({}, 1), ({"lam_value": 0.95}, 1), ({"lam_value": 1.0}, 2), ({"lam_length_alpha": 0.05}, 2)],
    ids=str,
)
def test_a_lambda_of_its_own_is_one_more_scan(settings, calls, monkeypatch) -> None:
    seen: list[float] = []
    gae = fastrl_kernels.gae
    monkeypatch.setattr(
        fastrl_kernels, "gae", lambda *a, **k: seen.append(k["lam"]) or gae(*a, **k)
    )
    estimate = make_advantages(PPOConfig(**settings))
    estimate(*ragged())
    assert len(seen) == calls
    assert isinstance(estimate, GAE) == (calls == 1)


def test_a_step_with_decoupled_lambdas_follows_the_formulas_in_float64() -> None:
    trainer = sgd_trainer(lam=0.8, lam_value=1.0)
    start, batch = weights(trainer.model), batch_of_tokens()
    trainer.step(**batch)
    policy, reference = make_policy().double().eval(), perturbed(make_policy()).double().eval()
    exact_step(policy, reference, batch, rate=RATE, epochs=2, lam=0.8, lam_value=1.0)
    assert_moved_alike(trainer.model, start, policy)


def test_in_the_warm_up_the_value_head_alone_follows_the_formulas_in_float64() -> None:
    trainer = sgd_trainer(critic_warmup_steps=1)
    start, batch = weights(trainer.model), batch_of_tokens()
    stats = trainer.step(**batch)
    assert stats["ppo/critic_warmup"] == 1
    assert stats["ppo/policy/policykl"] == pytest.approx(0, abs=1e-6)
    assert stats["ppo/loss/total"] == pytest.approx(0.1 * stats["ppo/loss/value"], rel=1e-5)
    policy, reference = make_policy().double().eval(), perturbed(make_policy()).double().eval()
    exact_step(
        policy, reference, batch, rate=RATE, epochs=2, policy_coef=0.0,
        learns=lambda name: name.startswith("v_head"),
    )  # fmt: skip
    assert_moved_alike(trainer.model, start, policy)
    now = weights(trainer.model)
    assert not torch.equal(now["v_head.summary.weight"], start["v_head.summary.weight"])
    assert all(torch.equal(x, start[k]) for k, x in now.items() if not k.startswith("v_head"))
    assert trainer.step(**batch)["ppo/critic_warmup"] == 0
    after = weights(trainer.model)
    assert not any(torch.equal(x, now[k]) for k, x in after.items() if "mlp" in k)


def lora_policy() -> Any:
    from fastrl import AutoModelForCausalLMWithValueHead

    torch.manual_seed(1)
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        tiny_models.language_model(), peft_config=tiny_models.lora()
    )


def half_policy() -> Any:
    from fastrl import AutoModelForCausalLMWithValueHead

    model = tiny_models.language_model().to(torch.bfloat16)
    torch.manual_seed(1)
    return AutoModelForCausalLMWithValueHead.from_pretrained(model)


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (tiny_models.policy, {"optim": "adamw_torch", "optim_args": "weight_decay=0.1"}),
        (tiny_models.policy, {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}),
        (tiny_models.policy, {"optim": "adafactor"}),
        (lora_policy, {}),
        (half_policy, {}),
    ],
    ids=["decay", "accumulated", "adafactor", "adapter", "bfloat16"],
)
def test_the_warm_up_leaves_policy_and_its_moments_as_they_are(policy, settings) -> None:
    model = policy()
    trainer = make_trainer(policy=model, critic_warmup_steps=2, **settings)
    start, coef = weights(model), trainer.kl_ctl.value
    batch = make_batch()
    batch["queries"] = [q % 40 + 5 for q in batch["queries"]]
    for _ in range(2):
        trainer.step(**batch)
    now = weights(model)
    moved = {name for name, x in now.items() if not torch.equal(x, start[name])}
    assert moved == {"v_head.summary.weight", "v_head.summary.bias"}
    assert set(trainer.state_dict()["optimizer"]["moments"]) == moved
    assert trainer.kl_ctl.value == coef
    trainer.step(**batch)
    assert set(trainer.state_dict()["optimizer"]["moments"]) == {
        name for name, p in model.named_parameters() if p.requires_grad
    }


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_goes_on_in_the_phase_in_which_it_stopped(tmp_path, stop: int) -> None:
    """With the warm-up's steps, two of four."""

    def train(output: Any, steps: int, **arguments: Any) -> tuple[PPOTrainer, Any]:
        trainer = make_trainer(policy=tiny_models.policy(), critic_warmup_steps=2)
        result = trainer.train(
            lengths, prompts=TEXTS, steps=steps, output=output, progress=False,
            generation_kwargs={"max_new_tokens": 5, "top_k": 0}, **arguments,
        )  # fmt: skip
        return trainer, result

    whole, result = train(tmp_path / "whole", 4)
    phases = [step["ppo/critic_warmup"] for step in result.history]
    assert phases == [1, 1, 0, 0]
    train(tmp_path / "two", stop)
    two, resumed = train(tmp_path / "two", 4, resume=True)
    assert [step["ppo/critic_warmup"] for step in resumed.history] == phases[stop:]
    expected = parameters(whole)
    assert all(torch.equal(x, expected[name]) for name, x in parameters(two).items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lam_value": 1.5}, r"lam_value must lie in \[0, 1\] or be None, got 1.5"),
        ({"lam_value": math.nan}, "lam_value must lie in"),
        ({"lam_length_alpha": 0.0}, "lam_length_alpha must be positive or None, got 0.0"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps must be 0 or more"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"lam_value": 0.0}, {"lam_length_alpha": 0.05}, {"critic_warmup_steps": 1}],
    ids=str,
)
def test_without_a_value_function_they_are_refused(settings) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is of a value function"):
        PPOConfig(advantage="rloo", group_size=2, **settings)
