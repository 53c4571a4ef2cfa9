"""Sampling tokens: temperature, top-k, top-p and min-p, and the log-probabilities of the draw."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._cpu.native import calls as native
from ._cpu.row_chunks import FLOOR, exponentials_of, rows_at_a_time
from ._cpu.top_p import MANY, last_below, lowest_by_buckets, tempered
from .argument_types import explains_types
from .checks import Passed, check_float, check_per_token, is_plain, layout
from .dispatch import choose
from .operators import joined, new, operator, split
from .race import part_size, winners
from .rng import is_integer
from .rows import as_rows
from .types import COLDEST, SampledTokens, SamplingParameters

_INF = math.inf


def _lowest_by_sorting(x: Tensor, e: Tensor, p: SamplingParameters, free: Tensor) -> Tensor:
    """The lowest logit [r, 1] that top-k and then top-p keep; no shape depends on data."""
    vocabulary = x.shape[-1]
    by_k, by_p, _ = p.truncates(vocabulary)
    one_k = by_k and not isinstance(p.top_k, Tensor)
    highest, columns = x.topk(int(p.top_k)) if one_k else x.sort(descending=True)
    lowest = torch.full_like(highest[:, :1], -_INF)
    if isinstance(p.top_k, Tensor):
        active = (p.top_k > 0) & (p.top_k < vocabulary)
        kth = highest.gather(-1, (p.top_k.long() - 1).clamp(0, vocabulary - 1))
        lowest = torch.where(active, kth, lowest)
    elif by_k:
        lowest = highest[:, -1:]
    if by_p:
        weights = e.gather(-1, columns).double()
        limit = torch.where(highest >= lowest, weights, 0.0).sum(-1, keepdim=True)
        if one_k:  # logits that equal the k-th are kept as well
            ties = torch.ge(x, lowest, out=free).sum(-1, keepdim=True) - highest.shape[-1]
            limit += ties * weights[:, -1:]
        # Top-p keeps nothing lower than the lowest that top-k kept.
        found = torch.maximum(lowest, last_below(highest, weights, 0.0, limit * p.top_p))
        off = isinstance(p.top_p, Tensor) and p.top_p >= 1
        lowest = torch.where(off, lowest, found) if isinstance(off, Tensor) else found
    return lowest


def _least_logit(row_max: Tensor, p: SamplingParameters) -> Tensor:
    """The lowest number [r, 1] that min-p keeps: log p_v ≥ log max p + log min_p, rounded up, so
    that comparing fp32 logits with it rounds nothing."""
    # A tensor of a number would wait for a GPU.
    log = p.min_p.double().log() if isinstance(p.min_p, Tensor) else math.log(p.min_p)
    exact = row_max.double() + log * p.temperature
    bound = exact.float()
    return torch.where(bound < exact, torch.nextafter(bound, row_max), bound)


def lowest_kept(
    x: Tensor, e: Tensor, row_max: Tensor, p: SamplingParameters, free: Tensor
) -> Tensor:
    """The lowest logit [r, 1] that top-k, then top-p, then min-p keep; ``free`` is working memory
    of x's shape."""
    by_k, by_p, by_min = p.truncates(x.shape[-1])
    lowest = torch.full_like(row_max, -_INF)
    if by_p and not by_k and x.device.type == "cpu" and x.shape[-1] >= MANY:
        lowest = lowest_by_buckets(x, e, row_max, p.temperature, p.top_p)
    elif by_k or by_p:
        lowest = _lowest_by_sorting(x, e, p, free)
    if by_min:
        lowest = torch.maximum(lowest, _least_logit(row_max, p))
        # Numbers in place of booleans, whose passes take five times as long: -inf where a logit
        # is kept, inf elsewhere.
        side = torch.lt(x, lowest, out=free).sub_(0.5).mul_(_INF)
        lowest = torch.maximum(x, side, out=side).amin(-1, keepdim=True)
    return lowest


def without_zero(p: SamplingParameters) -> tuple[bool | Tensor, SamplingParameters]:
    """Which rows are greedy, and their temperatures replaced by 1; NaN replaces impossible ones."""
    t = p.temperature
    if not isinstance(t, Tensor):
        return t < COLDEST, p._replace(temperature=1.0 if t < COLDEST else t)
    greedy = (t >= 0) & (t < COLDEST)
    t = torch.where(greedy, 1.0, torch.where((t > 0) & (t < _INF), t, math.nan))
    return greedy, p._replace(temperature=t)


