"""Attention of sequences packed in one row without padding, in which the responses to one prompt
share its keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastrl.models.attention import Variant
from fastrl.models.host_memory import to_device
from fastrl.models.packed_parts import PackedParts


class Group(NamedTuple):
    """A prompt and the lengths of the responses that begin with it; without any, a sequence."""

    prompt: int  # tokens
    responses: tuple[int, ...] = ()


class Runs(NamedTuple):
    """Runs of queries, one after the other, each of which attends a run of keys: where ``causal``,
    those up to its own place in a run of the same length."""

    queries: Sequence[int]  # tokens
    keys: Sequence[int]
    causal: bool


class PackedLayout:
    """Where the tokens of groups lie in a row [1, T]: first the prompts of all groups, in order,
    then the responses of the first group, of the second, …

    A token attends to those before it of its own prompt or response; a response's also to its whole
    prompt. Positions count from the beginning of the prompt.

    Args:
        groups: each prompt is there once.
        device: of the row.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device | str = "cpu"):
        self.groups, self.device = tuple(groups), torch.device(device)
        self.prompts = [group.prompt for group in groups]
        self.responses = [n for group in groups for n in group.responses]
        self.first_response = sum(self.prompts)
        self.tokens = self.first_response + sum(self.responses)
        self.longest = max(g.prompt + max(g.responses, default=0) for g in groups)

    @cached_property
    def own(self) -> Runs:
        """Prompts and responses, each of which attends to itself."""
        lengths = [*self.prompts, *self.responses]
        return Runs(lengths, lengths, causal=True)

    @cached_property
    def shared(self) -> Runs:
        """The responses of each group, and the prompt that they attend to. A prompt without
        responses has an empty run of queries."""
        return Runs([sum(g.responses) for g in self.groups], self.prompts, causal=False)

    @property
    def shares(self) -> bool:
        """Whether there are responses beside their prompts."""
        return bool(self.responses)

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64."""
        begins = [g.prompt for g in self.groups for _ in g.responses]
        parts = [torch.arange(n) for n in self.prompts]
        parts += [torch.arange(b, b + n) for b, n in zip(begins, self.responses, strict=True)]
        return to_device(torch.cat(parts), self.device)

    @cached_property
    def by_parts(self) -> PackedParts:
        """For layers that go from token to token."""
        responses = [group.responses for group in self.groups]
        return PackedParts(self.prompts, responses, self.device)

    def parts(self) -> Iterator[tuple[slice, list[slice]]]:
        """Places of the queries of each prompt and then of each response, and of the keys that they
        attend; in the order of the row."""
        ends = list(accumulate(self.prompts))
        prompts = [slice(end - n, end) for n, end in zip(self.prompts, ends, strict=True)]
        for own in prompts:
            yield own, [own]
        begin = self.first_response
        for prompt, group in zip(prompts, self.groups, strict=True):
            for n in group.responses:
                own = slice(begin, begin + n)
                begin += n
                yield own, [prompt, own]


class PackedAttention:
    """The attention of a model that runs a packed row.

    By blocks, prompts and responses apart: what responses read of their prompts is computed for all
    responses together, and the two parts are joined by their log Σ exp. Where scores are capped or
    dropped, or where the window is shorter than a sequence, each prompt and response by itself.

    Attributes:
        windows: those that layers have attended with.
    """

    def __init__(self, layout: PackedLayout):
        self.layout = layout
        self.windows: set[int | None] = set()
        self._kernel = kernel_for(layout.device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: Variant) -> Tensor:
        """As Attention's, of rows [1, ...]."""
        scale, window, softcap, dropout = variant
        self.windows.add(window)
        if window is not None and window >= self.layout.longest:
            window = None
        q, k, v = (x[0].transpose(0, 1) for x in (query, keys, values))  # [T, heads, D]
        if q.is_cuda and torch.is_autocast_enabled("cuda"):
            # As torch's own attention does: RoPE makes fp32 of queries and keys.
            dtype = torch.get_autocast_dtype("cuda")
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        plain = window is None and softcap is None and not dropout
        if plain and self._kernel is not None and self._kernel.takes(q, k, v):
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            return _Blocks.apply(q, k, v, scale, self.layout, self._kernel)[None]  # type: ignore[no-any-return]
        return self._by_masks(q, k, v, variant._replace(window=window))[None]

    def _by_masks(self, q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
        times = q.shape[1] // k.shape[1]
        found = []
        for own, of_keys in self.layout.parts():
            # [1, heads, t, D]
            queries = q[own].transpose(0, 1)[None]
            keys, values = (
                torch.cat([x[places] for places in of_keys])
                .repeat_interleave(times, dim=1)
                .transpose(0, 1)[None]
                for x in (k, v)
            )
            mask = _causal(queries.shape[2], keys.shape[2], variant.window, q.device)
            found.append(_masked_attention(queries, keys, values, mask, variant)[0])
        return torch.cat([x.transpose(0, 1) for x in found]).to(q.dtype)


def _causal(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each of the last queries attends, [queries, keys] bool."""
    before = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    return mask if window is None else mask.triu(before + 1 - window)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, variant: Variant) -> Tensor:
    scale, _, softcap, dropout = variant
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    probs = scores.masked_fill(~mask, -torch.inf).float().softmax(-1)
    return F.dropout(probs, dropout).to(v.dtype) @ v


class Operands(NamedTuple):
    """What attends, and what it attends to."""

    q: Tensor  # [Tq, Hq, D]
    k: Tensor  # [Tk, Hkv, D]
    v: Tensor  # [Tk, Hkv, D]
    scale: float  # of the scores q·k

    @property
    def times(self) -> int:
        """Heads of queries that read one of keys."""
        return self.q.shape[1] // self.k.shape[1]

    def single(self) -> Operands:
        """In fp32, where they are in less."""
        return Operands(_single(self.q), _single(self.k), _single(self.v), self.scale)


class Attended(NamedTuple):
    """softmax(S)·v of scores S = scale·q·k, and what its gradient needs of S."""

    out: Tensor  # [Tq, Hq, D]
    lse: Tensor  # [Tq, Hq] fp32, log Σ exp S

    def behind(self, first: int) -> Attended:
        """Of queries from the ``first`` on: views."""
        return Attended(self.out[first:], self.lse[first:])


class Kernel(Protocol):
    """Attention of runs of queries to runs of keys and values."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether it is for such tensors."""

    def forward(self, x: Operands, runs: Runs) -> Attended:
        """By the runs' keys alone."""

    def backward(
        self, grad: Tensor, x: Operands, attended: Attended, runs: Runs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v through these runs.

        ``attended`` is by all keys that a query attends, here and elsewhere: with P = exp(S - lse),
        dS = P·(dP - Σ dO·O) then holds for the keys here.
        """


class _Blocks(torch.autograd.Function):
    """Attention by blocks: [T, Hq, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        layout: PackedLayout,
        kernel: Kernel,
    ) -> Tensor:
        x = Operands(q, k, v, scale)
        attended = kernel.forward(x, layout.own)
        if layout.shares:
            first = layout.first_response
            of_prompts = kernel.forward(_to_prompts(x, first), layout.shared)
            _join(attended.behind(first), of_prompts)
        ctx.save_for_backward(q, k, v, *attended)
        ctx.options = scale, layout, kernel
        return attended.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, *attended = ctx.saved_tensors
        scale, layout, kernel = ctx.options
        x, found = Operands(q, k, v, scale), Attended(*attended)
        dq, dk, dv = kernel.backward(grad, x, found, layout.own)
        if layout.shares:
            first = layout.first_response
            more = kernel.backward(
                grad[first:], _to_prompts(x, first), found.behind(first), layout.shared
            )
            for whole, part in zip((dq[first:], dk[:first], dv[:first]), more, strict=True):
                whole += part
        return dq, dk, dv, None, None, None


def _to_prompts(x: Operands, first_response: int) -> Operands:
    """The responses' queries, and the prompts' keys and values."""
    return Operands(x.q[first_response:], x.k[:first_response], x.v[:first_response], x.scale)


def _join(attended: Attended, other: Attended) -> None:
    """softmax over two sets of keys, from those over each: Σ o·exp(lse) / Σ exp(lse); in place."""
    lse = torch.logaddexp(attended.lse, other.lse)
    # out + (other - out)·w, with w the other's share
    share = (other.lse - lse).exp_().to(attended.out.dtype)
    attended.out.lerp_(other.out, share.unsqueeze(-1))
    attended.lse.copy_(lse)


class CPUKernel:
    """torch's flash attention for CPUs, in fp32 for lower precision. Runs of one length that lie
    together share a call, and so do causal ones of about one length, padded on the right: padding
    is behind real tokens, which do not see it, and its gradient is 0."""

    def __init__(self) -> None:
        # By the runs, that are the same objects for all layers.
        self._calls: dict[int, list[tuple[_Slice | _Ragged, _Slice | _Ragged]]] = {}

    def _calls_for(self, runs: Runs) -> list[Any]:
        """Queries and keys of each call."""
        if id(runs) not in self._calls:
            calls: list[Any] = list(_equal(runs))
            if runs.causal and len(calls) > _FEW:
                calls = [(each, each) for each in _ragged(runs.queries)]
            self._calls[id(runs)] = calls
        return self._calls[id(runs)]

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return q.shape[-1] == v.shape[-1]

    def forward(self, x: Operands, runs: Runs) -> Attended:
        dtype, times = x.q.dtype, x.times
        q, k, v, scale = x.single()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2])
        for queries, keys in self._calls_for(runs):
            found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries.of(q), keys.of(k, times), keys.of(v, times), 0.0, runs.causal, scale=scale
            )
            queries.write(out, found)
            queries.write(lse.unsqueeze(-1), sums.unsqueeze(-1))
        return Attended(out.to(dtype), lse)

    def backward(
        self, grad: Tensor, x: Operands, attended: Attended, runs: Runs
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, times = x.q.dtype, x.times
        q, k, v, scale = x.single()
        grad, out, lse = _single(grad), _single(attended.out), attended.lse.unsqueeze(-1)
        dq, dk, dv = (torch.zeros_like(y, memory_format=torch.contiguous_format) for y in (q, k, v))
        for queries, keys in self._calls_for(runs):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                queries.zeroed(grad), queries.of(q), keys.of(k, times), keys.of(v, times),
                queries.of(out), queries.of(lse).squeeze(-1), 0.0, runs.causal, scale=scale,
            )  # fmt: skip
            queries.write(dq, found[0])
            for whole, part in zip((dk, dv), found[1:], strict=True):
                own = part if times == 1 else part.unflatten(1, (-1, times)).sum(2)
                keys.write(whole, own)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class _Slice(NamedTuple):
    """Some runs of one length, one after the other."""

    start: int
    runs: int
    length: int

    def of(self, x: Tensor, times: int = 1) -> Tensor:
        """[runs, heads·times, length, D] of [T, heads, D]: a view, where heads are not repeated."""
        part = x[self.start : self.start + self.runs * self.length]
        part = part.unflatten(0, (self.runs, self.length)).transpose(1, 2)
        return part if times == 1 else part.repeat_interleave(times, dim=1)

    def zeroed(self, x: Tensor) -> Tensor:
        """The same: there is no padding."""
        return self.of(x)

    def write(self, x: Tensor, found: Tensor) -> None:
        """Writes [runs, heads, length, D] to where they stand in [T, heads, D]."""
        self.of(x).copy_(found)


