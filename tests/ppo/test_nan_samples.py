"""Samples that ended in NaN logits: in the batch with weight 0, in no baseline, mean or moment."""

import itertools
import json
import math
import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset

from fastrl import PPOConfig, PPOTrainer
from fastrl.rollout import RolloutOutput
from fastrl.run.metrics import JsonlCallback, scalars
from fastrl.samples import COLUMNS, TOKEN
from fastrl.trainers.ppo.step_input import without
from tests import seq2seq_models, test_samples, tiny_models
from tests.golden import tiny
from tests.ppo.conftest import descending
from tests.ppo.updates import apart, watch_gradients

BAD = 17
SAMPLING = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, "suppress_tokens": [BAD]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings("ignore:generation_kwargs. suppress_tokens"),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
]


def make_trainer(policy: Any = None, reference: Any = None, **settings: Any) -> PPOTrainer:
    settings = {"batch_size": 6, "ppo_epochs": 1, "seed": 3, **settings}
    return descending(1e-2, policy, reference, **settings)


def batch(keep: list[int] | None = None) -> dict[str, Any]:
    """Two groups of three; or some of their samples."""
    queries = [q for q in tiny_models.prompts(3, 5) for _ in range(3)]
    responses = tiny_models.prompts(4, 6, 2, 5, 3, 7, seed=1)
    scores = [torch.tensor(x) for x in (0.3, -2.0, 1.5, 0.7, -0.4, 2.2)]
    chosen = range(6) if keep is None else keep
    return {"queries": [queries[i] for i in chosen], "responses": [responses[i] for i in chosen],
            "scores": [scores[i] for i in chosen]}  # fmt: skip


def broken(given: dict[str, Any], *which: int, empty: bool = True) -> dict[str, Any]:
    """The batch whose samples ``which`` ended in NaN logits, and have a score that is none."""
    responses, scores = list(given["responses"]), list(given["scores"])
    reasons = ["length"] * len(responses)
    for i in which:
        reasons[i], scores[i] = "nan", torch.tensor(torch.nan)
        responses[i] = responses[i][:0] if empty else responses[i]
    rollout = RolloutOutput(responses, reasons)
    return {**given, "responses": responses, "scores": scores, "rollout": rollout}


NAMED = pytest.warns(
    UserWarning, match=r"NaN logits in \d sample\(s\) of the rollout: 1 \(prompt '"
)
ADVANTAGES = {
    "gae": {"use_score_scaling": True, "use_score_norm": True, "whiten_rewards": True},
    "grpo": {"advantage": "grpo", "group_size": 3, "kl_in": "loss"},
    "dr_grpo": {"advantage": "dr_grpo", "group_size": 3},
    "rloo": {"advantage": "rloo", "group_size": 3},
}


@pytest.mark.parametrize("empty", [True, False], ids=["at its first token", "later"])
def test_a_step_is_that_of_the_others(empty):
    """GAE: gradients, statistics and moments of a batch without the sample."""
    trainer = make_trainer(**ADVANTAGES["gae"])
    seen = watch_gradients(trainer)
    with NAMED:
        stats = trainer.step(**broken(batch(), 1, empty=empty))
    others = make_trainer(batch_size=5, **ADVANTAGES["gae"])
    expected = watch_gradients(others)
    wanted = others.step(**batch([0, 2, 3, 4, 5]))
    assert apart(seen[0], expected[0]) < 1e-5
    assert stats["ppo/nan_samples"] == 1
    assert wanted["ppo/nan_samples"] == 0
    for name, value in scalars(wanted).items():
        if not name.startswith(("time/", "perf/", "ppo/nan_samples")):
            assert stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert vars(trainer.running) == pytest.approx(vars(others.running))
    with warnings.catch_warnings():  # named once
        warnings.simplefilter("error")
        assert trainer.step(**broken(batch(), 2))["ppo/nan_samples"] == 1


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_group_is_that_of_its_sound_samples(advantage):
    """Two groups of three, one sample of each broken, are two groups of two."""
    trainer = make_trainer(**ADVANTAGES[advantage])
    seen = watch_gradients(trainer)
    with NAMED:
        stats = trainer.step(**broken(batch(), 1, 3))
    settings = {**ADVANTAGES[advantage], "group_size": 2, "batch_size": 4}
    others = make_trainer(**settings)
    expected = watch_gradients(others)
    wanted = others.step(**batch([0, 2, 4, 5]))
    assert apart(seen[0], expected[0]) < 1e-5
    for name in ("groups/no_spread", "groups/reward_std", "ppo/mean_scores", "ppo/std_scores"):
        assert stats[name] == pytest.approx(wanted[name], rel=1e-5)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_single_sound_sample_of_a_group_has_no_advantage(advantage):
    trainer = make_trainer(init_kl_coef=0.0, **{**ADVANTAGES[advantage], "kl_in": "reward"})
    with NAMED:
        stats = trainer.step(**broken(batch(), 1, 2, 4))
    advantages = stats["ppo/policy/advantages"]
    assert (advantages == 0).sum() == 4  # the tokens of sample 0
    assert (advantages != 0).sum() == 5 + 7
    assert stats["groups/no_spread"] == 0.5


