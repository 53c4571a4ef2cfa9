"""Policy losses beside the clipped one, and ratios of sequences, in float64 and by formulas."""

import math
from functools import partial

import pytest
import torch

from fastrl_kernels import KLTerm, PolicyLoss, linear_logprobs, linear_ppo_loss, ppo_loss, reference
from fastrl_kernels.policy_losses import POLICY_LOSSES, RATIO_LEVELS, sequence_means
from tests.kernels import test_linear_ppo_loss as linear
from tests.kernels.test_linear_logprobs import assert_same_bits
from tests.kernels.test_ppo_loss import batch, check, run

OBJECTIVES = {
    "cispo": (PolicyLoss("cispo"), {"cliprange": (math.inf, 0.15)}),
    "cispo, both bounds": (PolicyLoss("cispo"), {"cliprange": (0.3, 0.2)}),
    "sapo": (PolicyLoss("sapo", sapo_temperatures=(1.0, 1.6)), {}),
    "delta": (PolicyLoss(delta=1.3), {"cliprange": (0.1, 0.2)}),
    "delta, dual clip": (PolicyLoss(delta=1.3), {"dual_clip": 1.1}),
    "delta within the clip": (PolicyLoss(delta=1.1), {"cliprange": (0.1, 0.4)}),
    "sequence": (PolicyLoss(ratio_level="sequence"), {"cliprange": (0.02, 0.03)}),
    "sequence-token": (PolicyLoss(ratio_level="sequence-token"), {"cliprange": (0.02, 0.03)}),
    "cispo, sequence": (PolicyLoss("cispo", "sequence"), {"cliprange": (0.02, 0.03)}),
    "sapo, sequence": (PolicyLoss("sapo", "sequence"), {}),
    "product": (PolicyLoss(ratio_level="product"), {"cliprange": (0.3, 0.4)}),
    "vespo": (PolicyLoss("vespo", vespo_powers=(0.4, 0.2), vespo_decays=(0.03, 0.05)), {}),
}
EACH = pytest.mark.parametrize("name", OBJECTIVES)


@EACH
@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean"])
def test_loss_gradients_and_statistics(backend, device, name, aggregate):
    """With advantages and weights of their own for the tokens, and a KL term."""
    objective, options = OBJECTIVES[name]
    terms = {"token_weights": True}
    stats = check(
        batch(device=device), backend, terms=terms, aggregate=aggregate, objective=objective,
        **options,
    )  # fmt: skip
    assert name[:4] in ("sapo", "vesp") or 0.01 < stats["clipfrac"] < 0.99


@EACH
def test_sequences_that_are_no_rows(backend, device, name):
    objective, options = OBJECTIVES[name]
    tensors = batch((60,), device=device)
    lengths = torch.tensor([7, 0, 20, 1, 32], device=device)
    check(tensors, backend, objective=objective, lengths=lengths, **options)


@EACH
def test_fused_with_the_head(backend, device, name):
    objective, options = OBJECTIVES[name]
    inputs = linear.batch(*linear.SMALL, device=device, bias=True)
    for workspace in (None, linear.ROWS):
        linear.check(inputs, backend, workspace, objective=objective, **options)


@EACH
def test_without_old_logprobs_nothing_was_learned_since(backend, device, name):
    objective, options = OBJECTIVES[name]
    inputs = linear.batch(*linear.SMALL, device=device, bias=True)
    names = ("hidden", "weight", "labels", "bias")
    hidden, weight, labels, bias = (inputs[name].detach() for name in names)
    own = linear_logprobs(hidden, weight, labels, bias=bias, backend=backend)
    mask = labels != -100
    for workspace in (None, linear.ROWS):
        found = []
        for old in (None, own):
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            loss, stats = linear_ppo_loss(
                *leaves, labels, old, inputs["advantages"], mask, bias=bias, objective=objective,
                backend=backend, workspace_bytes=workspace, **options,
            )  # fmt: skip
            loss.backward()
            found.append([loss.detach(), stats.logprobs, *(x.grad for x in leaves)])
        # Some libraries' products of another number of rows have other last bits.
        for unknown, known in zip(*found, strict=True):
            close = {"rtol": 1e-5, "atol": 1e-6 * float(known.abs().max())}
            torch.testing.assert_close(unknown, known, **close)


