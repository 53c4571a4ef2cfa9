"""The fused head at 4096 × 4096 × 131072 in bf16: bytes beside its products, and memory; a teacher
is twice as wide."""

from functools import cache, partial

from benchmarks.ops.head_counts import GIB, HeadCounts, counted
from benchmarks.ops.record import MIB
from tests.counts.record import Count

SHAPE = 4096, 4096, 131072


@cache
def _counts(op: str) -> HeadCounts:
    return counted(op, *SHAPE, teacher=2 * SHAPE[1] if "kl" in op else 0)


def _beside(op: str) -> float:
    return _counts(op).beside / GIB


def _peak(op: str) -> float:
    return _counts(op).peak / MIB


COUNTS = (
    Count("linear_logprobs, beside its products", "GiB", 3.3, partial(_beside, "linear_logprobs")),
    Count("linear_logprobs, above in- and outputs", "MiB", 600, partial(_peak, "linear_logprobs")),
    Count("linear_ppo_loss, beside its products", "GiB", 3.3, partial(_beside, "linear_ppo_loss")),
    # A pass over each side's logits, one over both, and one that writes the student's, too.
    Count("linear_kl_loss, beside its products", "GiB", 7.4, partial(_beside, "linear_kl_loss")),
)
