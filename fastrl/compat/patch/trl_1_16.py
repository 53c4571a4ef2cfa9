"""Replacements in TRL 1.16: its trainers' fused head, and log-probs and entropies of logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.compat.patch.coverage import entropies, has_one_index, has_rows, is_plain, softmax_dtype
from fastrl.compat.patch.replacement import Calls, Replacement, delegating, small

# Further results of TRL's fused head, and their names in `linear_logprobs`.
_EXTRAS = {
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
_OUTPUTS = ("entropy", *_EXTRAS)


class _ChunkedLogProb:
    """Has the ``apply`` of TRL's autograd function ``_ChunkedLogProbFunction``."""

    def __init__(self, original: Any, calls: Calls) -> None:
        self._original, self._calls = original, calls

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """Returns log-probs, entropies, log Σ p², mean logits and is-top-1, [N] each; all but the
        log-probs are None unless in ``outputs``. The first two have gradients."""
        softcap = final_logit_softcapping
        if not _covers_head(hidden, weight, bias, temperature, softcap, logit_scale):
            self._calls.delegated += 1
            head = (hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale)
            return self._original.apply(*head, outputs)
        self._calls.ours += 1
        entropy = "entropy" in outputs
        extras = tuple(ours for theirs, ours in _EXTRAS.items() if theirs in outputs)
        results = fastrl_kernels.linear_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            entropy=entropy,
            extras=extras,
        )
        results = list(results) if entropy or extras else [results]
        if not entropy:
            results.insert(1, None)
        return (*results[:2], *(results[2] if extras else (None,) * len(_EXTRAS)))


def _covers_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
) -> bool:
    """Whether our op takes a head. It takes no sharded one, which has to be gathered anew for
    backward, as TRL's function does; outside of autocast, none in another dtype than the hidden
    states', for which it raises; and none whose T, softcap or scale is not finite and above 0."""
    one_dtype = hidden.dtype == weight.dtype or torch.is_autocast_enabled(hidden.device.type)
    numbers = (temperature, logit_scale, 1.0 if softcap is None else softcap)
    return (
        one_dtype
        and all(is_plain(x) for x in (hidden, weight, bias) if x is not None)
        and all(isinstance(x, (int, float)) and 0 < x < math.inf for x in numbers)
    )


def _covers(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> bool:
    return (
        has_one_index(logits, index)
        and isinstance(temperature, (int, float))
        and 0 < temperature < math.inf
        and (row_mask is None or row_mask.shape == index.shape)
    )


def _result_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of TRL's results: fp32 from its GPU kernels, elsewhere that of log_softmax."""
    return torch.float32 if logits.device.type in ("cuda", "xpu") else softmax_dtype(logits)


def _counted(row_mask: Tensor | None) -> Tensor | None:
    return None if row_mask is None else row_mask != 0


@delegating(_covers)
def _selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    logprobs = fastrl_kernels.token_logprobs(
        logits, index, temperature=temperature, mask=_counted(row_mask)
    )
    return logprobs.to(_result_dtype(logits))


@delegating(has_rows)
def _entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    return entropies(logits).to(_result_dtype(logits))


@delegating(
    lambda logits, index, entropy_requires_grad=True, *rest, **options: _covers(
        logits, index, *rest, **options
    )
)
def _selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logprobs, entropy = fastrl_kernels.token_logprobs(
        logits, index, temperature=temperature, mask=_counted(row_mask), entropy=True
    )
    dtype = _result_dtype(logits)
    entropy = entropy if entropy_requires_grad else entropy.detach()
    return logprobs.to(dtype), entropy.to(dtype)


def _head_cases(device: torch.device) -> list[tuple[Any, ...]]:
    def case(*rest: Any) -> tuple[Any, ...]:
        hidden = small(5, 4, device=device, requires_grad=True)
        weight = small(7, 4, device=device, step=3, requires_grad=True)
        bias = small(7, device=device, step=4, requires_grad=True)
        return hidden, weight, bias, torch.arange(5, device=device) % 7, *rest

    return [case(0.5, 4, 2.0, 3.0, _OUTPUTS), case(1.0, 32, None, 1.0, ("log_probs", "is_top1"))]


def _logits(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [2, 3, 7], indices and a row mask [2, 3]."""
    logits = small(2, 3, 7, device=device, requires_grad=True)
    index = torch.arange(6, device=device).reshape(2, 3)
    return logits, index, (index != 4).long()


def _selective_cases(device: torch.device) -> list[tuple[Any, ...]]:
    logits, index, mask = _logits(device)
    return [(logits, index), (logits, index, 0.5, mask)]


def _entropy_cases(device: torch.device) -> list[tuple[Any, ...]]:
    return [(_logits(device)[0],)]


def _pair_cases(device: torch.device) -> list[tuple[Any, ...]]:
    logits, index, mask = _logits(device)
    return [(logits, index), (logits, index, False, 0.5, mask)]


_UTILS = "trl.trainer.utils"
REPLACEMENTS = (
    Replacement(_UTILS, "_ChunkedLogProbFunction", "linear_logprobs", _ChunkedLogProb, _head_cases),
    Replacement(
        _UTILS, "selective_log_softmax", "token_logprobs", _selective_log_softmax, _selective_cases
    ),
    Replacement(
        _UTILS, "entropy_from_logits", "token_logprobs", _entropy_from_logits, _entropy_cases
    ),
    Replacement(
        _UTILS,
        "selective_log_softmax_and_entropy",
        "token_logprobs",
        _selective_log_softmax_and_entropy,
        _pair_cases,
    ),
)
