"""A whole PPO iteration on fastrl and on TRL's classic trainer, or on plain PyTorch.

Two workers, one per library and each in its own environment, hold a trainer on the same weights
and queries. First a gate, in fp32 and with plain gradient descent: both make the same two steps,
and their statistics must agree. Where they differ by more than rounding, a PPO in float64 makes the
same steps and decides: fastrl must be within rounding of it, or nearer to it than the peer. What is
timed has Adam, which makes whole steps of rounding, and may be in bf16: there the statistics must
be finite, and how far they lie apart is told.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import worker
from benchmarks.harness import EAGER, OURS, Case, Goal, Measurement, Run, Side
from benchmarks.peers import TRL_CLASSIC
from benchmarks.worker import Absent, Model, Worker

# What both sides do for each way of keeping the reference.
REFERENCES = {
    "copy": "a frozen copy of the policy, on both sides",
    "adapter": "a LoRA of rank 8 on the attention's input projections is trained, the reference is "
    "its base, on both sides",
    "trunk": "embeddings, the head that is tied to them and the bottom half of the layers are "
    "frozen, on both sides; fastrl stores them once and step() runs them once per sample, the peer "
    "stores them twice and runs them in every forward",
    "offload": "fastrl's copy is in host memory; the peer keeps one as ever",
    "none": "the KL coefficient is 0; fastrl has no reference, the peer keeps a copy",
}
UNKNOWN = {"none": {"objective/kl"}}  # to fastrl, without a reference


# --- cases ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, a batch in tokens, and how the reference is kept. The model's weights are fp32; in
    bf16 it runs under autocast."""

    model: Model
    batch: int
    query: int
    response: int
    mini_batch: int
    epochs: int = 4
    reference: str = "copy"

    @property
    def shape(self) -> dict[str, Any]:
        """As workers are told."""
        sizes = {k: v for k, v in vars(self).items() if k not in ("model", "reference")}
        return vars(self.model) | sizes | {"threads": torch.get_num_threads()}

    @property
    def exact(self) -> Work:
        """What is compared number by number before this is timed: a smaller batch, in fp32."""
        model = dataclasses.replace(self.model, dtype="fp32")
        batch, mini_batch = min(self.batch, 8), min(self.mini_batch, 4)
        return dataclasses.replace(self, model=model, batch=batch, mini_batch=mini_batch)

    @property
    def what(self) -> str:
        """One sentence on what an iteration is."""
        precision = {
            "fp32": "fp32",
            "bf16": "bf16 by autocast over fp32 weights, which both sides' generate is run under",
        }[self.model.dtype]
        return (
            f"{worker.described(vars(self.model))}, {precision}: {self.batch} samples of "
            f"{self.query} + {self.response} tokens, mini-batches of {self.mini_batch}, "
            f"{self.epochs} epochs; reference {self.reference}: {REFERENCES[self.reference]}"
        )


_LARGE = {"batch": 64, "query": 128, "response": 256, "mini_batch": 8}
_SMALL = Work(worker.SMALL, 16, 16, 48, 4)
_TOYS = (Work(worker.TOY, 4, 8, 8, 2), Work(worker.TOY_QWEN, 4, 8, 8, 2))


def cases(run: Run) -> list[Case]:
    """Each model with each reference, the quickest first; without `full`, the usual ones."""
    peer = peer_of(run)
    if run.toy:
        found: tuple[tuple[Work, float, Goal | None], ...] = tuple((w, 1.0, None) for w in _TOYS)
    elif run.device.type == "cpu":
        found = ((_SMALL, 200.0, Goal("speedup", 3.0, against=peer)),)
    else:
        goal = Goal("speedup", 5.0, ("nvidia", "amd"), against=peer)
        found = (
            (Work(worker.GPT2, **_LARGE), 180.0, goal),
            (Work(worker.QWEN, **_LARGE), 420.0, goal),
        )
    references = ["copy", *(["adapter", "trunk"] if peer == TRL_CLASSIC and not run.toy else [])]
    references += ["offload", "none"] if run.full and peer == TRL_CLASSIC else []
    return [
        Case(
            "ppo",
            work.model.name,
            f"reference {reference}",
            dataclasses.replace(work, reference=reference).what,
            dataclasses.replace(work, reference=reference),
            goals=(goal,) if goal and reference == "copy" else (),
            seconds=seconds,
        )
        for work, seconds, goal in found
        for reference in references
    ]


def peer_of(run: Run) -> str:
    """TRL where it can be had, on a CPU; on a GPU's machine, where an interpreter is named."""
    if run.toy or not run.peers:
        return EAGER
    return TRL_CLASSIC if run.peer_python or run.device.type == "cpu" else EAGER


# --- the gate ------------------------------------------------------------------------------------

Statistics = list[dict[str, float]]  # of each step

# As the golden tests. By gradient descent, two steps in fp32 are within 1e-5 of float64.
RELATIVE, ABSOLUTE = 1e-3, 1e-5
AT_THE_EDGE = 5e-4  # of all tokens: whose ratio rounding puts on either side of where it is clipped
TOLD = (
    "objective/kl",
    "objective/entropy",
    "ppo/loss/policy",
    "ppo/loss/value",
    "ppo/loss/total",
    "ppo/policy/entropy",
    "ppo/policy/approxkl",
    "ppo/returns/mean",
    "ppo/val/vpred",
)


