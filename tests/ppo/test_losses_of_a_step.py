"""Policy losses, entropies and ratios of sequences in a step, against formulas in float64."""

from contextlib import nullcontext

import pytest
import torch

from fastrl_kernels.types import AGGREGATES
from tests import tiny_models
from tests.ppo.test_policy_gradients import by_formula, groups, make_trainer

CASES = {
    "cispo": {"policy_loss": "cispo", "cliprange_high": 0.005},
    "sapo": {"policy_loss": "sapo", "sapo_temperature_neg": 1.7},
    "vespo": {"policy_loss": "vespo"},
    "delta": {"cliprange": 0.003, "delta": 1.006},
    "gspo": {
        "ratio_level": "sequence", "cliprange": 3e-4, "cliprange_high": 4e-4,
        "loss_aggregate": "seq-mean-token-mean",
    },
    "product": {"ratio_level": "product", "cliprange": 3e-3},
    "gspo-token": {"ratio_level": "sequence-token", "cliprange": 3e-4},
    "luspo": {
        "ratio_level": "sequence", "loss_aggregate": "seq-mean-token-sum", "cliprange": 3e-4,
    },
    "entropy bonus": {"entropy_coef": 0.3},
    "entropy bonus of sequences": {"entropy_coef": 0.3, "loss_aggregate": "seq-mean-token-mean"},
    "top entropy": {"top_entropy_quantile": 0.3},
    "top entropy and a bonus": {"top_entropy_quantile": 0.4, "entropy_coef": 0.1},
}  # fmt: skip


def scores_of(model, queries, responses):
    """Log-probs and entropies of each response's tokens, from the model's own logits."""
    found = []
    for q, r in zip(queries, responses, strict=True):
        logits = model(torch.cat([q, r])[None]).logits[0, len(q) - 1 : -1].log_softmax(-1)
        entropies = -(logits.exp() * logits).sum(-1)
        found.append((logits.gather(-1, r[:, None])[:, 0], entropies))
    return found


def objective(settings, ratio, a, logprobs):
    """Per token of one response, without weights."""
    low = settings.get("cliprange", 0.2)
    high = settings.get("cliprange_high", low)
    kind = settings.get("policy_loss", "clip")
    if kind == "cispo":
        return -ratio.detach().clamp(max=1 + high) * a * logprobs
    if kind == "sapo":
        soft = 1.0 if a > 0 else settings["sapo_temperature_neg"]
        return -a * torch.sigmoid(soft * (ratio - 1)) * 4 / soft
    if kind == "vespo":
        w, (k, decay) = ratio.detach().prod(), (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        return -(w**k) * torch.exp(decay * (1 - w)) * a * logprobs
    plain = ratio.clamp(max=settings["delta"]) if "delta" in settings else ratio
    return torch.maximum(-a * plain, -a * ratio.clamp(1 - low, 1 + high))


def exact_loss(model, old, batch, settings):
    queries, responses, scores = batch
    new = scores_of(model, queries, responses)
    every = torch.cat([h for _, h in new]).detach()
    least = torch.quantile(every, 1 - settings.get("top_entropy_quantile", 1.0))
    level, per_token = settings.get("ratio_level", "token"), []
    advantages = by_formula("grpo", torch.stack(scores).double())
    for (lp, h), o, a in zip(new, old, advantages, strict=True):
        log_ratio = lp - o
        if level == "sequence":
            log_ratio = log_ratio.mean().expand(len(lp))
        elif level == "product":
            log_ratio = log_ratio.sum().expand(len(lp))
        elif level == "sequence-token":
            log_ratio = log_ratio.mean().detach() + lp - lp.detach()
        loss = objective(settings, log_ratio.exp(), a, lp) * (h.detach() >= least)
        per_token.append(loss - settings.get("entropy_coef", 0.0) * h)
    aggregate = settings.get("loss_aggregate", "token-mean")
    assert aggregate in AGGREGATES
    if aggregate == "token-mean":
        return torch.cat(per_token).mean()
    sums = [x.mean() if aggregate.endswith("mean") else x.sum() for x in per_token]
    return sum(sums) / len(sums)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "rows"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_follows_the_formulas_gradient(case, fused, monkeypatch):
    settings, batch, rate = CASES[case], groups(1, 4), 1e-2
    if not fused:
        monkeypatch.setattr("fastrl.models.lm_head._why_not_linear", lambda _: "it is asked for")
    model = tiny_models.language_model("gpt2")
    # The first epoch goes a little way, so that ratios differ from 1 in the second.
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with nullcontext() if fused else pytest.warns(UserWarning, match="it is asked for"):
        trainer = make_trainer(
            model, None, optimizer, ppo_epochs=2, init_kl_coef=0.0, group_size=4, **settings
        )
    result = trainer.step(*batch)
    if case not in ("sapo", "vespo", *(name for name in CASES if "entropy" in name)):
        assert 0 < result["ppo/policy/clipfrac"] < 0.9, "both branches count"

    exact = tiny_models.language_model("gpt2").double()
    start = {k: p.detach().clone() for k, p in exact.named_parameters()}
    with torch.no_grad():
        old = [lp for lp, _ in scores_of(exact, *batch[:2])]
    for _ in range(2):
        exact.zero_grad()
        exact_loss(exact, old, batch, settings).backward()
        with torch.no_grad():
            for p in exact.parameters():
                p -= rate * p.grad
    for name, p in model.named_parameters():
        got = (p.detach().cpu().double() - start[name]) / rate
        expected = (exact.get_parameter(name).detach() - start[name]) / rate
        # parameters of size 1 are rounded to 6e-8 twice, and that is divided by the rate
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=3e-5, msg=name)


@pytest.mark.parametrize("settings", [
    {}, {"policy_loss": "sapo"}, {"policy_loss": "vespo"}, {"ratio_level": "sequence"},
    {"top_entropy_quantile": 0.6},
    {"top_entropy_quantile": 0.6, "policy_loss": "vespo"},
], ids=str)  # fmt: skip
def test_a_responses_ratio_is_the_same_in_mini_batches_of_any_parts(settings):
    """Forwards of a sample each give the gradient of one of all."""
    moved = []
    for tokens in (None, 16):
        model = tiny_models.language_model("gpt2")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        trainer = make_trainer(
            model, None, optimizer, ppo_epochs=2, init_kl_coef=0.0, group_size=4,
            micro_batch_tokens=tokens, entropy_coef=0.1, **settings,
        )  # fmt: skip
        trainer.step(*groups(1, 4))
        moved.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*moved, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # sums in another order


def test_the_entropy_bonus_shows_in_the_loss():
    result = make_trainer(init_kl_coef=0.0, entropy_coef=0.5).step(*groups())
    expected = result["ppo/loss/policy"] - 0.5 * result["ppo/policy/entropy"]
    assert result["ppo/loss/total"] == pytest.approx(expected, rel=1e-5)
