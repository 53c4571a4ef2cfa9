"""Rows whose logits all lie far below zero, as masks of finite numbers leave them: distributions
like others, down to the lowest number that fp32 has."""

import pytest
import torch

from fastrl_kernels import (
    TeacherHead,
    full_kl,
    linear_kl,
    linear_logprobs,
    linear_nll_loss,
    linear_sample,
    reference,
    sample_tokens,
    token_logprobs,
)
from tests.kernels.draws import keys_for

LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16)}
KEPT = 3  # of each row; columns from there on lie lower


def rows_of(vocabulary, device, dtype=torch.float32):
    """Whose first three logits are equal; of the last row all are."""
    logits = torch.full((4, vocabulary), LOWEST[dtype])
    for row, highest in enumerate((-2e30, -1e31, -1e38)):
        logits[row, :KEPT] = highest
    return logits.to(device, dtype)


@pytest.mark.parametrize("vocabulary", [37, 700])
def test_log_probs_entropies_and_gradients(backend, device, vocabulary):
    logits = rows_of(vocabulary, device)
    logits[1, KEPT:] = -torch.inf
    labels = torch.tensor([0, 1, 2, vocabulary - 1], device=device)
    found = []
    for x in (logits.clone(), logits.double()):
        x.requires_grad_()
        op = reference.token_logprobs if x.dtype == torch.float64 else token_logprobs
        options = {} if x.dtype == torch.float64 else {"backend": backend}
        results = op(x, labels, entropy=True, **options)
        (grad,) = torch.autograd.grad(results[0].sum() + results[1].sum(), x)
        found.append((*(y.detach().double() for y in results), grad.double()))
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-7)


def test_divergences(backend, device):
    logits, ref = rows_of(37, device), rows_of(37, device)
    ref[:, :KEPT] -= ref[:, :KEPT] / 2  # where more lies below the highest ones
    ref[-1] = LOWEST[torch.float32]
    exact = reference.full_kl(logits.double(), ref.double())
    found = full_kl(logits, ref, backend=backend).double()
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)
    hidden, labels = torch.eye(4, device=device), torch.zeros(4, dtype=torch.long, device=device)
    teacher = TeacherHead(hidden, ref.T.contiguous())
    for beta in (0.0, 0.5, 1.0):
        found = linear_kl(
            hidden, logits.T.contiguous(), labels, teacher, beta=beta, backend=backend
        ).divergences.double()
        wanted = reference.divergence(
            logits.double().log_softmax(-1), ref.double().log_softmax(-1), beta
        )
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workspace", [None, 4096])
def test_from_hidden_states(backend, device, workspace):
    logits = rows_of(700, device)
    hidden, weight = torch.eye(4, device=device), logits.T.contiguous()
    labels = torch.tensor([0, 1, 2, 699], device=device)
    options = {"backend": backend, "workspace_bytes": workspace}
    exact, entropies = reference.token_logprobs(logits.double(), labels, entropy=True)
    found = linear_logprobs(hidden, weight, labels, entropy=True, **options)
    for mine, expected in zip(found, (exact, entropies), strict=True):
        torch.testing.assert_close(mine.double(), expected, rtol=1e-6, atol=1e-6)
    loss, _ = linear_nll_loss(hidden, weight, labels, **options)
    torch.testing.assert_close(loss.double(), -exact.mean(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", LOWEST)
@pytest.mark.parametrize("vocabulary", [37, 700])
@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.7},
], ids=str)  # fmt: skip
def test_draws(backend, device, vocabulary, dtype, options):
    logits = rows_of(vocabulary, device, dtype)
    found = sample_tokens(logits, keys_for(4, device), backend=backend, **options)
    tokens = found.tokens.tolist()
    assert all(0 <= token < KEPT for token in tokens[:3])
    assert 0 <= tokens[3] < vocabulary
    count = torch.tensor([KEPT] * 3 + [vocabulary], device=device)
    torch.testing.assert_close(found.logprobs, -count.log(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.entropies, count.log(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.truncated_logprobs, -count.log(), rtol=1e-6, atol=0)
    cuts = options.keys() - {"temperature"}
    lowest = torch.where(torch.arange(4, device=device) < 3, logits[:, 0].float(), -torch.inf)
    assert torch.equal(found.cutoffs, lowest if cuts else torch.full_like(lowest, -torch.inf))


def test_draws_from_hidden_states(backend, device):
    logits = rows_of(300, device, torch.bfloat16)
    hidden = torch.eye(4, device=device, dtype=torch.bfloat16)
    for temperature in (1.0, 0.0):
        options = {"temperature": temperature, "backend": backend}
        found = linear_sample(hidden, logits.T.contiguous(), keys_for(4, device), **options)
        expected = sample_tokens(logits, keys_for(4, device), temperature=temperature)
        assert torch.equal(found.tokens, expected.tokens)
        count = torch.tensor([KEPT] * 3 + [300], device=device)
        torch.testing.assert_close(found.logprobs, -count.log(), rtol=1e-6, atol=0)


def test_a_row_without_any_finite_logit_is_no_distribution(backend, device):
    logits = torch.full((1, 37), -torch.inf, device=device)
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}):
        found = sample_tokens(logits, keys_for(1, device), backend=backend, **options)
        assert found.tokens.tolist() == [-1]
        assert all(x.isnan().all() for x in found[1:])
