"""Recurrences of packed rows are those of each text alone; kernels for them get their lengths."""

import pytest
import torch
import torch.nn.functional as F

from fastrl.models.delta_rule import chunked_delta_rule
from fastrl.models.packed_parts import PackedParts, Parts
from fastrl.models.recurrence import gated_delta_rule

CPU = torch.device("cpu")
LENGTHS = (5, 1, 70, 33, 32, 64)


def operands(tokens, heads=2, width=4, value_width=3, dtype=torch.float64, seed=0):
    """q, k, v, g and β [T, heads, ...], keys of which some are nearly the same."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(tokens, heads, *shape, generator=generator, dtype=dtype)

    key = F.normalize(random(width) + 2.0, dim=-1)
    made = random(width), key, random(value_width), -random().abs(), random().sigmoid()
    return [x.requires_grad_() for x in made]


def recurrence(q, k, v, g, beta, state):
    """Token after token, by the formula."""
    outs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        missing = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + torch.einsum("hk,hv->hkv", k[t], missing)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outs), state


@pytest.mark.parametrize("begins", [False, True], ids=["from 0", "from states"])
@pytest.mark.parametrize("size", [1, 16, 32])
def test_chunks_of_texts_are_the_recurrence_of_each(size, begins):
    """Outputs, last states, and gradients of all operands and of the first states."""
    tensors = operands(sum(LENGTHS))
    initial = torch.randn(len(LENGTHS), 2, 4, 3, dtype=torch.float64).requires_grad_()
    inputs = [*tensors, initial] if begins else tensors
    out, last = chunked_delta_rule(
        *tensors, Parts(LENGTHS, CPU).chunks(size), initial if begins else None
    )
    zeros = torch.zeros_like(initial)
    of_texts = zip(*(x.split(LENGTHS) for x in tensors), initial if begins else zeros, strict=True)
    wanted = [recurrence(*each) for each in of_texts]
    expected = torch.cat([x for x, _ in wanted]), torch.stack([x for _, x in wanted])
    weights = [torch.randn(x.shape, dtype=torch.float64) for x in expected]

    def gradients(found):
        total = sum((x * w).sum() for x, w in zip(found, weights, strict=True))
        return torch.autograd.grad(total, inputs)

    for x, right in zip(
        (out, last, *gradients((out, last))), (*expected, *gradients(expected)), strict=True
    ):
        assert (x - right).abs().max() <= 1e-12 * right.abs().max().clamp(min=1)


def kernel_stub(calls):
    """In the place of flash-linear-attention's kernel, which transformers would have loaded: it
    takes texts by their ends in one row, and keeps what it was called with. It runs none of it."""
    is_new_implementation = True

    def rule(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, **others):
        assert is_new_implementation
        assert q.shape[0] == 1
        calls.append((cu_seqlens.tolist(), initial_state, output_final_state, others))
        lengths = cu_seqlens.diff().tolist()
        heads = q * q.shape[-1] ** -0.5, k, v, g, beta
        out, states = chunked_delta_rule(
            *(x[0] for x in heads), Parts(lengths, CPU).chunks(16), initial_state
        )
        return out[None], states if output_final_state else None

    return rule


def test_a_kernel_gets_prompts_and_then_responses_with_their_prompts_states():
    parts = PackedParts([6, 3], [(2, 5), (4,)], CPU)
    row = [x.detach()[None] for x in operands(parts.tokens)]
    calls: list = []
    found, states = gated_delta_rule(
        parts, kernel_stub(calls), *row[:3], g=row[3], beta=row[4], output_final_state=True
    )
    (ends, first, kept, _), (ends_of_responses, initial, kept_again, others) = calls
    assert (ends, first, kept) == ([0, 6, 9], None, True)
    assert (ends_of_responses, kept_again) == ([0, 2, 7, 11], False)
    assert torch.equal(initial, states[[0, 0, 1]])
    assert others == {"use_qk_l2norm_in_kernel": False}
    own, own_states = gated_delta_rule(
        parts, recurrence, *row[:3], g=row[3], beta=row[4], output_final_state=True
    )
    assert (found - own).abs().max() <= 1e-12
    assert (states - own_states).abs().max() <= 1e-12


def test_batches_of_about_one_length_pad_little_and_are_few():
    parts = Parts([100, 3, 98, 5, 101, 2, 600], CPU)
    row, shapes, order, place = parts.batches
    assert shapes == [(1, 600), (6, 101)]
    assert order[place].tolist() == list(range(7))
    x = torch.arange(parts.tokens, dtype=torch.float32)[:, None]
    assert torch.equal(row.gathered(row.spread(x)), x)
    assert row.spread(x).count_nonzero() == parts.tokens - 1  # the first token's number is 0
