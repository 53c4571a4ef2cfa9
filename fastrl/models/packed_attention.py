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
from fastrl_kernels.gemm import without_gaps


class Group(NamedTuple):
    """The lengths of a prompt and of its responses; without responses, of a whole sequence."""

    prompt: int  # tokens
    responses: tuple[int, ...] = ()


class Runs(NamedTuple):
    """Runs of queries, one after the other; each run attends to a run of keys. Where ``causal``,
    a run's last query stands at its last key, and a query attends to the keys up to its own, or to
    the last ``window`` of these."""

    queries: Sequence[int]  # tokens of each run
    keys: Sequence[int]  # tokens of each run's keys
    causal: bool
    window: int | None = None


class Blocks(NamedTuple):
    """The runs by which the tokens of a packed row attend."""

    own: Runs  # each token's attention to its own prompt or response, or to all of its keys
    # The responses' attention to their whole prompts; None where ``own`` has all keys.
    shared: Runs | None = None
    # [Tk] int64, the places of the keys of ``own``; None: the places of the queries.
    keys: Tensor | None = None


class PackedLayout:
    """The places of groups' tokens in a row [1, T]: first the prompts of all groups, in order,
    then the responses of the first group, of the second, …

    A token attends to itself and the tokens before it in its prompt or response; a response's token
    also to the whole prompt. Positions count from the beginning of the prompt.

    Args:
        groups: the prompts with their responses, each prompt once.
        device: the row's device.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device | str = "cpu"):
        self.groups, self.device = tuple(groups), torch.device(device)
        self.prompts = [group.prompt for group in groups]
        self.responses = [n for group in groups for n in group.responses]
        self.first_response = sum(self.prompts)
        self.tokens = self.first_response + sum(self.responses)
        self.longest = max(g.prompt + max(g.responses, default=0) for g in groups)
        self._near: dict[tuple[int | None, int | None], Blocks] = {}

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

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of layers in which a token attends to all before it."""
        return Blocks(self.own, self.shared if self.responses else None)

    def near(self, window: int | None, chunk: int | None) -> Blocks:
        """The blocks of layers in which a token attends to the last ``window`` tokens, itself
        included, or to the tokens of its chunk: a response's run of keys is the end of its prompt
        that the response sees, and then the response."""
        if (window, chunk) not in self._near:
            parts = [x for x in self.parts(window, chunk) if x[0].start < x[0].stop]
            queries = [tokens.stop - tokens.start for tokens, _ in parts]
            keys = [n + seen.stop - seen.start for n, (_, seen) in zip(queries, parts, strict=True)]
            places = None
            if keys != queries:
                ranges = [torch.arange(x.start, x.stop) for q, seen in parts for x in (seen, q)]
                places = to_device(torch.cat(ranges), self.device)
            self._near[window, chunk] = Blocks(Runs(queries, keys, True, window), keys=places)
        return self._near[window, chunk]

    @cached_property
    def positions(self) -> Tensor:
        """The tokens' positions, [T] int64."""
        begins = [g.prompt for g in self.groups for _ in g.responses]
        parts = [torch.arange(n) for n in self.prompts]
        parts += [torch.arange(b, b + n) for b, n in zip(begins, self.responses, strict=True)]
        return to_device(torch.cat(parts), self.device)

    @cached_property
    def by_parts(self) -> PackedParts:
        """The row's parts, for layers that go from token to token."""
        responses = [group.responses for group in self.groups]
        return PackedParts(self.prompts, responses, self.device)

    def parts(
        self, window: int | None = None, chunk: int | None = None
    ) -> Iterator[tuple[slice, slice]]:
        """Yields the places of each prompt's, then of each response's tokens, chunk by chunk, and
        the places of the tokens of its prompt that they attend to, none for a prompt."""
        ends = list(accumulate(self.prompts))
        prompts = [slice(end - n, end) for n, end in zip(self.prompts, ends, strict=True)]
        for of_prompt in prompts:
            yield from _parts(of_prompt, slice(of_prompt.start, of_prompt.start), window, chunk)
        begin = self.first_response
        for prompt, group in zip(prompts, self.groups, strict=True):
            for n in group.responses:
                yield from _parts(slice(begin, begin + n), prompt, window, chunk)
                begin += n


