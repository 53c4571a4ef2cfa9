"""Batches of more than 2³¹ logits: the last rows give the bits that they give alone."""

import pytest
import torch

from fastrl_kernels import full_kl, sample_keys, sample_tokens, token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

VOCABULARY = 50257
ROWS = 2**31 // VOCABULARY + 5
LAST = slice(ROWS - 4, None)


def logits(seed: int) -> torch.Tensor:
    """4 GiB of them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.empty(ROWS, VOCABULARY, dtype=torch.bfloat16, device="cuda")
    return x.normal_(generator=generator)


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.arange(ROWS, device="cuda") % VOCABULARY


def test_token_logprobs(labels: torch.Tensor) -> None:
    x = logits(0).requires_grad_()
    upstream = torch.linspace(-1, 1, ROWS, device="cuda")
    found, entropies = token_logprobs(x, labels, entropy=True)
    (gradient,) = torch.autograd.grad((found, entropies), x, (upstream, upstream))
    few = x.detach()[LAST].clone().requires_grad_()
    alone, alone_entropies = token_logprobs(few, labels[LAST], entropy=True)
    (expected,) = torch.autograd.grad((alone, alone_entropies), few, (upstream[LAST],) * 2)
    assert torch.equal(found[LAST], alone)
    assert torch.equal(entropies[LAST], alone_entropies)
    assert torch.equal(gradient[LAST], expected)
    assert gradient[LAST].abs().sum() > 0


def test_full_kl() -> None:
    x, reference = logits(0).requires_grad_(), logits(1)
    found = full_kl(x, reference)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    few = x.detach()[LAST].clone().requires_grad_()
    alone = full_kl(few, reference[LAST].clone())
    (expected,) = torch.autograd.grad(alone.sum(), few)
    assert torch.equal(found[LAST], alone)
    assert torch.equal(gradient[LAST], expected)
    assert gradient[LAST].abs().sum() > 0


@pytest.mark.parametrize("cut", [{}, {"top_k": 40, "top_p": 0.9}], ids=["whole", "cut"])
def test_sample_tokens(cut: dict[str, float]) -> None:
    x = logits(0)
    keys = sample_keys(0, torch.arange(ROWS, device="cuda"), 0)
    found = sample_tokens(x, keys, **cut)
    alone = sample_tokens(x[LAST].clone(), keys[LAST], **cut)
    for name, one in alone._asdict().items():
        if one is not None:
            assert torch.equal(found._asdict()[name][LAST], one), name
