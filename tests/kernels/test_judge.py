"""The judge finds one rounding too many, and lets pass what has none."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl_kernels import reference
from tests.kernels import judge as judging
from tests.kernels.draws import formula as sampled
from tests.kernels.judge import assert_all_close_to_exact, judge, results
from tests.kernels.roundings import Rounded, spacing

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Inputs = dict[str, Tensor]


def to_bits(x: Tensor, bits: int) -> Tensor:
    """Rounded to a mantissa of so many bits, the first one included."""
    unit = spacing(x.double(), FP32) * 2.0 ** (24 - bits)
    return ((x.double() / unit).round() * unit).to(x.dtype)


def bf16(x: Tensor) -> Tensor:
    return x.to(BF16).to(x.dtype)


def fp16(x: Tensor) -> Tensor:
    return x.to(FP16).to(x.dtype)


def tf32(x: Tensor) -> Tensor:
    return to_bits(x, 11)


def bits16(x: Tensor) -> Tensor:
    return to_bits(x, 16)


class Once(TorchDispatchMode):
    """Context in which the results of an operator, or its nth one, are rounded once more."""

    def __init__(self, operator: str, rounds: Callable[[Tensor], Tensor], nth: int | None) -> None:
        super().__init__()
        self.operator, self.rounds, self.nth, self.seen = operator, rounds, nth, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ != self.operator or not found.is_floating_point():
            return found
        self.seen += 1
        return self.rounds(found) if self.nth in (None, self.seen - 1) else found


def normal(*shape: int, scale: float = 1.0, mean: float = 0.0, seed: int = 0) -> Tensor:
    return mean + scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ROWS, LENGTH, VOCABULARY = 9, 37, 207
MASK = normal(ROWS, LENGTH, seed=9) > -0.5
LABELS = (normal(ROWS, seed=8).abs() * 100).long() % VOCABULARY
LOGITS = {"logits": normal(ROWS, VOCABULARY, scale=3.0)}
PAIR = {**LOGITS, "ref_logits": normal(ROWS, VOCABULARY, scale=3.0, seed=1)}
VALUES = {"values": normal(ROWS, LENGTH, mean=0.3)}
HEAD = {"hidden": normal(ROWS, 16), "weight": normal(VOCABULARY, 16, seed=1)}
_OLD = -3 * normal(ROWS, LENGTH).abs()
POLICIES = {
    "logprobs": _OLD + 0.3 * normal(ROWS, LENGTH, seed=1),
    "old_logprobs": _OLD,
    "advantages": normal(ROWS, LENGTH, seed=2),
}


def log_probs(*names: str, mean: float) -> Inputs:
    drawn = (normal(40, scale=2.0, mean=mean, seed=seed) for seed in range(len(names)))
    return {name: -x.abs() - 0.01 for name, x in zip(names, drawn, strict=True)}


def gae(values: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return reference.gae(2 * values, values, MASK, gamma=0.99, lam=0.95, **options)


def ppo(kind: str, level: str = "token", **options: Any) -> Callable[..., Tensor]:
    objective = (kind, level, None, (1.0, 1.05), (2.0, 3.0), (3.0, 2.0))

    def loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        given = (logprobs, old_logprobs, advantages, MASK)
        return reference.ppo_loss(*given, objective=objective, **options)[0]

    return loss


def linear_ppo(hidden: Tensor, weight: Tensor) -> Tensor:
    old, advantages = torch.full((ROWS,), -6.0), normal(ROWS, seed=2)
    constants = old.to(hidden), advantages.to(hidden), LABELS >= 0
    return reference.linear_ppo_loss(hidden, weight, LABELS, *constants)[0]


def kl_rewards(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, ...]:
    counted, scores = logprobs == logprobs, torch.ones(()).to(logprobs)
    return reference.kl_rewards(logprobs, ref_logprobs, scores, counted, coef=0.1)


def sampling(logits: Tensor) -> tuple[Tensor, ...]:
    kept = logits > 0.8 * logits.amax(-1, keepdim=True)
    return sampled(logits, logits.argmax(-1), kept, 0.7)


def kto(policy: Tensor, ref: Tensor) -> Tensor:
    return reference.kto_loss(policy, ref, torch.arange(40) < 20, 0.5)


def attention(values: Tensor) -> Tensor:
    keys = [normal(3, 19, 3, LENGTH, seed=seed).to(values) for seed in (1, 2)]
    return reference.decode_attention(values.view(3, 3, LENGTH), *keys, torch.tensor([19, 7, 1]))


def rms_norm(values: Tensor) -> Tensor:
    return reference.rms_norm(values, normal(LENGTH, seed=3).to(values))


def divergence(beta: float) -> Callable[..., Tensor]:
    """Of a head from a teacher's."""

    def op(hidden: Tensor, weight: Tensor) -> Tensor:
        of_teacher = normal(ROWS, 5, seed=2), normal(VOCABULARY, 5, seed=3)
        teacher = (*(x.to(hidden) for x in of_teacher), None, None, 1.0)
        return reference.linear_kl(hidden, weight, LABELS, teacher, beta=beta)[0]

    return op


