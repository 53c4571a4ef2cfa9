"""Every loss, values and gradients, through the whole trainer on a tiny model, against its formula
in float64."""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from fastrl.alignment import LOSSES, Example, Loss, make_loss
from fastrl.alignment.logprobs import ReferencePolicy, Tokens, TrainedPolicy
from fastrl.data.batch import make_batches
from fastrl.learn.ref_model.copy import CopyRefModel
from fastrl.models import CausalLMPolicy
from fastrl.trainers.passes import DeferredGradients
from fastrl_kernels import reference as formulas
from tests import tiny_models
from tests.alignment.conftest import GRADIENT_STEP, Make, make_factory, model_of
from tests.golden import tiny
from tests.trainers.conftest import weights

BETA, EPSILON = 0.3, 0.1


def token_logprobs(model: Any, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    """log π of every token of a response, without padding."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)]


def pairs(loss: Callable[[dict[str, Tensor]], Tensor]) -> Callable[..., Tensor]:
    """The mean of a loss of pairs from log π and r of both sides, and their means over tokens."""

    def mean(samples: list[Example], model: Any, reference: Any) -> Tensor:
        x = {}
        for k, side in enumerate("wl"):
            given = [(sample.prompt_ids, sample.responses[k].ids) for sample in samples]
            own = [token_logprobs(model, *ids) for ids in given]
            refs = [token_logprobs(reference or model, *ids).detach() for ids in given]
            for name, of in (("", Tensor.sum), ("mean ", Tensor.mean)):
                x[f"{name}p_{side}"] = torch.stack(list(map(of, own)))
                ratios = zip(own, refs, strict=True)
                x[f"{name}r_{side}"] = torch.stack([of(p - ref) for p, ref in ratios])
        return loss(x).mean()

    return mean


def by_op(
    kind: str, divergence: str = "reverse_kl", r: str = "r", **options: float
) -> Callable[..., Tensor]:
    def loss(x: dict[str, Tensor]) -> Tensor:
        of = [formulas.f_divergence_scores(x[f"{r}_{k}"], divergence=divergence) for k in "wl"]
        return formulas.pair_loss(*of, *map(torch.zeros_like, of), kind=kind, beta=BETA, **options)

    return pairs(loss)


def per_token_mean(samples: list[Example], model: Any) -> Tensor:
    parts = [token_logprobs(model, s.prompt_ids, s.responses[0].ids) for s in samples]
    return -torch.cat(parts).mean()


def kto(samples: list[Example], model: Any, reference: Any, has_kl: bool = True) -> Tensor:
    def ratios(by: int) -> Tensor:
        answers = (each.responses[0].ids for each in [*samples[by:], *samples[:by]])
        given = [(x.prompt_ids, ids) for x, ids in zip(samples, answers, strict=True)]
        of = [torch.stack([token_logprobs(m, *x).sum() for x in given]) for m in (model, reference)]
        return of[0] - of[1].detach()

    kl = ratios(1).mean() if has_kl else 0.0
    desired = torch.tensor([sample.desired for sample in samples])
    r = ratios(0)
    return formulas.kto_loss(r, torch.zeros_like(r), desired, kl, **WEIGHTS).mean()


def bradley_terry(samples: list[Example], model: Any) -> Tensor:
    def rewards(k: int) -> Tensor:
        ids = ([[*sample.prompt_ids, *sample.responses[k].ids]] for sample in samples)
        return torch.cat([model(input_ids=torch.tensor(x)).logits[0] for x in ids])

    return formulas.reward_loss(rewards(0), rewards(1), center_coef=0.2).mean()


SMOOTHED = {"label_smoothing": EPSILON}
WEIGHTS = {"beta": BETA, "desirable_weight": 0.7, "undesirable_weight": 1.3}
BY_OP = ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
CASES: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    **{kind: ({"beta": BETA}, by_op(kind)) for kind in BY_OP},
    **{
        f"dpo under {kind}": ({"beta": BETA, "divergence": kind}, by_op("sigmoid", kind))
        for kind in ("forward_kl", "js_divergence", "alpha_divergence")
    },
    "dpo": ({"beta": BETA}, by_op("sigmoid")),
    "cdpo": ({"beta": BETA, **SMOOTHED}, by_op("sigmoid", **SMOOTHED)),
    "robust": ({"beta": BETA, **SMOOTHED}, by_op("robust", **SMOOTHED)),
    "exo_pair": ({"beta": BETA, **SMOOTHED}, by_op("exo_pair", **SMOOTHED)),
    "discopop": ({"beta": BETA, "tau": 0.5}, by_op("discopop", tau=0.5)),
    "ipo of means": ({"beta": BETA, "length_means": True}, by_op("ipo", r="mean r")),
    "sigmoid_norm": ({"beta": BETA}, by_op("sigmoid", r="mean r")),
    "simpo": ({"beta": 2.0, "gamma": 0.5},
     pairs(lambda x: formulas.simpo_loss(x["mean p_w"], x["mean p_l"], beta=2.0, gamma=0.5))),
    "orpo": ({"beta": BETA},
     pairs(lambda x: formulas.orpo_loss(x["mean p_w"], x["mean p_l"], beta=BETA) - x["mean p_w"])),
    "slic": ({"beta": 1.5, "lam": 0.2},
     pairs(lambda x: torch.relu(1.5 - x["p_w"] + x["p_l"]) - 0.2 * x["p_w"])),
    "sft": ({}, lambda samples, model, _: per_token_mean(samples, model)),
    "kto": (WEIGHTS, kto),
    "apo_zero_unpaired": (WEIGHTS, lambda *given: kto(*given, has_kl=False)),
    "bradley-terry": ({"center_coef": 0.2}, lambda x, model, _: bradley_terry(x, model)),
}  # fmt: skip
# All rows of pairs go one way.
WEIGHED = ("dpo", "orpo", "sft", "kto", "apo_zero_unpaired", "bradley-terry")


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


@pytest.mark.parametrize("name", [n for n in WEIGHED if n != "kto"])
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


@pytest.mark.parametrize("name", WEIGHED)
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


@pytest.mark.parametrize("name", ["dpo", "ipo", "slic"])
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


@pytest.mark.parametrize(("make", "said"), [
    (lambda x: x.mean(), "returned tensor"),
    (lambda x: (x, {}), r"of shape \(4,\)"),
    (lambda x: (x.mean().item(), {}), "returned a loss of the type float"),
    (lambda x: (x.mean(), None), "metrics of the type NoneType"),
    (lambda x: (x.mean(), {"m": 1.0}), "the metric 'm' of the type float"),
    (lambda x: (x.mean(), {"loss": x.mean()}), "the metric 'loss', .* a name of the trainer's"),
])  # fmt: skip
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
