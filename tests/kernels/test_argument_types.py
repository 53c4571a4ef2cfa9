"""Arguments of another type than an op's annotations say: an error that names them."""

import inspect
import typing

import numpy
import pytest
import torch
from torch import Tensor

import fastrl_kernels as ops
from fastrl_kernels.argument_types import explains_types, misfit
from tests.together import together

X = torch.zeros(2, 3)
MASK = torch.ones(2, 3, dtype=torch.bool)
LOGITS, LABELS = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)
HEAD = torch.zeros(2, 3), torch.zeros(5, 3), LABELS
OPS = [getattr(ops, name) for name in ops.__all__ if inspect.isfunction(getattr(ops, name))]
ON_TENSORS = [op for op in OPS if Tensor in typing.get_type_hints(op).values()]


@together("op", ON_TENSORS)
def test_lists_in_place_of_tensors_are_named(op):
    needed = [p.name for p in inspect.signature(op).parameters.values() if p.default is p.empty]
    hints = typing.get_type_hints(op)
    wrong = {name: [0.5, 0.5] if hints[name] is Tensor else 1 for name in needed}
    with pytest.raises(TypeError, match=r"must be (a tensor|integers in a t|SlotB)") as caught:
        op(**wrong)
    assert str(caught.value).split()[0] in needed


@pytest.mark.parametrize(("call", "message"), [
    (lambda: ops.ppo_loss(X, X, X, MASK, cliprange=(0.1, 0.2, 0.3)),
     r"cliprange must be a number or \(a number, a number\), got tuple of 3"),
    (lambda: ops.ppo_loss(X, X, X, MASK, cliprange=(0.1,)), "cliprange must be .*, got tuple"),
    (lambda: ops.ppo_loss(X, X, X, MASK, cliprange="0.2"), "cliprange must be .*, got str"),
    (lambda: ops.ppo_loss(X, X, X, MASK, value=X), "value must be ValueTerm or None, got Tens"),
    (lambda: ops.ppo_loss(X, X, X, MASK, kl=0.1), "kl must be KLTerm or None, got float"),
    (lambda: ops.ppo_loss(X, X, X, MASK, kl=ops.KLTerm(X, "0.1")),
     "kl.coef must be a number, got str"),
    (lambda: ops.ppo_loss(X, X, X, MASK, dual_clip=torch.tensor(3.0)), "must be Python numb"),
    (lambda: ops.ppo_loss(X, X, X, MASK.tolist()), "mask must be a tensor, got list"),
    (lambda: ops.gae(X, X, MASK, gamma="1", lam=0.95), "gamma must be a number, got str"),
    (lambda: ops.kl_rewards(X, X, X[:, 0], MASK, coef="0.1"), "coef must be .*, got str"),
    (lambda: ops.token_logprobs(LOGITS, LABELS, temperature="1"),
     "temperature must be a number or a tensor, got str"),
    (lambda: ops.linear_kl(*HEAD, 0.5), "teacher is a float: pass TeacherHead"),
    (lambda: ops.linear_kl(*HEAD, ops.TeacherHead([0.5], HEAD[1])),
     "teacher.hidden must be a tensor, got list"),
    (lambda: ops.linear_logprobs(*HEAD, softcap="30"), "softcap must be a number or None, got"),
    (lambda: ops.linear_logprobs(*HEAD, extras="is_top1"), "extras must be a tuple of names"),
    (lambda: ops.linear_logprobs(*HEAD, workspace_bytes=1e6), "workspace_bytes must be an int"),
    (lambda: ops.masked_whiten(X, MASK, moments=X[0, 0]), "moments must be Moments or None"),
    (lambda: ops.merge_moments([1.0]), "moments must be Moments, got list of 1"),
    (lambda: ops.dpo_loss(*[X[0]] * 4, beta="0.1"), "beta must be a number, got str"),
    (lambda: ops.rms_norm(X, X[0], dtype="bfloat16"), "dtype must be float32, bfloat16"),
    (lambda: ops.rms_norm(X, X[0], dtype=torch.int8), "dtype must be float32, .*, got torch.i"),
    (lambda: ops.explain(None), "device must be a torch.device or a string, got None"),
    (lambda: ops.linear_sample_pays(1.5, 8, 512, torch.bfloat16), "rows must be an integer"),
    (lambda: ops.linear_sample_pays(1, 8, 512, "bf16"), "dtype must be a torch.dtype, got str"),
])  # fmt: skip
def test_other_types_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


