"""The value function's own λ and its warm-up."""

import copy
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fastrl_kernels
import fastrl_kernels.reference as exact
from fastrl import PPOConfig, PPOTrainer
from fastrl.learn.advantages import GAE, discounted_sums
from fastrl.rewards.functions import ClassifierReward
from fastrl.trainers.ppo.method import advantages_of
from tests import tiny_models
from tests.golden import tiny
from tests.ppo.conftest import (
    BATCH,
    descending,
    make_batch,
    make_policy,
    make_trainer,
    parameters,
    perturbed,
)
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


# Of one mini-batch, whose steps are those of ``exact_step``.
sgd_trainer = partial(
    descending, RATE, batch_size=BATCH, mini_batch_size=BATCH, ppo_epochs=2, init_kl_coef=0.3,
    adap_kl_ctrl=False,
)  # fmt: skip


def assert_moved_alike(model: Any, start: dict[str, Tensor], expected: Any) -> None:
    wanted = dict(expected.named_parameters())
    for name, p in model.named_parameters():
        # weights of size 1 are rounded to 6e-8 in each epoch, and that is divided by the rate
        got, exactly = ((x.cpu().double() - start[name]) / RATE for x in (p, wanted[name]))
        torch.testing.assert_close(got.detach(), exactly.detach(), rtol=1e-4, atol=3e-5, msg=name)


def weights(model: Any) -> dict[str, Tensor]:
    return {k: p.detach().clone().cpu() for k, p in model.named_parameters()}


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
    kept, advantages, returns = advantages_of(config)(values, rewards, mask)
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
    _, advantages, returns = advantages_of(config)(values, rewards, mask)
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
    estimate = advantages_of(PPOConfig(**settings))
    estimate(*ragged())
    assert len(seen) == calls
    assert (type(estimate) is GAE) == (calls == 1)


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
@pytest.mark.parametrize(("policy", "settings"), [
    (tiny_models.policy, {"optim": "adamw_torch", "optim_args": "weight_decay=0.1"}),
    (tiny_models.policy, {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}),
    (tiny_models.policy, {"optim": "adafactor"}),
    (lora_policy, {}),
    (half_policy, {}),
], ids=["decay", "accumulated", "adafactor", "adapter", "bfloat16"])  # fmt: skip
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


def in_the_warm_up(steps: int, warmup: int) -> Any:
    """Context of a run that says so where it ends in the warm-up."""
    if steps > warmup:
        return nullcontext()
    return pytest.warns(UserWarning, match=rf"does not learn in {steps} step.*_steps={warmup}")


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_goes_on_in_the_phase_in_which_it_stopped(tmp_path, stop: int) -> None:
    """With the warm-up's steps, two of four."""

    def train(output: Any, steps: int, **arguments: Any) -> tuple[PPOTrainer, Any]:
        trainer = make_trainer(policy=tiny_models.policy(), critic_warmup_steps=2)
        with in_the_warm_up(steps, 2):
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