def test_mini_batches_of_such_samples_alone_are_not_there():
    settings = {"mini_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = make_trainer(**settings, loss_denominator="step")
    pairs = trainer.update.epochs.shuffle.permutation(6).reshape(3, 2).tolist()
    trainer.update.epochs.shuffle.seed(3)
    left_out = (*pairs[0], pairs[1][0])  # a whole optimizer step, and half of another
    with pytest.warns(UserWarning, match=r"NaN logits in 3 sample\(s\)"):
        stats = trainer.step(**broken(batch(), *left_out))
    assert stats["ppo/optimizer_steps"] == 2
    assert stats["ppo/nonfinite_minibatches"] == stats["ppo/skipped_minibatches"] == 0
    assert all(math.isfinite(x) for x in scalars(stats).values())


@pytest.mark.parametrize("family", ["t5_untied", "bart"])
def test_an_encoder_decoder_does_so_too(family):
    def make(size):
        policies = [seq2seq_models.policy(family, x) for x in (0.0, 0.05)]
        return make_trainer(*policies, batch_size=size)

    trainer, others = make(6), make(5)
    seen, expected = watch_gradients(trainer), watch_gradients(others)
    with NAMED:
        trainer.step(**broken(batch(), 1))
    others.step(**batch([0, 2, 3, 4, 5]))
    assert apart(seen[0], expected[0]) < 1e-5


@pytest.mark.parametrize("given", [{}, {"response_masks": "given"}, {"weights": [2.0] * 6}])
def test_masks_and_weights_may_be_given_as_well(given):
    sick = broken(batch(), 1, 4)
    if given:
        masks = [torch.ones_like(r) for r in sick["responses"]]
        given = {"response_masks": masks} if "response_masks" in given else given
    trainer = make_trainer(loss_denominator="step")
    seen = watch_gradients(trainer)
    with NAMED:
        trainer.step(**sick, **given)
    plain = make_trainer(batch_size=4)
    expected = watch_gradients(plain)
    plain.step(**batch([0, 2, 3, 5]))
    assert apart(seen[0], expected[0]) < 1e-5


def test_an_error_is_raised_before_anything_changes(unchanged):
    trainer = make_trainer(on_nonfinite="raise", use_score_scaling=True)
    with (
        unchanged(trainer),
        pytest.raises(FloatingPointError, match=r"NaN logits in 2 sample\(s\).*: 1 \(prompt '"),
    ):
        trainer.step(**broken(batch(), 1, 4))


def test_a_batch_without_a_sound_sample_says_that_the_model_is_broken(unchanged):
    trainer = make_trainer()
    with unchanged(trainer), pytest.raises(FloatingPointError, match="the model is broken"):
        trainer.step(**broken(batch(), *range(6)))


def test_without_a_rollout_an_empty_response_is_an_error_still():
    given = broken(batch(), 1)
    del given["rollout"]
    given["scores"][1] = torch.tensor(0.0)
    with pytest.raises(ValueError, match=r"responses\[1\] is empty"):
        make_trainer().step(**given)


def poisoned() -> Any:
    """A policy in which a token makes all that comes after it NaN."""
    policy = tiny_models.policy("gpt2", tie_word_embeddings=False)
    table = policy.pretrained_model.get_input_embeddings()

    def poison(_module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.where((args[0] == BAD)[..., None], torch.nan, out)

    table.register_forward_hook(poison)
    return policy


class Rewards:
    """Counts tokens; notes what it is asked about."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], list[Any]]] = []

    def __call__(
        self, prompts: Any, completions: Any, completion_ids: Any, row: Any
    ) -> list[float]:
        assert all(len(ids) > 0 for ids in completion_ids)
        assert len(prompts) == len(completions) == len(completion_ids) == len(row)
        self.asked.append((list(prompts), list(row)))
        return [float(sum(ids)) for ids in completion_ids]


@pytest.mark.parametrize(("case", "old_logprobs"), [
    *itertools.product(("gae", "grpo", "trunk"), ("auto", "rollout")),
    ("generate", "auto"),  # which says no log-probs
])  # fmt: skip
def test_train_goes_on(case, old_logprobs, tmp_path):
    """A prompt whose responses are NaN is left out of what the reward is asked about, of means,
    and of every weight's gradient."""
    settings: dict[str, Any] = dict(ADVANTAGES["grpo"] if case == "grpo" else ADVANTAGES["gae"])
    settings |= {"mini_batch_size": 2, "missing": 0.5} if case == "gae" else {"mini_batch_size": 3}
    missing = settings.pop("missing", None)
    settings["init_kl_coef"] = 0.1
    if case == "generate":
        settings["rollout_backend"] = "generate"
    policy, reference = poisoned(), tiny_models.policy("gpt2", 0.05, tie_word_embeddings=False)
    if case == "trunk":
        settings |= {"reference": "trunk", "num_shared_layers": 1}
        trainer = PPOTrainer(PPOConfig(batch_size=6, **settings), policy, None, tiny.tokenizer())
    else:
        trainer = make_trainer(policy, reference, old_logprobs=old_logprobs, **settings)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    prompts = [f"w{i} w{i + 1}" for i in range(20, 26)]
    word = tiny.tokenizer().decode([BAD])
    prompts[1] = f"w30 {word}"
    asked = Rewards()
    rows = Dataset.from_dict({"prompt": prompts, "row": list(range(6))})
    path = tmp_path / "metrics.jsonl"

    def evaluated(prompts: Any, **told: Any) -> list[float]:
        told.setdefault("row", [None] * len(prompts))
        return asked(prompts, **told)

    with pytest.warns(UserWarning, match=r"NaN logits in \d sample") as said:
        result = trainer.train(
            evaluated, steps=3, dataset=rows, eval_prompts=prompts, generation_kwargs=SAMPLING,
            progress=False, callbacks=[JsonlCallback(path)], missing_eos_penalty=missing,
        )  # fmt: skip
    assert len([w for w in said if "NaN logits" in str(w.message)]) == 1
    assert all(word not in prompt for told, _ in asked.asked for prompt in told)
    assert all(1 not in rows for _, rows in asked.asked)
    left_out = [metrics["ppo/nan_samples"] for metrics in result.history]
    assert sum(left_out) == 3
    for metrics in result.history:
        assert all(math.isfinite(x) for x in metrics.values())
    assert all(bool(p.isfinite().all()) for p in policy.parameters())
    assert any(not torch.equal(p, before[name]) for name, p in policy.named_parameters())
    for evaluation in result.evaluations:
        assert evaluation.nan_samples == 1
        assert math.isfinite(evaluation.mean)
        assert math.isfinite(evaluation.sem)
        assert math.isfinite(evaluation.kl)
        assert [math.isnan(r) for r in evaluation.rewards] == [i == 1 for i in range(6)]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["eval/nan_samples"] for r in records if "eval/kl" in r] == [1, 1]


def test_train_stops_where_that_is_asked_for(unchanged):
    trainer = make_trainer(poisoned(), on_nonfinite="raise")
    asked = Rewards()
    prompts = [f"w{i}" for i in range(20, 25)] + [tiny.tokenizer().decode([BAD])]
    with unchanged(trainer), pytest.raises(FloatingPointError, match=r"NaN logits in 1 sample"):
        trainer.train(asked, steps=1, prompts=prompts, generation_kwargs=SAMPLING, progress=False)
    assert asked.asked == []


def test_a_batch_of_which_no_token_counts_changes_nothing():
    trainer, given = make_trainer(), batch()
    masks = [torch.zeros_like(r) for r in given["responses"]]
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.warns(UserWarning, match="leave out every token of all responses") as caught:
        stats = trainer.step(**given, response_masks=masks)
    assert len(caught) == 1
    assert stats["ppo/optimizer_steps"] == 0
    assert math.isnan(stats["tokens/responses_len_mean"])
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_every_column_of_tokens_is_as_long_as_the_response_that_is_left_out() -> None:
    """A batch needs a token of each response, so that an empty one becomes a token long."""
    samples = test_samples.some({*COLUMNS}, [2, 0, 1])
    left = without(samples, [1])
    for name, column in COLUMNS.items():
        if column["kind"] == TOKEN and name != "experts":
            assert [len(row) for row in getattr(left, name)] == [2, 1, 1], name
    for i in (0, 2):
        assert test_samples.rows(left)[i] == test_samples.rows(samples)[i]
    assert not left.masks[1].any()
    assert left.rewards[1].isnan()
