"""Attention of packed rows is that of each sequence alone."""

import pytest
import torch
import torch.nn.functional as F
from transformers.masking_utils import sliding_window_causal_mask_function

from fastrl.models import packed_attention
from fastrl.models.attention import Variant
from fastrl.models.packed_attention import FlashKernel, Group, PackedAttention, PackedLayout

LAYOUTS = {
    "one": [Group(7)],
    "of one token": [Group(1), Group(1, (1, 1))],
    "alone": [Group(5), Group(1), Group(9), Group(9)],
    "groups": [Group(6, (3, 3, 3)), Group(2, (4, 1)), Group(6, (5,) * 4)],
    "ragged": [Group(n) for n in (40, 3, 17, 70, 1, 66, 9, 33)],
    "ragged groups": [Group(n, (n + 2, 1, 2 * n)) for n in (2, 7, 30, 4)],
    "mixed": [Group(4), Group(5, (2, 7, 7, 1)), Group(3), Group(1, (6, 6))],
}
SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0, -0.3, 1.0])  # the first ones, for fewer heads
VARIANTS = {
    "plain": Variant(None, None, None), "scaled": Variant(0.3, None, None),
    "wide window": Variant(None, 100, None), "window": Variant(None, 3, None),
    "window of one": Variant(None, 1, None), "chunks": Variant(None, None, None, chunk=4),
    "sinks": Variant(None, None, None, sinks=SINKS),
    "sinks and window": Variant(0.5, 5, None, sinks=SINKS),
    "sinks and chunks": Variant(None, None, None, sinks=SINKS, chunk=3),
    "capped": Variant(0.5, None, 1.5),
    "capped window": Variant(0.5, 4, 1.5),
    "capped, sinks and chunks": Variant(0.5, None, 1.5, sinks=SINKS, chunk=6),
}  # fmt: skip
HEADS = {"equal": (4, 4), "shared": (6, 2)}


def tensors(layout, heads, dtype, width=8, value_width=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads[0], width), (heads[1], width), (heads[1], value_width)]
    made = [torch.randn(1, n, layout.tokens, d, generator=generator) for n, d in shapes]
    return [x.to(dtype).requires_grad_() for x in made]


def sequences(layout):
    """The places of each sequence in the row, prompt and response."""
    found, begin, behind = [], 0, layout.first_response
    for prompt, responses in layout.groups:
        own = torch.arange(begin, begin + prompt)
        begin += prompt
        for n in responses:
            found.append(torch.cat([own, torch.arange(behind, behind + n)]))
            behind += n
        if not responses:
            found.append(own)
    return found


def alone(layout, q, k, v, variant):
    """Each sequence by itself, by the formula."""
    out = torch.zeros(1, layout.tokens, q.shape[1], v.shape[-1], dtype=q.dtype)
    times = q.shape[1] // k.shape[1]
    for places in sequences(layout):
        qs, ks, vs = (x[0][:, places] for x in (q, k, v))
        ks, vs = (x.repeat_interleave(times, 0) for x in (ks, vs))
        scores = qs @ ks.mT * (variant.scale or q.shape[-1] ** -0.5)
        if variant.softcap:
            scores = variant.softcap * torch.tanh(scores / variant.softcap)
        n = len(places)
        mask = torch.ones(n, n).tril().bool()
        if variant.window:
            mask = mask.triu(1 - variant.window)
        if variant.chunk:
            chunk = torch.arange(n) // variant.chunk
            mask = mask & (chunk == chunk[:, None])
        scores = scores.masked_fill(~mask, -torch.inf)
        if variant.sinks is not None:
            scores = torch.cat([scores, variant.sinks.view(-1, 1, 1).expand(-1, n, 1)], -1)
        found = scores.softmax(-1)[..., :n] @ vs
        out[0].index_put_((places,), found.transpose(0, 1))
    return out


