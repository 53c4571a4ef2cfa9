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


COUNTS = tuple(
    Count(f"{call}, in Python", "µs", 1e6 * GOAL_SECONDS, partial(_microseconds, call), exact=False)
    for call in (
        *("token_logprobs", "gae", "ppo_loss", "ppo_loss, backward", "kl_penalty"),
        *("kl_penalty, backward", "kl_rewards", "full_kl", "masked_whiten"),
    )
)