def classifier(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A reward model of the policies' vocabulary, wider than they are."""
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    torch.manual_seed(2)
    sizes = {
        "vocab_size": tiny.VOCABULARY, "hidden_size": 24, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 48, "num_labels": 1, "pad_token_id": tiny.PAD,
    }  # fmt: skip
    config = LlamaConfig(**{**sizes, **settings})
    return AutoModelForSequenceClassification.from_config(config).to(dtype)


def values_of(model: Any, query: Tensor, response: Tensor) -> tuple[None, Tensor]:
    hidden = model.model(torch.cat([query, response])[None]).last_hidden_state
    return None, model.score(hidden)[0, len(query) - 1 : -1, 0]


def critic_trainer(critic: Any = None, policy: Any = None, **settings: Any) -> PPOTrainer:
    settings = {"batch_size": BATCH, "mini_batch_size": 2, "learning_rate": 1e-3, **settings}
    critic = classifier() if critic is None else critic
    policy = policy or tiny_models.language_model()
    return PPOTrainer(PPOConfig(**settings), policy, None, tiny.tokenizer(), critic=critic)


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_step_with_a_critic_follows_the_formulas_in_float64(warmup, padding_free) -> None:
    critic, policy = classifier(), make_policy()
    settings = {
        "batch_size": BATCH, "mini_batch_size": BATCH, "ppo_epochs": 2, "init_kl_coef": 0.3,
        "adap_kl_ctrl": False, "critic_warmup_steps": warmup, "padding_free": padding_free,
        "optim": "sgd", "learning_rate": RATE, "critic_learning_rate": RATE, "vf_coef": 0.5,
    }  # fmt: skip
    config, reference = PPOConfig(**settings), perturbed(make_policy())
    trainer = PPOTrainer(config, policy, reference, tiny.tokenizer(), critic=critic)
    before, critics, batch = weights(policy), weights(critic), batch_of_tokens()
    stats = trainer.step(**batch)

    own, exact_critic = make_policy().double().eval(), classifier(torch.float64).eval()
    exact_step(
        own, perturbed(make_policy()).double().eval(), batch, rate=RATE, epochs=2, vf_coef=0.5,
        critic=values_of, critic_model=exact_critic, learns=lambda _: not warmup,
    )  # fmt: skip
    assert_moved_alike(policy, before, own)
    assert_moved_alike(critic, critics, exact_critic)
    assert torch.equal(weights(policy)["v_head.summary.weight"], before["v_head.summary.weight"])
    assert any(not torch.equal(x, critics[k]) for k, x in weights(critic).items() if "mlp" in k)
    moved = [k for k, x in weights(policy).items() if not torch.equal(x, before[k])]
    assert bool(moved) == (not warmup)
    assert stats["ppo/critic/optimizer_steps"] == 2
    assert stats["ppo/optimizer_steps"] == (0 if warmup else 2)
    assert stats["ppo/critic/learning_rate"] == RATE
    total = 0.5 * stats["ppo/loss/value"] + (0 if warmup else stats["ppo/loss/policy"])
    assert stats["ppo/loss/total"] == pytest.approx(total, rel=1e-5)
    assert math.isfinite(stats["ppo/val/explained_variance"])


def test_a_kl_alone_is_the_same_without_the_critics_forward() -> None:
    trainer = critic_trainer()
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.mul_(1.1)  # the reference stays as it was
    sequences = batch_of_tokens()
    queries, responses = sequences["queries"], sequences["responses"]
    batch = trainer.make_batch(queries, responses, None)
    with trainer._evaluating():
        scored = trainer.scorer(batch)
    expected = (scored.logprobs - scored.ref_logprobs).sum(-1).mean()
    ran: list[Any] = []
    trainer.critic.model.register_forward_pre_hook(lambda *_: ran.append(1))
    assert trainer.sequence_kl(queries, responses) == pytest.approx(float(expected), abs=1e-6)
    assert expected.abs() > 1e-3
    assert not ran


def test_a_critic_in_parts_of_a_mini_batch_learns_the_same() -> None:
    batch = make_batch()
    whole, parts = critic_trainer(), critic_trainer(micro_batch_tokens=20)
    stats, in_parts = whole.step(**batch), parts.step(**batch)
    for name in ("ppo/loss/value", "ppo/val/var", "ppo/returns/var", "ppo/val/vpred"):
        assert in_parts[name] == pytest.approx(stats[name], rel=1e-4), name
    expected = weights(whole.critic.unwrapped)
    for name, x in weights(parts.critic.unwrapped).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-5)


