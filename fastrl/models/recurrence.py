"""Recurrent layers and convolutions of packed rows, in which no state goes from text to text and
the responses to one prompt continue from its end.

Each function replaces one that a Hugging Face model's layers call, see
:mod:`fastrl.models.layer_functions`; its docstring says when it calls the replaced one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from fastrl.models.delta_rule import CHUNK, chunked_delta_rule
from fastrl.models.packed_parts import PackedParts, Parts

NO_LIMIT = (0.0, float("inf"))  # limits of time steps that limit nothing
_LEAST, _MOST = 16, 64  # tokens of a chunk; within longer ones more is multiplied than needed


def convolved(
    parts: PackedParts,
    convolve: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """A causal convolution [1, C, T] along a packed row: zeros stand in front of each prompt, and
    the last tokens of its prompt in front of each response.

    Args:
        convolve: the model's function, called with the row and these places in front of its texts;
            it is not called on CPUs, where sums of products are faster.
        weight: [C, K].
    """
    width = weight.shape[-1]
    halos = parts.halos(width - 1)
    row = x[0].t()
    longer = halos.row.spread(row)
    if parts.shares:
        longer = longer.index_copy(0, halos.places, row.index_select(0, halos.sources))
    if x.device.type != "cpu":
        out = convolve(longer.t()[None], weight, bias, activation=activation, **others)[0].t()
    else:
        longer = F.pad(longer.to(weight.dtype), (0, 0, width - 1, 0))
        taps = [longer[i : i + halos.row.size] for i in range(width)]
        out = taps[0] * weight[:, 0] if bias is None else torch.addcmul(bias, taps[0], weight[:, 0])
        for i in range(1, width):
            out = torch.addcmul(out, taps[i], weight[:, i])
        out = (out if activation is None else ACT2FN[activation](out)).to(x.dtype)
    return halos.row.gathered(out).t()[None]


def gated_delta_rule(
    parts: PackedParts,
    rule: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`fastrl.models.delta_rule.chunked_delta_rule` of a packed row. All tensors are [1, T,
    heads, ...]; several heads of values may share a head of queries and keys. A prompt begins with
    a state of 0, and a response with the last state of its prompt.

    Args:
        rule: the model's function, which is called only if it is a kernel that takes lengths.

    Returns:
        the outputs, and the prompts' last states [P, ...], or None without ``output_final_state``.
    """
    row = query, key, value, g, beta
    if _takes_lengths(rule):
        others["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return _by_lengths(rule, row, others, parts, output_final_state)
    q, k, v = _operands(query[0], key[0], value[0], use_qk_l2norm_in_kernel)
    g, beta = g[0].to(v.dtype), beta[0].to(v.dtype)

    def run(first: int, texts: Parts, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = slice(first, first + texts.tokens)
        return chunked_delta_rule(
            q[tokens], k[tokens], v[tokens], g[tokens], beta[tokens], texts.chunks(CHUNK), initial
        )

    out, states = run(0, parts.prompts, None)
    if parts.shares:
        initial = states.index_select(0, parts.prompt_of_response)
        out = torch.cat([out, run(parts.prompts.tokens, parts.responses, initial)[0]])
    return out.to(query.dtype)[None], states if output_final_state else None


def kimi_delta_rule(
    parts: PackedParts,
    rule: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    output_final_state: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi's delta rule of a packed row, in which each channel has a decay: g [1, T, heads, K].

    Args:
        rule: the model's function, called with sequences in rows of their own; if it is a kernel
            that takes lengths, with a row of all prompts, then one of all responses.

    Returns:
        what :func:`gated_delta_rule` does.
    """
    row = query, key, value, g, beta
    others.pop("initial_state", None)
    if _takes_lengths(rule):
        return _by_lengths(rule, row, others, parts, output_final_state)

    def scan(x: list[Tensor], initial: Tensor | None, final: bool) -> tuple[Tensor, Any]:
        # Padding has g = β = 0, which leaves a state as it is.
        return rule(  # type: ignore[no-any-return]
            *x[:3], g=x[3], beta=x[4], initial_state=initial, output_final_state=final, **others
        )

    return _in_batches(scan, row, parts, output_final_state)


def mamba2_scan(
    parts: PackedParts,
    scan: Any,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> Any:
    """Mamba-2's scan of a packed row, of x [1, T, heads, width], steps dt [1, T, heads], B and C
    [1, T, groups, states]:

        S_t = exp(A·dt_t)·S_{t-1} + dt_t·B_t·x_tᵀ,   out_t = C_tᵀ·S_t + D·x_t,

    where a prompt begins with S = 0 and a response with the last state of its prompt.

    Args:
        scan: the model's function, called with sequences in rows of their own.

    Returns:
        the outputs; with ``return_final_states`` also the last states of the prompts [P, ...].
    """
    others = {k: v for k, v in others.items() if k not in ("initial_states", "seq_idx")}
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)

    def run(rows: list[Tensor], initial: Tensor | None, final: bool) -> tuple[Tensor, Any]:
        # Padding has dt = 0, which leaves a state as it is.
        scanned = scan(
            rows[0], rows[1], A, rows[2], rows[3], chunk_size=_chunk(rows[0].shape[1], chunk_size),
            initial_states=initial, return_final_states=final, **others,
        )  # fmt: skip
        return scanned if final else (scanned, None)

    out, states = _in_batches(run, (x, dt, B, C), parts, return_final_states)
    return (out, states) if return_final_states else out


def nothing(parts: PackedParts, fused: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces a kernel that runs a whole layer: as it returns None, the layer calls its
    convolution and its scan one after the other."""


def delta_step(
    rule: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """One step of the gated delta rule in each slot, with arguments [b, 1, heads, ...]. Without a
    kernel it changes the states [b, heads, K, V] in place: a step reads and writes little else.

    Args:
        rule: the model's function, which is called only if it is a kernel for GPUs.

    Returns:
        the outputs, and the states, or None without ``output_final_state``.
    """
    if _takes_lengths(rule):
        others["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        return rule(  # type: ignore[no-any-return]
            query, key, value, g=g, beta=beta, initial_state=initial_state,
            output_final_state=output_final_state, **others,
        )  # fmt: skip
    states = initial_state.flatten(0, 1)
    q, k, v = _operands(query, key, value, use_qk_l2norm_in_kernel)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [b·heads, 1, ...]
    decay, strength = (x.float().flatten()[:, None, None] for x in (g.float().exp(), beta))
    written = (v - torch.bmm(k, states) * decay) * strength
    states.mul_(decay).baddbmm_(k.mT, written)
    out = torch.bmm(q, states).unflatten(0, initial_state.shape[:2]).transpose(1, 2)
    return out.to(query.dtype), initial_state if output_final_state else None


def _operands(
    query: Tensor, key: Tensor, value: Tensor, normalised: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in fp32 or fp64: queries and keys ``normalised``, queries scaled,
    and both repeated to as many heads as values have."""
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (query, key, value))
    if normalised:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, times = q * q.shape[-1] ** -0.5, v.shape[-2] // k.shape[-2]
    if times > 1:
        q, k = (x.repeat_interleave(times, dim=-2) for x in (q, k))
    return q, k, v


def limited_update(
    limit: tuple[float, float],
    update: Any,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    *others: Any,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **options: Any,
) -> Tensor:
    """Mamba-2's decode step, with the limit of dt, which transformers' models apply in forwards of
    whole texts, but leave out in decode steps.

    Args:
        limit: the bounds of dt, the same for all of the model's layers.
        update: the model's function, which changes ``state``.
    """
    if limit != NO_LIMIT:
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        dt, dt_bias = (F.softplus(dt) if dt_softplus else dt).clamp(*limit), None
        dt_softplus = False
    return update(  # type: ignore[no-any-return]
        state, x, dt, *others, dt_bias=dt_bias, dt_softplus=dt_softplus, **options
    )


def _takes_lengths(rule: Any) -> bool:
    """Whether ``rule`` takes sequences of any lengths in one row: kernels do, torch's code not."""
    try:
        return bool(inspect.getclosurevars(rule).nonlocals.get("is_new_implementation"))
    except TypeError:  # not a Python function
        return False


def _chunk(length: int, most: int) -> int:
    """Tokens of a chunk: a power of two that is not much longer than the sequences."""
    return min(most, _MOST, max(_LEAST, 1 << (length - 1).bit_length()))


def _by_lengths(
    rule: Any, row: Sequence[Tensor], others: dict[str, Any], parts: PackedParts, final: bool
) -> tuple[Tensor, Tensor | None]:
    """Runs ``rule``, a kernel for sequences of any lengths, on prompts, then on responses."""
    others = {k: x for k, x in others.items() if k not in ("initial_state", "cu_seqlens")}

    def run(first: int, texts: Parts, initial: Tensor | None, final: bool) -> tuple[Tensor, Any]:
        q, k, v, g, beta = (x[:, first : first + texts.tokens].contiguous() for x in row)
        return rule(  # type: ignore[no-any-return]
            q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=final,
            cu_seqlens=texts.ends, **others,
        )  # fmt: skip

    out, states = run(0, parts.prompts, None, final or parts.shares)
    if parts.shares:
        initial = states.index_select(0, parts.prompt_of_response)
        behind, _ = run(parts.prompts.tokens, parts.responses, initial, False)
        out = torch.cat([out, behind], dim=1)
    return out, states if final else None


def _in_batches(
    run: Callable[[list[Tensor], Tensor | None, bool], tuple[Tensor, Any]],
    row: Sequence[Tensor],
    parts: PackedParts,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Calls ``run`` on prompts, then on responses, in batches [N, L, ...] of sequences of about one
    length with zeros behind them."""

    def over(first: int, texts: Parts, initial: Tensor | None, final: bool) -> tuple[Tensor, Any]:
        zero_padded, shapes, order, place = texts.batches
        longer = [zero_padded.spread(x[0, first : first + texts.tokens]) for x in row]
        sizes = [count * length for count, length in shapes]
        outs, states = [], []
        begins: Any = [None] * len(shapes)
        if initial is not None:
            begins = initial.index_select(0, order).split([count for count, _ in shapes])
        for shape, begin, *batch in zip(
            shapes, begins, *(x.split(sizes) for x in longer), strict=True
        ):
            out, state = run([x.unflatten(0, shape) for x in batch], begin, final)
            outs.append(out.flatten(0, 1))
            states.append(state)
        last = torch.cat(states).index_select(0, place) if final else None
        return zero_padded.gathered(torch.cat(outs)), last

    out, states = over(0, parts.prompts, None, final or parts.shares)
    if parts.shares:
        initial = states.index_select(0, parts.prompt_of_response)
        behind, _ = over(parts.prompts.tokens, parts.responses, initial, False)
        out = torch.cat([out, behind])
    return out[None], states if final else None