def _parts(
    response: slice, prompt: slice, window: int | None, chunk: int | None
) -> Iterator[tuple[slice, slice]]:
    """The parts of one response, or of a prompt behind an empty ``prompt``, see ``parts``."""
    position = prompt.stop - prompt.start
    seen = position if window is None else min(position, window - 1)
    begin, end = response.start, response.stop
    if chunk is not None:
        seen = min(seen, position % chunk)
        end = min(end, begin + chunk - position % chunk)
    yield slice(begin, end), slice(prompt.stop - seen, prompt.stop)
    while chunk is not None and end < response.stop:
        begin, end = end, min(response.stop, end + chunk)
        yield slice(begin, end), slice(begin, begin)


class PackedAttention:
    """The attention of a model that runs a packed row.

    A response's attention to its prompt is computed for all responses to the prompt together, and
    joined with its attention to itself by their log Σ exp. Where a window or a chunk is shorter
    than a sequence, each response has a copy of the keys that it sees of its prompt. With a
    softcap, dropout or no kernel, each prompt and response runs by itself.

    Attributes:
        windows: the windows that layers have attended with.
    """

    def __init__(self, layout: PackedLayout):
        self.layout = layout
        self.windows: set[int | None] = set()
        self._kernel = kernel_for(layout.device)

    @property
    def positions(self) -> Tensor:
        """The tokens' positions, [1, T]."""
        return self.layout.positions.unsqueeze(0)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: Variant) -> Tensor:
        """The result [1, T, Hq, D] of a row, see :class:`fastrl.models.attention.Attention`."""
        self.windows.add(variant.window)
        longest = self.layout.longest
        window, chunk = (
            None if x is None or x >= longest else x for x in (variant.window, variant.chunk)
        )
        q, k, v = (x[0].transpose(0, 1) for x in (query, keys, values))  # [T, heads, D]
        if q.is_cuda and torch.is_autocast_enabled("cuda"):
            # RoPE makes fp32 of queries and keys, and torch's own attention casts them back, too.
            dtype = torch.get_autocast_dtype("cuda")
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        scale = q.shape[-1] ** -0.5 if variant.scale is None else variant.scale
        plain = variant.softcap is None and not variant.dropout
        if plain and self._kernel is not None:
            width = v.shape[-1]
            q, k, v = _of_one_width(q, k, v)
            if self._kernel.takes(q):
                layout = self.layout
                near = window is not None or chunk is not None
                blocks = layout.near(window, chunk) if near else layout.blocks
                out = _Blocks.apply(q, k, v, variant.sinks, scale, blocks, self._kernel)
                return out[None, ..., :width]  # type: ignore[no-any-return]
            v = v[..., :width]
        variant = variant._replace(scale=scale, window=window, chunk=chunk)
        return self._by_masks(q, k, v, variant)[None]

    def _by_masks(self, q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
        times = q.shape[1] // k.shape[1]
        results = []
        for at, before in self.layout.parts(variant.window, variant.chunk):
            # [1, heads, t, D]
            queries = q[at].transpose(0, 1)[None]
            keys, values = (
                torch.cat([x[before], x[at]]).repeat_interleave(times, dim=1).transpose(0, 1)[None]
                for x in (k, v)
            )
            mask = _causal(queries.shape[2], keys.shape[2], variant.window, q.device)
            results.append(_masked_attention(queries, keys, values, mask, variant)[0])
        return torch.cat([x.transpose(0, 1) for x in results]).to(q.dtype)


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """Pads the last dimension with zeros: kernels have one width for keys and values."""
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _causal(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query attends to, [queries, keys] bool; the last query is at the last key."""
    before = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    return mask if window is None else mask.triu(before + 1 - window)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, variant: Variant) -> Tensor:
    softcap, dropout, sinks = variant.softcap, variant.dropout, variant.sinks
    q, k, v = map(without_gaps, (q, k, v))  # other heads lie between the rows of one in memory
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=variant.scale)
    scores = q @ k.transpose(-1, -2) * (variant.scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = _single(scores.masked_fill(~mask, -torch.inf))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probs = scores.softmax(-1)[..., : k.shape[2]]
    return F.dropout(probs, dropout).to(v.dtype) @ v


class Operands(NamedTuple):
    """Queries, keys and values, and the scale of their scores."""

    q: Tensor  # [Tq, Hq, D]
    k: Tensor  # [Tk, Hkv, D]
    v: Tensor  # [Tk, Hkv, D]
    scale: float  # factor of the scores q·k

    @property
    def times(self) -> int:
        """The number of heads of queries that read one head of keys."""
        return self.q.shape[1] // self.k.shape[1]

    def single(self) -> Operands:
        """The operands in fp32, where they have less precision."""
        return Operands(_single(self.q), _single(self.k), _single(self.v), self.scale)


class Attended(NamedTuple):
    """softmax(S)·v of scores S = scale·q·k, and what its gradient needs of S."""

    out: Tensor  # [Tq, Hq, D]
    lse: Tensor  # [Tq, Hq] fp32, log Σ exp S

    def behind(self, first: int) -> Attended:
        """The results of queries from the ``first`` on, as views."""
        return Attended(self.out[first:], self.lse[first:])


class Kernel(Protocol):
    """Attention of runs of queries to runs of keys and values."""

    def takes(self, q: Tensor) -> bool:
        """Whether the kernel runs queries like ``q``, with keys and values of the same width."""

    def forward(self, x: Operands, runs: Runs) -> Attended:
        """Attends to the keys of each run alone."""

    def backward(
        self, grad: Tensor, x: Operands, attended: Attended, runs: Runs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v through these runs.

        ``attended`` is over all keys that a query attends to, those of other runs included: with
        P = exp(S - lse), dS = P·(dP - Σ dO·O) holds for the keys of these runs.
        """


class _Blocks(torch.autograd.Function):
    """Attention by blocks: [T, Hq, D]. A head's sink, of ``sinks`` [Hq], is a logit without a value
    beside the scores: with s = Σ exp of the scores, the result is out·s/(s + exp(sink))."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scale: float,
        blocks: Blocks,
        kernel: Kernel,
    ) -> Tensor:
        attended = kernel.forward(_gathered(q, k, v, scale, blocks), blocks.own)
        if blocks.shared is not None:
            x, first = _to_prompts(q, k, v, scale, blocks.shared)
            _join(attended.behind(first), kernel.forward(x, blocks.shared))
        if sinks is not None:
            _add_sinks(attended, sinks)
        ctx.save_for_backward(q, k, v, sinks, *attended)
        ctx.options = scale, blocks, kernel
        return attended.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, sinks, *attended = ctx.saved_tensors
        scale, blocks, kernel = ctx.options
        attention = Attended(*attended)
        dq, dk, dv = kernel.backward(grad, _gathered(q, k, v, scale, blocks), attention, blocks.own)
        if blocks.keys is not None:
            dk, dv = (_scattered(x, blocks.keys, len(q)) for x in (dk, dv))
        if blocks.shared is not None:
            x, first = _to_prompts(q, k, v, scale, blocks.shared)
            grads = kernel.backward(grad[first:], x, attention.behind(first), blocks.shared)
            for whole, part in zip((dq[first:], dk[:first], dv[:first]), grads, strict=True):
                whole += part
        dsinks = None
        if sinks is not None:
            # The gradient by log f, f a factor of out: log f has the slope -P(sink) by a sink.
            by_factor = (_single(grad) * _single(attention.out)).sum(-1)
            dsinks = -((sinks - attention.lse).exp() * by_factor).sum(0).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None


def _gathered(q: Tensor, k: Tensor, v: Tensor, scale: float, blocks: Blocks) -> Operands:
    """The operands of ``blocks.own``."""
    if blocks.keys is not None:
        k, v = k[blocks.keys], v[blocks.keys]
    return Operands(q, k, v, scale)


def _scattered(grad: Tensor, places: Tensor, tokens: int) -> Tensor:
    """The sums [T, heads, D] of the gradients ``grad`` for each of the row's places."""
    # An embedding's gradient has the same bits each time, unlike index_add_ on GPUs.
    whole = torch.ops.aten.embedding_dense_backward(
        _single(grad).flatten(1), places, tokens, -1, False
    )
    return whole.view(tokens, *grad.shape[1:]).to(grad.dtype)


def _to_prompts(
    q: Tensor, k: Tensor, v: Tensor, scale: float, shared: Runs
) -> tuple[Operands, int]:
    """The responses' queries, and the prompts' keys and values; the place of the first response."""
    first = sum(shared.keys)
    return Operands(q[first:], k[:first], v[:first], scale), first


def _join(attended: Attended, other: Attended) -> None:
    """Makes ``attended`` the softmax over the keys of both: Σ o·exp(lse) / Σ exp(lse)."""
    lse = torch.logaddexp(attended.lse, other.lse)
    # out + (other - out)·w, with w the other's share
    share = (other.lse - lse).exp_().to(attended.out.dtype)
    attended.out.lerp_(other.out, share.unsqueeze(-1))
    attended.lse.copy_(lse)


def _add_sinks(attended: Attended, sinks: Tensor) -> None:
    """Adds the sinks' logits to the scores of ``attended``, in place."""
    sinks = sinks.to(attended.lse.dtype)
    share = (attended.lse - sinks).sigmoid_().to(attended.out.dtype)
    attended.out.mul_(share.unsqueeze(-1))
    attended.lse.copy_(torch.logaddexp(attended.lse, sinks))


class CPUKernel:
    """torch's flash attention for CPUs, in fp32 for lower precision. Runs of one length that lie
    together share a call, and so do causal ones of about one length, padded on the right: padding
    is behind real tokens, which do not see it, and its gradient is 0."""

    def __init__(self) -> None:
        # Calls by the id of their runs, which are the same objects for all layers.
        self._calls: dict[int, list[_KernelCall]] = {}

    def _calls_for(self, runs: Runs) -> list[_KernelCall]:
        if id(runs) not in self._calls:
            near = runs.causal and (runs.window is not None or runs.queries != runs.keys)
            calls = list(_near(runs) if near else _equal(runs))
            if runs.causal and not near and len(calls) > _FEW:
                calls = list(_ragged(_starts(runs.queries), runs.queries))
            self._calls[id(runs)] = calls
        return self._calls[id(runs)]

    def takes(self, q: Tensor) -> bool:
        return True

    def forward(self, x: Operands, runs: Runs) -> Attended:
        dtype, times = x.q.dtype, x.times
        q, k, v, scale = x.single()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2])
        for queries, keys, masked in self._calls_for(runs):
            mask = _bias(masked, runs.window, q) if masked else None
            attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries.of(q), keys.of(k, times), keys.of(v, times), 0.0,
                runs.causal and mask is None, attn_mask=mask, scale=scale,
            )  # fmt: skip
            queries.write(out, attended)
            queries.write(lse.unsqueeze(-1), sums.unsqueeze(-1))
        return Attended(out.to(dtype), lse)

    def backward(
        self, grad: Tensor, x: Operands, attended: Attended, runs: Runs
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, times = x.q.dtype, x.times
        q, k, v, scale = x.single()
        grad, out, lse = _single(grad), _single(attended.out), attended.lse.unsqueeze(-1)
        dq, dk, dv = (torch.zeros_like(y, memory_format=torch.contiguous_format) for y in (q, k, v))
        for queries, keys, masked in self._calls_for(runs):
            mask = _bias(masked, runs.window, q) if masked else None
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                queries.zeroed(grad), queries.of(q), keys.of(k, times), keys.of(v, times),
                queries.of(out), queries.of(lse).squeeze(-1), 0.0,
                runs.causal and mask is None, attn_mask=mask, scale=scale,
            )  # fmt: skip
            queries.write(dq, grads[0])
            for whole, part in zip((dk, dv), grads[1:], strict=True):
                summed = part if times == 1 else part.unflatten(1, (-1, times)).sum(2)
                keys.add(whole, summed)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class _KernelCall(NamedTuple):
    """Runs that share a call."""

    queries: _Slice | _Ragged
    keys: _Slice | _Ragged
    masked: tuple[int, int] | None = None  # the numbers of queries and keys, for a mask