def test_values_come_from_the_critic_where_log_probs_come_from_the_rollout(tmp_path) -> None:
    trainer = critic_trainer(old_logprobs="rollout")
    seen: list[Tensor] = []
    compute = trainer.compute_advantages
    trainer.compute_advantages = lambda v, *a: seen.append(v) or compute(v, *a)  # type: ignore[method-assign]
    expected = classifier().eval()
    result = trainer.train(
        lengths, prompts=TEXTS, steps=1, output=tmp_path, progress=False, eval_prompts=TEXTS[:2],
        generation_kwargs={"max_new_tokens": 5, "top_k": 0},
    )  # fmt: skip
    assert result.history[0]["rollout/reused"] == 1
    from fastrl.run.ledger import read_ledger

    for i, row in enumerate(read_ledger(tmp_path / "ledger").to_pylist()):
        pair = torch.tensor(row["prompt_ids"]), torch.tensor(row["completion_ids"])
        with torch.no_grad():
            values = values_of(expected, *pair)[1]
        begin = len(pair[0]) - 1
        got = seen[0][i][begin : begin + len(values)].cpu()
        torch.testing.assert_close(got, values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_with_a_critic_is_resumed_bit_for_bit(tmp_path, stop: int) -> None:
    classifier().save_pretrained(tmp_path / "reward")

    def train(output: Any, steps: int, **arguments: Any) -> PPOTrainer:
        config = PPOConfig(
            batch_size=BATCH, mini_batch_size=2, learning_rate=1e-3, critic_warmup_steps=2,
            critic=str(tmp_path / "reward"), critic_learning_rate=3e-3,
        )  # fmt: skip
        trainer = PPOTrainer(config, tiny_models.language_model(), None, tiny.tokenizer())
        with in_the_warm_up(steps, 2):
            trainer.train(
                lengths, prompts=TEXTS, steps=steps, output=output, progress=False,
                generation_kwargs={"max_new_tokens": 5, "top_k": 0}, **arguments,
            )  # fmt: skip
        return trainer

    whole = train(tmp_path / "whole", 4)
    train(tmp_path / "two", stop)
    two = train(tmp_path / "two", 4, resume=True)
    for one, other in ((whole.model, two.model), (whole.critic.unwrapped, two.critic.unwrapped)):
        expected = weights(one)
        assert all(torch.equal(x, expected[name]) for name, x in weights(other).items())
    whole.save_pretrained(tmp_path / "saved")
    again = critic_trainer(critic=str(tmp_path / "saved" / "critic"))
    expected = weights(whole.critic.unwrapped)
    assert all(torch.equal(x, expected[k]) for k, x in weights(again.critic.unwrapped).items())
    reward = ClassifierReward.from_pretrained(tmp_path / "saved" / "critic")
    assert len(reward(TEXTS[:2], TEXTS[:2])) == 2


def test_a_checkpoint_with_a_critic_is_not_that_of_a_trainer_without(unchanged) -> None:
    state = critic_trainer().state_dict()
    trainer = make_trainer(policy=tiny_models.policy())
    with unchanged(trainer), pytest.raises(ValueError, match="had a critic of its own: make the"):
        trainer.load_state_dict(state)
    with pytest.raises(ValueError, match="had no critic of its own"):
        critic_trainer().load_state_dict(trainer.state_dict())
    with pytest.raises(ValueError, match=r"of another critic, whose .* resume with the critic"):
        critic_trainer(classifier(num_hidden_layers=1)).load_state_dict(state)


@pytest.mark.parametrize("after", ["policy", "critic"])
def test_an_error_in_an_update_leaves_no_gradient_behind(after: str) -> None:
    trainer = critic_trainer()
    learner = trainer.critic if after == "critic" else trainer.update
    begun = trainer.update.epochs.shuffle.get_state()[1].tolist()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = learner.gradient.engine.optimizer.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(**make_batch())
    handle.remove()
    for model in (trainer.model, trainer.critic.model):
        assert all(p.grad is None for p in model.parameters())
    assert trainer.update.epochs.shuffle.get_state()[1].tolist() == begun
    trainer.step(**make_batch())


def test_values_that_are_not_finite_leave_the_sample_out() -> None:
    critic = classifier()
    with torch.no_grad():
        critic.model.embed_tokens.weight[11] = math.nan
    batch = make_batch()
    for name in ("queries", "responses"):
        batch[name] = [torch.where(ids == 11, 12, ids) for ids in batch[name]]
    batch["responses"][2][0] = 11
    with pytest.warns(UserWarning, match=r"its values, prompt .*left out of the step"):
        stats = critic_trainer(critic).step(**batch)
    assert stats["ppo/nonfinite_samples"] == 1


def without_pad_head() -> Any:
    from transformers import AutoModelForSequenceClassification, BertConfig

    config = BertConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=1,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


@pytest.mark.parametrize(
    ("critic", "settings", "error", "message"),
    [
        (tiny_models.language_model, {}, ValueError, "has no head that gives each token one"),
        (lambda: classifier(num_labels=2), {}, ValueError, "has no head that gives each token one"),
        (without_pad_head, {}, ValueError, "reads both ways|has no head"),
        (lambda: classifier(vocab_size=5), {}, ValueError, "the critic knows 5 tokens"),
        (lambda: classifier().requires_grad_(False), {}, ValueError, "nothing of the model can be"),
        (lambda: 3, {}, TypeError, "critic must be a path, or a sequence classifier"),
        (classifier, {"advantage": "rloo", "group_size": 2}, ValueError, "critic is for values"),
    ],
    ids=["language model", "labels", "encoder", "vocabulary", "frozen", "number", "groups"],
)
def test_what_cannot_be_a_critic_is_refused(critic, settings, error, message) -> None:
    with pytest.raises(error, match=message):
        critic_trainer(critic(), **settings)


@pytest.mark.parametrize("padding_free", [True, False])
def test_a_token_of_padding_may_be_added_that_no_model_knows(padding_free: bool) -> None:
    """As TRL's own script does; masks leave it out."""
    found = []
    for added in (False, True):
        tokenizer = tiny.tokenizer()
        if added:
            tokenizer.add_special_tokens({"pad_token": "<new>"})
        settings = {"padding_free": padding_free, "rollout_backend": "generate"}
        config = PPOConfig(batch_size=BATCH, mini_batch_size=2, **settings)
        trainer = PPOTrainer(config, make_policy(), None, tokenizer, critic=classifier())
        batch = make_batch()
        greedy = {"do_sample": False, "max_new_tokens": 4, "batch_size": BATCH}
        replies = trainer.generate(batch["queries"], **greedy)
        found.append(([x.tolist() for x in replies], trainer.step(**batch)["ppo/loss/total"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_critic_of_the_policys_own_layers_is_refused(frozen: bool) -> None:
    """Frozen ones, under adapters of both, may be the same."""
    policy = make_policy()
    from transformers import GPT2ForSequenceClassification

    config = policy.pretrained_model.config
    critic = GPT2ForSequenceClassification(copy.deepcopy(config))
    critic.config.num_labels, critic.score = 1, torch.nn.Linear(config.n_embd, 1, bias=False)
    critic.transformer.wte = policy.pretrained_model.transformer.wte
    if frozen:
        critic.transformer.wte.requires_grad_(False)
        critic_trainer(critic, policy)
        return
    with pytest.raises(ValueError, match="trained weights in common with the policy"):
        critic_trainer(critic, policy)


def test_two_critics_are_refused() -> None:
    config = PPOConfig(batch_size=BATCH, critic="reward")
    with pytest.raises(ValueError, match=r"PPOConfig.critic='reward' names another: leave one out"):
        PPOTrainer(config, make_policy(), None, tiny.tokenizer(), critic=classifier())


def test_a_critics_learning_rate_without_a_critic_is_named() -> None:
    config = PPOConfig(batch_size=BATCH, mini_batch_size=2, critic_learning_rate=1e-3)
    with pytest.warns(UserWarning, match="critic_learning_rate=0.001 is of a critic") as caught:
        PPOTrainer(config, make_policy(), None, tiny.tokenizer())
    assert caught[0].filename == __file__


def test_a_sample_beyond_the_critics_context_is_refused(unchanged) -> None:
    trainer = critic_trainer(classifier(max_position_embeddings=8))
    with unchanged(trainer), pytest.raises(ValueError, match="beyond the critic's context of 8"):
        trainer.step(**make_batch())
