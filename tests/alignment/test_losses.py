"""Every loss, values and gradients, through the whole trainer on a tiny model, against its formula
in float64."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from fastrl.alignment import LOSSES, Example, Loss, make_loss
from fastrl.alignment.logprobs import ReferencePolicy, Tokens, TrainedPolicy
from fastrl.data.batch import make_batches
from fastrl.models import CausalLMPolicy
from fastrl.ref_model.copy import CopyRefModel
from fastrl.trainers.passes import DeferredGradients
from tests import tiny_models
from tests.alignment.conftest import (
    GRADIENT_STEP,
    Make,
    make_factory,
    model_of,
)
from tests.golden import tiny
from tests.trainers.conftest import weights

BETA, EPSILON = 0.3, 0.1


def pair(of_pair: Callable[[dict[str, Tensor]], Tensor]) -> Callable[..., Tensor]:
    """The loss of one pair from the figures of its two sides."""

    def loss(model: Any, reference: Any, sample: Example) -> Tensor:
        figures = {}
        for side, name in zip(sample.responses, ("w", "l"), strict=True):
            logprobs = token_logprobs(model, sample.prompt_ids, side.ids)
            of_reference = token_logprobs(reference or model, sample.prompt_ids, side.ids).detach()
            figures |= {f"p_{name}": logprobs.sum(), f"mean_{name}": logprobs.mean()}
            figures |= {
                f"r_{name}": (logprobs - of_reference).sum(),
                f"mean_r_{name}": (logprobs - of_reference).mean(),
            }
        return of_pair(figures)

    return loss


def token_logprobs(model: Any, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    """log π of every token of a response, without padding."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]


def log_odds(mean: Tensor) -> Tensor:
    return mean - torch.log1p(-mean.exp())


def dpo(sign: float = 1.0) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda x: -F.logsigmoid(sign * BETA * (x["r_w"] - x["r_l"]))


def per_token_mean(samples: list[Example], model: Any) -> Tensor:
    parts = [token_logprobs(model, s.prompt_ids, s.responses[0].ids) for s in samples]
    return -torch.cat(parts).mean()


def kto(samples: list[Example], model: Any, reference: Any) -> Tensor:
    def ratio(prompt: Example, answer: Example) -> Tensor:
        ids = prompt.prompt_ids, answer.responses[0].ids
        return token_logprobs(model, *ids).sum() - token_logprobs(reference, *ids).sum().detach()

    following = [*samples[1:], samples[0]]
    kl = torch.stack([ratio(*both) for both in zip(samples, following, strict=True)]).mean()
    kl = kl.detach().clamp(min=0)
    losses = []
    for sample in samples:
        sign = 1.0 if sample.desired else -1.0
        weight = 0.7 if sample.desired else 1.3
        gain = BETA * sign * (ratio(sample, sample) - kl)
        losses.append(weight * (1 - torch.sigmoid(gain)))
    return torch.stack(losses).mean()


def bradley_terry(samples: list[Example], model: Any) -> Tensor:
    def reward(sample: Example, side: int) -> Tensor:
        ids = [*sample.prompt_ids, *sample.responses[side].ids]
        return model(input_ids=torch.tensor([ids])).logits.squeeze()

    losses = [
        -F.logsigmoid(reward(s, 0) - reward(s, 1)) + 0.2 * (reward(s, 0) + reward(s, 1)) ** 2
        for s in samples
    ]
    return torch.stack(losses).mean()


