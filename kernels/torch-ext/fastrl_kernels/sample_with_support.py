"""Draws with the set that each came from: figures over what was kept, and what that was."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ._cpu.row_chunks import FLOOR, exponentials_of
from ._cpu.top_p import tempered
from .argument_types import explains_types
from .checks import check_device
from .dispatch import choose
from .race import winners, winners_among
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
from .token_sets import counts_of, ids_of, packed, restrict_to_words_, unpacked, within
from .types import LOWEST, SampledTokens, SamplingParameters

_INF = math.inf
# Of sets with at most this share of the vocabulary the tokens are gathered, a few hundred
# operations for thousands; of others all logits are worked on.
_SHORT = 1 / 64


def _sample_rows(
    x: Tensor,
    p: SamplingParameters,
    memory: Tensor,
    draw: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws columns of fp32 logits [r, C] in working memory [3, r, parts, P], by what ``draw``
    makes of the parts' sums [r, parts] and of the weights: columns [r], -1 in rows that are no
    distribution, the other fields of ``SampledTokens`` [r, 5], and which columns are in the set,
    bool, in whole words: [r, ⌈C/32⌉·32]."""
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
        lowest = lowest_kept(x, weights, row_max, p, kept).clamp_(min=LOWEST)
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
    column = raced(x, greedy, lambda: draw(sums, memory[1]))
    at_one = x.gather(-1, column) - row_max
    at = tempered(at_one.clone(), p.temperature) - log_sum
    d.clamp_(min=FLOOR)
    # Over the parts as they are, as ``sample_tokens`` adds up: for the same bits.
    mean = padded[0].mul_(padded[1]).sum(-1, keepdim=True) / total
    if isinstance(p.temperature, Tensor) or p.temperature != 1.0:
        exponentials_of(torch.sub(x, row_max, out=d), d).mul_(kept)
        log_sum_t1 = padded[0].sum(-1, keepdim=True).log()
    sound = (total > 0) & (row_max > -_INF)
    drawn = of_sound(sound, column, [at, at_one - log_sum_t1, at, cutoff, log_sum - mean])
    members = x.new_zeros(len(x), -(-vocabulary // 32) * 32, dtype=torch.bool)
    torch.ge(x, torch.where(sound, lowest, _INF), out=members[:, :vocabulary])
    return *drawn, members


def _of_all(
    x: Tensor, keys: Tensor, p: SamplingParameters, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [r], numbers [r, 5] and words [r, ⌈V/32⌉] of draws from logits [r, V]."""
    tokens, numbers, kept = _sample_rows(x, p, memory, lambda sums, w: winners(sums, w, keys))
    return tokens, numbers, packed(kept)


def _of_some(
    x: Tensor, ids: Tensor, keys: Tensor, p: SamplingParameters, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of logits [r, K] of some tokens: ``ids`` [r, K], in ascending order."""

    def draw(_sums: Tensor, weights: Tensor) -> Tensor:
        return torch.searchsorted(ids, winners_among(weights[:, 0], ids, keys, vocabulary))

    memory = x.new_empty(3, len(x), 1, x.shape[1])
    columns, numbers, kept = _sample_rows(x, p, memory, draw)
    tokens = ids.gather(1, columns.clamp(min=0)[:, None])[:, 0]
    # Of distinct tokens: the sum of their bits has all of them.
    bits = kept[:, : x.shape[1]].int() << (ids % 32).int()
    words = bits.new_zeros(len(x), -(-vocabulary // 32)).scatter_add_(1, ids // 32, bits)
    return torch.where(columns < 0, -1, tokens), numbers, words


def _of_allowed(
    logits: Tensor, keys: Tensor, p: SamplingParameters, allowed: Tensor
) -> tuple[SampledTokens, Tensor]:
    """Draws from the logits [N, V] of the tokens that words [N, ⌈V/32⌉] allow, on a CPU."""
    n, vocabulary = logits.shape
    allowed = within(allowed, vocabulary)
    sizes = counts_of(allowed)
    tokens, words = torch.empty_like(keys), torch.zeros_like(allowed)
    numbers = torch.empty(n, 5)
    # How a row is worked on depends on that row alone, and so does what it is to the bit.
    room = torch.where(
        sizes <= _SHORT * vocabulary, 8 ** sizes.clamp(min=1).log2().div(3).ceil(), 0
    )
    for k in room.unique().int().tolist():
        rows = (room == k).nonzero()[:, 0]
        chosen = p.of(rows)
        if k:
            named = torch.arange(k) < sizes[rows, None]
            ids = torch.full((len(rows), k), vocabulary - 1)
            ids[named] = ids_of(allowed[rows]).long()
            x = logits[rows[:, None], ids].float().masked_fill_(~named, -_INF)
            columns = chosen.rows(slice(None))
            found = _of_some(x, ids, keys[rows], columns, vocabulary)
            tokens[rows], numbers[rows], words[rows] = found
        else:
            x = restrict_to_words_(logits[rows].float(), allowed[rows])
            if x.sum().isnan():
                x.masked_fill_(~unpacked(allowed[rows], vocabulary), -_INF)
            drawn, words[rows] = in_chunks(_of_all, x, keys[rows], chosen, buffers=3)
            tokens[rows], numbers[rows] = drawn.tokens, torch.stack(drawn[1:], -1)
    return SampledTokens(tokens, *numbers.unbind(-1)), words


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
    logits: Tensor, keys: Tensor, p: SamplingParameters, allowed: Tensor | None, backend: str
) -> tuple[SampledTokens, Tensor]:
    # In traced code two draws are two operators, and need none of their own.
    in_operators = backend == "triton" or torch.compiler.is_compiling()
    if logits.device.type == "cpu" and not in_operators:
        check_values(p)
        if allowed is not None:
            return _of_allowed(logits, keys, p, allowed)
    if allowed is not None:
        logits = logits.masked_fill(~unpacked(allowed, logits.shape[1]), -_INF)
    if in_operators:
        return _by_two_draws(logits, keys, p, backend)
    return in_chunks(_of_all, logits, keys, p, buffers=3)


def _check_allowed(allowed: Tensor, logits: Tensor) -> None:
    n, vocabulary = logits.shape
    if allowed.dtype != torch.int32:
        raise TypeError(f"allowed must be int32, bits of tokens, got {allowed.dtype}")
    if allowed.shape != (n, -(-vocabulary // 32)):
        raise ValueError(
            f"allowed has shape {tuple(allowed.shape)}: for logits [{n}, {vocabulary}] it must be "
            f"[{n}, {-(-vocabulary // 32)}]"
        )
    check_device("allowed", allowed, "logits", logits)


@explains_types
def sample_with_support(
    logits: Tensor,
    keys: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    allowed: Tensor | None = None,
    backend: str = "auto",
) -> tuple[SampledTokens, Tensor]:
    """Draws as :func:`sample_tokens` does, and returns the set S that each token came from.

    What it returns is of the distribution that was drawn from, q = p/Σ_{v in S} p_v in S and 0
    elsewhere, with p = softmax(z/T):

        log q of the token, its log-probability at T = 1 over the same S, and H(q).

    S holds what top-k, top-p and min-p keep of the logits that are not -inf, and that are allowed;
    of greedy rows (T = 0) all of these. The token is that of ``sample_tokens`` with the same key;
    on a GPU, and where few tokens are allowed, one in 10,000 may be another one of S, as between
    backends.

    Args:
        logits, keys, temperature, top_k, top_p, min_p, backend: see :func:`sample_tokens`.
        allowed: [N, ⌈V/32⌉] int32, the tokens that are allowed as bits, the token 32·word + i as
            the bit i of a word, such as grammars have them; bits from V on are ignored. Logits of
            others count as -inf, whatever they are. On a CPU, rows that allow few tokens take the
            time of these, not of all.

    Returns:
        ``SampledTokens``, whose ``logprobs``, ``logprobs_t1`` and ``entropies`` are over S, and
        whose ``truncated_logprobs`` equal ``logprobs``; and S as bits, words [N, ⌈V/32⌉] int32,
        see :meth:`TokenSets.of_words`. A row that is no distribution has no token in its set.

    Raises:
        TypeError, ValueError: see :func:`sample_tokens`.
    """
    parameters = SamplingParameters(temperature, top_k, top_p, min_p)
    check_draw(logits, keys, parameters)
    if allowed is not None:
        _check_allowed(allowed, logits)
    chosen = choose(backend, logits)
    keys = keys if keys.dtype == torch.int64 else keys.view(torch.int64)
    with torch.no_grad():
        return _run(logits, keys, parameters, allowed, chosen)
