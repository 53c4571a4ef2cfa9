"""Python's time in front of a launch. Its gate counts functions (tests/kernels/test_launch.py), as
times depend on the machine."""

from __future__ import annotations

from functools import cache, partial

from benchmarks.python_time import GOAL_SECONDS, python_work
from tests.counts.record import Count


@cache
def _seconds() -> dict[str, float]:
    return {work.call: work.seconds for work in python_work()}


def _microseconds(call: str) -> float:
    return 1e6 * _seconds()[call]


_ONE = 1e6 * GOAL_SECONDS
_BACKWARD = _ONE + 6  # with autograd's own
# A draw takes two launches, and three with a cut, of 30 arguments each.
_GOALS = {
    "token_logprobs": _ONE,
    "gae": _ONE,
    "ppo_loss": _ONE,
    "ppo_loss, backward": _BACKWARD,
    "kl_penalty": _ONE,
    "kl_penalty, backward": _BACKWARD,
    "kl_rewards": _ONE,
    "full_kl": _ONE,
    "masked_whiten": _ONE,
    "rms_norm": _ONE,
    "swiglu": _ONE,
    "rotate_and_store": _ONE,
    "decode_attention": _ONE,
    "sample_tokens": _ONE + 12,
    "sample_tokens top_k": _ONE + 24,
}
COUNTS = tuple(
    Count(f"{call}, in Python", "µs", goal, partial(_microseconds, call), exact=False)
    for call, goal in _GOALS.items()
)
