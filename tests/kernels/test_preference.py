"""The preference and reward losses: against float64, by hand, and by what their papers prove."""

import functools
import math

import pytest
import torch
from torch import Tensor

from fastrl_kernels import (
    dpo_loss,
    f_divergence_scores,
    ipo_loss,
    kto_loss,
    orpo_loss,
    pair_loss,
    reference,
    reward_loss,
    simpo_loss,
    slic_loss,
)
from fastrl_kernels.preference import CERTAIN, F_DIVERGENCES, PAIR_KINDS
from tests.kernels.judge import DTYPES, judge, names

PAIRS = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
CASES = {
    "DPO": (dpo_loss, PAIRS, {}),
    "DPO of coin flips": (dpo_loss, PAIRS, {"label_smoothing": 0.5}),
    "IPO": (ipo_loss, PAIRS, {"beta": 0.2}),
    "SimPO": (simpo_loss, ("mean_chosen", "mean_rejected"), {"beta": 2.0, "gamma": 0.5}),
    "ORPO": (orpo_loss, ("mean_chosen", "mean_rejected"), {"beta": 0.2}),
    "SLiC": (slic_loss, PAIRS[:2], {"beta": 2.0, "lam": 0.3}),
    "KTO": (kto_loss, ("policy", "reference"), {"desirable_weight": 1.3, "beta": 0.2}),
    "rewards": (reward_loss, ("chosen", "rejected"), {}),
    "rewards with a margin": (reward_loss, ("chosen", "rejected", "margin"), {"center_coef": 0.1}),
}
SMOOTHING = {"exo_pair": 1e-3, "aot": 0.1, "aot_unpaired": 0.1, "robust": 0.2}
CASES |= {
    f"pairs: {kind}": (
        pair_loss,
        PAIRS,
        {"kind": kind, "beta": 0.2, "label_smoothing": SMOOTHING.get(kind, 0.0)},
    )
    for kind in PAIR_KINDS
}
SORTED = {"pairs: aot", "pairs: aot_unpaired"}  # whose examples are compared with each other
PER_CASE = pytest.mark.parametrize("case", CASES)


def batch(case: str, n: int = 97, dtype=torch.float32, device="cpu", seed=0) -> dict[str, Tensor]:
    """Log-probs of whole responses, the policy's near the reference's; means; or rewards."""
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Tensor] = {}
    sums = {}
    for name in CASES[case][1]:
        noise = torch.randn(n, generator=generator)
        if name.startswith("mean"):
            inputs[name] = -noise.abs() - 0.01
        elif name in ("chosen", "rejected", "margin"):
            inputs[name] = noise
        else:
            kind = name.split("_")[-1]  # policy and reference of one response are close
            shared = "one" if kind in ("policy", "reference") else kind
            if shared not in sums:
                sums[shared] = -50.0 - 100.0 * torch.rand(n, generator=generator)
            inputs[name] = sums[shared] + 5.0 * noise
    inputs = {name: x.to(device, dtype) for name, x in inputs.items()}
    if case == "KTO":
        inputs["desirable"] = (torch.rand(n, generator=generator) < 0.5).to(device)
        inputs["kl"] = torch.tensor(1.7, device=device, dtype=dtype)
    return inputs


def both(case: str):
    op, _, options = CASES[case]
    formula = getattr(reference, op.__name__)
    return functools.partial(op, **options), functools.partial(formula, **options)