def _bias(masked: tuple[int, int], window: int | None, like: Tensor) -> Tensor:
    """A bias of scores, [queries, keys]: -inf where a query does not attend to a key, else 0."""
    mask = _causal(*masked, window, like.device)
    return like.new_zeros(masked).masked_fill_(~mask, -torch.inf)


class _Slice(NamedTuple):
    """Runs of one length, one after the other."""

    start: int
    runs: int
    length: int

    def of(self, x: Tensor, times: int = 1) -> Tensor:
        """The runs [runs, heads·times, length, D] of x [T, heads, D], a view for ``times`` of 1."""
        part = x[self.start : self.start + self.runs * self.length]
        part = part.unflatten(0, (self.runs, self.length)).transpose(1, 2)
        return part if times == 1 else part.repeat_interleave(times, dim=1)

    def zeroed(self, x: Tensor) -> Tensor:
        """The runs of x, see :meth:`of`; there is no padding to set to zero."""
        return self.of(x)

    def write(self, x: Tensor, values: Tensor) -> None:
        """Writes values [runs, heads, length, D] to the runs' places in x [T, heads, D]."""
        self.of(x).copy_(values)

    def add(self, x: Tensor, values: Tensor) -> None:
        """Adds values [runs, heads, length, D] at the runs' places in x; :meth:`of` is a view."""
        self.of(x).add_(values)