def disagreements(
    ours: Statistics,
    theirs: Statistics,
    unknown: Collection[str] = (),
    exact: Statistics | None = None,
) -> Iterator[str]:
    """A line for each of the peer's statistics that fastrl lacks or has otherwise; those that are
    unknown to fastrl must be NaN.

    Of two numbers that differ, ``exact``, what float64 gives, decides where it is known: fastrl's
    may stand if it is as near to float64 as rounding leaves it, or nearer than the peer's.
    """
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        for key, value in expected.items():
            if key not in found:
                yield f"step {step}: {key} is missing"
            elif key in unknown:
                if not math.isnan(found[key]):
                    yield f"step {step}: {key} is {found[key]:.7g}, which cannot be known"
            elif not _close(key, found[key], value):
                line = f"step {step}: {key} is {found[key]:.7g}, the peer has {value:.7g}"
                if exact is None:
                    yield line
                    continue
                right = exact[step].get(key, math.nan)
                nearer = abs(found[key] - right) < abs(value - right)
                if not (nearer or _close(key, found[key], right)):
                    yield f"{line}, float64 {right:.7g}"


def _close(key: str, mine: float, right: float) -> bool:
    edge = AT_THE_EDGE if key.endswith("clipfrac") else 0.0
    return abs(mine - right) <= ABSOLUTE + RELATIVE * abs(right) + edge


def not_finite(
    ours: Statistics, theirs: Statistics, unknown: Collection[str] = ()
) -> Iterator[str]:
    """A line for each of the peer's statistics that fastrl lacks, or that is no number on a side;
    those that are unknown to fastrl are looked at on the peer's alone."""
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        for key, value in expected.items():
            if key not in found:
                yield f"step {step}: {key} is missing"
            elif not math.isfinite(found[key]) and key not in unknown:
                yield f"step {step}: {key} is {found[key]}"
            if not math.isfinite(value):
                yield f"step {step}: {key} is {value}, the peer's"


def apart(ours: Statistics, theirs: Statistics, unknown: Collection[str] = ()) -> str:
    """How far the sides' statistics lie apart where they are not held to a tolerance."""
    lines = []
    for key in TOLD:
        if key in theirs[0] and key not in unknown:
            both = [(mine[key], other[key]) for mine, other in zip(ours, theirs, strict=True)]
            difference, of = (
                statistics.fmean(map(abs, column))
                for column in zip(*((a - b, b) for a, b in both), strict=True)
            )
            lines.append(f"{key} {difference:.1e} (of {of:.2g})")
    return f"mean |Δ| of two steps' statistics, of the peer's own: {', '.join(lines)}"


def trained_otherwise(ours: dict[str, int], theirs: dict[str, int]) -> Iterator[str]:
    """A line for each parameter that one side trains and the other does not, or not as large."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield (
                f"{name}: fastrl trains {ours.get(name, 0)} numbers of it, "
                f"the peer {theirs.get(name, 0)}"
            )


def wrong_steps(work: Work, peer: str, python: Path, device: str) -> Iterator[str]:
    """What is wrong with fastrl's two steps of gradient descent; nothing where the sides agree, or
    where float64 decides for fastrl."""
    unknown = UNKNOWN.get(work.reference, set())
    options = {"reference": work.reference, "optimizer": "sgd"}
    with worker.pair(peer, python, "ppo", work.shape, device, **options) as sides:
        ours, theirs = (side.ask("check") for side in sides.values())
    yield from trained_otherwise(ours["trained"], theirs["trained"])
    both = ours["statistics"], theirs["statistics"]
    if any(disagreements(*both, unknown)):
        with Worker(Path(sys.executable), "float64", "ppo", work.shape, device, **options) as judge:
            judge.ready()
            exact = judge.ask("check")["statistics"]
        yield from disagreements(*both, unknown, exact)


# --- the measurement -----------------------------------------------------------------------------


def test_iteration(measurement: Measurement, case: Case, run: Run, python: Path) -> None:
    try:
        measure(measurement, case.of, peer_of(run), python)
    except Absent as why:
        pytest.skip(run.leave(case, str(why)))


def measure(measurement: Measurement, work: Work, peer: str, python: Path) -> None:
    """Gate, then turns of both sides."""
    run, unknown = measurement.run, UNKNOWN.get(work.reference, set())
    device = run.device.type
    measurement.entry["shape"] = work.shape
    if wrong := list(wrong_steps(work.exact, peer, python, device)):
        measurement.refuse("by gradient descent in fp32: " + "; ".join(wrong))
    with worker.pair(peer, python, "ppo", work.shape, device, reference=work.reference) as workers:
        ours, theirs = (side.ask("check") for side in workers.values())
        both = ours["statistics"], theirs["statistics"]
        wrong = list(not_finite(*both, unknown))
        if wrong := [*wrong, *trained_otherwise(ours["trained"], theirs["trained"])]:
            measurement.refuse("; ".join(wrong))
        if work.model.dtype != "fp32":
            measurement.entry["remarks"].append(apart(*both, unknown))
        sides = {}
        for (name, side), check in zip(workers.items(), (ours, theirs), strict=True):
            sides[name] = asking(side)
            sides[name].facts = {"trained parameters": sum(check["trained"].values())}
            if check["at rest"] is not None:
                sides[name].memory["at rest"] = check["at rest"]
        measurement.run.result("ppo")["versions"] |= {n: w.versions for n, w in workers.items()}
        measurement.measure({OURS: sides[OURS], peer: sides[peer]}, 7)


def asking(side: Worker) -> Side:
    """A worker as a side: its turn is an answer; the most memory that one needed is kept."""
    found = Side(dict)

    def turn() -> dict[str, float]:
        answer = side.ask("turn")
        if answer.get("peak") is not None:
            found.memory["peak"] = max(answer["peak"], found.memory.get("peak", 0))
        return answer["seconds"]

    found.turn = turn
    return found