PAIRS: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "dpo": ({"beta": BETA}, pair(dpo())),
    "cdpo": (
        {"beta": BETA, "label_smoothing": EPSILON},
        pair(lambda x: (1 - EPSILON) * dpo()(x) + EPSILON * dpo(-1.0)(x)),
    ),
    "robust": (
        {"beta": BETA, "label_smoothing": EPSILON},
        pair(lambda x: ((1 - EPSILON) * dpo()(x) - EPSILON * dpo(-1.0)(x)) / (1 - 2 * EPSILON)),
    ),
    "hinge": ({"beta": BETA}, pair(lambda x: torch.relu(1 - BETA * (x["r_w"] - x["r_l"])))),
    "ipo": ({"beta": BETA}, pair(lambda x: (x["r_w"] - x["r_l"] - 1 / (2 * BETA)) ** 2)),
    "ipo of means": (
        {"beta": BETA, "length_means": True},
        pair(lambda x: (x["mean_r_w"] - x["mean_r_l"] - 1 / (2 * BETA)) ** 2),
    ),
    "simpo": (
        {"beta": 2.0, "gamma": 0.5},
        pair(lambda x: -F.logsigmoid(2.0 * (x["mean_w"] - x["mean_l"] - 0.5 / 2.0))),
    ),
    "orpo": (
        {"beta": BETA},
        pair(
            lambda x: (
                -x["mean_w"] - BETA * F.logsigmoid(log_odds(x["mean_w"]) - log_odds(x["mean_l"]))
            )
        ),
    ),
    "slic": (
        {"beta": 1.5, "lam": 0.2},
        pair(lambda x: torch.relu(1.5 - x["p_w"] + x["p_l"]) - 0.2 * x["p_w"]),
    ),
}
OTHERS: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "sft": ({}, lambda samples, model, _: per_token_mean(samples, model)),
    "kto": (
        {"beta": BETA, "desirable_weight": 0.7, "undesirable_weight": 1.3},
        kto,
    ),
    "bradley-terry": (
        {"center_coef": 0.2},
        lambda samples, model, _: bradley_terry(samples, model),
    ),
}
CASES = {
    **{
        name: (
            coefficients,
            lambda samples, model, reference, one=one: torch.stack(
                [one(model, reference, sample) for sample in samples]
            ).mean(),
        )
        for name, (coefficients, one) in PAIRS.items()
    },
    **OTHERS,
}


def samples_of(task: Any) -> list[Example]:
    return next(iter(make_factory(task))).examples


def gradients_of(
    formula: Any, samples: list[Example], model: Any, other: Any
) -> tuple[float, dict[str, Tensor]]:
    value = formula(samples, model, other)
    value.backward()
    return value.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradients_are_those_of_its_formula(make_trainer: Make, name: str) -> None:
    """As far off as the formula in fp32, text by text, or a few times that: a padded batch adds
    up in another order."""
    coefficients, formula = CASES[name]
    loss = make_loss(name.split(" ")[0], **coefficients)
    model = model_of(loss)
    other = tiny_models.language_model(perturbation=0.3) if loss.compares else None
    samples = samples_of(loss.tasks[0])
    wide = [copy.deepcopy(x).double() if x is not None else None for x in (model, other)]
    exact, gradients = gradients_of(formula, samples, *wide)
    _, plain = gradients_of(formula, samples, copy.deepcopy(model), other)
    before = weights(model)
    ref_model = None if other is None else CausalLMPolicy(copy.deepcopy(other))
    trainer = make_trainer(loss, model, ref_model=ref_model, **GRADIENT_STEP)
    assert trainer.train().training_loss == pytest.approx(exact, rel=1e-5)
    assert max(g.abs().max() for g in gradients.values()) > 1e-3
    after = weights(model)
    # Of all parameters, as that of a single small one may be lucky, and so may all of them be.
    own = max(
        2**-20,
        *(
            ((plain[n].double() - g).abs().max() / g.abs().max()).item()
            for n, g in gradients.items()
        ),
    )
    for parameter, gradient in gradients.items():
        moved = (before[parameter] - after[parameter]).double()
        # Beside it, the weight itself is rounded when the gradient is taken off.
        rounding = 2**-23 * after[parameter].abs().max().item()
        error = (moved - gradient).abs().max().item()
        assert error <= 8 * own * gradient.abs().max().item() + rounding, parameter


def test_every_loss_is_in_the_cases_above() -> None:
    assert {name.split(" ")[0] for name in CASES} == set(LOSSES) - {"ppo"}


def stepped(make_trainer: Make, name: str, rows: Any, by_weight: Any = None, **given: Any) -> Any:
    """The weights after one step of a loss on examples with weights."""
    coefficients, _ = CASES[name]
    loss = make_loss(name.split(" ")[0], **coefficients)
    model = model_of(loss)

    def weigh(batch: Any, policy: Any) -> None:
        for i in range(1, batch.generations + 1):
            batch.weigh(i, by_weight)

    other = CausalLMPolicy(tiny_models.language_model(perturbation=0.3)) if loss.compares else None
    make_trainer(
        loss,
        model,
        rows,
        ref_model=other,
        batch_size=len(rows),
        reweighter=weigh if by_weight is not None else None,
        **GRADIENT_STEP,
        **given,
    ).train()
    return weights(model)


def rows_of(name: str, count: int = 2) -> list[Any]:
    loss = LOSSES[name.split(" ")[0]]
    return samples_of(loss.tasks[0])[:count]