def judge(layout, heads, dtype, variant, **widths):
    """Outputs and gradients against float64, as near as torch's own attention of single
    sequences in that dtype."""
    exact = tensors(layout, heads, torch.float64, **widths)
    if variant.sinks is not None:
        exact.append(variant.sinks[: heads[0]].double().requires_grad_())
    for x in exact:
        x.data = x.data.to(dtype).double()
    given = [x.detach().to(dtype).requires_grad_() for x in exact]
    variants = [variant._replace(sinks=(*x[3:], None)[0]) for x in (exact, given)]
    expected = alone(layout, *exact[:3], variants[0])
    found = PackedAttention(layout).attend(*given[:3], variants[1])
    assert found.dtype == dtype
    assert found.shape == expected.shape
    # Of a response alone: the prompt's outputs are there once.
    upstream = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    wanted = torch.autograd.grad((expected * upstream).sum(), exact)
    got = torch.autograd.grad((found.double() * upstream).sum(), given)
    # A few roundings of numbers of that size.
    rounding = 8 * torch.finfo(dtype).eps
    for a, b in zip((found, *got), (expected, *wanted), strict=True):
        assert (a.double() - b).abs().max() <= rounding * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_a_packed_row_attends_as_its_sequences_alone(groups, variant, heads):
    judge(PackedLayout(groups), heads, torch.float32, variant)


@pytest.mark.parametrize("name", ["window", "sinks and window", "sinks and chunks"])
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_windows_in_blocks_of_few_queries(groups, name, monkeypatch):
    monkeypatch.setattr(packed_attention, "_QUERIES", 4)
    judge(PackedLayout(groups), (4, 2), torch.float32, VARIANTS[name])


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["plain", "sinks and window", "sinks and chunks"])
def test_other_precisions(groups, name, dtype):
    judge(PackedLayout(groups), (4, 2), dtype, VARIANTS[name])


@pytest.mark.parametrize("value_width", [6, 10])
@pytest.mark.parametrize("name", ["plain", "window", "capped"])
def test_values_of_another_width(name, value_width):
    layout = PackedLayout(LAYOUTS["mixed"])
    judge(layout, (4, 2), torch.float32, VARIANTS[name], value_width=value_width)


def test_positions_count_from_the_beginning_of_the_prompt():
    layout = PackedLayout([Group(2), Group(3, (2, 1))])
    assert layout.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 3]
    assert (layout.tokens, layout.first_response, layout.longest) == (8, 5, 5)


def test_probabilities_are_dropped_where_the_layer_asks_for_it():
    layout = PackedLayout([Group(4, (3, 3)), Group(6)])
    query, keys, _ = tensors(layout, (4, 4), torch.float32)
    ones = torch.ones(1, 4, layout.tokens, 8)
    torch.manual_seed(0)
    out = PackedAttention(layout).attend(query, keys, ones, Variant(None, None, None, 0.5))
    whole = PackedAttention(layout).attend(query, keys, ones, Variant(None, None, None))
    torch.testing.assert_close(whole, torch.ones_like(whole))  # probabilities add up to 1
    assert out.std() > 0.1


def test_nothing_of_another_sequence_is_read():
    """Not even NaN, whose product with 0 is NaN."""
    layout = PackedLayout(LAYOUTS["mixed"])
    q, k, v = tensors(layout, (4, 2), torch.float32)
    first = sequences(layout)[0]
    others = torch.ones(layout.tokens, dtype=torch.bool)
    others[first] = False
    with torch.no_grad():
        clean = PackedAttention(layout).attend(q, k, v, VARIANTS["plain"])[:, first]
        for x in (q, k, v):
            x[:, :, others] = torch.nan
        for name in ("plain", "window", "chunks", "capped"):
            found = PackedAttention(layout).attend(q, k, v, VARIANTS[name])[:, first]
            assert found.isfinite().all(), name
        found = PackedAttention(layout).attend(q, k, v, VARIANTS["plain"])[:, first]
    assert torch.equal(found, clean)


