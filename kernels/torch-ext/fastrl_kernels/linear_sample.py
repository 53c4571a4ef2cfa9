"""Tokens drawn from hidden states and the LM head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .argument_types import explains_types
from .checks import check_count, check_per_token, check_positive
from .dispatch import choose, device_kind
from .gemm import without_gaps
from .lm_head import DEFAULT_WORKSPACE_BYTES, WORKSPACE_BYTES, checked_factors, row_chunks
from .operators import joined, new, operator, split
from .race import part_size
from .sampling import check_keys, check_sampling_parameter, sample_tokens
from .types import LogitTransform, SampledTokens

LEAST_GROUP = 16  # columns, of the smallest tile of tensor cores

# Rows at which the launch saved and the logits neither written nor read outweigh 5% of the
# whole: 2 µs and 3.5·N·V bytes against the head's 2·V·H, 4·N·V and 6 µs, at 3 TB/s.
_MOST_ROWS, _HIDDEN_PER_ROW, _HIDDEN_OF_LAUNCHES = 32, 33, 51_000_000


def linear_sample_pays(rows: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> bool:
    """Whether ``linear_sample`` takes less than 95% of the time of a product and ``sample_tokens``,
    counted for an H100 and an H200.

    It saves a launch and 3.5·N·V bytes beside the head's 2·V·H, so H must be small; and each logit
    costs a hundred instructions, which only the tiles of up to 32 rows hide behind the loads of
    weights. ``benchmarks/ops/draw_counts.py`` counts it.

    Args:
        rows: N.
        hidden: H.
        vocabulary: V.
        dtype: of the head.

    Raises:
        TypeError: sizes that are not integers, or a dtype that is none.
        ValueError: a negative size, V = 0.
    """
    check_count("rows", rows)
    check_count("hidden", hidden)
    check_count("vocabulary", vocabulary, least=1)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
    saves = hidden <= _HIDDEN_PER_ROW * rows + _HIDDEN_OF_LAUNCHES / vocabulary
    half = dtype in (torch.bfloat16, torch.float16)
    return half and 0 < rows <= _MOST_ROWS and saves and part_size(vocabulary) >= LEAST_GROUP


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform
) -> Tensor:
    """Logits [r, V] as the head rounds them; with a transform in fp32."""
    x = F.linear(without_gaps(hidden), without_gaps(weight), bias)
    if transform.softcap is not None:
        x = x.float().mul_(transform.inner).tanh_()
    return x if transform.outer == 1.0 else x.float().mul_(transform.outer)


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keys: Tensor,
    temperature: float | Tensor,
    transform: LogitTransform,
    backend: str,
) -> SampledTokens:
    """``linear_sample`` of checked arguments: by its kernels, or ``sample_tokens`` of the logits of
    as many rows at a time as a workspace holds."""
    if backend == "triton":
        from ._triton import linear_sample as triton

        # Tensor cores would round fp32 factors.
        if weight.dtype != torch.float32 and part_size(len(weight)) >= LEAST_GROUP:
            return triton.linear_sample(hidden, weight, bias, keys, temperature, transform)
    budget = WORKSPACE_BYTES.get(device_kind(hidden), DEFAULT_WORKSPACE_BYTES)
    chunks = row_chunks(len(hidden), len(weight), hidden.element_size(), budget)
    draws = [
        sample_tokens(
            _logits(hidden[rows], weight, bias, transform),
            keys[rows],
            temperature=temperature[rows] if isinstance(temperature, Tensor) else temperature,
            backend=backend,
        )
        for rows in chunks or [slice(0, 0)]
    ]
    return draws[0] if len(draws) == 1 else SampledTokens(*map(torch.cat, zip(*draws, strict=True)))


@operator()
def _linear_sample(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keys: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    transform = LogitTransform(softcap, logit_scale)
    t = joined(temperatures, temperature)
    return tuple(_run(hidden, weight, bias, keys, t, transform, backend))  # type: ignore[return-value]


@_linear_sample.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor, *_others: object
) -> tuple[Tensor, ...]:
    return torch.empty_like(keys), *(new(hidden, keys.shape[0]) for _ in range(5))


@explains_types
@torch.no_grad()
def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    keys: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: str = "auto",
) -> SampledTokens:
    """Draws one token per row from softmax(z/T), from hidden states h and the LM head's weight W.

        x = h·Wᵀ + b, rounded to the head's dtype;  z = c·tanh(s·x/c), or s·x without a cap

    The tokens are those that ``sample_tokens`` draws from z with the same keys, and so are
    log-probs and entropies, to rounding; nothing is cut. Where sums of products in another order
    round x differently, as other kernels and other numbers of rows do, a token may differ as well.

    On a GPU, heads in half precision with more than 128 tokens take two launches: one multiplies,
    and keeps of each tile of logits its softmax statistics and the winner of the race within it;
    one joins them. Logits are not written, and every logit takes a variate. That is faster than a
    product and ``sample_tokens`` for few rows only: ``linear_sample_pays`` tells. A row's result
    does not depend on the other rows, but that up to 16 rows have tiles of their own, whose sums
    may round a logit differently. Elsewhere it is a product and ``sample_tokens``, of some rows at
    a time.

    Args:
        hidden: [N, H] fp32, bf16 or fp16.
        weight: [V, H], of the same dtype.
        keys: [N] int64 (bit patterns) or uint64, from ``sample_keys``.
        bias: [V].
        temperature: T ≥ 0, a number or [N]. 0 (all below 1e-30) is greedy: the highest logit, the
            first of equals; log-probs and entropies are at T = 1 then.
        softcap: c > 0, or None.
        logit_scale: s > 0.
        backend: "auto", "triton" or "torch"; see ``explain``.

    Returns:
        ``SampledTokens``, without gradients. ``truncated_logprobs`` are ``logprobs``, and
        ``cutoffs`` -inf. A row that is no distribution gets token -1 and NaN.

    Raises:
        TypeError: dtypes that do not fit, a DTensor, a temperature that is no number.
        ValueError: shapes or devices that do not fit, a number out of its range. Tensors of
            temperatures are read on PyTorch's path on CPU tensors only.

    Under autocast, hidden states and head are cast as a linear layer's would be.

    Source: a race in the epilogue of the head's product is FlashSampling (arXiv:2603.15854); this
    one is ``sample_tokens``'s own race, ``fastrl_kernels.reference.race``.
    """
    hidden, weight, bias, _ = checked_factors(hidden, weight, bias)
    if hidden.dim() != 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}: it must be [N, H]")
    check_keys(keys)
    check_per_token("keys", keys, "hidden", hidden)
    check_sampling_parameter("temperature", temperature, "hidden", hidden)
    if softcap is not None:
        softcap = check_positive("softcap", softcap)
    logit_scale = check_positive("logit_scale", logit_scale)
    chosen, keys = choose(backend, hidden, weight, bias), keys.view(torch.int64)
    hidden, weight = hidden.detach(), weight.detach()
    bias = None if bias is None else bias.detach()
    if torch.compiler.is_compiling():
        return SampledTokens(
            *_linear_sample(
                hidden, weight, bias, keys, *split(temperature), softcap, logit_scale, chosen
            )
        )
    transform = LogitTransform(softcap, logit_scale)
    return _run(hidden, weight, bias, keys, temperature, transform, chosen)