class _Ragged:
    """Some runs of about one length, padded with the last token of each: never with another run's,
    which might be NaN.

    Args:
        starts, lengths: of the runs.
    """

    def __init__(self, starts: Sequence[int], lengths: Sequence[int]):
        columns, ends = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
        self._index = torch.tensor(starts)[:, None] + torch.minimum(columns, ends - 1)
        self._real = columns < ends
        self._places = self._index[self._real]

    def of(self, x: Tensor, times: int = 1) -> Tensor:
        """[runs, heads·times, length, D] of [T, heads, D]."""
        part = x[self._index].transpose(1, 2)
        return part if times == 1 else part.repeat_interleave(times, dim=1)

    def zeroed(self, x: Tensor) -> Tensor:
        """The same, with zeros for padding."""
        return self.of(x).masked_fill(~self._real[:, None, :, None], 0)

    def write(self, x: Tensor, found: Tensor) -> None:
        """Writes [runs, heads, length, D] to where they stand in [T, heads, D]."""
        x[self._places] = found.transpose(1, 2)[self._real]


# Calls that are not worth gathering for; the shortest run beside the longest in a call, and the
# length up to which all runs go together.
_FEW, _SHORTEST, _ALL = 4, 0.7, 32


def _ragged(lengths: Sequence[int]) -> Iterator[_Ragged]:
    """Runs in calls of about one length."""
    starts = [end - n for n, end in zip(lengths, accumulate(lengths), strict=True)]
    together: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[together[0]] if together else 0
        if together and longest > _ALL and lengths[i] < _SHORTEST * longest:
            yield _Ragged([starts[j] for j in together], [lengths[j] for j in together])
            together = []
        together.append(i)
    yield _Ragged([starts[j] for j in together], [lengths[j] for j in together])