class _Ragged:
    """Runs of about one length, each padded with its own last token: other runs may hold NaN."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[int]):
        self._slices = [slice(a, a + n) for a, n in zip(starts, lengths, strict=True)]
        columns, ends = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
        self._index = torch.tensor(starts)[:, None] + torch.minimum(columns, ends - 1)
        self._real = columns < ends
        self._places = self._index[self._real]

    def of(self, x: Tensor, times: int = 1) -> Tensor:
        """The runs [runs, heads·times, length, D] of x [T, heads, D]."""
        part = x[self._index].transpose(1, 2)
        return part if times == 1 else part.repeat_interleave(times, dim=1)

    def zeroed(self, x: Tensor) -> Tensor:
        """The runs of x, see :meth:`of`, with zeros for padding."""
        return self.of(x).masked_fill(~self._real[:, None, :, None], 0)

    def write(self, x: Tensor, values: Tensor) -> None:
        """Writes values [runs, heads, length, D] to the runs' places in x [T, heads, D]."""
        x[self._places] = values.transpose(1, 2)[self._real]

    def add(self, x: Tensor, values: Tensor) -> None:
        """Adds values [runs, heads, length, D] at the runs' places in x, which runs may share."""
        for places, part in zip(self._slices, values, strict=True):
            row = x[places]
            row += part.transpose(0, 1)[: len(row)]


