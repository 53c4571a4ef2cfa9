"""linear_ppo_loss: gradients, statistics and memory, on both backends."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl_kernels import (
    KLTerm,
    LinearLossStats,
    LossStats,
    linear_logprobs,
    linear_ppo_loss,
    masked_mean,
    ppo_loss,
    reference,
)
from fastrl_kernels.types import AGGREGATES, KL_KINDS
from fastrl_kernels.workspace import clear
from tests.kernels import test_linear_logprobs
from tests.kernels.judge import DTYPES, assert_close_to_exact, assert_same_to_rounding, names
from tests.kernels.launches import allocations, watched
from tests.kernels.roundings import Rounded
from tests.kernels.test_linear_logprobs import (
    LAYOUTS,
    LEAVES,
    MANY,
    Inputs,
    assert_logits_never_exist,
    assert_same_bits,
)

BF16, FP32 = torch.bfloat16, torch.float32
PER_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
OF_HEAD = ("bias", "temperature", "softcap", "logit_scale")
SMALL = (3, 4, 60)
ROWS = 1500  # bytes: half of the rows of SMALL in fp32


def batch(*shape: int, device="cpu", dtype=FP32, seed=0, **options: Any) -> Inputs:
    """Inputs of which every tensor is used: a policy near the old one, holes, labels of -100; the
    first token's ratio is clipped."""
    inputs = test_linear_logprobs.batch(*shape, device=device, dtype=dtype, seed=seed, **options)
    inputs = test_linear_logprobs.with_holes(inputs)
    logprobs = linear_logprobs(**inputs, backend="torch").cpu()
    generator = torch.Generator().manual_seed(100 + seed)

    def noise(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(logprobs.shape, generator=generator)

    tokens = {
        "old_logprobs": logprobs + noise(0.4), "advantages": noise(), "weights": noise().abs(),
        "token_weights": noise().abs(), "ref_logprobs": logprobs + noise(0.3),
    }  # fmt: skip
    for at in map(tuple, counted_of(inputs).nonzero()[:1].tolist()):
        tokens["old_logprobs"][at] = logprobs[at] - tokens["advantages"][at].sign()
    return {**inputs, **{name: x.to(device) for name, x in tokens.items()}}


def counted_of(inputs: Inputs) -> Tensor:
    return inputs["mask"] & (inputs["labels"] != -100)


def with_terms(inputs: Inputs, kl: str | None = "k3", plain: bool = False) -> Inputs:
    """The tensors as arguments; a plain tuple in place of a KLTerm for the reference."""
    ref_logprobs = inputs["ref_logprobs"]
    given = {k: x for k, x in inputs.items() if k != "ref_logprobs"}
    if kl is None:
        return given
    return {**given, "kl": (ref_logprobs, 0.15, kl) if plain else KLTerm(ref_logprobs, 0.15, kl)}


def run(
    inputs: Inputs, backend: str | None, kl: str | None = "k3", wrt=LEAVES, upstream=1.0, **options
) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Loss, gradients by name and statistics; by the reference where ``backend`` is None."""
    leaves = {k: inputs[k].detach().requires_grad_() for k in wrt if k in inputs}
    given = with_terms({**inputs, **leaves}, kl, plain=backend is None)
    if backend is None:
        loss, stats = reference.linear_ppo_loss(**given, **options)
    else:
        loss, stats = linear_ppo_loss(**given, **options, backend=backend)
        assert loss.dtype == stats.tensor.dtype == FP32
        assert loss.dim() == 0
    grads = torch.autograd.grad(loss, [*leaves.values()], torch.full_like(loss, upstream))
    return loss.detach(), dict(zip(leaves, grads, strict=True)), stats


def composed(inputs: Inputs, kl: str | None = "k3", wrt=LEAVES, **options: Any):
    """`ppo_loss` of `linear_logprobs`, which this op is to give in one."""
    leaves = {k: inputs[k].detach().requires_grad_() for k in wrt if k in inputs}
    given = {**with_terms({**inputs, **leaves}, kl), **options}
    for_head = {k: given.pop(k) for k in ("hidden", "weight", "labels", *OF_HEAD) if k in given}
    for_head["workspace_bytes"] = given.pop("workspace_bytes", None)
    given["mask"] = counted_of(inputs)
    logprobs, entropies = linear_logprobs(
        **for_head, mask=inputs["mask"], entropy=True, backend=options["backend"]
    )
    loss, stats = ppo_loss(logprobs, **given)
    grads = dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True))
    return loss.detach(), grads, stats, logprobs.detach(), entropies.detach()


def doubled(inputs: Inputs) -> Inputs:
    return {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}


def by_name(loss: Tensor, grads: dict[str, Tensor], stats: Any) -> Inputs:
    """All that ``run`` returns."""
    names = (*LossStats.NAMES, "logprobs")
    found = stats if isinstance(stats, dict) else {name: getattr(stats, name) for name in names}
    grads = {f"d{name}": x for name, x in grads.items()}
    return {"total": loss, **grads, **{name: found[name] for name in names}}


def check(inputs: Inputs, backend: str, workspace_bytes: int | None = None, **options: Any) -> None:
    loss, grads, stats = run(inputs, backend, workspace_bytes=workspace_bytes, **options)
    runs = Rounded(lambda: by_name(*run(inputs, None, **options)))
    exact = by_name(*run(doubled(inputs), None, **options))
    for name, x in by_name(loss, grads, stats).items():
        assert_close_to_exact(x, runs[name], exact[name], name)
    counted = counted_of(inputs)
    for name, grad in grads.items():
        assert grad.dtype == inputs[name].dtype
    assert not grads["hidden"][~counted].any()
    assert grads["hidden"].any()


# Several rows each: libraries sum the products of a single row less accurately.
WORKSPACES = pytest.mark.parametrize("workspace", [None, 50_000], ids=["one chunk", "many chunks"])


@PER_DTYPE
@WORKSPACES
def test_loss_and_gradients(backend, device, dtype, workspace):
    """In one chunk the plain op, in many all that a head may have."""
    full = workspace is not None
    inputs = batch(*MANY, dtype=dtype, device=device, bias=full)
    options = {"softcap": 8.0, "logit_scale": 1.5, "entropy": True} if full else {}
    if full:
        inputs["temperature"] = test_linear_logprobs.temperatures(inputs)
    check(inputs, backend, workspace, upstream=-1.7, **options)


OPTIONS = {
    "seq-mean-token-sum": {"aggregate": "seq-mean-token-sum"},
    "seq-mean-token-mean": {"aggregate": "seq-mean-token-mean"},
    "seq-mean-token-sum-norm": {"aggregate": "seq-mean-token-sum-norm", "kl": "k3+"},
    "clip ranges": {"cliprange": (0.1, 0.3), "dual_clip": 1.2, "kl": "mse"},
    "denominator": {"denominator": 23.0, "kl": None},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_match_the_formula(backend, device, options):
    check(batch(*SMALL, device=device, bias=True), backend, ROWS, **OPTIONS[options])


@pytest.mark.parametrize(
    ("kl", "aggregate"), [*zip([None, *KL_KINDS, "k3", "kl"], AGGREGATES * 2, strict=True)]
)
def test_it_is_the_loss_of_the_log_probs(backend, device, kl, aggregate):
    """The same bits in the loss and in every statistic, where both have whole rows at a time."""
    dtype = BF16 if kl in ("k3+", "abs") else FP32
    inputs = batch(*SMALL, dtype=dtype, device=device, bias=True)
    denominator = {"k3": 19.5, "mse": torch.tensor(31.0, device=device)}.get(kl)
    options = {
        "denominator": denominator,
        "aggregate": aggregate,
        "cliprange": (0.1, 0.3),
        "dual_clip": 1.5 if kl == "k3+" else None,
        "softcap": 9.0 if kl == "abs" else None,
        "workspace_bytes": ROWS if backend == "torch" else None,
        "backend": backend,
    }
    if kl == "kl":
        del inputs["weights"], inputs["token_weights"]
    loss, grads, stats = run(inputs, kl=kl, entropy=True, **options)
    loss_, _, stats_, logprobs, entropies = composed(inputs, kl, **options)
    assert_same_bits((loss, stats.logprobs, stats.entropies), (loss_, logprobs, entropies))
    assert_same_bits([stats.tensor[:-1]], [stats_.tensor])
    assert (stats.clipfrac > 0) & (stats.tokens == counted_of(inputs).sum())
    mean = masked_mean(entropies, counted_of(inputs), backend="torch")
    torch.testing.assert_close(stats.entropy, mean)
    for_reference = {k: options[k] for k in options if k not in ("backend", "workspace_bytes")}
    runs = Rounded(lambda: run(inputs, None, kl=kl, **for_reference)[1])
    _, exact, _ = run(doubled(inputs), None, kl=kl, **for_reference)
    for name in LEAVES:
        assert_close_to_exact(grads[name], runs[name], exact[name], f"d{name}")


def test_entropy_is_a_statistic_where_asked_for(backend, device):
    inputs = batch(*SMALL, device=device)
    _, without, stats = run(inputs, backend)
    assert list(stats.to_dict()) == list(LinearLossStats.NAMES)
    assert stats.entropy.isnan()
    assert stats.entropies is None
    _, grads, stats = run(inputs, backend, entropy=True)
    assert_same_bits(grads.values(), without.values())
    for x in (stats.tensor, stats.logprobs, stats.entropies):
        assert not x.requires_grad
    assert stats.logprobs.shape == stats.entropies.shape == SMALL[:-1]
    assert not stats.entropies[~counted_of(inputs)].any()
    with pytest.raises(AttributeError, match="no field 'kl': choose one of"):
        _ = stats.kl


@pytest.mark.parametrize(
    ("shape", "aggregate"),
    [*zip([(5, 60), (3, 1, 60), (1, 4, 60), (2, 3, 2, 60)], AGGREGATES, strict=True)],
)
def test_any_shape(backend, device, shape, aggregate):
    inputs = batch(*shape, device=device, seed=2)
    inputs["mask"].view(-1)[0], inputs["labels"].view(-1)[0] = True, 3
    check(inputs, backend, aggregate=aggregate)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["hidden", "weight"])
@WORKSPACES
def test_any_strides(backend, device, which, layout, workspace):
    inputs = batch(7, 1200, device=device)
    inputs[which] = LAYOUTS[layout](inputs[which])
    check(inputs, backend, workspace, upstream=0.3)


def test_strided_constants(backend, device):
    inputs = batch(3, 4, 60, device=device)
    rolled = {k: x.transpose(0, 1) if k not in LEAVES else x for k, x in inputs.items()}
    rolled["hidden"] = inputs["hidden"].transpose(0, 1)
    check(rolled, backend, aggregate="seq-mean-token-mean")


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_upstream_factors_scale_and_one_leaves_all_bits(backend, device, dtype):
    inputs = batch(16, 60, dtype=dtype, device=device, bias=True, seed=3)
    _, plain, _ = run(inputs, backend)
    assert all(x.any() for x in plain.values())
    for factor in (1.0, -0.3, 65536.0):
        _, scaled, _ = run(inputs, backend, upstream=factor)
        for name, x in plain.items():
            expected = (x.float() * factor).to(dtype)
            if backend == "torch" and device == "cuda" and factor == -0.3:
                assert_same_to_rounding([scaled[name]], [expected])  # products of another head
            else:
                assert torch.equal(scaled[name], expected), (name, factor)


def test_a_second_backward_is_refused(backend, device):
    inputs = batch(*SMALL, device=device)
    inputs["hidden"].requires_grad_()
    loss, _ = linear_ppo_loss(**with_terms(inputs), backend=backend)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="linear_ppo_loss hands its gradients out once: call it"):
        loss.backward()


@pytest.mark.parametrize("wanted", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ()])
def test_gradients_reach_only_those_who_ask(backend, device, wanted):
    """A frozen head costs no memory of its size; without gradients nothing is computed for them."""
    inputs = batch(5, 1100, width=64, device=device, bias=True)
    given = {"workspace_bytes": 10_000, "backend": backend}
    loss, everything, _ = run(inputs, **given)
    with allocations(*inputs.values()) as found:
        if wanted:
            loss_, grads, _ = run(inputs, wrt=wanted, **given)
            assert_same_bits(grads.values(), [everything[name] for name in wanted])
        else:
            leaves = {k: inputs[k].detach().requires_grad_() for k in LEAVES}
            with torch.no_grad():
                loss_, _ = linear_ppo_loss(**with_terms({**inputs, **leaves}), **given)
            assert not loss_.requires_grad
    assert_same_bits([loss_], [loss])
    of_head = [what for size, what in found if size >= inputs["weight"].nbytes]
    assert bool(of_head) == ("weight" in wanted), of_head


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_logits_never_exist(backend, device, dtype):
    options = {"free": clear, "backend": backend, "upstream": 2.0, "entropy": True}
    assert_logits_never_exist(run, batch, device, dtype, **options)


def test_runs_give_the_same_bits(backend, device):
    inputs = batch(*MANY, dtype=BF16, device=device, bias=True)
    (loss, *first), (loss_, *second) = (
        run(inputs, backend, workspace_bytes=20_000) for _ in range(2)
    )
    assert_same_bits([loss, *first[0].values()], [loss_, *second[0].values()])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_stands_at_masked_places_never_shows(backend, device, poison):
    inputs = batch(*SMALL, device=device, bias=True)
    inputs["temperature"] = test_linear_logprobs.temperatures(inputs)
    counted = counted_of(inputs)
    dirty = {**inputs, "labels": torch.where(inputs["mask"], inputs["labels"], 10**9)}
    for name in (
        "hidden",
        "temperature",
        "old_logprobs",
        "advantages",
        "weights",
        "token_weights",
        "ref_logprobs",
    ):
        here = counted[..., None] if name == "hidden" else counted
        dirty[name] = torch.where(here, inputs[name], poison)
    options = {"workspace_bytes": ROWS, "entropy": True, "aggregate": "seq-mean-token-mean"}
    loss, grads, stats = run(inputs, backend, **options)
    loss_, grads_, stats_ = run(dirty, backend, **options)
    assert_same_bits([loss_, stats_.tensor, stats_.logprobs], [loss, stats.tensor, stats.logprobs])
    assert_same_bits(grads_.values(), grads.values())
    assert not grads_["hidden"][~counted].any()
    assert all(x.isfinite().all() for x in grads_.values())


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("shape", [(4, 3), (0, 3), (3, 0)], ids=str)
def test_a_batch_that_counts_nowhere_gives_zeros(backend, device, aggregate, shape):
    inputs = batch(*shape, 40, device=device, bias=True)
    inputs["mask"][...] = False
    inputs["hidden"].fill_(torch.nan)
    loss, grads, stats = run(inputs, backend, aggregate=aggregate, entropy=True, upstream=2.0)
    assert loss == 0
    assert not any(x.any() for x in (*grads.values(), stats.tensor, stats.logprobs))
    assert [x.shape for x in grads.values()] == [inputs[name].shape for name in LEAVES]


def test_a_denominator_of_zero_gives_zeros(backend, device):
    """Of ranks that together count nothing, if nothing counts on this one or not."""
    inputs = batch(*SMALL, device=device)
    for change in ({}, {"mask": torch.zeros_like(inputs["mask"])}):
        zero = torch.zeros((), device=device)
        loss, grads, _ = run({**inputs, **change}, backend, denominator=zero)
        assert loss == 0
        assert not any(x.any() for x in grads.values())


@WORKSPACES
def test_autocast_multiplies_in_its_dtype(backend, device, workspace):
    inputs = batch(*MANY, device=device, bias=True)
    with torch.autocast(device, dtype=BF16):
        loss, grads, _ = run(inputs, backend, workspace_bytes=workspace)
    low = {k: x.to(BF16) if k in LEAVES else x for k, x in inputs.items()}
    loss_, grads_, _ = run(low, backend, workspace_bytes=workspace)
    assert [x.dtype for x in grads.values()] == [FP32] * 3
    # The weight's gradient is rounded to fp32 alone; hidden states and bias have theirs in bf16.
    grads = {k: x.to(BF16).float() for k, x in grads.items()}
    assert_same_bits([loss, *grads.values()], [loss_, *(x.float() for x in grads_.values())])


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean"])
def test_nothing_waits_for_the_device(device, aggregate):
    inputs = batch(*SMALL, device=device, bias=True)
    for name in LEAVES:
        inputs[name].requires_grad_()
    for denominator in (None, torch.tensor(9.0, device=device)):
        with watched() as calls:
            loss, stats = linear_ppo_loss(
                **with_terms(inputs), aggregate=aggregate, denominator=denominator, entropy=True,
                workspace_bytes=ROWS, backend="triton",
            )  # fmt: skip
            _ = stats.clipfrac, stats.entropy
            loss.backward()
        assert calls.count("_lm_head_fwd_kernel") == calls.count("_lm_head_bwd_kernel") == 2
        assert calls.count("_lm_head_scale_kernel") == 3
