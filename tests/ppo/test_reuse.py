"""Old log-probs and values from the rollout: recognised, audited, and the same as recomputed."""

import copy

import pytest
import torch

from fastrl import PPOConfig, PPOTrainer
from fastrl.rollout import GenerateEngine, RolloutEngine
from tests import tiny_models
from tests.golden import tiny

SAMPLING = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "top_p": 1.0}


def make_trainer(model=None, optimizer=None, **config):
    model = model or tiny_models.policy("gpt2")
    settings = {"batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-3, **config}
    return PPOTrainer(PPOConfig(**settings), model, tokenizer=tiny.tokenizer(), optimizer=optimizer)


def rolled_out(trainer, seed=0, **kwargs):
    queries = tiny_models.prompts(5, 3, 7, 2)
    torch.manual_seed(seed)
    responses = trainer.generate(queries, return_prompt=False, **{**SAMPLING, **kwargs})
    return queries, responses, [torch.tensor(float(i)) for i in range(4)]


@pytest.fixture
def policy_scores(monkeypatch):
    """How many samples the policy scored for old log-probs."""
    from fastrl.learn.scorer import Scorer

    seen = []
    whole, few = Scorer._score, Scorer.policy_scores

    def score(self, part, runs_policy, values):
        if runs_policy:
            seen.append(len(part))
        return whole(self, part, runs_policy, values)

    def audit(self, part):
        seen.append(-len(part))
        return few(self, part)

    monkeypatch.setattr(Scorer, "_score", score)
    monkeypatch.setattr(Scorer, "policy_scores", audit)
    return seen


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_step_is_the_same_whether_reused_or_recomputed(side, masked, policy_scores):
    weights, statistics = [], []
    for old_logprobs in ("rollout", "recompute"):
        model = tiny_models.policy("gpt2")
        # Adam would make much of gradients that are all rounding.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = make_trainer(model, optimizer, old_logprobs=old_logprobs)
        trainer.tokenizer.padding_side = side
        queries, responses, scores = rolled_out(trainer)
        masks = None
        if masked:
            masks = [torch.ones(len(r), dtype=torch.bool) for r in responses]
            masks[1][len(masks[1]) // 2] = False
        statistics.append(trainer.step(queries, responses, scores, response_masks=masks))
        weights.append(torch.cat([p.flatten() for p in trainer.model.parameters()]))
    assert policy_scores == [2, 2], "only the second trainer's policy scored"
    reused, recomputed = statistics
    assert (reused["rollout/reused"], recomputed["rollout/reused"]) == (1.0, 0.0)
    for name in ("objective/kl", "ppo/loss/total", "ppo/returns/mean", "ppo/val/mean"):
        assert reused[name] == pytest.approx(recomputed[name], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def test_own_responses_are_recognised_and_a_few_are_audited(policy_scores):
    trainer = make_trainer(batch_size=8, mini_batch_size=8)
    queries = tiny_models.prompts(5, 3, 7, 2, 4, 6, 1, 3)
    responses = trainer.generate(queries, return_prompt=False, **SAMPLING)
    result = trainer.step(queries, responses, [torch.tensor(1.0)] * 8)
    assert policy_scores == [-4]
    assert result["rollout/reused"] == 1.0
    assert 0 < result["rollout/audit_max"] <= 1e-5
    assert 0 < result["rollout/audit_logprobs_max"] <= 1e-5
    assert result["rollout/audit_mean"] <= result["rollout/audit_max"]


@pytest.mark.parametrize("kind", ["token", "shorter", "query", "weights", "step", "loaded"])
def test_anything_else_is_recomputed(kind, policy_scores):
    trainer = make_trainer()
    queries, responses, scores = rolled_out(trainer)
    if kind == "token":
        responses[2] = responses[2].clone()
        responses[2][0] = (responses[2][0] + 1) % 40
    elif kind == "shorter":
        responses[0] = responses[0][:-1]
    elif kind == "query":
        queries[3] = queries[3].flip(0) + 1
    elif kind == "weights":
        with torch.no_grad():
            trainer.model.v_head.summary.bias.add_(1e-3)
    elif kind == "step":
        trainer.step(queries, responses, scores)
        policy_scores.clear()
    elif kind == "loaded":
        trainer.model.load_state_dict(copy.deepcopy(trainer.model.state_dict()))
    result = trainer.step(queries, responses, scores)
    assert policy_scores == [2, 2]
    assert result["rollout/reused"] == 0.0
    assert "rollout/audit_max" not in result


def test_the_latest_samples_alone_are_remembered(monkeypatch):
    monkeypatch.setattr("fastrl.trainers.ppo.rollouts.REMEMBERED", 6)
    trainer = make_trainer()
    old, _, _ = first = rolled_out(trainer)
    queries = [query + 1 for query in old]
    responses = trainer.generate(queries, return_prompt=False, **SAMPLING)
    assert len(trainer.rollouts.memory._known) == 6
    assert trainer.rollouts.memory.find(queries, responses).old_logprobs is not None
    assert trainer.rollouts.memory.find(*first[:2]).old_logprobs is None


def test_a_rollout_may_be_handed_over(policy_scores):
    trainer = make_trainer()
    queries = tiny_models.prompts(5, 3, 7, 2)
    out = trainer.rollouts.sample(queries, SAMPLING)
    trainer.rollouts.memory._known.clear()
    scores = [torch.tensor(1.0)] * 4
    result = trainer.step(queries, out.sequences, scores, rollout=out)
    assert result["rollout/reused"] == 1.0
    assert policy_scores == [-4]


@pytest.mark.parametrize("what", ["logprobs_t1", "values"])
@pytest.mark.parametrize("wrong", [0.01, torch.nan])
def test_an_audit_that_fails_recomputes_the_step(what, wrong, policy_scores):
    trainer, honest = make_trainer(), make_trainer(old_logprobs="recompute")
    queries, responses, scores = rolled_out(trainer)
    expected = honest.step(queries, responses, scores)
    policy_scores.clear()
    out = trainer.rollouts.sample(queries, SAMPLING)
    out.sequences = [r.cpu() for r in responses]
    told = [torch.zeros(len(r)) for r in responses]
    out.logprobs, out.logprobs_t1, out.values = None, list(told), list(told)
    getattr(out, what)[1] = told[1] + wrong
    result = trainer.step(queries, responses, scores, rollout=out)
    assert policy_scores == [-4, 2, 2]
    assert result["rollout/reused"] == 0.0
    assert not result["rollout/audit_max"] <= 1e-4
    assert result["objective/kl"] == pytest.approx(expected["objective/kl"], abs=1e-6)


@pytest.mark.parametrize("change", ["fewer", "other"])
def test_a_rollout_of_other_responses_is_refused(change):
    trainer = make_trainer()
    queries, responses, scores = rolled_out(trainer)
    out = trainer.rollouts.sample(queries, SAMPLING)
    if change == "fewer":
        out.sequences.pop()
    else:
        out.sequences = [r.cpu() for r in responses]
        out.sequences[2] = out.sequences[2].clone() + 1
    before = torch.cat([p.flatten() for p in trainer.model.parameters()]).clone()
    with pytest.raises(ValueError, match=r"rollout (holds 3)|rollout\.sequences\[2\]"):
        trainer.step(queries, responses, scores, rollout=out)
    assert torch.equal(before, torch.cat([p.flatten() for p in trainer.model.parameters()]))


def test_rollout_alone_refuses_what_it_does_not_know():
    trainer = make_trainer(old_logprobs="rollout")
    queries, responses, scores = rolled_out(trainer)
    responses[0] = responses[0][:-1]
    with pytest.raises(ValueError, match="not all responses come from this trainer's generate"):
        trainer.step(queries, responses, scores)
    assert trainer.current_step == 0


def test_the_kl_over_the_vocabulary_needs_the_policys_forward(policy_scores):
    trainer = make_trainer(kl_penalty="full")
    result = trainer.step(*rolled_out(trainer))
    assert result["rollout/reused"] == 0.0
    assert policy_scores == [2, 2]


def engines_of(trainer):
    return [type(engine) for engine in trainer.rollouts.backend._engines.values()]


def test_the_engine_generates_by_default():
    trainer = make_trainer()
    rolled_out(trainer)
    assert engines_of(trainer) == [RolloutEngine]


def test_generate_is_there_for_whoever_asks():
    trainer = make_trainer(rollout_backend="generate")
    result = trainer.step(*rolled_out(trainer))
    assert not hasattr(trainer.rollouts.backend, "_engines")
    assert result["rollout/reused"] == 0.0


def test_both_backends_give_the_same_greedy_responses():
    both = [make_trainer(rollout_backend=name) for name in ("engine", "generate")]
    first, second = (rolled_out(trainer, do_sample=False)[1] for trainer in both)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_argument_that_the_engine_does_not_know_is_named_once():
    trainer = make_trainer()
    with pytest.warns(UserWarning, match="does not know the argument num_beams"):
        rolled_out(trainer, num_beams=2, do_sample=False)
    rolled_out(trainer, num_beams=2, do_sample=False)  # a warning would be an error


def test_a_model_without_the_interface_falls_back_with_a_warning():
    with pytest.warns(UserWarning, match="BloomForCausalLM: batches are padded"):
        trainer = make_trainer(tiny_models.policy("bloom"))
    with pytest.warns(UserWarning, match="BloomForCausalLM: rollouts go through model.generate"):
        queries, responses, scores = rolled_out(trainer)
    assert engines_of(trainer) == [GenerateEngine]
    assert trainer.step(queries, responses, scores)["rollout/reused"] == 0.0


def test_lengths_are_drawn_once_per_batch_of_queries():
    trainer = make_trainer()
    drawn = iter([2, 5])
    queries = tiny_models.prompts(5, 3, 7, 2)
    responses = trainer.generate(
        queries, length_sampler=lambda: next(drawn), batch_size=2, return_prompt=False,
        do_sample=False, suppress_tokens=[tiny.EOS],
    )  # fmt: skip
    assert [len(r) for r in responses] == [2, 2, 5, 5]


def test_the_reference_generates_with_weights_of_its_own():
    trainer = make_trainer()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    queries = tiny_models.prompts(5, 3, 7, 2)
    own, reference = trainer.generate(
        queries, return_prompt=False, generate_ref_response=True, max_new_tokens=8
    )
    other = make_trainer(copy.deepcopy(trainer.ref_model).requires_grad_(True))
    expected = other.generate(queries, return_prompt=False, max_new_tokens=8)
    assert all(torch.equal(a, b) for a, b in zip(reference, expected, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(own, reference, strict=True))


def test_the_engine_stays_within_the_memory_that_the_configuration_gives():
    free, tight = (make_trainer(rollout_kv_cache_gib=gib) for gib in (None, 2**-16))
    responses = [rolled_out(trainer)[1] for trainer in (free, tight)]
    for a, b in zip(*responses, strict=True):
        assert torch.equal(a, b)
    slots = [
        next(iter(t.rollouts.backend._engines.values()))._kv_cache.slots for t in (free, tight)
    ]
    assert slots[0] == 4 > slots[1]


@pytest.mark.parametrize("sleep", [True, False])
def test_the_engine_sleeps_through_updates_where_asked(sleep):
    trainer = make_trainer(rollout_sleep=sleep)
    batch = rolled_out(trainer)
    engine = next(iter(trainer.rollouts.backend._engines.values()))
    assert engine._kv_cache is not None
    held, update = [], trainer.update
    trainer.update = lambda *x: held.append(engine._kv_cache) or update(*x)
    trainer.step(*batch)
    assert (held[0] is None) is sleep
    rolled_out(trainer, seed=1)
