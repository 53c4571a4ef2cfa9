"""Attention of one new token per sequence over a cache of keys and values in slots."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ._cpu.native import calls as native
from .argument_types import explains_types
from .checks import Passed, check_count, check_device, check_float, check_positive, is_plain, layout
from .dispatch import choose
from .gemm import without_gaps
from .types import AttentionSettings


def _capturing(x: Tensor) -> bool:
    """Whether a CUDA graph records what is done with x."""
    if not x.is_cuda or torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return False
    return torch.cuda.is_current_stream_capturing()


class LiveTokens:
    """The live tokens of each row, for several layers of one step: what layers make of the lengths
    is made once for all of them, as is the memory in which a layer's programs count each other.

    Make one for each step, where the step runs: within the capture, if a CUDA graph captures it.

    Args:
        lengths: [B] int32 or int64. Must not change while this is in use.
    """

    def __init__(self, lengths: Tensor):
        self.lengths = lengths
        self._made: dict[tuple, Tensor] = {}
        self._captured = _capturing(lengths)

    def counted(self, span: int, window: int, chunk: int) -> Tensor:
        """Which tokens count, [B, 1, 1, span]; a window or a chunk as long as the span leaves out
        none."""
        return self._kept((span, window, chunk), lambda: self._counted(span, window, chunk))

    def bias(self, span: int, window: int, chunk: int, heads: int) -> Tensor:
        """What is added to scores, [B·heads, 1, span] fp32: 0 for tokens that count, -inf for
        others; NaN in rows that are longer than the span."""
        return self._kept(
            (span, window, chunk, heads), lambda: self._bias(span, window, chunk, heads)
        )

    @property
    def empty(self) -> Tensor:
        """Which rows have no live token, [B, 1, 1]."""
        return self._kept((), lambda: (self.lengths == 0).view(-1, 1, 1))

    def arrivals(self, programs: int, stream: int) -> Tensor:
        """A counter for each of a kernel's programs, [programs] int32, which are 0 and which a
        launch leaves at 0. Launches on one stream share them. Those on another stream, which may
        run at the same time, have others."""

        def make() -> Tensor:
            return torch.zeros(programs, dtype=torch.int32, device=self.lengths.device)

        if _capturing(self.lengths) != self._captured:
            return make()  # a graph must neither share its memory nor use that of others
        return self._kept((programs, stream, "arrivals"), make)

    def _kept(self, key: tuple[int | str, ...], make: Callable[[], Tensor]) -> Tensor:
        if torch.compiler.is_compiling():  # sizes as keys would become constants
            return make()
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _counted(self, span: int, window: int, chunk: int) -> Tensor:
        position = torch.arange(span, device=self.lengths.device)
        lengths = self.lengths.view(-1, 1, 1, 1)
        live = position < lengths
        if window < span:
            live = live & (position >= lengths - window)
        if chunk < span:
            live = live & (position >= (lengths - 1) // chunk * chunk)
        return live

    def _bias(self, span: int, window: int, chunk: int, heads: int) -> Tensor:
        zeros = torch.zeros(self.lengths.shape, device=self.lengths.device)
        zeros = zeros.masked_fill_(self.lengths > span, math.nan).view(-1, 1, 1, 1)
        rows = zeros.masked_fill(~self.counted(span, window, chunk), -math.inf)
        rows = torch.where(zeros.isnan(), zeros, rows)  # a window may leave no token
        return rows.expand(-1, heads, 1, span).flatten(0, 1)


def _one_batch(x: Tensor, rows: int, span: int) -> Tensor:
    """Keys or values x of the first rows as one batch [rows·Hkv, span, D]."""
    return x[:rows].transpose(1, 2).flatten(0, 1)[:, :span]


def _is_one_batch(x: Tensor) -> bool:
    """Whether slots and heads are one dimension, so that :func:`_one_batch` copies nothing."""
    slots, _, heads, _ = x.shape
    return slots == 1 or heads == 1 or x.stride(0) == heads * x.stride(2)


def _batched(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    live: LiveTokens,
    sinks: Tensor | None,
    a: AttentionSettings,
) -> Tensor:
    """Two batched products around a softmax, for fp32: a product per slot and head of keys, of the
    queries that share it."""
    batch, heads, width = query.shape
    kv_heads = keys.shape[2]
    query = query.reshape(batch * kv_heads, heads // kv_heads, width)
    keys, values = (_one_batch(x, batch, a.span) for x in (keys, values))
    bias = live.bias(a.span, a.window, a.chunk, kv_heads)
    if a.inner is None or a.softcap is None:
        scores = torch.baddbmm(bias, query, keys.mT, alpha=a.scale)
    else:
        scores = torch.bmm(query, keys.mT).mul_(a.inner).tanh_().mul_(a.softcap).add_(bias)
    weights = scores.softmax(-1)
    out = torch.bmm(weights, values).view(batch, heads, values.shape[-1])
    if sinks is not None:
        out.mul_(_share(scores.view(batch, heads, -1), weights.view(batch, heads, -1), sinks))
    return out.masked_fill_(live.empty, 0.0)


def _share(scores: Tensor, weights: Tensor, sinks: Tensor) -> Tensor:
    """The share [B, Hq, 1] of a head's softmax that its sink leaves to the scores [B, Hq, span], Σ
    exp(scores) / (Σ exp(scores) + exp(sink)); ``weights`` are the scores' softmax.

    With m the largest score, Σ exp(s - m) is 1 over the largest weight. exp is left to softmax,
    which takes each row by itself: PyTorch's elementwise functions have other bits for the last
    few elements, which then are those of other rows.
    """
    largest = scores.amax(-1)
    scale, sink = torch.stack((largest, sinks.expand_as(largest)), -1).softmax(-1).unbind(-1)
    # `_explicit` has weights of 0 where nothing is live.
    heaviest = weights.amax(-1).clamp_min_(torch.finfo(torch.float32).tiny)
    return (scale / (scale + sink * heaviest)).unsqueeze(-1)


def _explicit(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    live: Tensor,
    sinks: Tensor | None,
    a: AttentionSettings,
) -> Tensor:
    """softmax(cap(scale·q·kᵀ))·v in fp32."""
    scores = query.float() @ keys.float().mT
    scores = scores.mul_(a.scale if a.inner is None else a.inner)
    if a.softcap is not None:
        scores = scores.tanh_().mul_(a.softcap)
    scores = scores.masked_fill_(~live, -math.inf)
    weights = scores.softmax(-1).masked_fill_(~live, 0.0)  # NaN where nothing is live
    out = weights @ values.float()
    if sinks is not None:
        share = _share(scores.flatten(1, 2), weights.flatten(1, 2), sinks)
        out.mul_(share.view(*out.shape[:-1], 1))
    return out.to(query.dtype)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: LiveTokens,
    sinks: Tensor | None,
    a: AttentionSettings,
) -> Tensor:
    on_cpu = query.device.type == "cpu"
    single = query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if on_cpu and single and _is_one_batch(keys) and _is_one_batch(values):
        return _batched(query, keys, values, tokens, sinks, a)
    batch, heads, width = query.shape
    kv_heads = keys.shape[2]
    # The heads that share keys take the place of a sequence's tokens.
    query = query.reshape(batch, kv_heads, heads // kv_heads, width)
    keys, values = (x[:batch, : a.span].transpose(1, 2) for x in (keys, values))
    live = tokens.counted(a.span, a.window, a.chunk)
    if a.softcap is None and sinks is None and on_cpu:
        query, keys = without_gaps(query), without_gaps(keys)
        out = F.scaled_dot_product_attention(query, keys, values, live, scale=a.scale)
    else:
        out = _explicit(query, keys, values, live, sinks, a)
    out = out.masked_fill_(tokens.lengths.view(-1, 1, 1, 1) > a.span, math.nan)
    return out.reshape(batch, heads, values.shape[-1])


def _check_tensors(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, sinks: Tensor | None
) -> None:
    check_float("query", query)
    if query.dim() != 3 or 0 in query.shape[1:]:
        raise ValueError(f"query has shape {tuple(query.shape)}: it must be [B, Hq, D]")
    for name, x in (("keys", keys), ("values", values)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name} are {x.dtype}, query is {query.dtype}: convert one of them")
        if x.dim() != 4 or 0 in x.shape[1:]:
            raise ValueError(f"{name} have shape {tuple(x.shape)}: they must be [S, M, Hkv, D]")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} have strides {x.stride()}: the last must be 1")
        check_device(name, x, "query", query)
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"keys have shape {tuple(keys.shape)}, values {tuple(values.shape)}: all but the last "
            "dimension must be equal"
        )
    (batch, heads, width), (slots, _, kv_heads, key_width) = query.shape, keys.shape
    if key_width != width:
        raise ValueError(f"keys are {key_width} wide, query is {width}: they must be equal")
    if heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads, keys have {kv_heads}: the former must be a multiple"
        )
    if slots < batch:
        raise ValueError(
            f"keys have {slots} slots, query has {batch} rows: row i attends slot i, so that there "
            "must be as many"
        )
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}: convert them first")
    if lengths.shape != query.shape[:1]:
        raise ValueError(
            f"lengths have shape {tuple(lengths.shape)}: they must be ({batch},), one per row"
        )
    check_device("lengths", lengths, "query", query)
    if sinks is not None:
        check_float("sinks", sinks)
        if sinks.shape != (heads,):
            raise ValueError(
                f"sinks have shape {tuple(sinks.shape)}: they must be ({heads},), one per head of "
                "the query"
            )
        check_device("sinks", sinks, "query", query)


def _checked(
    query: Tensor,
    keys: Tensor,
    scale: float | None,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    span: int | None,
) -> AttentionSettings:
    tokens = keys.shape[1]
    span = tokens if span is None else check_count("span", span)
    if not 1 <= span <= tokens:
        raise ValueError(f"span must be in [1, {tokens}], the tokens of a slot, got {span}")
    if window is not None and check_count("window", window) < 1:
        raise ValueError(f"window must be positive, or None for all tokens, got {window}")
    if chunk is not None and check_count("chunk", chunk) < 1:
        raise ValueError(f"chunk must be positive, or None for all tokens, got {chunk}")
    chunk = span if chunk is None else min(chunk, span)
    return AttentionSettings(
        span,
        chunk if window is None else min(window, chunk),
        chunk,
        query.shape[-1] ** -0.5 if scale is None else check_positive("scale", scale),
        None if softcap is None else check_positive("softcap", softcap),
    )


_passed = Passed()


@explains_types
def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | LiveTokens,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    span: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of one new token per sequence over its slot of a cache of keys and values:

        out[i, h] = Σ_t p_t · v[i, t, g],   p = softmax_t(cap(scale · q[i, h] · k[i, t, g]))

    over the live tokens t of row i, with g = h // (Hq / Hkv) and cap(x) = c·tanh(x/c) where there
    is a softcap c. A sink s_h is one more logit of the softmax, whose value is 0. Row i attends
    slot i. Scores, sums and the softmax are fp32; the weights are rounded to the values' dtype
    before they meet them, as tensor cores want them.

    Nothing waits for the device, no shape depends on data, and launches depend on shapes and
    numbers alone: a CUDA graph may replay them while lengths grow, up to the span. In the Triton
    path a row's bits depend neither on other rows nor on the span. Forward only.

    On a CPU, fp32 is fastest where keys and values lie in memory as [S, Hkv, M, D]: slots and heads
    are one batch of products then, and nothing is copied.

    Args:
        query: [B, Hq, D] fp32, bf16 or fp16.
        keys: [S, M, Hkv, D] of the query's dtype, with S ≥ B slots of M tokens and Hq a multiple of
            Hkv. Any strides, but for a last one of 1: views of a larger cache.
        values: [S, M, Hkv, Dv] of the same dtype and kind of strides.
        lengths: [B] int32 or int64, live tokens of each row, the new one included; 0 gives zeros.
            The Triton path reads no others. PyTorch's gives them weights of 0, so that they have to
            be finite there: to leave them out would take longer than the attention. Or
            ``LiveTokens(lengths)``, made once for all layers of a step.
        scale: the factor of the scores, D^-½ unless given.
        window: only the last so many of the live tokens count, as in layers with a sliding window.
        chunk: only live tokens of the last one's chunk count, t // chunk being equal.
        softcap: c > 0, which no score exceeds.
        sinks: [Hq] fp32, bf16 or fp16, s; none unless given.
        span: a bound of all lengths, M unless given. Work is sized by it, on the host, and rows
            that are longer become NaN.
        backend: "auto", "triton", "torch" or "native"; see ``explain``.

    Returns:
        [B, Hq, Dv] of the query's dtype.

    Raises:
        TypeError: dtypes that are not as above.
        ValueError: shapes, strides or devices that do not fit; numbers out of their range.

    Source: the split over tokens is that of Dao et al., 2023, "Flash-Decoding for long-context
    inference"; the softcap is Gemma 2's (arXiv:2408.00118), sinks are gpt-oss's
    (arXiv:2508.10925), chunks Llama 4's.
    """
    tokens = lengths if isinstance(lengths, LiveTokens) else LiveTokens(lengths)
    key = attention = None
    if is_plain(query):
        tensors = query, keys, values, tokens.lengths
        layouts = map(layout, tensors if sinks is None else (*tensors, sinks))
        key = *layouts, scale, window, chunk, softcap, span
        attention = _passed.get(key)
    if attention is None:
        _check_tensors(query, keys, values, tokens.lengths, sinks)
        attention = _checked(query, keys, scale, window, chunk, softcap, span)
        if key is not None:
            _passed.keep(key, attention)
    chosen = choose(backend, query)
    if not torch.compiler.is_compiling() and isinstance(query, FakeTensor):
        chosen = "torch"  # there is nothing to launch a kernel on, only a shape to find
    if chosen == "triton":
        from ._triton.decode_attention import attend

        return attend(query, keys, values, tokens.lengths, tokens.arrivals, sinks, attention)
    if chosen == "native" and native.are_fp32(query, keys, values, sinks):
        return native.decode_attention(query, keys, values, tokens.lengths, sinks, attention)
    with torch.no_grad():
        return _attend(query, keys, values, tokens, sinks, attention)