def test_chunks_of_rows_may_cut_sequences(backend, device):
    """A sequence's ratio is known before the first chunk's gradient."""
    inputs = linear.batch(2, 9, 60, device=device)
    lengths = torch.tensor([5, 10, 3], device=device)
    objective = PolicyLoss(ratio_level="sequence")
    options = {"objective": objective, "lengths": lengths, "cliprange": 0.05}
    for workspace in (None, linear.ROWS):
        linear.check(inputs, backend, workspace, **options)


ENTROPIES = {
    "bonus": {"entropy_coef": 0.3},
    "top": {"top_entropy": 0.4},
    "both": {"entropy_coef": -0.2, "top_entropy": 0.3, "aggregate": "seq-mean-token-mean"},
    "both, sequences": {
        "entropy_coef": 0.2, "top_entropy": 0.5, "objective": PolicyLoss("clip", "sequence"),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ENTROPIES)
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_entropies_in_the_loss(backend, device, name, softcap):
    inputs = linear.batch(*linear.SMALL, device=device, bias=True)
    options = {**ENTROPIES[name], "softcap": softcap}
    for workspace in (None, linear.ROWS):
        linear.check(inputs, backend, workspace, entropy=True, **options)


def test_no_entropy_term_leaves_all_bits(backend, device):
    inputs = linear.batch(*linear.SMALL, device=device)
    loss, grads, _ = linear.run(inputs, backend)
    same, plain, _ = linear.run(inputs, backend, entropy_coef=0.0, top_entropy=1.0)
    assert_same_bits((loss, *grads.values()), (same, *plain.values()))


def formula(name: str, ratio, a, logprobs):
    """Per token, as the sources print them."""
    if name == "cispo":
        return -ratio.detach().clamp(max=5.0) * a * logprobs
    if name == "delta":
        return -torch.minimum(ratio.clamp(max=1.3) * a, ratio.clamp(0.8, 1.2) * a)
    if name == "sapo":
        tau = torch.where(a > 0, 1.0, 1.05)
        return -(torch.sigmoid(tau * (ratio - 1)) * 4 / tau) * a
    if name == "vespo":  # its ratio is that of the sequence
        k, decay = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        w = ratio.detach()
        return -(w**k * torch.exp(decay * (1 - w))) * a * logprobs
    return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)


