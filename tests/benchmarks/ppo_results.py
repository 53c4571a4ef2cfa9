"""Results of the PPO benchmark as files have them, old ones and new ones."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.before import ppo_cases, ppo_tables

SECONDS = {"fastrl": [1.0, 2.0, 4.0], "peer": [3.0, 4.0, 4.0], "ratio": 2.0}
OLD_SHAPE = {
    "layers": 2, "width": 32, "heads": 4, "vocabulary": 503, "batch": 4, "query": 8,
    "response": 8, "mini_batch": 2, "epochs": 4, "threads": 2,
}  # fmt: skip


def a_result(**changes: object) -> dict:
    """As files were before there was a choice of references."""
    return {
        "benchmark": "ppo",
        "date": "2025-01-02",
        "commit": "abc1234",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8},
        "versions": {"fastrl": {"torch": "2"}, "peer": {"torch": "2"}},
        "peer": "trl==0.11.4",
        "shape": OLD_SHAPE,
        "phases": dict.fromkeys(ppo_tables.PHASES, SECONDS),
    } | changes


def an_entry(reference: str = "copy", **changes: object) -> dict:
    """With figures: fastrl is the faster by 2."""
    phases = dict.fromkeys(ppo_tables.PHASES, SECONDS)
    found = {"reference": reference, "absent": None, "red": None, "trained": 1234}
    return found | {"phases": phases} | changes


def without_figures(reference: str, **why: str) -> dict:
    return an_entry(reference, phases={}, trained=0, **why)


def a_result_of(*entries: dict) -> dict:
    """As files were before there was a choice of shapes."""
    found = a_result(references=list(entries))
    del found["phases"]
    return found


def a_case(shape: ppo_cases.Shape, *entries: dict, goal: ppo_cases.Goal | None = None) -> dict:
    return {
        "shape": vars(shape),
        "goal": asdict(goal) if goal else None,
        "references": list(entries) or [an_entry()],
    }


def a_result_of_cases(*cases: dict, gpu: str | None = None, **changes: object) -> dict:
    """As files are."""
    found = a_result(cases=list(cases), threads=2, left={})
    del found["phases"], found["shape"]
    if gpu:
        found["machine"] = found["machine"] | {"accelerator": gpu}
    return found | changes
