"""`pytest benchmarks`: a small grid of every op under pytest-benchmark, gate first.

`pytest benchmarks --benchmark-json=out.json` keeps the figures. Peers other than eager PyTorch and
roofs are for `python -m benchmarks`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.before import build, cases
from benchmarks.before.measure import EAGER, OURS
from benchmarks.before.problem import FACTOR, errors_of, ratio, results

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def small(op: str) -> cases.Case:
    """An op's main case, with fewer rows."""
    main = cases.grid(op, DEVICE.type)[0]
    if main.steps:
        return dataclasses.replace(main, rows=16, steps=256)
    hidden = 256 if main.hidden else 0
    return dataclasses.replace(main, rows=64, hidden=hidden, vocabulary=50257)


@pytest.mark.parametrize("who", [OURS, EAGER])
@pytest.mark.parametrize("op", cases.available())
def test_speed(benchmark, op: str, who: str) -> None:
    case = small(op)
    problem = build.problem(case, DEVICE)
    calls = {OURS: problem.ours, EAGER: problem.eager}
    judged = errors_of(problem, {name: results(problem, call) for name, call in calls.items()})
    assert ratio(judged[OURS], judged[EAGER]) <= FACTOR, "no speed on a red gate"

    def once() -> None:
        results(problem, calls[who])
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{op} {case.label}"
    benchmark.extra_info.update(op=op, case=case.label, implementation=who)
    benchmark.pedantic(once, rounds=5, warmup_rounds=1)