@pytest.mark.parametrize(("name", "objective", "cliprange"), [
    ("cispo", PolicyLoss("cispo"), (math.inf, 4.0)),
    ("delta", PolicyLoss(delta=1.3), 0.2),
    ("sapo", PolicyLoss("sapo"), 0.2),
    ("clip", PolicyLoss(), 0.2),
    ("clip", PolicyLoss(ratio_level="sequence"), 0.2),
    ("vespo", PolicyLoss("vespo"), 0.2),
])  # fmt: skip
def test_trls_formulas(backend, device, name, objective, cliprange):
    """Of TRL 1.16's GRPO: one advantage per response, a mean over tokens."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(5, 12, generator=generator)
    logprobs = (old + 0.6 * torch.randn(5, 12, generator=generator)).to(device)
    advantages = torch.randn(5, 1, generator=generator).expand(5, 12).contiguous().to(device)
    mask = (torch.arange(12) < torch.tensor([[12], [3], [7], [1], [9]])).to(device)
    old = old.to(device)
    mine, exact = logprobs.clone().requires_grad_(), logprobs.double().requires_grad_()
    loss, _ = ppo_loss(
        mine, old, advantages, mask, objective=objective, cliprange=cliprange, backend=backend
    )
    log_ratio = exact - old.double()
    if objective.ratio_level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1)).unsqueeze(-1).expand(5, 12)
    if name == "vespo":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True).expand(5, 12)
    per_token = formula(name, log_ratio.exp(), advantages.double(), exact)
    expected = (per_token * mask).sum() / mask.sum()
    loss.backward()
    expected.backward()
    # fp32 sums of 32 terms of about 1
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dual_clip", [None, 1.15, 1.6])
@pytest.mark.parametrize("delta", [None, 1.1, 1.5])
def test_gradients_on_both_sides_of_each_border(backend, device, delta, dual_clip):
    """Of each sign of A, with the formula's gradient, which is that of its own differences."""
    borders = [0.8, 1.0, 1.3, *(x for x in (delta, dual_clip) if x is not None)]
    ratios = torch.tensor([x + side for x in borders for side in (-0.02, 0.02)]).repeat(2)
    advantages = torch.tensor([0.7, -0.7]).repeat_interleave(len(ratios) // 2)
    ones, old = torch.ones(len(ratios), dtype=torch.bool), torch.full_like(ratios, -2.0)
    options = {"cliprange": (0.2, 0.3), "dual_clip": dual_clip, "denominator": 1.0}

    def formula(logprobs):
        objective = PolicyLoss(delta=delta)
        return reference.ppo_loss(
            logprobs, old.double(), advantages.double(), ones, objective=objective, **options
        )[0]

    exact = (old.double() + ratios.double().log()).requires_grad_()
    assert torch.autograd.gradcheck(formula, (exact,))
    (expected,) = torch.autograd.grad(formula(exact), exact)
    mine = exact.detach().float().to(device).requires_grad_()
    loss, _ = ppo_loss(
        mine, *(x.to(device) for x in (old, advantages, ones)), backend=backend,
        objective=PolicyLoss(delta=delta), **options,
    )  # fmt: skip
    loss.backward()
    # fp32 log-probs of about 2: ratios are known to 2e-7
    torch.testing.assert_close(mine.grad.cpu().double(), expected, rtol=1e-6, atol=0)


def test_a_sequences_ratio_is_the_geometric_mean_by_hand():
    x = torch.tensor([1.0, 3.0, 7.0, 5.0])
    mask = torch.tensor([True, True, False, True])
    lengths = torch.tensor([3, 1])
    assert sequence_means(x, mask, lengths).tolist() == [2.0, 2.0, 2.0, 5.0]
    assert sequence_means(x.view(2, 2), mask.view(2, 2), None).tolist() == [[2.0, 2.0], [5.0, 5.0]]


def test_the_token_form_is_the_sequences_where_a_response_has_one_advantage(backend, device):
    tensors = batch(device=device)
    tensors["advantages"] = tensors["advantages"][:, :1].expand_as(tensors["mask"]).contiguous()
    terms = {"weights": False}
    found = [
        run(tensors, backend, terms, objective=PolicyLoss(ratio_level=level), cliprange=0.03)
        for level in ("sequence", "sequence-token")
    ]
    for a, b in zip(found[0][1].values(), found[1][1].values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)  # a mean of equal numbers


def test_weights_of_sequences_far_away_are_zero_or_bounded(backend, device):
    """VESPO's log w is held in [log 1e-8, 20]: e^20 weighs nothing, and neither bound is NaN."""
    logprobs = torch.tensor([[-1.0, -2.0], [-30.0, -30.0], [-1.0, -1.0]], device=device)
    old = torch.tensor([[-40.0, -50.0], [-1.0, -1.0], [-1.0, -1.0]], device=device)
    leaf = logprobs.clone().requires_grad_()
    ones = torch.ones_like(old)
    objective = PolicyLoss("vespo", vespo_powers=(0.5, 0.5))
    loss, _ = ppo_loss(leaf, old, ones, ones > 0, objective=objective, backend=backend)
    loss.backward()
    weights = [0.0, 1e-8**0.5 * math.exp(3 * (1 - 1e-8)), 1.0]
    for row, weight in zip(leaf.grad.cpu(), weights, strict=True):
        # log φ of about 10 in fp32
        torch.testing.assert_close(row, torch.full((2,), -weight / 6), rtol=2e-6, atol=0)


def test_a_nan_shows(backend, device):
    for objective, _ in OBJECTIVES.values():
        tensors = batch((2, 5), device=device)
        tensors["mask"][:] = True
        tensors["logprobs"][0, 1] = torch.nan
        loss, grads, _ = run(tensors, backend, objective=objective)
        assert loss.isnan()
        assert grads["logprobs"][0, 1].isnan(), objective


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"objective": PolicyLoss("ppo")}, ValueError, "unknown policy loss 'ppo': choose one of"),
    ({"objective": PolicyLoss(ratio_level="word")}, ValueError, "unknown ratio_level 'word'"),
    ({"objective": PolicyLoss(delta=1.0)}, ValueError, "delta must be above 1, got 1.0"),
    ({"objective": PolicyLoss("sapo", delta=2.0)}, ValueError, "delta is for the policy loss"),
    ({"objective": PolicyLoss("cispo"), "dual_clip": 3.0}, ValueError, "dual_clip is for"),
    ({"objective": PolicyLoss("sapo", sapo_temperatures=(1.0, 0.0))}, ValueError,
     "sapo_temperatures must be positive"),
    ({"objective": PolicyLoss("sapo", sapo_temperatures=(1.0, math.nan))}, ValueError,
     "sapo_temperatures must be positive"),
    ({"objective": PolicyLoss("vespo", vespo_powers=(1.0, -1.0))}, ValueError,
     "vespo_powers must be 0 or more"),
    ({"objective": PolicyLoss("vespo", vespo_decays=(1.0, 0.0))}, ValueError,
     "vespo_decays must be positive"),
    ({"objective": PolicyLoss("vespo", "sequence")}, ValueError,
     "ratio_level='sequence', but the policy loss 'vespo'"),
    ({"objective": PolicyLoss(delta=torch.tensor(2.0))}, TypeError, "delta must be a number"),
    ({"lengths": torch.tensor([3, 8])}, ValueError, "lengths add up to 11, but logprobs has"),
    ({"lengths": torch.tensor([10.0])}, TypeError, "lengths must be int64"),
    ({"lengths": torch.tensor([10]), "aggregate": "seq-mean-token-sum"}, ValueError,
     "with lengths these are no sequences"),
])  # fmt: skip
def test_bad_input(options, error, message):
    x = torch.zeros(2, 5)
    with pytest.raises(error, match=message):
        ppo_loss(x, x, x, x == 0, **options)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"entropy_coef": math.nan}, ValueError, "entropy_coef must be finite"),
    ({"top_entropy": 0.0}, ValueError, r"top_entropy must lie in \(0, 1\], got 0.0"),
    ({"top_entropy": torch.tensor(0.5)}, TypeError, "must be Python numbers"),
])  # fmt: skip
def test_bad_entropy_terms(options, error, message):
    inputs = linear.batch(*linear.SMALL)
    del inputs["ref_logprobs"]
    with pytest.raises(error, match=message):
        linear_ppo_loss(**inputs, **options)