def results(op, *tensors: Tensor, **options) -> list[Tensor]:
    """The loss, and the gradient of its sum by every tensor."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    loss = op(*leaves, **options)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


def row(*values: float) -> Tensor:
    return torch.tensor(values)


@PER_CASE
@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_losses_and_all_gradients_are_as_exact_as_pytorch(device, dtype, case):
    inputs = batch(case, dtype=dtype, device=device)
    judged = judge(*both(case), inputs, wrt=CASES[case][1])
    assert judged["output 0"].dtype == torch.float32
    assert judged["output 0"].shape == (97,)


@PER_CASE
def test_the_specification_has_the_gradients_of_its_values(case):
    inputs = {k: x.double() if x.is_floating_point() else x for k, x in batch(case, 7).items()}
    leaves = [inputs.pop(name).requires_grad_() for name in CASES[case][1]]
    assert torch.autograd.gradcheck(lambda *x: both(case)[1](*x, **inputs), leaves)


@PER_CASE
def test_low_precision_enters_the_arithmetic_as_it_is(device, case):
    """Rounding the difference of two sums to bf16 would lose it."""
    inputs = batch(case, dtype=torch.bfloat16, device=device)
    wide = {k: x.float() if x.is_floating_point() else x for k, x in inputs.items()}
    op = both(case)[0]
    assert torch.equal(op(**inputs), op(**wide))


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"ORPO"}))  # whose margins end at ±2·log 2²⁴
@pytest.mark.parametrize("margin", [1e4, -1e4])
def test_extreme_margins_stay_finite_and_right(device, case, margin):
    inputs = batch(case, device=device)
    first = CASES[case][1][0]
    inputs[first] = inputs[first] + margin
    judged = judge(*both(case), inputs, wrt=CASES[case][1])
    assert all(x.isfinite().all() for x in judged.values())


@pytest.mark.parametrize("case", sorted(CASES.keys() - SORTED))
def test_an_example_has_no_part_in_another(device, case):
    inputs = batch(case, device=device)
    op = both(case)[0]
    alone = {k: x if k == "kl" else x[5:6] for k, x in inputs.items()}
    torch.testing.assert_close(op(**alone), op(**inputs)[5:6], rtol=1e-6, atol=0)


@PER_CASE
def test_an_empty_batch(device, case):
    inputs = batch(case, 0, device=device)
    wanted = inputs[CASES[case][1][0]].requires_grad_()
    loss = both(case)[0](**inputs)
    loss.sum().backward()
    assert loss.shape == wanted.grad.shape == (0,)


def test_dpo_by_hand():
    # h = (-10 + 12) - (-20 + 19) = 3; σ(1.5) = 0.8175745
    tensors = row(-10.0), row(-20.0), row(-12.0), row(-19.0)
    loss, *grads = results(dpo_loss, *tensors, beta=0.5)
    torch.testing.assert_close(loss, row(-math.log(0.8175745)))
    slope = 0.5 * (1 - 0.8175745)
    for grad, sign in zip(grads, (-1, 1, 1, -1), strict=True):
        torch.testing.assert_close(grad, row(sign * slope))


def test_pairs_by_hand():
    # βr_w = 0.5·2 = 1, βr_l = 0.5·(-1) = -0.5; σ(1) = 0.7310586, σ(0.5) = 0.6224593
    tensors = row(-10.0), row(-20.0), row(-12.0), row(-19.0)

    def loss(kind: str) -> Tensor:
        return pair_loss(*tensors, kind=kind, beta=0.5)

    torch.testing.assert_close(loss("bco_pair"), row(-math.log(0.7310586) - math.log(0.6224593)))
    torch.testing.assert_close(loss("apo_zero"), row(1 - 0.7310586 + 1 - 0.6224593))
    torch.testing.assert_close(loss("sppo_hard"), row((2.0 - 1.0) ** 2 + (-1.0 + 1.0) ** 2))


def test_exo_is_least_where_the_policy_is_as_sure_as_the_labels():
    eps, beta = 0.05, 0.1
    best = math.log((1 - eps) / eps) / beta
    loss, grad, *_ = results(
        pair_loss, *margins(row(best)), kind="exo_pair", label_smoothing=eps, beta=beta
    )
    assert loss.abs() < 1e-6
    assert grad.abs() < 1e-8


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_optimal_transport_does_not_depend_on_the_order_of_examples(kind):
    tensors = list(batch("DPO").values())
    one, other = torch.randperm(97), torch.randperm(97)
    # A model's margins stay together, or the log-ratios of a side.
    orders = (one, one, other, other) if kind == "aot" else (one, other, one, other)
    mixed = [x[order] for x, order in zip(tensors, orders, strict=True)]
    expected = pair_loss(*tensors, kind=kind)
    torch.testing.assert_close(pair_loss(*mixed, kind=kind), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
@pytest.mark.parametrize("alpha", [0.5, 2.0, 1.0])
def test_scores_of_f_divergences_are_exact(device, divergence, alpha):
    log_ratios = torch.linspace(-8, 8, 65, device=device)
    options = {"divergence": divergence, "alpha": alpha}
    op = functools.partial(f_divergence_scores, **options)
    formula = functools.partial(reference.f_divergence_scores, **options)
    judge(op, formula, {"log_ratios": log_ratios}, wrt=["log_ratios"])


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
def test_scores_of_f_divergences_stay_finite(divergence):
    scores, grad = results(f_divergence_scores, row(-1e4, 1e4), divergence=divergence)
    assert scores.isfinite().all()
    assert grad.isfinite().all()


def test_at_the_reference_dpo_is_a_coin_flip():
    x, y = row(-10.0, -500.0), row(-20.0, -3.0)
    loss, grad, *_ = results(dpo_loss, x, y, x, y)
    assert torch.equal(loss, torch.full((2,), math.log(2)))
    torch.testing.assert_close(grad, row(-0.05, -0.05))


def margins(h: Tensor) -> tuple[Tensor, ...]:
    return h, torch.zeros_like(h), torch.zeros_like(h), torch.zeros_like(h)


H = torch.linspace(-60.0, 60.0, 41)


@pytest.mark.parametrize("eps", [0.05, 0.2, 0.5])
def test_conservative_dpo_is_the_mixture_of_both_labels(eps):
    right, d_right, *_ = results(dpo_loss, *margins(H))
    swapped, d_swapped, *_ = results(lambda h: dpo_loss(*margins(-h)), H)
    loss, grad, *_ = results(dpo_loss, *margins(H), label_smoothing=eps)
    torch.testing.assert_close(loss, (1 - eps) * right + eps * swapped)
    torch.testing.assert_close(grad, (1 - eps) * d_right + eps * d_swapped, rtol=1e-5, atol=1e-8)


def test_conservative_dpo_is_least_where_the_policy_is_as_sure_as_the_labels():
    eps, beta = 0.2, 0.1
    best = math.log((1 - eps) / eps) / beta
    _, grad, *_ = results(dpo_loss, *margins(row(best)), label_smoothing=eps)
    assert grad.abs() < 1e-8


@pytest.mark.parametrize("eps", [0.05, 0.2, 0.45])
def test_robust_dpo_is_unbiased_under_swapped_labels(eps):
    """Over labels swapped with probability ε, its mean and its mean gradient are those of DPO."""
    clean = results(dpo_loss, *margins(H))
    given = results(dpo_loss, *margins(H), label_smoothing=eps, kind="robust")
    swapped = results(lambda h: dpo_loss(*margins(-h), label_smoothing=eps, kind="robust"), H)
    for a, b, expected in zip(given, swapped, clean, strict=False):
        atol = 2e-6 / (1 - 2 * eps)  # by which what is near 1 has been divided
        torch.testing.assert_close((1 - eps) * a + eps * b, expected, rtol=1e-5, atol=atol)


def test_the_hinge_is_zero_beyond_its_margin():
    loss, grad, *_ = results(
        dpo_loss, *margins(row(-3.0, 0.0, 1.9, 2.1, 50.0)), beta=0.5, kind="hinge"
    )
    torch.testing.assert_close(loss, row(2.5, 1.0, 0.05, 0.0, 0.0))
    assert torch.equal(grad, row(-0.5, -0.5, -0.5, 0.0, 0.0))


def test_ipo_wants_a_margin_of_half_over_beta():
    loss, grad, *_ = results(ipo_loss, *margins(row(2.0, 5.0)), beta=0.25)
    assert torch.equal(loss, row(0.0, 9.0))
    assert torch.equal(grad, row(0.0, 6.0))


def test_simpo_by_hand():
    # 2·(-1 + 2) - 2 = 0; 2·(-1 + 3) - 2 = 2, σ(2) = 0.8807971
    loss, chosen, rejected = results(
        simpo_loss, row(-1.0, -1.0), row(-2.0, -3.0), beta=2.0, gamma=2.0
    )
    torch.testing.assert_close(loss, row(math.log(2), -math.log(0.8807971)))
    torch.testing.assert_close(chosen, row(-1.0, -2 * (1 - 0.8807971)))
    assert torch.equal(rejected, -chosen)


def test_orpo_by_hand():
    # Odds of 4 and 1/4: a ratio of 16.
    loss, chosen, rejected = results(orpo_loss, row(math.log(0.8)), row(math.log(0.2)), beta=0.5)
    torch.testing.assert_close(loss, row(-0.5 * math.log(16 / 17)))
    torch.testing.assert_close(chosen, row(-0.5 / 17 / 0.2))
    torch.testing.assert_close(rejected, row(0.5 / 17 / 0.8))


@pytest.mark.parametrize("certain", ["mean_chosen", "mean_rejected"])
def test_orpo_is_exact_up_to_certainty(device, certain):
    """log1p(-exp(p)) has no digit left at p = -1e-6."""
    inputs = batch("ORPO", 200, device=device)
    inputs[certain] = -(10.0 ** torch.linspace(-7.0, 2.0, 200, device=device))
    judge(*both("ORPO"), inputs, wrt=("mean_chosen", "mean_rejected"))
    exact = inputs[certain].double()
    odds = torch.log(torch.exp(exact) / -torch.expm1(exact))
    other = inputs["mean_rejected" if certain == "mean_chosen" else "mean_chosen"].double()
    other_odds = torch.log(torch.exp(other) / -torch.expm1(other))
    ratio = odds - other_odds if certain == "mean_chosen" else other_odds - odds
    expected = 0.2 * torch.log1p(torch.exp(-ratio))
    torch.testing.assert_close(both("ORPO")[0](**inputs).double(), expected, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("p", [0.0, -1e-30, -1e-8, 1e-6, 3.0])
def test_orpo_at_certainty_is_that_of_the_last_log_prob_below_it(p):
    expected = results(orpo_loss, row(CERTAIN, -1.0, CERTAIN), row(-1.0, CERTAIN, CERTAIN))
    actual = results(orpo_loss, row(p, -1.0, p), row(-1.0, p, p))
    for a, b in zip(actual, expected, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)
    assert (actual[1] < 0).all()  # raise what was chosen, lower what was not, even there
    assert (actual[2] > 0).all()


def test_orpo_of_an_impossible_response(device):
    loss, chosen, rejected = results(orpo_loss, row(-torch.inf, -1.0), row(-1.0, -torch.inf))
    assert torch.equal(loss, row(torch.inf, 0.0))
    assert chosen.isfinite().all()
    assert rejected.isfinite().all()


def test_slic_by_hand():
    # Margins of 1 and 5 where 3 are wanted, and the likelihood.
    loss, chosen, rejected = results(slic_loss, row(-4.0, -4.0), row(-5.0, -9.0), beta=3.0, lam=0.5)
    assert torch.equal(loss, row(2.0 + 2.0, 2.0))
    assert torch.equal(chosen, row(-1.5, -0.5))
    assert torch.equal(rejected, row(1.0, 0.0))


def test_kto_by_hand():
    policy, ref = row(-10.0, -10.0, -10.0), row(-13.0, -13.0, -11.0)
    desirable = torch.tensor([True, False, True])
    loss, grad, d_ref = results(
        lambda policy, ref: kto_loss(
            policy, ref, desirable, 1.0, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0
        ),
        policy,
        ref,
    )
    # r - z = 2, 2, 0; σ(1) = 0.7310586
    sigma = 0.7310586
    torch.testing.assert_close(loss, row(2 * (1 - sigma), 3 * sigma, 1.0))
    slope = 0.5 * sigma * (1 - sigma)
    torch.testing.assert_close(grad, row(-2 * slope, 3 * slope, -2 * 0.5 * 0.25))
    assert torch.equal(d_ref, -grad)


def test_kto_has_the_same_slope_on_either_side():
    gain = row(0.0, 3.0, 20.0, 60.0)
    desirable = torch.ones(4, dtype=torch.bool)
    exact = torch.sigmoid(gain.double()) * torch.sigmoid(-gain.double())
    for sign in (1, -1):
        _, grad, _ = results(
            lambda policy, ref: kto_loss(policy, ref, desirable, 0.0, beta=1.0),
            sign * gain,
            torch.zeros(4),
        )
        torch.testing.assert_close(grad.double(), -exact, rtol=1e-5, atol=0)


def test_kto_takes_a_negative_estimate_of_the_kl_for_zero():
    inputs = batch("KTO")
    at_zero = kto_loss(**{**inputs, "kl": 0.0})
    for kl in (-3.0, torch.tensor(-3.0), torch.tensor(0.0)):
        assert torch.equal(kto_loss(**{**inputs, "kl": kl}), at_zero)


def test_kto_takes_the_kl_as_a_number_or_on_the_device(device):
    inputs = batch("KTO", device=device)
    kl = torch.tensor(0.75, device=device)
    assert torch.equal(kto_loss(**{**inputs, "kl": kl}), kto_loss(**{**inputs, "kl": 0.75}))


def test_kto_refuses_a_kl_that_wants_a_gradient():
    inputs = batch("KTO")
    inputs["kl"].requires_grad_()
    with pytest.raises(ValueError, match=r"kl requires a gradient.*pass kl.detach\(\)"):
        kto_loss(**inputs)
    with torch.no_grad():
        kto_loss(**inputs)


def test_rewards_by_hand():
    # σ(2 - 1) = 0.7310586; with a margin of 1, σ(0); (2 + 1)² = 9
    loss, chosen, rejected = results(reward_loss, row(2.0), row(1.0))
    torch.testing.assert_close(loss, row(-math.log(0.7310586)))
    torch.testing.assert_close(chosen, row(0.7310586 - 1))
    assert torch.equal(rejected, -chosen)
    loss, chosen, rejected, margin = results(
        functools.partial(reward_loss, center_coef=0.1), row(2.0), row(1.0), row(1.0)
    )
    torch.testing.assert_close(loss, row(math.log(2) + 0.9))
    torch.testing.assert_close(chosen, row(-0.5 + 0.6))
    torch.testing.assert_close(rejected, row(0.5 + 0.6))
    torch.testing.assert_close(margin, row(0.5))


def test_a_nan_stays_where_it_is(device):
    for case in CASES.keys() - SORTED:
        inputs = batch(case, device=device)
        inputs[CASES[case][1][0]][3] = torch.nan
        assert both(case)[0](**inputs).isnan().nonzero().tolist() == [[3]], case


@PER_CASE
def test_tensors_that_do_not_fit_are_refused_by_name(case):
    op, wanted, _ = CASES[case]
    for name in wanted:
        inputs = batch(case, 4)
        with pytest.raises(TypeError, match=f"{name} must be float32, bfloat16, float16"):
            op(**{**inputs, name: inputs[name].long()})
        with pytest.raises(TypeError, match=f"{name} must be float32"):
            op(**{**inputs, name: inputs[name].double()})
        with pytest.raises(ValueError, match=rf"{name} has shape \(4, 1\): pass one number per"):
            op(**{**inputs, name: inputs[name].unsqueeze(1)})
        with pytest.raises(ValueError, match=r"has shape .* they must be equal"):
            op(**{**inputs, name: inputs[name][:1]})
        with pytest.raises(ValueError, match=r"is on .*: move it there"):
            op(**{**inputs, name: inputs[name].to("meta")})


@pytest.mark.parametrize(("op", "numbers"), [
    (dpo_loss, ("beta",)),
    (ipo_loss, ("beta",)),
    (simpo_loss, ("beta",)),
    (orpo_loss, ("beta",)),
    (slic_loss, ("beta",)),
    (kto_loss, ("beta",)),
    (simpo_loss, ("gamma",)),
    (slic_loss, ("lam",)),
    (kto_loss, ("desirable_weight", "undesirable_weight")),
    (reward_loss, ("center_coef",)),
])  # fmt: skip
def test_coefficients_that_make_no_sense_are_refused(op, numbers):
    case = next(name for name, (candidate, *_) in CASES.items() if candidate is op)
    inputs = batch(case, 3)
    for name in numbers:
        for bad in (-0.1, math.inf, math.nan, *([0.0] if name == "beta" else [])):
            with pytest.raises(ValueError, match=rf"{name} must be .* got {bad}"):
                op(**inputs, **{name: bad})
        with pytest.raises(TypeError, match=f"{name} must be a Python number"):
            op(**inputs, **{name: torch.tensor(0.1)})
        if name != "beta":
            op(**inputs, **{name: 0.0})


@pytest.mark.parametrize(("kind", "label_smoothing", "message"), [
    ("sigmoid", -0.1, r"in \[0, 0.5\] for sigmoid, got -0.1"),
    ("sigmoid", 0.51, r"in \[0, 0.5\] for sigmoid"),
    ("sigmoid", math.nan, r"in \[0, 0.5\] for sigmoid"),
    ("robust", 0.5, r"in \[0, 0.5\) for robust, got 0.5"),
    ("robust", -0.1, r"in \[0, 0.5\) for robust"),
    ("hinge", 0.1, "must be 0 for the hinge, got 0.1"),
    ("exo_pair", 0.0, r"in \(0, 1\) for exo_pair, got 0.0: 1e-3 is usual"),
    ("exo_pair", 1.0, r"in \(0, 1\) for exo_pair"),
    ("aot", 0.6, r"in \[0, 0.5\]"),
    *((kind, 0.1, f"must be 0 for {kind}") for kind in ("ipo", "nca_pair", "apo_zero")),
])  # fmt: skip
def test_label_smoothing_outside_its_range_is_refused(kind, label_smoothing, message):
    with pytest.raises(ValueError, match=message):
        pair_loss(**batch("DPO", 3), kind=kind, label_smoothing=label_smoothing)


def test_label_smoothing_is_a_number_and_a_kind_known():
    with pytest.raises(TypeError, match="label_smoothing must be a Python number"):
        dpo_loss(**batch("DPO", 3), label_smoothing=torch.tensor(0.1))
    with pytest.raises(ValueError, match="unknown kind 'ipo': choose one of sigmoid, hinge, rob"):
        dpo_loss(**batch("DPO", 3), kind="ipo")


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"desirable": torch.ones(3)}, TypeError, "desirable must be boolean"),
    ({"desirable": torch.ones(2) > 0}, ValueError, "desirable has shape"),
    ({"desirable": torch.ones(3, device="meta") > 0}, ValueError, "desirable is on meta"),
    ({"kl": torch.zeros(1)}, ValueError, r"kl has shape \(1,\): pass a float or a 0-d"),
    ({"kl": torch.tensor(1)}, TypeError, "kl must be float32"),
    ({"kl": torch.zeros((), device="meta")}, ValueError, "kl is on meta"),
    ({"kl": math.nan}, ValueError, "kl must be finite, got nan"),
])  # fmt: skip
def test_what_kto_refuses_besides(change, error, message):
    with pytest.raises(error, match=message):
        kto_loss(**{**batch("KTO", 3), **change})