def _equal(runs: Runs) -> Iterator[tuple[_Slice, _Slice]]:
    """Slices of queries and keys; runs without queries have no part in them."""
    q = k = 0
    for (of_queries, of_keys), same in groupby(zip(runs.queries, runs.keys, strict=True)):
        count = len(list(same))
        if of_queries:
            yield _Slice(q, count, of_queries), _Slice(k, count, of_keys)
        q, k = q + count * of_queries, k + count * of_keys


def _single(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class FlashKernel:
    """The flash attention in torch for NVIDIA GPUs, on runs of any lengths, in fp16 and bf16."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], Tensor] = {}

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        width = q.shape[-1]
        return (
            q.dtype in (torch.float16, torch.bfloat16)
            and width == v.shape[-1]
            and width % 8 == 0
            and width <= _WIDEST
        )

    def forward(self, x: Operands, runs: Runs) -> Attended:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            x.q, x.k, x.v, *self._lengths(runs, x.q.device), 0.0, runs.causal, False, scale=x.scale
        )
        return Attended(out, lse.transpose(0, 1).contiguous())  # [Hq, Tq]

    def backward(
        self, grad: Tensor, x: Operands, attended: Attended, runs: Runs
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty((), dtype=torch.long, device=grad.device)  # there is no dropout
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), x.q, x.k, x.v, attended.out,
            attended.lse.transpose(0, 1).contiguous(), *self._lengths(runs, grad.device),
            0.0, runs.causal, unused, unused, scale=x.scale,
        )  # fmt: skip

    def _lengths(self, runs: Runs, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Cumulative lengths, int32, and the longest, of queries and of keys."""
        of_queries, of_keys = (
            self._cumulative(tuple(lengths), device) for lengths in (runs.queries, runs.keys)
        )
        # With one query to a run, where heads share keys, torch takes each run to have one.
        return of_queries, of_keys, max(2, *runs.queries), max(runs.keys)

    def _cumulative(self, lengths: tuple[int, ...], device: torch.device) -> Tensor:
        if lengths not in self._ends:
            ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            self._ends[lengths] = to_device(ends, device)
        return self._ends[lengths]


_WIDEST = 256  # of a head, in flash attention


def kernel_for(device: torch.device) -> Kernel | None:
    """The kernel for blocks on a device; None where there is none."""
    if device.type == "cpu":
        return CPUKernel()
    if device.type == "cuda" and torch.version.hip is None:
        return FlashKernel() if torch.cuda.get_device_capability(device) >= (8, 0) else None
    return None