def test_every_loss_and_level_is_tested():
    kinds = {objective.kind for objective, _ in OBJECTIVES.values()}
    levels = {objective.ratio_level for objective, _ in OBJECTIVES.values()}
    assert kinds == set(POLICY_LOSSES)
    assert levels == set(RATIO_LEVELS)


def test_a_row_without_a_formula_is_an_error(monkeypatch, backend, device):
    """And not computed as another loss is."""
    monkeypatch.setitem(POLICY_LOSSES, "row", POLICY_LOSSES["clip"])
    tensors, objective = batch((2, 6), device=device), PolicyLoss("row")
    given = [tensors[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")]
    for compute in (partial(ppo_loss, backend=backend), reference.ppo_loss):
        with pytest.raises(Exception, match=r"row|without a kernel"):
            compute(*given, objective=objective)


def test_the_term_of_the_reference_policy_stays_the_tokens_own(backend, device):
    """One token's KL does not reach the others of its sequence."""
    tensors = batch((1, 6), device=device)
    tensors["mask"][:] = True
    zeros = torch.zeros_like(tensors["advantages"])
    logprobs = tensors["logprobs"].clone().requires_grad_()
    ref = tensors["logprobs"].clone()
    ref[0, 2] -= 1.0
    loss, _ = ppo_loss(
        logprobs, tensors["old_logprobs"], zeros, tensors["mask"], kl=KLTerm(ref, 0.5),
        objective=PolicyLoss(ratio_level="sequence"), backend=backend,
    )  # fmt: skip
    loss.backward()
    assert (logprobs.grad != 0).nonzero()[:, 1].tolist() == [2]
