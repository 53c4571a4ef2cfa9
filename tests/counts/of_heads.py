"""The fused head at 4096 × 4096 × 131072 in bf16: bytes beside its products, memory, and the time
that both make of an H100."""

from __future__ import annotations

from functools import cache, partial

from benchmarks.ops.head_counts import GIB, HeadCounts, counted
from benchmarks.ops.record import MIB
from benchmarks.predict import H100
from tests.counts.record import Count

SHAPE = 4096, 4096, 131072


@cache
def _counts(op: str) -> HeadCounts:
    return counted(op, *SHAPE)


def _beside(op: str) -> float:
    return _counts(op).beside / GIB


def _peak(op: str) -> float:
    return _counts(op).peak / MIB


def _time(op: str) -> float:
    found = _counts(op)
    return 1e3 * found.seconds(H100.bytes_per_second, H100.flops_per_second)


COUNTS = (
    Count("linear_logprobs, beside its products", "GiB", 3.3, partial(_beside, "linear_logprobs")),
    Count("linear_logprobs, above in- and outputs", "MiB", 600, partial(_peak, "linear_logprobs")),
    Count("linear_logprobs, estimated on an H100", "ms", 26, partial(_time, "linear_logprobs")),
    Count("linear_ppo_loss, beside its products", "GiB", 3.3, partial(_beside, "linear_ppo_loss")),
    Count(
        "linear_ppo_loss, estimated on an H100",
        "ms",
        20.5,
        partial(_time, "linear_ppo_loss"),
    ),
)