GAE = {"gamma": 0.9, "lam": 0.9}


@together(("call", "error", "message"), [
    (lambda: ops.gae(X, X, gamma=1.5, lam=0.9), ValueError, r"gamma must be in \[0, 1\], got 1.5"),
    (lambda: ops.gae(X, X, gamma=0.9, lam=-0.1), ValueError, r"lam must be in \[0, 1\]"),
    (lambda: ops.gae(X, X, gamma=torch.tensor(0.9), lam=0.9), TypeError, "must be a Python number"),
    (lambda: ops.gae(X, X, truncated=MASK, **GAE), ValueError,
     "truncated and bootstrap_value belong together"),
    (lambda: ops.gae(X, X, bootstrap_value=X, **GAE), ValueError,
     "truncated and bootstrap_value belong together"),
    (lambda: ops.gae(X, X, terminated=X, **GAE), TypeError, "terminated must be boolean"),
    (lambda: ops.gae(X, X[:1], **GAE), ValueError, "values has shape"),
    (lambda: ops.gae(X, X, X, **GAE), TypeError, "mask must be boolean"),
    (lambda: ops.kl_penalty(X, X, "k2"), ValueError,
     "unknown kind 'k2': choose one of kl, abs, mse, k3, k3"),
    (lambda: ops.kl_penalty(X, X, mask=X), TypeError, "mask must be boolean"),
    (lambda: ops.kl_penalty(X, X.double()), TypeError, "ref_logprobs must be float32"),
    (lambda: ops.kl_penalty(X, X[:1]), ValueError, "ref_logprobs has shape"),
    (lambda: ops.kl_rewards(X, X, X[0], MASK, coef=0.1), ValueError,
     r"scores has shape \(3,\): pass one per row, \(2,\)"),
    (lambda: ops.kl_rewards(X, X, X[:, 0], MASK, coef=X[:, 0]), ValueError, "coef has shape"),
    (lambda: ops.masked_mean(X, X), TypeError, "mask must be boolean"),
    (lambda: ops.masked_whiten(X, MASK[:1]), ValueError, "mask has shape"),
    (lambda: ops.masked_var(LABELS, LABELS > 0), TypeError, "values must be float32"),
    (lambda: ops.linear_sample_pays(-1, 8, 9, torch.bfloat16), ValueError, "rows must be at least"),
    (lambda: ops.linear_sample_pays(1, -8, 9, torch.bfloat16), ValueError, "hidden must be at lea"),
    (lambda: ops.linear_sample_pays(1, 8, 0, torch.bfloat16), ValueError, "vocabulary must be at"),
])  # fmt: skip
def test_what_an_op_refuses_and_why(call, error, message):
    """What has more to refuse says it in its own file."""
    with pytest.raises(error, match=message):
        call()


def test_other_errors_stay_as_they_are():
    @explains_types
    def op(x: Tensor, number: float = 1.0) -> Tensor:
        if number == 2:
            raise ValueError("x and number must not be 2")
        return x.to("nowhere") if number == 3 else x.sqrt()

    with pytest.raises(ValueError, match="x and number must not be 2"):
        op([1.0], number=2)
    with pytest.raises(RuntimeError, match="nowhere"):
        op(X, number=3)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        op()
    with pytest.raises(TypeError, match="x must be a tensor, got list of 1") as caught:
        op([1.0])
    assert isinstance(caught.value.__cause__, AttributeError)


def test_what_stands_for_a_number_fits():
    for value in (1, 0.5, numpy.float32(0.5), numpy.int64(3)):
        assert misfit("x", value, float) is None
    assert misfit("x", [0.1, 0.2], float | tuple[float, float]) is None
    assert misfit("x", None, float | None) is None
    assert misfit("x", torch.nn.Parameter(X), Tensor) is None
    assert misfit("x", ops.ValueTerm(X, X, X), ops.ValueTerm | None) is None