# Up to _FEW calls are not worth gathering for; a call's shortest run has at least the share
# _SHORTEST of the longest one's tokens; runs of up to _ALL tokens share a call.
_FEW, _SHORTEST, _ALL = 4, 0.7, 32


def _starts(lengths: Sequence[int]) -> list[int]:
    return [end - n for n, end in zip(lengths, accumulate(lengths), strict=True)]


def _ragged(
    starts: Sequence[int], lengths: Sequence[int], keys: Sequence[int] | None = None
) -> Iterator[_KernelCall]:
    """Calls of runs of about one length; ``keys`` are their keys' starts, if not ``starts``."""
    together: list[int] = []

    def call() -> _KernelCall:
        sizes = [lengths[j] for j in together]
        queries, key_runs = (
            None if x is None else _Ragged([x[j] for j in together], sizes) for x in (starts, keys)
        )
        assert queries is not None
        return _KernelCall(queries, key_runs or queries)

    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[together[0]] if together else 0
        if together and longest > _ALL and lengths[i] < _SHORTEST * longest:
            yield call()
            together = []
        together.append(i)
    if together:
        yield call()


def _equal(runs: Runs) -> Iterator[_KernelCall]:
    """Calls of neighbouring runs of equal lengths; runs without queries are left out."""
    q = k = 0
    for (of_queries, of_keys), same in groupby(zip(runs.queries, runs.keys, strict=True)):
        count = len(list(same))
        if of_queries:
            yield _KernelCall(_Slice(q, count, of_queries), _Slice(k, count, of_keys))
        q, k = q + count * of_queries, k + count * of_keys