def divergence_of_tokens(rest: str, beta: float) -> Callable[..., Tensor]:
    ids = torch.arange(VOCABULARY)[::9].expand(ROWS, -1)

    def op(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        logprobs = normal(*ids.shape, seed=4).log_softmax(-1).to(hidden) - 0.3
        teacher = ids, logprobs, rest
        loss, found = reference.linear_kl_loss(hidden, weight, LABELS, teacher, beta=beta)
        return loss, found[0]

    return op


_LINEAR = functools.partial(reference.linear_logprobs, labels=LABELS, entropy=True)
_SIDES = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
_TWO = log_probs("logprobs", "ref_logprobs", mean=1.0)
# A formula, its inputs in fp32, and those which gradients are taken by.
CASES: dict[str, tuple[Callable[..., Any], Inputs, tuple[str, ...]]] = {
    "token_logprobs": (
        functools.partial(
            reference.token_logprobs, labels=LABELS, temperature=1.7, entropy=True
        ), LOGITS, ("logits",)
    ),
    "full_kl": (reference.full_kl, PAIR, ("logits",)),
    "sampling": (sampling, LOGITS, ()),
    "k2": (functools.partial(reference.kl_penalty, kind="mse"), _TWO, ("logprobs",)),
    "k3": (functools.partial(reference.kl_penalty, kind="k3"), _TWO, ("logprobs",)),
    "kl_rewards": (kl_rewards, _TWO, ("logprobs",)),
    "gae": (gae, VALUES, ("values",)),
    "gae whitened": (functools.partial(gae, whiten=True), VALUES, ("values",)),
    "masked_mean": (functools.partial(reference.masked_mean, mask=MASK), VALUES, ("values",)),
    "masked_var": (functools.partial(reference.masked_var, mask=MASK), VALUES, ("values",)),
    "masked_whiten": (functools.partial(reference.masked_whiten, mask=MASK), VALUES, ("values",)),
    "ppo_loss": (ppo("clip", aggregate="seq-mean-token-mean"), POLICIES, ("logprobs",)),
    "sapo": (ppo("sapo"), POLICIES, ("logprobs",)),
    "cispo": (ppo("cispo"), POLICIES, ("logprobs",)),
    "vespo": (ppo("vespo"), POLICIES, ("logprobs",)),
    "sequence ratios": (ppo("clip", "sequence"), POLICIES, ("logprobs",)),
    "dpo_loss": (reference.dpo_loss, log_probs(*_SIDES, mean=20.0), _SIDES[:2]),
    "ipo_loss": (reference.ipo_loss, log_probs(*_SIDES, mean=20.0), _SIDES[:2]),
    "simpo_loss": (
        reference.simpo_loss, log_probs("mean_chosen", "mean_rejected", mean=3.0), ("mean_chosen",)
    ),
    "orpo_loss": (
        reference.orpo_loss, log_probs("mean_chosen", "mean_rejected", mean=3.0), ("mean_chosen",)
    ),
    "slic_loss": (reference.slic_loss, log_probs(*_SIDES[:2], mean=20.0), _SIDES[:2]),
    "kto_loss": (kto, log_probs("policy", "ref", mean=20.0), ("policy",)),
    "reward_loss": (
        reference.reward_loss, log_probs("chosen", "rejected", mean=2.0), ("chosen", "rejected")
    ),
    "linear_logprobs": (_LINEAR, HEAD, ("hidden", "weight")),
    "linear_logprobs capped": (
        functools.partial(_LINEAR, softcap=9.0), HEAD, ("hidden", "weight")
    ),
    "forward KL": (divergence(0.0), HEAD, ("hidden", "weight")),
    "reverse KL": (divergence(1.0), HEAD, ("hidden", "weight")),
    "mixed KL": (divergence(0.3), HEAD, ("hidden", "weight")),
    "bucket": (divergence_of_tokens("bucket", 0.0), HEAD, ("hidden", "weight")),
    "renormalised": (divergence_of_tokens("renormalised", 0.5), HEAD, ("hidden", "weight")),
    "linear_nll_loss": (
        lambda hidden, weight: reference.linear_nll_loss(hidden, weight, LABELS)[0],
        HEAD, ("hidden", "weight"),
    ),
    "linear_ppo_loss": (linear_ppo, HEAD, ("hidden", "weight")),
    "rms_norm": (rms_norm, VALUES, ()),
    "swiglu": (lambda values: reference.swiglu(5 * values, values.flip(0)), VALUES, ()),
    "decode_attention": (attention, VALUES, ()),
}  # fmt: skip
# A case, its inputs' dtype, and the operator of PyTorch, or its nth one, the gradient's included,
# whose result is rounded once more.
FAULTS = [
    ("token_logprobs", BF16, "div", bf16, 0),
    ("token_logprobs", BF16, "_log_softmax", bf16, None),
    ("token_logprobs", BF16, "exp", fp16, None),
    ("token_logprobs", BF16, "_log_softmax_backward_data", bf16, None),
    ("token_logprobs", FP16, "_log_softmax_backward_data", fp16, None),
    ("token_logprobs", FP32, "sum", tf32, None),
    ("full_kl", BF16, "sub", fp16, None),
    ("full_kl", BF16, "_log_softmax", bf16, 1),
    ("full_kl", FP32, "exp", bits16, None),
    ("sampling", BF16, "exp", bf16, None),
    ("sampling", FP16, "log", fp16, None),
    ("k2", BF16, "sub", bf16, None),
    ("k3", FP16, "expm1", fp16, None),
    ("kl_rewards", FP32, "mul", tf32, None),
    ("gae", BF16, "stack", bf16, None),
    ("gae", FP32, "mul", tf32, 7),
    ("gae whitened", FP32, "rsqrt", bits16, None),
    ("masked_mean", BF16, "sum", bf16, None),
    ("masked_var", FP32, "sub", tf32, None),
    ("masked_whiten", BF16, "div", bf16, 0),
    ("ppo_loss", FP32, "sub", fp16, 0),
    ("ppo_loss", BF16, "exp", bf16, None),
    ("ppo_loss", FP32, "_to_copy", tf32, None),
    ("ppo_loss", BF16, "mul", bf16, None),
    ("sapo", FP32, "sigmoid", fp16, None),
    ("cispo", FP32, "exp", tf32, None),
    ("vespo", FP32, "exp", bits16, None),
    ("sequence ratios", FP32, "div", fp16, 0),
    ("dpo_loss", FP32, "sub", fp16, 2),
    ("dpo_loss", FP32, "softplus_backward", fp16, None),
    ("ipo_loss", FP32, "pow", tf32, None),
    ("simpo_loss", FP32, "sub", fp16, 0),
    ("orpo_loss", FP32, "expm1", bits16, None),
    ("slic_loss", FP32, "rsub", tf32, None),
    ("kto_loss", FP32, "sigmoid", fp16, None),
    ("reward_loss", BF16, "sub", bf16, None),
    ("linear_logprobs", FP32, "mm", tf32, 0),
    ("linear_logprobs", FP32, "_log_softmax_backward_data", bf16, None),
    ("linear_logprobs capped", FP32, "tanh", fp16, None),
    ("forward KL", FP32, "mm", tf32, 1),
    ("forward KL", FP32, "exp", bits16, None),
    ("reverse KL", FP32, "_log_softmax", bf16, 1),
    ("reverse KL", FP32, "sub", fp16, None),
    ("mixed KL", FP32, "logaddexp", bits16, None),
    ("mixed KL", FP32, "exp", bits16, None),
    ("bucket", FP32, "logsumexp", bf16, None),
    ("bucket", FP32, "log", fp16, 0),
    ("renormalised", FP32, "logsumexp", bits16, None),
    ("linear_nll_loss", FP32, "mm", tf32, 1),
    ("linear_ppo_loss", FP32, "gather", bf16, 0),
    ("rms_norm", BF16, "mean", bf16, None),
    ("swiglu", BF16, "sigmoid", bf16, None),
    ("decode_attention", FP16, "_softmax", bf16, None),
]
IDS = [" ".join(str(getattr(x, "__name__", x)) for x in fault) for fault in FAULTS]


def in_fp32(formula: Callable[..., Any]) -> Callable[..., Any]:
    """An op as exact as the formula: fp32 from its inputs on, and a rounding at the end."""
    return lambda **given: formula(**{name: x.float() for name, x in given.items()})


def inputs_of(case: str, dtype: torch.dtype) -> Inputs:
    return {name: x.to(dtype) for name, x in CASES[case][1].items()}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_an_op_that_rounds_as_its_formula_passes(case, dtype):
    formula, _, wrt = CASES[case]
    judge(in_fp32(formula), formula, inputs_of(case, dtype), wrt=wrt)


@pytest.mark.parametrize(("case", "dtype", "operator", "rounds", "nth"), FAULTS, ids=IDS)
def test_one_rounding_too_many_is_found(case, dtype, operator, rounds, nth):
    formula, _, wrt = CASES[case]
    inputs = inputs_of(case, dtype)
    with Once(operator, rounds, nth) as fault:
        actual = results(in_fp32(formula), inputs, wrt)
    assert fault.seen > (nth or 0)
    with pytest.raises(AssertionError, match=r"error .* exceeds"):
        assert_all_close_to_exact(actual, formula, inputs, wrt=wrt)


def far_logits(dtype: torch.dtype = FP32) -> Tensor:
    return (LOGITS["logits"] + 300.0).to(dtype)


def one_number_for_max_and_sum(logits: Tensor) -> Tensor:
    return logits.gather(-1, LABELS[:, None])[:, 0] - logits.logsumexp(-1)


def with_a_short_log2e(logits: Tensor) -> Tensor:
    log2e = bits16(torch.tensor(math.log2(math.e)))
    shifted = logits - logits.amax(-1, keepdim=True)
    picked = shifted.gather(-1, LABELS[:, None])[:, 0]
    return picked - torch.exp2(shifted * log2e).sum(-1).log()


def from_a_rounded_maximum(logits: Tensor) -> Tensor:
    shifted = logits - bf16(logits.amax(-1, keepdim=True))
    return shifted.gather(-1, LABELS[:, None])[:, 0] - bf16(shifted.exp()).sum(-1).log()


def sums_in_bf16(values: Tensor) -> Tensor:
    return values.bfloat16().cumsum(-1)[:, -1].float()


def sums_one_after_the_other(values: Tensor) -> Tensor:
    total = torch.zeros(len(values))
    for column in values.unbind(-1):
        total = total + column
    return total


def mean_of_squares_less_square_of_mean(values: Tensor) -> Tensor:
    return values.square().mean(-1) - values.mean(-1).square()


def eps_outside_the_root(values: Tensor) -> Tensor:
    return values / (values.square().mean(-1, keepdim=True).sqrt() + 1e-6)


def exponential_less_one(values: Tensor) -> Tensor:
    return torch.exp(-values) - 1 + values


SPELLED = {
    one_number_for_max_and_sum: (
        lambda logits: reference.token_logprobs(logits, LABELS), {"logits": far_logits()}
    ),
    with_a_short_log2e: (lambda logits: reference.token_logprobs(logits, LABELS), LOGITS),
    from_a_rounded_maximum: (lambda logits: reference.token_logprobs(logits, LABELS), LOGITS),
    sums_in_bf16: (lambda values: values.sum(-1), VALUES),
    sums_one_after_the_other: (
        lambda values: values.sum(-1), {"values": normal(ROWS, 20_000, mean=1.0)}
    ),
    mean_of_squares_less_square_of_mean: (
        lambda values: (values - values.mean(-1, keepdim=True)).square().mean(-1),
        {"values": 30 + VALUES["values"]},
    ),
    eps_outside_the_root: (
        lambda values: reference.rms_norm(values, torch.ones(LENGTH).to(values)), VALUES
    ),
    exponential_less_one: (
        lambda values: torch.expm1(-values) + values, {"values": 0.01 * VALUES["values"]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("faulty", SPELLED, ids=lambda op: op.__name__)
def test_a_way_of_computing_that_loses_digits_is_found(faulty, monkeypatch):
    monkeypatch.setattr(judging, "FLOOR", 1e-7)  # these run on a CPU, whatever kernels run on
    formula, inputs = SPELLED[faulty]
    judge(formula, formula, inputs)
    with pytest.raises(AssertionError, match=r"error .* exceeds"):
        judge(faulty, formula, inputs)


@pytest.mark.parametrize("case", CASES)
def test_what_is_allowed_is_a_few_roundings(case):
    formula, _, wrt = CASES[case]
    inputs = inputs_of(case, FP32)
    exact = results(formula, inputs, wrt, torch.float64)
    for of_run in Rounded(lambda: results(formula, inputs, wrt)):
        errors = {name: (of_run[name] - x).norm() / x.norm() for name, x in exact.items()}
        assert 0 < max(errors.values()) < 2.0**-18, errors


def test_infinities_nan_and_shapes_are_judged():
    x = torch.tensor([1.0, torch.inf, 2.0])
    for wrong in ([1.0, -torch.inf, 2.0], [1.0, 2.0, 2.0], [torch.nan, torch.inf, 2.0]):
        with pytest.raises(AssertionError):
            judge(lambda x, wrong=wrong: torch.tensor(wrong), lambda x: x * 1.0, {"x": x})
    with pytest.raises(AssertionError, match="shape"):
        judge(lambda x: x[:2], lambda x: x * 1.0, {"x": x})
    large = {"x": torch.tensor([6e4, 7e4], dtype=torch.float64)}
    judge(lambda x: x.half(), lambda x: x * 1.0, large)  # 7e4 is infinite in fp16


def test_a_formula_that_gives_no_number_allows_nothing():
    x = {"x": torch.ones(3)}
    with pytest.raises(AssertionError, match="the formula itself gives no number"):
        judge(lambda x: x + 1, lambda x: x + math.nan, x)
