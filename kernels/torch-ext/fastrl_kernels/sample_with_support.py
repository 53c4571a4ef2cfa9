"""Draws with the set that each came from: figures over what was kept, and what that was."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._cpu.row_chunks import FLOOR, exponentials_of
from ._cpu.top_p import tempered
from .argument_types import explains_types
from .dispatch import choose
from .sampling import (
    check_draw,
    check_values,
    in_chunks,
    lowest_kept,
    of_sound,
    raced,
    sample_tokens,
    without_zero,
)
from .token_sets import packed
from .types import LOWEST, SampledTokens, SamplingParameters

_INF = math.inf


def _sample_rows(
    x: Tensor, keys: Tensor, p: SamplingParameters, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws from fp32 logits [r, V], in working memory [3, r, parts, P]: tokens [r], the other
    fields of ``SampledTokens`` [r, 5], and words [r, ⌈V/32⌉]."""
    vocabulary = x.shape[-1]
    truncated, (greedy, p) = any(p.truncates(vocabulary)), without_zero(p)
    row_max = x.amax(-1, keepdim=True)
    lowest = torch.full_like(row_max, LOWEST)  # no logit of -inf is kept
    padded = memory.flatten(2)  # the last part may reach past the row: its weights there are 0
    padded[:, :, vocabulary:] = 0.0
    d, weights, kept = padded[:, :, :vocabulary]
    exponentials_of(tempered(torch.sub(x, row_max, out=d), p.temperature), weights)
    cutoff = torch.full_like(row_max, -_INF)
    if truncated:
        lowest = lowest_kept(x, weights, row_max, p, d).clamp_(min=LOWEST)
        if isinstance(greedy, Tensor):
            lowest = torch.where(greedy, LOWEST, lowest)
        finite = torch.gt(x, -_INF, out=kept).sum(-1, keepdim=True)
    # Numbers in place of booleans, whose passes take three times as long.
    torch.ge(x, lowest, out=kept)
    if truncated:
        cutoff = torch.where(kept.sum(-1, keepdim=True) < finite, lowest, cutoff)
        weights.mul_(kept)
    sums = memory[1].sum(-1)
    total = sums.sum(-1, keepdim=True)
    log_sum = log_sum_t1 = total.log()
    column = raced(x, sums, memory[1], keys, greedy)
    at_one = x.gather(-1, column) - row_max
    at = tempered(at_one.clone(), p.temperature) - log_sum
    if isinstance(p.temperature, Tensor) or p.temperature != 1.0:
        exponentials_of(torch.sub(x, row_max, out=d), d).mul_(kept)
        log_sum_t1 = padded[0].sum(-1, keepdim=True).log()
    tempered(torch.sub(x, row_max, out=d), p.temperature).clamp_(min=FLOOR)
    # Over the parts as they are, as ``sample_tokens`` adds up: for the same bits.
    mean = padded[0].mul_(padded[1]).sum(-1, keepdim=True) / total
    sound = (total > 0) & (row_max > -_INF)
    drawn = of_sound(sound, column, [at, at_one - log_sum_t1, at, cutoff, log_sum - mean])
    return *drawn, packed(x >= torch.where(sound, lowest, _INF))


def _by_two_draws(
    logits: Tensor, keys: Tensor, p: SamplingParameters, backend: str
) -> tuple[SampledTokens, Tensor]:
    """The same by ``sample_tokens``: a draw that finds what is kept, and one from that alone."""
    cut = sample_tokens(logits, keys, **p._asdict(), backend=backend)
    # No logit of -inf is kept, nor anything in rows that are no distribution, whose cutoff is NaN.
    kept = logits >= cut.cutoffs.clamp(min=LOWEST)[:, None]
    among = logits.masked_fill(~kept, -_INF)
    drawn = sample_tokens(among, keys, temperature=p.temperature, backend=backend)
    return drawn._replace(cutoffs=cut.cutoffs), packed(kept)


def _run(
    logits: Tensor, keys: Tensor, p: SamplingParameters, backend: str
) -> tuple[SampledTokens, Tensor]:
    # In traced code two draws are two operators, and need none of their own.
    if backend == "triton" or torch.compiler.is_compiling():
        return _by_two_draws(logits, keys, p, backend)
    if logits.device.type == "cpu":
        check_values(p)
    drawn, words = in_chunks(_sample_rows, logits, keys, p, buffers=3)
    assert words is not None
    return drawn, words


@explains_types
def sample_with_support(
    logits: Tensor,
    keys: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    backend: str = "auto",
) -> tuple[SampledTokens, Tensor]:
    """Draws as :func:`sample_tokens` does, and returns the set S that each token came from.

    What it returns is of the distribution that was drawn from, q = p/Σ_{v in S} p_v in S and 0
    elsewhere, with p = softmax(z/T):

        log q of the token, its log-probability at T = 1 over the same S, and H(q).

    S holds what top-k, top-p and min-p keep of the logits that are not -inf; of greedy rows (T = 0)
    all of these. The token is that of ``sample_tokens`` with the same key; on a GPU one in 10,000
    may be another one of S, as between backends.

    Args:
        logits, keys, temperature, top_k, top_p, min_p, backend: see :func:`sample_tokens`.

    Returns:
        ``SampledTokens``, whose ``logprobs``, ``logprobs_t1`` and ``entropies`` are over S, and
        whose ``truncated_logprobs`` equal ``logprobs``; and S as bits, words [N, ⌈V/32⌉] int32,
        see :meth:`TokenSets.of_words`. A row that is no distribution has no token in its set.

    Raises:
        TypeError, ValueError: see :func:`sample_tokens`.
    """
    parameters = SamplingParameters(temperature, top_k, top_p, min_p)
    check_draw(logits, keys, parameters)
    chosen = choose(backend, logits)
    keys = keys if keys.dtype == torch.int64 else keys.view(torch.int64)
    with torch.no_grad():
        return _run(logits, keys, parameters, chosen)