@pytest.mark.parametrize("name", [n for n in CASES if n != "kto"])
def test_weights_of_2_and_0_duplicate_and_drop(make_trainer: Make, name: str) -> None:
    """But for KTO, whose KL is of the batch's other pairs: see below."""
    one, other = rows_of(name)
    weighed = stepped(make_trainer, name, [one, other], [2.0, 0.0])
    doubled = stepped(make_trainer, name, [one, one])
    for parameter, x in weighed.items():
        torch.testing.assert_close(x, doubled[parameter], rtol=1e-5, atol=1e-5, msg=parameter)
    if name == "dpo":  # what would be seen if weights were not
        apart = stepped(make_trainer, name, [one, other])
        assert max((weighed[n] - apart[n]).abs().max() for n in apart) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_a_weight_of_0_takes_a_samples_gradient_away_exactly(make_trainer: Make, name: str) -> None:
    loss = LOSSES[name.split(" ")[0]]
    model = model_of(loss)
    before = weights(model)
    after = stepped(make_trainer, name, rows_of(name), [0.0, 0.0])
    assert all(torch.equal(x, after[parameter]) for parameter, x in before.items())


def test_ktos_weights_multiply_its_samples_losses(make_trainer: Make) -> None:
    """The batch, and so the KL, stays what it is."""
    rows = rows_of("kto", 3)
    whole, first = (
        stepped(make_trainer, "kto", rows, given) for given in ([2.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    )
    alone = stepped(make_trainer, "kto", rows, [1.0, 0.0, 0.0])
    start = weights(model_of(LOSSES["kto"]))
    for name, x in whole.items():
        expected = first[name] + (alone[name] - start[name])
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", PAIRS)
def test_a_tie_is_half_of_each_order(name: str) -> None:
    """And a reward of 0 for the first is the second's preference."""
    coefficients, _ = CASES[name]
    loss = make_loss(name.split(" ")[0], **coefficients)
    samples = samples_of("offline-pairwise")
    views = plain_views(loss)

    def value(rewards: tuple[float, float], turned: bool = False) -> float:
        changed = [
            dataclasses.replace(
                s, rewards=rewards, responses=s.responses[::-1] if turned else s.responses
            )
            for s in samples
        ]
        return loss(type(batch)(changed, batch.pad_token_id), *views).loss.item()

    batch = next(iter(make_factory("offline-pairwise")))
    ahead, behind = value((1.0, 0.0)), value((0.0, 1.0))
    assert ahead != pytest.approx(behind, rel=1e-3)
    # Log-probs of up to 60 are rounded by 4e-6.
    assert behind == pytest.approx(value((1.0, 0.0), turned=True), rel=1e-5)
    assert value((0.5, 0.5)) == pytest.approx((ahead + behind) / 2, rel=1e-5)


def plain_views(loss: Any) -> tuple[Any, Any]:
    """A policy and a reference without a trainer, as a user's own loop would have them."""
    policy = CausalLMPolicy(tiny_models.language_model())
    reference = CopyRefModel(CausalLMPolicy(tiny_models.language_model(perturbation=0.3)))
    tokens = Tokens(make_batches(policy, tiny.tokenizer(), None), policy.device, reference)
    passes = DeferredGradients(policy, Accelerator(cpu=True), bounded=False)
    return TrainedPolicy(policy, tokens, passes), ReferencePolicy(reference, tokens)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: x.mean(), "returned tensor"),
        (lambda x: (x, {}), r"of shape \(4,\)"),
        (lambda x: (x.mean().item(), {}), "returned a loss of the type float"),
        (lambda x: (x.mean(), None), "metrics of the type NoneType"),
        (lambda x: (x.mean(), {"m": 1.0}), "the metric 'm' of the type float"),
        (lambda x: (x.mean(), {"loss": x.mean()}), "the metric 'loss', .* a name of the trainer's"),
    ],
)
def test_what_a_loss_of_a_users_may_not_return_is_named(
    make: Any, said: str, make_trainer: Make
) -> None:
    @dataclass(frozen=True)
    class Own(Loss):
        name = "own"
        tasks = ("sft",)

        def __call__(self, batch: Any, policy: Any, reference: Any) -> Any:
            return make(-policy.logprobs(batch)[0].sums)

    with pytest.raises(TypeError, match=rf"the loss own .*{said}"):
        make_trainer(Own()).train()