class VarlenByFormula:
    """torch's flash attention for GPUs, as its schema says, by the formula."""

    def __init__(self):
        self.calls = []

    def _scores(self, q, k, scale, causal, left=None, right=None):
        """The last query stands at the last key."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
        assert right == (None if left is None else 0)
        assert causal or left is None
        ones, ahead = torch.ones(scores.shape[1:]), len(k) - len(q)
        if causal:
            scores = scores.masked_fill(ones.triu(1 + ahead).bool(), -torch.inf)
        if left is not None:
            scores = scores.masked_fill(ones.tril(ahead - left - 1).bool(), -torch.inf)
        return scores

    def forward(
        self, q, k, v, ends_q, ends_k, max_q, max_k, dropout, causal, debug, *, scale,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        window = window_size_left, window_size_right
        self.calls.append((ends_q, ends_k))
        assert (ends_q.dtype, ends_k.dtype) == (torch.int32, torch.int32)
        assert max_q >= ends_q.diff().max()
        assert max_k == ends_k.diff().max()
        if max_q == 1 and q.shape[1] > k.shape[1]:
            q.reshape(len(ends_q) - 1, *q.shape[1:])  # as torch does, to spread heads over threads
        assert not dropout
        assert not debug
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
            scores = self._scores(q[a:b], k[c:d], scale, causal, *window)
            values = v[c:d].repeat_interleave(q.shape[1] // v.shape[1], 1).float()
            out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
            lse[:, a:b] = scores.logsumexp(-1)
        return out, lse, None, None, None

    def backward(
        self, grad, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, dropout, causal, seed, unused,
        *, scale, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        window = window_size_left, window_size_right
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        times = q.shape[1] // k.shape[1]
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
            scores = self._scores(q[a:b], k[c:d], scale, causal, *window)
            probs = (scores - lse[:, a:b, None]).exp()
            keys, values = (x[c:d].repeat_interleave(times, 1).float() for x in (k, v))
            dprobs = torch.einsum("qhd,khd->hqk", grad[a:b].float(), values)
            delta = (grad[a:b].float() * out[a:b].float()).sum(-1).t()[..., None]
            dscores = probs * (dprobs - delta) * scale
            dq[a:b] = torch.einsum("hqk,khd->qhd", dscores, keys)
            of_keys = torch.einsum("hqk,qhd->khd", dscores, q[a:b].float())
            of_values = torch.einsum("hqk,qhd->khd", probs, grad[a:b].float())
            dk[c:d] += of_keys.unflatten(1, (-1, times)).sum(2)
            dv[c:d] += of_values.unflatten(1, (-1, times)).sum(2)
        return tuple(x.to(q.dtype) for x in (dq, dk, dv))


@pytest.fixture
def varlen(monkeypatch):
    """The kernel for GPUs, on CPUs."""
    varlen = VarlenByFormula()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", varlen.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", varlen.backward)
    monkeypatch.setattr(packed_attention, "kernel_for", lambda _device: FlashKernel())
    return varlen


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_runs_are_named_to_the_gpus_kernel_by_their_ends(groups, varlen):
    layout = PackedLayout(groups)
    judge(layout, (4, 2), torch.bfloat16, VARIANTS["plain"])
    assert len(varlen.calls) == 1 + bool(layout.responses), "forward: a call for all runs"


def test_runs_of_one_query_and_of_none_are_named_to_the_gpus_kernel(varlen):
    groups = [Group(3), Group(2, (0, 1))]
    judge(PackedLayout(groups), (4, 2), torch.bfloat16, VARIANTS["plain"])
    assert len(varlen.calls) == 2


@pytest.mark.parametrize(("name", "calls"), [
    ("wide window", 2),  # of prompts and responses, and of responses to prompts
    ("window", 1),  # of responses with what they see of their prompts
    ("chunks", 1),
    ("sinks", 2),
    ("sinks and window", 1),
    ("capped window", 0),
])  # fmt: skip
def test_the_gpus_kernel_is_asked_for_windows_and_chunks(name, calls, varlen):
    for groups in LAYOUTS.values():
        judge(PackedLayout(groups), (4, 2), torch.bfloat16, VARIANTS[name])
    varlen.calls.clear()
    judge(PackedLayout(LAYOUTS["mixed"]), (4, 2), torch.bfloat16, VARIANTS[name])
    assert len(varlen.calls) == calls


def test_latents_of_the_gpus_kernel_have_values_as_wide_as_keys(varlen):
    layout = PackedLayout(LAYOUTS["mixed"])
    judge(layout, (4, 4), torch.bfloat16, VARIANTS["plain"], width=24, value_width=16)
    assert varlen.calls


def test_a_window_is_that_of_transformers():
    """Of so many tokens, the query's own among them."""
    seen = packed_attention._causal(2, 6, 3, torch.device("cpu"))
    for row, at in zip(seen, (4, 5), strict=True):
        inside = sliding_window_causal_mask_function(3)
        assert row.tolist() == [bool(inside(0, 0, torch.tensor(at), k)) for k in range(6)]


def test_the_gpus_kernel_is_asked_only_for_what_it_takes():
    kernel = FlashKernel()
    half = torch.zeros(2, 3, 64, dtype=torch.bfloat16)
    assert kernel.takes(half)
    for other in (half.float(), half[..., :60], F.pad(half, (0, 256))):
        assert not kernel.takes(other)
