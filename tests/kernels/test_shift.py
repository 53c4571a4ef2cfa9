"""``shift`` of the linear ops: position t scores the label of t + shift."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl_kernels import (
    KLTerm,
    TeacherHead,
    linear_kl,
    linear_kl_loss,
    linear_logprobs,
    linear_nll_loss,
    linear_ppo_loss,
    losses,
    reference,
    workspace,
)
from tests.kernels import test_linear_ppo_loss
from tests.kernels.judge import judge
from tests.kernels.launches import allocations
from tests.kernels.test_linear_logprobs import LEAVES, Inputs, assert_same_bits, batch, run
from tests.together import together

OPS = pytest.mark.parametrize(
    "op", [linear_logprobs, linear_nll_loss, linear_ppo_loss, linear_kl, linear_kl_loss]
)
SHAPES = pytest.mark.parametrize("leading", [(6,), (2, 6), (2, 1, 6)], ids=str)


def constants(op: Any, like: Tensor, vocabulary: int = 60) -> dict[str, Any]:
    """What the PPO loss takes besides, per token, and divergences of a teacher."""
    if op in (linear_kl, linear_kl_loss):
        states = torch.ones(*like.shape, 2, device=like.device)
        return {"teacher": TeacherHead(states, torch.ones(vocabulary, 2, device=like.device))}
    if op is not linear_ppo_loss:
        return {}
    old = torch.full(like.shape, -5.0, device=like.device)
    mask = torch.ones_like(like, dtype=torch.bool)
    return {"old_logprobs": old, "advantages": old + 6.0, "mask": mask}


@SHAPES
@pytest.mark.parametrize("shift", [1, 4])
def test_it_is_slicing_bit_for_bit(backend, device, leading, shift):
    """Hidden states without their last positions, and labels without their first."""
    inputs = batch(*leading, 60, device=device, bias=True)
    sliced = {
        **inputs,
        "hidden": inputs["hidden"][..., :-shift, :],
        "labels": inputs["labels"][..., shift:],
    }
    logprobs, entropies, by_hidden, *others = run(inputs, shift=shift, backend=backend)
    assert logprobs.shape == (*leading[:-1], leading[-1] - shift)
    assert not by_hidden[..., -shift:, :].any()
    found = [logprobs, entropies, by_hidden[..., :-shift, :], *others]
    assert_same_bits(found, run(sliced, backend=backend))


def test_true_is_one_and_false_is_none(backend, device):
    inputs = batch(2, 5, 60, device=device)
    for flag in (True, False):
        found = run(inputs, shift=flag, backend=backend)
        assert_same_bits(found, run(inputs, shift=int(flag), backend=backend))
    assert_same_bits(found, run(inputs, backend=backend))


def test_the_ppo_loss_of_labels_to_come(backend, device):
    """Whatever is per token stands where the results do."""
    whole = batch(3, 6, 60, device=device, bias=True)
    per_token = test_linear_ppo_loss.batch(3, 4, 60, device=device)
    names = ("old_logprobs", "advantages", "weights", "token_weights", "mask")
    inputs: Inputs = {**whole, **{name: per_token[name] for name in names}}
    ref_logprobs = per_token["ref_logprobs"]

    def op(**given: Any) -> tuple[Tensor, ...]:
        kl = KLTerm(ref_logprobs, 0.15)
        loss, stats = linear_ppo_loss(**given, kl=kl, shift=2, entropy=True, backend=backend)
        return loss, stats.logprobs, stats.entropies

    def formula(**given: Any) -> tuple[Tensor, ...]:
        kl = (ref_logprobs.to(given["old_logprobs"].dtype), 0.15, "k3")
        loss, stats = reference.linear_ppo_loss(**given, kl=kl, shift=2, entropy=True)
        return loss, stats["logprobs"], stats["entropies"]

    judge(op, formula, inputs, wrt=LEAVES)


def test_the_likelihood_of_labels_to_come(backend, device):
    inputs = batch(3, 6, 60, device=device)
    inputs["labels"][0, 3] = -100
    inputs["weights"] = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)).to(device)
    op = functools.partial(losses.LinearNLLLoss(shift=True), backend=backend)
    formula = functools.partial(reference.linear_nll_loss, shift=1)
    judge(op, formula, inputs, wrt=["hidden", "weight"])


@OPS
def test_nothing_is_copied_that_is_not_without(backend, device, op):
    """Rows that do not count are zeroed in a copy, which is read from where the states are."""
    inputs = batch(2, 65, 9, width=64, device=device)
    labels = inputs["labels"][:, 1:].contiguous()
    given = {**inputs, **constants(op, labels, 9)}
    sliced = {**given, "hidden": inputs["hidden"][:, :-1].contiguous(), "labels": labels}
    made = []
    op(**sliced, check_labels=False, backend=backend)  # the first of a process measures
    for options, tensors in (({"shift": 1}, given), ({}, sliced)):
        workspace.clear()
        with torch.no_grad(), allocations(*tensors.values()) as found:
            op(**tensors, **options, check_labels=False, backend=backend)
        made.append([what for size, what in found if size >= labels.numel() * 64])
    assert made[0] == made[1]


def test_the_first_labels_are_not_read(backend, device):
    inputs = batch(2, 6, 60, device=device)
    expected = run(inputs, shift=2, backend=backend)
    inputs["labels"][:, :2] = 10**6
    assert_same_bits(run(inputs, shift=2, check_labels=True, backend=backend), expected)


@OPS
def test_a_label_out_of_range_is_named_by_its_own_position(backend, device, op):
    inputs = batch(2, 6, 60, device=device)
    inputs["labels"][1, 4] = 60
    given = {**inputs, **constants(op, inputs["labels"][..., 2:])}
    with pytest.raises(ValueError, match=r"labels\[1, 4\] is 60, outside \[0, 60\)"):
        op(**given, shift=2, check_labels=True, backend=backend)
    mask = torch.ones(2, 4, dtype=torch.bool, device=device)
    mask[1, 2] = False
    op(**{**given, "mask": mask}, shift=2, check_labels=True, backend=backend)


REFUSED = {
    "T": (6, ValueError, "shift must be at least 0 and less than T, got 6 for labels of shape"),
    "negative": (-1, ValueError, "shift must be at least 0 and less than T, got -1"),
    "a fraction": (1.0, TypeError, "shift must be a bool or an int, got float"),
    "a tensor": (torch.tensor(1), TypeError, "shift must be a bool or an int, got Tensor"),
}


@OPS
@together("why", REFUSED)
def test_what_is_refused_and_why(backend, device, op, why):
    shift, error, message = REFUSED[why]
    inputs = batch(2, 6, 60, device=device)
    with pytest.raises(error, match=message):
        op(**inputs, **constants(op, inputs["labels"]), shift=shift, backend=backend)


def test_what_is_per_token_has_the_results_shape(backend, device):
    inputs = batch(2, 6, 60, device=device)
    whole = inputs["labels"]
    mask = torch.ones_like(whole, dtype=torch.bool)
    message = r"mask has shape \(2, 6\), labels\[..., 1:\] \(2, 5\): they must be equal"
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**inputs, mask=mask, shift=1, backend=backend)
    message = r"temperature has shape \(2, 6\), but hidden\[..., :-1, :\] are \(2, 5, 8\)"
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**inputs, temperature=mask.float(), shift=1, backend=backend)
    given = {**constants(linear_ppo_loss, whole), "mask": mask[:, 1:]}
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(2, 6\), labels\[..., 1:\]"):
        linear_ppo_loss(**inputs, **given, shift=1, backend=backend)
    with pytest.raises(ValueError, match=r"weights has shape \(2, 6\), labels\[..., 1:\]"):
        linear_nll_loss(**inputs, weights=mask.float(), shift=1, backend=backend)
    one = {"hidden": inputs["hidden"][0, 0], "labels": whole[0, 0], "weight": inputs["weight"]}
    with pytest.raises(ValueError, match="labels has no time dimension"):
        linear_logprobs(**one, shift=1, backend=backend)