_QUERIES = 128  # the most queries of a block, see _near


def _near(runs: Runs) -> Iterator[_KernelCall]:
    """Calls of causal runs that have a window, or more keys than queries. Runs with as many keys as
    queries that fit in the window stay whole; others are cut into blocks of queries, each with all
    keys that its queries attend to. Blocks of one size share a call."""
    whole: list[tuple[int, int, int]] = []
    blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    starts = zip(_starts(runs.queries), _starts(runs.keys), strict=True)
    for (q, k), n, m in zip(starts, runs.queries, runs.keys, strict=True):
        window = m if runs.window is None else runs.window
        if n == m <= window:
            whole.append((q, n, k))
            continue
        for begin in range(0, n, _QUERIES):
            end = min(begin + _QUERIES, n)
            first = max(0, m - n + begin + 1 - window)
            size = end - begin, m - n + end - first
            blocks.setdefault(size, []).append((q + begin, k + first))
    if whole:
        yield from _ragged(*zip(*whole, strict=True))
    for (n, m), places in blocks.items():
        queries, keys = zip(*places, strict=True)
        count = len(places)
        yield _KernelCall(_Ragged(queries, [n] * count), _Ragged(keys, [m] * count), (n, m))


def _single(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class FlashKernel:
    """The flash attention in torch for NVIDIA GPUs, on runs of any lengths, in fp16 and bf16."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], Tensor] = {}

    def takes(self, q: Tensor) -> bool:
        width = q.shape[-1]
        return q.dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= _WIDEST

    def forward(self, x: Operands, runs: Runs) -> Attended:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            x.q, x.k, x.v, *self._lengths(runs, x.q.device), 0.0, runs.causal, False,
            scale=x.scale, **_window(runs),
        )  # fmt: skip
        return Attended(out, lse.transpose(0, 1).contiguous())  # torch's lse is [Hq, Tq]

    def backward(
        self, grad: Tensor, x: Operands, attended: Attended, runs: Runs
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty((), dtype=torch.long, device=grad.device)  # there is no dropout
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), x.q, x.k, x.v, attended.out,
            attended.lse.transpose(0, 1).contiguous(), *self._lengths(runs, grad.device),
            0.0, runs.causal, unused, unused, scale=x.scale, **_window(runs),
        )  # fmt: skip

    def _lengths(self, runs: Runs, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Cumulative lengths (int32) of queries and of keys, and the longest length of each."""
        of_queries, of_keys = (
            self._cumulative(tuple(lengths), device) for lengths in (runs.queries, runs.keys)
        )
        # At least 2: told of 1 query at most, torch takes all runs to have one where heads share
        # keys.
        return of_queries, of_keys, max(2, *runs.queries), max(runs.keys)

    def _cumulative(self, lengths: tuple[int, ...], device: torch.device) -> Tensor:
        if lengths not in self._ends:
            ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            self._ends[lengths] = to_device(ends, device)
        return self._ends[lengths]


def _window(runs: Runs) -> dict[str, int]:
    """Flash attention's arguments for a window: how many tokens before and behind a query's own."""
    if runs.window is None:
        return {}
    return {"window_size_left": runs.window - 1, "window_size_right": 0}


_WIDEST = 256  # the widest head of flash attention


def kernel_for(device: torch.device) -> Kernel | None:
    """The kernel for blocks on a device; None where there is none."""
    if device.type == "cpu":
        return CPUKernel()
    if device.type == "cuda" and torch.version.hip is None:
        return FlashKernel() if torch.cuda.get_device_capability(device) >= (8, 0) else None
    return None