def _sample_rows(
    x: Tensor, keys: Tensor, p: SamplingParameters, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Draws from fp32 logits [r, V], in working memory [2, r, parts, P]: tokens [r], and the other
    fields of ``SampledTokens`` [r, 5]."""
    vocabulary = x.shape[-1]
    truncated, (greedy, p) = any(p.truncates(vocabulary)), without_zero(p)
    row_max = x.amax(-1, keepdim=True)
    d, e = memory.flatten(2)  # the last part may reach past the row: its weights there are 0
    d[:, vocabulary:] = -_INF
    torch.sub(x, row_max, out=d[:, :vocabulary])
    log_sum_t1 = None
    if isinstance(p.temperature, Tensor) or p.temperature != 1.0:
        log_sum_t1 = exponentials_of(d, e).sum(-1, keepdim=True).log()
        tempered(d, p.temperature)
    exponentials_of(d, e)  # not torch.softmax, which adds a row up one after the other
    sums = memory[1].sum(-1)
    total = sums.sum(-1, keepdim=True)
    log_sum = total.log()
    mean = d.clamp_(min=FLOOR).mul_(e).sum(-1, keepdim=True) / total
    log_kept, cutoff = log_sum, torch.full_like(row_max, -_INF)
    if truncated:
        d, weights = d[:, :vocabulary], e[:, :vocabulary]
        lowest = lowest_kept(x, weights, row_max, p, d)
        if isinstance(greedy, Tensor):
            lowest = torch.where(greedy, -_INF, lowest)
        finite = torch.gt(x, -_INF, out=d).sum(-1, keepdim=True)
        kept = torch.ge(x, lowest, out=d)
        cutoff = torch.where(kept.sum(-1, keepdim=True) < finite, lowest, cutoff)
        weights.mul_(kept)
        sums = memory[1].sum(-1)
        log_kept = log_sum - (total / sums.sum(-1, keepdim=True)).log()
    column = raced(x, greedy, lambda: winners(sums, memory[1], keys))
    at = x.gather(-1, column) - row_max
    scaled = tempered(at.clone(), p.temperature)
    at_one = at - (log_sum if log_sum_t1 is None else log_sum_t1)
    fields = [scaled - log_sum, at_one, scaled - log_kept, cutoff, log_sum - mean]
    return of_sound((total > 0) & (row_max > -_INF), column, fields)


def raced(x: Tensor, greedy: bool | Tensor, draw: Callable[[], Tensor]) -> Tensor:
    """Columns [r, 1] of logits [r, C]: what ``draw`` draws, of greedy rows the highest."""
    if greedy is True:
        return x.argmax(-1, keepdim=True)
    column = draw().clamp_(max=x.shape[-1] - 1)
    if isinstance(greedy, Tensor):
        return torch.where(greedy, x.argmax(-1, keepdim=True), column)
    return column


def of_sound(sound: Tensor, column: Tensor, fields: list[Tensor]) -> tuple[Tensor, Tensor]:
    numbers = torch.where(sound, torch.cat(fields, -1), math.nan)
    return torch.where(sound, column, -1).squeeze(-1), numbers


def in_chunks(
    by_rows: Callable[..., tuple[Tensor, ...]],
    logits: Tensor,
    keys: Tensor,
    p: SamplingParameters,
    buffers: int = 2,
) -> tuple[SampledTokens, Tensor]:
    """Draws a few rows at a time; and the words that ``by_rows`` gave, none if it did not."""
    rows = as_rows(logits)[0] if logits.numel() else logits
    n, vocabulary = rows.shape
    step, size = rows_at_a_time(vocabulary), part_size(vocabulary)
    shape = (buffers, min(step, n), -(-vocabulary // size), size)
    memory = torch.empty(shape, dtype=torch.float32, device=logits.device)
    found: list[tuple[Tensor, ...]] = []
    for first in range(0, n, step):
        chunk = slice(first, min(first + step, n))
        x = rows[chunk].float()
        found.append(by_rows(x, keys[chunk], p.rows(chunk), memory[:, : len(x)]))
    if not found:
        words = keys.new_empty(0, -(-vocabulary // 32), dtype=torch.int32)
        return SampledTokens(torch.empty_like(keys), *memory.new_empty(5, 0)), words
    tokens, numbers, *further = (
        found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
    )
    drawn = SampledTokens(tokens, *(x.clone() for x in numbers.unbind(-1)))
    return drawn, further[0] if further else tokens.new_empty(0, dtype=torch.int32)


# name: whether it is an integer, a condition for its values, and the condition in words
_RULES = {
    "temperature": (False, lambda x: (x >= 0) & (x < _INF), "0 (greedy) or positive and finite"),
    "top_k": (True, lambda x: x >= 0, "0 (off) or positive"),
    "top_p": (False, lambda x: (x > 0) & (x <= 1), "in (0, 1]; 1 is off"),
    "min_p": (False, lambda x: (x >= 0) & (x <= 1), "in [0, 1]; 0 is off"),
}


def _check_logits(logits: Tensor) -> None:
    check_float("logits", logits)
    if logits.dim() != 2 or logits.shape[-1] == 0:
        shape = tuple(logits.shape)
        raise ValueError(f"logits have shape {shape}: they must be [N, V] with V > 0")


def check_keys(keys: Tensor) -> None:
    """Checks the dtype of draws' keys."""
    if keys.dtype not in (torch.int64, torch.uint64):
        raise TypeError(f"keys must be int64 or uint64, got {keys.dtype}: see sample_keys")


def check_sampling_parameter(name: str, x: float | Tensor, like_name: str, like: Tensor) -> None:
    """Checks a parameter for the rows ``like``. The values of a tensor are not looked at."""
    whole, holds, rule = _RULES[name]
    if isinstance(x, Tensor):
        if not (is_integer(x) if whole else x.is_floating_point()):
            kind = "integers" if whole else "floating-point"
            raise TypeError(f"{name} must be {kind}, got {x.dtype}: convert it first")
        check_per_token(name, x, like_name, like)
        return
    if isinstance(x, bool) or not isinstance(x, int if whole else (int, float)):
        kind = "an integer" if whole else "a number"
        raise TypeError(f"{name} must be {kind} or a tensor, got {type(x).__name__}")
    if not holds(x):
        raise ValueError(f"{name} must be {rule}, got {x}")


def check_draw(logits: Tensor, keys: Tensor, parameters: SamplingParameters) -> None:
    """Checks all that needs no look at the values of tensors."""
    _check_logits(logits)
    check_keys(keys)
    check_per_token("keys", keys, "logits", logits)
    for name, value in parameters._asdict().items():
        check_sampling_parameter(name, value, "logits", logits)


def check_values(parameters: SamplingParameters) -> None:
    """Checks the values of parameters that are tensors."""
    for name, x in parameters._asdict().items():
        _, holds, rule = _RULES[name]
        if isinstance(x, Tensor) and not (held := holds(x)).all():
            row = int((~held).nonzero()[0])
            raise ValueError(f"{name}[{row}] must be {rule}, got {x[row].item()}")


def _run(
    logits: Tensor, keys: Tensor, parameters: SamplingParameters, backend: str
) -> SampledTokens:
    """``sample_tokens`` of arguments that were checked but for the values of tensors."""
    if backend == "triton":
        from ._triton import sampling

        return sampling.sample(logits, keys, parameters)
    if backend == "native" and native.draws(logits, parameters):
        return native.draw(logits, keys, parameters)
    if logits.device.type == "cpu":
        check_values(parameters)
    return in_chunks(_sample_rows, logits, keys, parameters)[0]


@operator()
def _sample_tokens(
    logits: Tensor,
    keys: Tensor,
    temperature: Tensor | None,
    temperature_number: float,
    top_k: Tensor | None,
    top_k_number: int,
    top_p: Tensor | None,
    top_p_number: float,
    min_p: Tensor | None,
    min_p_number: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    parameters = SamplingParameters(
        joined(temperature, temperature_number),
        joined(top_k, top_k_number),
        joined(top_p, top_p_number),
        joined(min_p, min_p_number),
    )
    return tuple(_run(logits, keys, parameters, backend))  # type: ignore[return-value]


@_sample_tokens.register_fake
def _(logits: Tensor, keys: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(keys), *(new(logits, keys.shape[0]) for _ in range(5))


def _compiled(
    logits: Tensor, keys: Tensor, parameters: SamplingParameters, backend: str
) -> SampledTokens:
    parts = (part for x in parameters for part in split(x))
    return SampledTokens(*_sample_tokens(logits, keys, *parts, backend))


_passed = Passed()
_NUMBERS = set(itertools.product((int, float), (int,), (int, float), (int, float)))


@explains_types
def sample_tokens(
    logits: Tensor,
    keys: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    backend: str = "auto",
) -> SampledTokens:
    """Draws one token per row from softmax(z/T), cut by top-k, then top-p, then min-p.

    With p = softmax(z/T), a token v is kept if all of these hold, which are transformers' rules in
    transformers' order, save that ties at a cutoff are all kept:

        top-k: fewer than k tokens have a higher logit;
        top-p: those of a higher logit have together less than top_p of what top-k kept;
        min-p: p_v ≥ min_p · max p.

    The draw depends on the row's logits, its parameters and its key, and on nothing else: neither
    on other rows, nor on the row's place in memory, nor on the backend, but that one in 10,000 fp32
    rows may differ between backends, where the scores of two tokens are equal to rounding. It is
    two races of exponential variates, among parts of the vocabulary and within one:
    ``fastrl_kernels.reference.race`` is its definition. A logit of -inf is never drawn. A row that
    is no distribution (it holds NaN or inf, or nothing but -inf) gets token -1, and NaN in every
    other field: look for it before the tokens index an embedding.

    Nothing waits for the device, and no shape depends on data, but for PyTorch's path on CPU
    tensors: it reads parameters to check them, and with top-p whether the highest logits were
    enough. Where scalars cut nothing, that work is left out.

    Args:
        logits: [N, V] fp32, bf16 or fp16; arithmetic is fp32. Never modified. Rows of any stride;
            copied once where the last dimension is not contiguous.
        keys: [N] int64 (bit patterns) or uint64, from ``sample_keys``.
        temperature: T ≥ 0, a number or [N]. 0 (all below 1e-30) is greedy: the highest logit, the
            first of equals; log-probs and entropies are at T = 1 then, and nothing is cut.
        top_k: a number or [N] integers; 0 is off.
        top_p: in (0, 1], a number or [N]; 1 is off.
        min_p: in [0, 1], a number or [N]; 0 is off, 1 keeps what equals the highest logit.
        backend: "auto", "triton", "torch" or "native"; see ``explain``.

    Returns:
        ``SampledTokens``: tokens, logprobs, logprobs_t1, truncated_logprobs, cutoffs, entropies.

    Raises:
        TypeError: logits that are not fp32, bf16 or fp16; keys that are not int64 or uint64;
            parameters that are no numbers.
        ValueError: shapes or devices that do not fit, V = 0, a parameter out of its range. Tensors
            of parameters are read on PyTorch's path on CPU tensors only; elsewhere, a temperature
            out of range makes the row's token -1.

    Source: nucleus sampling is Holtzman et al., 2019 (arXiv:1904.09751); min-p is Nguyen et al.,
    2024 (arXiv:2407.01082).
    """
    parameters = SamplingParameters(temperature, top_k, top_p, min_p)
    key = None
    if is_plain(logits):
        kinds = temperature.__class__, top_k.__class__, top_p.__class__, min_p.__class__
        if kinds in _NUMBERS:
            key = layout(logits), layout(keys), parameters, kinds
    if key is None or _passed.get(key) is None:
        check_draw(logits, keys, parameters)
        if key is not None:
            _passed.keep(key, True)
    chosen = choose(backend, logits)
    keys = keys if keys.dtype == torch.int64 else keys.view(torch.int64)
    if chosen == "triton" and key is not None:
        return _run(logits, keys, parameters, chosen)
    with torch.no_grad():
        run = _compiled if torch.compiler.is_compiling() else _run
        return run(logits, keys, parameters, chosen)
