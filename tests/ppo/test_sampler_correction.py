"""Importance weights of responses that another engine sampled, alone and in a step."""

import copy
import math

import pytest
import torch

from fastrl import PPOConfig, PPOTrainer
from fastrl.learn.correction import sampler_weights
from fastrl.rollout import RolloutOutput
from fastrl.run.processes import OneProcess
from fastrl.samples import Samples
from tests import tiny_models
from tests.golden import tiny
from tests.ppo.test_losses_of_a_step import objective, scores_of
from tests.ppo.test_policy_gradients import by_formula, groups, make_trainer

KINDS = ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask")
MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])


def log_ratios(*rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of policy and sampler whose differences are these logarithms."""
    sampled = torch.full((3, 3), -2.0)
    return sampled + torch.tensor(rows).log(), sampled


def in_float64(logprobs, sampled, mask, kind, least=None, most=3.0):
    """By rows, from the definitions."""
    difference = torch.where(mask, logprobs.double() - sampled.double(), 0.0)
    if kind.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True).expand(mask.shape)
    ratio = difference.exp()
    least, most = -math.inf if least is None else least, math.inf if most is None else most
    if kind.endswith("truncate"):
        return ratio.clamp(least, most)
    return torch.where((ratio < least) | (ratio > most), 0.0, ratio)


@pytest.mark.parametrize(("kind", "expected"), [
    ("token-truncate", [[2.0, 3.0], [0.5, 0.5, 3.0]]),
    ("token-mask", [[2.0, 0.0], [0.5, 0.0, 3.0]]),
    ("sequence-truncate", [[3.0, 3.0], [0.5, 0.5, 0.5]]),
    ("sequence-mask", [[0.0, 0.0], [0.0, 0.0, 0.0]]),
])  # fmt: skip
def test_weights_by_hand(kind, expected):
    logprobs, sampled = log_ratios([2.0, 6.0, 9.0], [0.5, 0.25, 3.0 - 1e-6], [7.0, 7.0, 7.0])
    weights, found = sampler_weights(logprobs, sampled, MASK, kind, 0.5 - 1e-6, 3.0)
    for row, mask, of_row in zip(weights, MASK, expected, strict=False):
        torch.testing.assert_close(row[mask], torch.tensor(of_row), rtol=1e-5, atol=0)
    used = [x for row in expected for x in row]
    if kind.startswith("sequence"):
        used = [row[0] for row in expected]
    cut = {"token": 2 / 5, "sequence": 1.0}[kind.split("-")[0]]
    assert float(found.weight_mean) == pytest.approx(sum(used) / len(used), rel=1e-5)
    assert float(found.weight_min) == pytest.approx(min(used), rel=1e-5)
    assert float(found.weight_max) == pytest.approx(max(used), rel=1e-5)
    assert float(found.cut_share) == pytest.approx(cut)
    logs = [abs(math.log(x)) for x in (2.0, 6.0, 0.5, 0.25, 3.0)]
    assert float(found.difference_mean) == pytest.approx(sum(logs) / 5, rel=1e-5)
    assert float(found.difference_max) == pytest.approx(math.log(6), rel=1e-5)
    assert float(found.unknown_share) == 0


def ragged(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    sampled = -3 * torch.rand(6, 9, generator=g)
    logprobs = sampled + 0.9 * torch.randn(6, 9, generator=g)
    lengths = torch.tensor([9, 1, 0, 4, 7, 3])
    return logprobs, sampled, torch.arange(9) < lengths[:, None], lengths


@pytest.mark.parametrize("bounds", [(None, 3.0), (0.6, 1.7), (0.8, None)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_formulas_in_float64(kind, bounds):
    logprobs, sampled, mask, _ = ragged()
    weights, found = sampler_weights(logprobs, sampled, mask, kind, *bounds)
    expected = in_float64(logprobs, sampled, mask, kind, *bounds)
    # a log-ratio of up to 4 in fp32
    torch.testing.assert_close(weights[mask].double(), expected[mask], rtol=2e-6, atol=0)
    assert 0 < found.cut_share < 1
    assert not weights.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_lie_one_after_the_other(kind):
    logprobs, sampled, mask, lengths = ragged()
    by_rows, of_rows = sampler_weights(logprobs, sampled, mask, kind, 0.6, 1.7)
    flat = torch.ones(int(lengths.sum()), dtype=torch.bool)
    weights, found = sampler_weights(
        logprobs[mask], sampled[mask], flat, kind, 0.6, 1.7, lengths=lengths
    )
    torch.testing.assert_close(weights, by_rows[mask], rtol=1e-6, atol=0)
    torch.testing.assert_close(found, of_rows, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_the_sampler_gave_no_log_prob_has_the_ratio_1(kind):
    logprobs, sampled = log_ratios([2.0, 1.5, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    sampled[0, 0] = torch.nan
    weights, found = sampler_weights(logprobs, sampled, MASK, kind)
    first = 1.0 if kind.startswith("token") else 1.5
    torch.testing.assert_close(weights[0, :2], torch.tensor([first, 1.5]))
    assert float(found.unknown_share) == pytest.approx(1 / 5)
    assert float(found.difference_max) == pytest.approx(math.log(1.5), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_prob_of_the_policy_that_is_nan_shows(kind):
    logprobs, sampled, mask, _ = ragged()
    logprobs[3, 1] = torch.nan
    weights, found = sampler_weights(logprobs, sampled, mask, kind)
    assert weights[3, 1].isnan()
    assert weights[4].isfinite().all()
    assert found.weight_mean.isnan()
    assert found.weight_max.isnan()


def test_no_token_has_no_statistics():
    weights, found = sampler_weights(*log_ratios(*[[1.0] * 3] * 3), MASK & False, "token-mask")
    assert weights.shape == MASK.shape
    assert all(x.isnan() for x in found)


# In a step.


def of_another_engine(model, queries, responses, spread: float = 0.4, seed: int = 3):
    """A rollout whose sampler's log-probs are near those of a model in float64."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        exact = [lp for lp, _ in scores_of(model, queries, responses)]
    sampled = [lp + spread * torch.randn(len(lp), generator=g).double() for lp in exact]
    given = [x.float() for x in sampled]
    rollout = RolloutOutput([r.clone() for r in responses], ["eos"] * len(responses), given)
    return rollout, [x.double() for x in given], exact


CASES = {
    **{kind: {"sampler_correction": kind, "sampler_correction_max": 1.2} for kind in KINDS},
    "both bounds": {"sampler_correction": "token-mask", "sampler_correction_min": 0.8,
     "sampler_correction_max": 1.4},
    "sequence ratios": {"sampler_correction": "sequence-truncate", "ratio_level": "sequence",
     "loss_aggregate": "seq-mean-token-mean"},
    "cispo, a KL term": {"sampler_correction": "token-truncate", "policy_loss": "cispo",
     "kl_in": "loss", "init_kl_coef": 0.3, "adap_kl_ctrl": False},
    "vespo": {"sampler_correction": "token-truncate", "policy_loss": "vespo"},
    "top entropy": {"sampler_correction": "token-truncate", "top_entropy_quantile": 0.4},
}  # fmt: skip


def weighted_loss(model, reference, old, weights, batch, settings):
    """The first step's loss, of groups of four: all ratios to the old policy are 1."""
    queries, responses, scores = batch
    new = scores_of(model, queries, responses)
    every = torch.cat([h for _, h in new]).detach()
    least = torch.quantile(every, 1 - settings.get("top_entropy_quantile", 1.0))
    of_groups = torch.stack(scores).double().split(4)
    advantages = torch.cat([by_formula("grpo", x) for x in of_groups])
    per_token = []
    for (lp, h), o, ref, u, a in zip(new, old, reference, weights, advantages, strict=True):
        log_ratio = lp - o
        if settings.get("policy_loss") == "vespo":
            w, (k, decay) = u.prod(), (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            loss = -(w**k) * torch.exp(decay * (1 - w)) * a * lp
        else:
            if settings.get("ratio_level") == "sequence":
                log_ratio = log_ratio.mean().expand(len(lp))
            loss = objective(settings, log_ratio.exp(), a, lp) * u
        loss = loss * (h.detach() >= least)
        if "kl_in" in settings:
            d = lp - ref
            loss = loss + settings["init_kl_coef"] * ((-d).exp() - 1 + d)
        per_token.append(loss)
    if settings.get("loss_aggregate") == "seq-mean-token-mean":
        return sum(x.mean() for x in per_token) / len(per_token)
    return torch.cat(per_token).mean()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "rows"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_weights_the_policys_loss(case, fused, monkeypatch, recwarn):
    settings, batch = {"init_kl_coef": 0.0, **CASES[case]}, groups(1, 4)
    if not fused:
        monkeypatch.setattr("fastrl.models.lm_head._why_not_linear", lambda _: "it is asked for")
    exact = tiny_models.language_model("gpt2").double()
    rollout, sampled, old = of_another_engine(exact, *batch[:2])
    weights = []
    for lp, s in zip(old, sampled, strict=True):
        kind, most = settings["sampler_correction"], settings.get("sampler_correction_max", 3.0)
        mask = torch.ones(1, len(lp), dtype=torch.bool)
        least = settings.get("sampler_correction_min")
        weights.append(in_float64(lp[None], s[None], mask, kind, least, most)[0])
    model = tiny_models.language_model("gpt2")
    other = tiny_models.language_model("gpt2", 0.05)
    trainer = make_trainer(
        model, other if "kl_in" in settings else None, None, group_size=4, **settings
    )
    with torch.no_grad():
        reference = [lp for lp, _ in scores_of(copy.deepcopy(other).cpu().double(), *batch[:2])]
    before = {k: p.detach().clone().cpu() for k, p in model.named_parameters()}
    result = trainer.step(*batch, rollout=rollout)
    weighted_loss(exact, reference, old, weights, batch, settings).backward()
    for name, p in model.named_parameters():
        got = (before[name] - p.detach().cpu()).double()
        # parameters of size 1 are rounded to 6e-8
        torch.testing.assert_close(
            got, exact.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name
        )

    used = torch.cat(weights)
    if settings["sampler_correction"].startswith("sequence"):
        used = torch.stack([w[0] for w in weights])
    off = (torch.cat(old) - torch.cat(sampled)).abs()
    assert result["sampler/weight_mean"] == pytest.approx(float(used.mean()), rel=1e-5)
    assert result["sampler/weight_min"] == pytest.approx(float(used.min()), rel=1e-5)
    assert result["sampler/weight_max"] == pytest.approx(float(used.max()), rel=1e-5)
    assert result["sampler/difference_max"] == pytest.approx(float(off.max()), rel=1e-5)
    assert result["sampler/unknown_share"] == 0
    assert result["rollout/reused"] == 0


def moved_by(trainer, *batch, **options) -> torch.Tensor:
    trainer.step(*batch, **options)
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def test_nothing_is_corrected_unless_it_is_asked_for():
    """The bits are those of a step that knows of no rollout."""
    batch = groups(1, 4)
    exact = tiny_models.language_model("gpt2").double()
    rollout, *_ = of_another_engine(exact, *batch[:2])
    settings = {"init_kl_coef": 0.0, "group_size": 4, "old_logprobs": "recompute"}
    plain = moved_by(make_trainer(**settings), *batch)
    trainer = make_trainer(**settings)
    assert torch.equal(moved_by(trainer, *batch, rollout=rollout), plain)
    assert trainer.experience.sampler_weights is None
    asked = make_trainer(sampler_correction="token-truncate", **settings)
    assert not torch.equal(moved_by(asked, *batch, rollout=rollout), plain)


@pytest.mark.parametrize("given", [True, False], ids=["rollout", "memory"])
def test_the_trainers_own_rollouts_have_weights_of_1(given):
    trainer = make_trainer(init_kl_coef=0.0, sampler_correction="token-mask")
    queries = [q for q in tiny_models.prompts(3, 6) for _ in range(2)]
    out = trainer.rollouts.sample(queries, {"max_new_tokens": 6, "do_sample": True})
    scores = [torch.tensor(float(i)) for i in range(4)]
    result = trainer.step(queries, out.sequences, scores, rollout=out if given else None)
    assert result["sampler/cut_share"] == 0
    assert result["rollout/reused"] == 0, "the policy's own log-probs are computed"
    # rounding of log-probs of about 5
    assert result["sampler/weight_max"] == pytest.approx(1, abs=1e-5)
    assert result["sampler/weight_min"] == pytest.approx(1, abs=1e-5)


def test_a_sampler_that_knows_no_values_goes_with_a_value_function():
    config = PPOConfig(batch_size=4, mini_batch_size=2, sampler_correction="sequence-truncate")
    trainer = PPOTrainer(config, tiny_models.policy("gpt2"), tokenizer=tiny.tokenizer())
    queries, responses, scores = groups(1, 4)
    exact = tiny_models.policy("gpt2").pretrained_model.double()
    rollout, *_ = of_another_engine(exact, queries, responses)
    result = trainer.step(queries, responses, scores, rollout=rollout)
    assert 0 < result["sampler/difference_mean"] < 1
    assert math.isfinite(result["ppo/loss/value"])


def test_a_sample_that_is_left_out_has_no_weight():
    settings = {"init_kl_coef": 0.0, "group_size": 4, "sampler_correction": "token-truncate"}
    queries, responses, scores = groups(1, 4)
    exact = tiny_models.language_model("gpt2").double()
    rollout, *_ = of_another_engine(exact, queries, responses)
    rollout.logprobs[2] = rollout.logprobs[2] - 15
    scores[2] = torch.tensor(torch.nan)
    rollout.finish_reasons[1] = "nan"  # at its first token
    for column in (responses, rollout.sequences, rollout.logprobs):
        column[1] = column[1][:0]
    with pytest.warns(UserWarning, match=r"scores\[2\] is nan|NaN logits"):
        result = make_trainer(**settings).step(queries, responses, scores, rollout=rollout)
    assert (result["ppo/nan_samples"], result["ppo/nonfinite_samples"]) == (1, 1)
    assert result["sampler/difference_max"] < 3


def test_tokens_that_do_not_count_are_in_no_weight():
    """Such as those of a tool, which nobody sampled."""
    settings = {"init_kl_coef": 0.0, "group_size": 4, "sampler_correction": "sequence-mask"}
    queries, responses, scores = groups(1, 4)
    masks = [torch.ones(len(r), dtype=torch.bool) for r in responses]
    exact = tiny_models.language_model("gpt2").double()
    rollout, *_ = of_another_engine(exact, queries, responses, spread=0.01)
    for mask, given in zip(masks, rollout.logprobs, strict=True):
        mask[0], given[0] = False, -90.0
    result = make_trainer(**settings).step(
        queries, responses, scores, response_masks=masks, rollout=rollout
    )
    assert result["sampler/cut_share"] == 0
    assert result["sampler/difference_max"] < 0.1


class TwoProcesses(OneProcess):
    """Of which the other has a given sample."""

    count = 2

    def __init__(self, other):
        self.other = other

    def objects(self, own):
        return [own, self.other]


@pytest.mark.parametrize("known", [True, False])
def test_log_probs_of_all_processes_lie_one_after_the_other(known):
    def own(token):
        response = torch.tensor([token, token])
        sampled = [torch.full((2,), -float(token))] if known or token == 1 else None
        return Samples([response], ["eos"], prompt_ids=[response], sampler_logprobs=sampled)

    joined = own(1).gathered(TwoProcesses(own(2)), tokens=True)
    assert [r.tolist() for r in joined.sequences] == [[1, 1], [2, 2]]
    if known:
        assert [x.tolist() for x in joined.sampler_logprobs] == [[-1, -1], [-2, -2]]
    else:
        assert joined.sampler_logprobs is None


@pytest.mark.parametrize("case", ["none", "no log-probs", "temperature", "length", "negatives"])
def test_log_probs_that_are_not_those_of_the_responses_are_refused(case):
    trainer = make_trainer(init_kl_coef=0.0, group_size=4, sampler_correction="token-mask")
    queries, responses, scores = groups(1, 4)
    exact = tiny_models.language_model("gpt2").double()
    rollout, *_ = of_another_engine(exact, queries, responses)
    message = "sampler_correction='token-mask' needs the log-probs with which the responses"
    if case == "none":
        rollout = None
    elif case == "no log-probs":
        rollout.logprobs = None
    elif case == "temperature":
        rollout.temperature = 0.5
    elif case == "length":
        rollout.logprobs[1] = rollout.logprobs[1][:-1]
        message = r"rollout.logprobs\[1\] has shape .* give one number for each token"
    else:
        rollout.logprobs[2] = -rollout.logprobs[2]
        message = "log-probs of sequence 2 reach .* give log-probs, not their negatives"
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(ValueError, match=message):
        trainer.step(queries, responses, scores, rollout=rollout)
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_mask_may_have_one_bound():
    PPOConfig(sampler_correction="token-mask", sampler_correction_max=None)
