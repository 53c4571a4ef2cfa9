"""Samples whose score, log-probs, values or rewards are not finite: in the batch with weight 0, as
those that ended in NaN logits."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import PPOTrainer
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.run.metrics import scalars
from tests.golden import tiny
from tests.ppo.test_nan_samples import ADVANTAGES, BAD, batch, broken, make_trainer
from tests.ppo.updates import apart, watch_gradients

NAN, INF = math.nan, math.inf
OTHERS = [0, 2, 3, 4, 5]

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


def scored(*scores: tuple[int, float]) -> dict[str, Any]:
    """The batch with other scores for some samples."""
    given = batch()
    for i, score in scores:
        given["scores"][i] = torch.tensor(score)
    return given


def marked(*which: int) -> dict[str, Any]:
    """The batch in which the responses of some samples alone hold a token."""
    given = batch()
    given["responses"] = [torch.where(r == BAD, BAD - 1, r) for r in given["responses"]]
    for i in which:
        given["responses"][i][0] = BAD
    return given


def in_the_reference(trainer: PPOTrainer, number: float) -> None:
    """A log-prob of the reference for marked samples."""
    score = trainer.reference.score

    def spoiled(inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        found = score(inputs, request)
        return found._replace(logprobs=_at_marks(request, found.logprobs, number))

    trainer.reference.score = spoiled  # type: ignore[method-assign]


def in_the_policy(field: str) -> Callable[[PPOTrainer, float], None]:
    """A log-prob or a value of the policy for marked samples, before the update."""

    def spoil(trainer: PPOTrainer, number: float) -> None:
        def spoiled(_module: Any, _args: Any, kwargs: Any, found: TokenScores) -> TokenScores:
            if torch.is_grad_enabled():
                return found
            numbers = _at_marks(kwargs["scoring"], getattr(found, field), number)
            return found._replace(**{field: numbers})

        trainer.model.register_forward_hook(spoiled, with_kwargs=True)

    return spoil


def _at_marks(request: ScoringRequest, x: Tensor, number: float) -> Tensor:
    return torch.where(request.labels == BAD, number, x)


SOURCES = {
    "policy": (in_the_policy("logprobs"), -INF, "its log-probs"),
    "values": (in_the_policy("values"), NAN, "its values"),
    "reference": (in_the_reference, NAN, "its rewards"),
    "reference, no probability": (in_the_reference, -INF, "its rewards"),
}


def check_that_it_is_the_step_of(wanted: dict[str, Any], stats: dict[str, Any]) -> None:
    left_alone = ("time/", "perf/", "ppo/nan_samples", "ppo/nonfinite_samples")
    for name, value in scalars(wanted).items():
        if not name.startswith(left_alone):
            assert stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", ["skip", "zero-sample"])
@pytest.mark.parametrize("score", [NAN, INF, -INF])
def test_a_step_is_that_of_the_samples_with_scores(score, kind):
    """GAE: gradients, statistics and moments of a batch without the sample."""
    trainer = make_trainer(on_nonfinite=kind, **ADVANTAGES["gae"])
    seen = watch_gradients(trainer)
    with pytest.warns(UserWarning, match=rf"scores\[1\] is {score} \(prompt 'w.*left out") as said:
        stats = trainer.step(**scored((1, score)))
    assert len(said) == 1
    others = make_trainer(batch_size=5, **ADVANTAGES["gae"])
    expected = watch_gradients(others)
    wanted = others.step(**batch(OTHERS))
    assert apart(seen[0], expected[0]) < 1e-5
    assert (stats["ppo/nonfinite_samples"], stats["ppo/nan_samples"]) == (1, 0)
    check_that_it_is_the_step_of(wanted, stats)
    assert vars(trainer.running) == pytest.approx(vars(others.running))
    with warnings.catch_warnings():  # named once
        warnings.simplefilter("error")
        assert trainer.step(**scored((2, score), (3, NAN)))["ppo/nonfinite_samples"] == 2


@pytest.mark.parametrize("source", SOURCES)
def test_a_step_is_that_of_the_samples_with_finite_experience(source):
    spoil, number, said_of = SOURCES[source]
    settings = {"mini_batch_size": 6, **ADVANTAGES["gae"]}
    trainer = make_trainer(**settings)
    spoil(trainer, number)
    seen = watch_gradients(trainer)
    with pytest.warns(UserWarning, match=rf"in 1 of 6 sample\(s\): 1 \({said_of}, prompt 'w"):
        stats = trainer.step(**marked(1))
    others = make_trainer(**{**settings, "batch_size": 5, "mini_batch_size": 5})
    expected = watch_gradients(others)
    chosen = {name: [x[i] for i in OTHERS] for name, x in marked(1).items()}
    wanted = others.step(**chosen)
    assert apart(seen[0], expected[0]) < 1e-5
    assert stats["ppo/nonfinite_samples"] == 1
    assert stats["ppo/nonfinite_minibatches"] == 0
    check_that_it_is_the_step_of(wanted, stats)
    assert vars(trainer.running) == pytest.approx(vars(others.running))


def test_a_token_without_probability_is_found_where_the_kl_is_finite():
    """That over the vocabulary: only the log-prob of the token that was drawn is not."""
    trainer = make_trainer(kl_penalty="full")
    in_the_policy("logprobs")(trainer, -INF)
    with pytest.warns(UserWarning, match="1 .its log-probs, prompt"):
        stats = trainer.step(**marked(1))
    assert stats["ppo/nonfinite_samples"] == 1
    assert all(math.isfinite(x) for x in scalars(stats).values())


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
@pytest.mark.parametrize("of_score", [True, False], ids=["score", "reference"])
def test_a_group_is_that_of_its_other_samples(advantage, of_score):
    """Also where the first optimizer step does not see the sample."""
    trainer = make_trainer(**ADVANTAGES[advantage], mini_batch_size=2)
    trainer.update.epochs.shuffle.seed(0)
    assert not {1, 3} & {*trainer.update.epochs.shuffle.permutation(6)[:2]}
    trainer.update.epochs.shuffle.seed(0)
    seen = watch_gradients(trainer)
    if not of_score:
        in_the_reference(trainer, NAN)
    given = {**marked(1, 3), "scores": batch()["scores"]}
    if of_score:
        given = scored((1, NAN), (3, INF)) | {"responses": given["responses"]}
    with pytest.warns(UserWarning, match="ppo/nonfinite_samples counts them"):
        stats = trainer.step(**given)
    # The same mini-batches, as samples that ended in NaN logits leave them.
    others = make_trainer(**ADVANTAGES[advantage], mini_batch_size=2)
    others.update.epochs.shuffle.seed(0)
    expected = watch_gradients(others)
    sick = broken({**marked(1, 3), "scores": batch()["scores"]}, 1, 3, empty=False)
    with pytest.warns(UserWarning, match="NaN logits in 2 sample"):
        wanted = others.step(**sick)
    assert len(seen) == len(expected)
    assert apart(seen[0], expected[0]) < 1e-5
    for name in ("groups/no_spread", "groups/reward_std", "ppo/mean_scores", "objective/kl"):
        assert stats[name] == pytest.approx(wanted[name], rel=1e-5)


def test_two_kinds_in_one_batch_are_both_left_out():
    trainer = make_trainer()
    in_the_reference(trainer, NAN)
    given = marked(4)
    given["scores"][1] = torch.tensor(NAN)
    with pytest.warns(UserWarning, match="left out of the step") as said:
        stats = trainer.step(**given)
    assert [str(w.message).split(" ")[0] for w in said] == ["scores[1]", "numbers"]
    assert stats["ppo/nonfinite_samples"] == 2
    assert all(math.isfinite(x) for x in scalars(stats).values())


@pytest.mark.parametrize("source", SOURCES)
def test_an_error_names_them_before_anything_changes(source, unchanged):
    spoil, number, said_of = SOURCES[source]
    trainer = make_trainer(on_nonfinite="raise", use_score_scaling=True)
    spoil(trainer, number)
    match = rf"not finite in 2 of 6 sample\(s\): 1 \({said_of}, prompt 'w.*nothing has changed"
    with unchanged(trainer), pytest.raises(FloatingPointError, match=match):
        trainer.step(**marked(1, 4))
    assert trainer.step(**marked())["ppo/nonfinite_samples"] == 0


@pytest.mark.parametrize("kind", ["skip", "zero-sample"])
def test_a_batch_without_a_sound_sample_is_an_error(kind, unchanged):
    trainer = make_trainer(on_nonfinite=kind)
    with unchanged(trainer), pytest.raises(ValueError, match=r"scores\[0\] is nan.*no score is"):
        trainer.step(**scored(*[(i, NAN) for i in range(6)]))
    in_the_reference(trainer, NAN)
    with unchanged(trainer), pytest.raises(FloatingPointError, match="The model is broken"):
        trainer.step(**marked(*range(6)))


def test_a_long_prompt_is_not_shown_in_full():
    trainer = make_trainer()
    given = scored((0, NAN))
    given["queries"][0] = torch.arange(tiny.FIRST_WORD, tiny.FIRST_WORD + 35)
    with pytest.warns(UserWarning, match="scores") as said:
        trainer.step(**given)
    assert len(str(said[0].message)) < 250
