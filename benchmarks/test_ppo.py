"""A whole PPO iteration of fastrl beside TRL's classic trainer, or beside plain PyTorch.

Two workers, one per library, hold a trainer on the same weights and queries. First a gate, in fp32
and with plain gradient descent: both make the same two steps, and their statistics must agree.
Where they differ by more than rounding, a PPO in float64 makes the same steps and decides: fastrl
must be within rounding of it, or nearer to it than the peer. What is timed has Adam, which turns
rounding into whole steps, and may be in bf16: its statistics must be finite, and their difference
is noted.

Where lengths are log-normal, a step on given responses is timed, and the positions are counted that
the policy runs for each token, without padding 1.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from benchmarks import models, worker
from benchmarks.cases import EAGER, OURS, Case, Goal
from benchmarks.environments import TRL_CLASSIC
from benchmarks.harness import Measurement, Run
from benchmarks.models import Model
from benchmarks.products import of_head, roofs, without_bf16
from benchmarks.sides.ppo import MOST
from benchmarks.worker import Absent, Worker, asking

# What both sides do for each way of keeping the reference.
REFERENCES = {
    "copy": "a frozen copy of the policy, on both sides",
    "adapter": "a LoRA of rank 8 on the attention's input projections is trained, the reference is "
    "its base, on both sides",
    "trunk": "embeddings, the head that is tied to them and the bottom half of the layers are "
    "frozen, on both sides; fastrl stores them once and step() runs them once per sample, the peer "
    "stores them twice and runs them in every forward",
    "offload": "fastrl's copy is in host memory; the peer's on the device",
    "none": "the KL coefficient is 0; fastrl has no reference, the peer keeps a copy",
}
POSITIONS = "positions per token, {}"  # in a phase
UNKNOWN = {"none": {"objective/kl"}}  # statistics that are NaN without a reference

# As in the golden tests. By gradient descent, two steps in fp32 are within 1e-5 of float64.
RELATIVE, ABSOLUTE = 1e-3, 1e-5
AT_THE_EDGE = 5e-4  # of all tokens: rounding puts their ratio on either side of where it is clipped

Statistics = list[dict[str, float]]  # of each step


@dataclasses.dataclass(frozen=True)
class Iteration(worker.WorkerShape):
    """A model, a batch in tokens, and how the reference is kept. In bf16 the model runs under
    autocast, over weights in fp32 unless they are in bf16 too. With a `sigma`, lengths are
    log-normal with that σ of the logarithm, and `query` and `response` are their medians."""

    model: Model
    batch: int
    query: int
    response: int
    mini_batch: int
    epochs: int = 4
    reference: str = "copy"
    weights: str = "fp32"  # without adapters, which are in fp32
    sigma: float = 0.0

    @property
    def exact(self) -> Iteration:
        """What the gate compares: a smaller batch, in fp32; of weights in bf16, two layers."""
        model = dataclasses.replace(self.model, dtype="fp32")
        if self.weights != "fp32":
            model = dataclasses.replace(model, layers=2)
        batch, mini_batch = min(self.batch, 8), min(self.mini_batch, 4)
        changed = {"batch": batch, "mini_batch": mini_batch, "weights": "fp32"}
        return dataclasses.replace(self, model=model, **changed)

    @property
    def label(self) -> str:
        """What distinguishes it among those of its model."""
        if self.sigma:
            return f"log-normal lengths, mini-batches of {self.mini_batch}, {self.model.dtype}"
        return f"reference {self.reference}, {self.model.dtype}"

    @property
    def what(self) -> str:
        """An iteration in one sentence."""
        precision = {
            "fp32": "fp32",
            "bf16": "bf16 by autocast over fp32 weights, which both sides' generate is run under"
            if self.weights == "fp32"
            else "weights in bf16, and autocast",
        }[self.model.dtype]
        lengths = f"{self.query} + {self.response} tokens"
        if self.sigma:
            lengths += f" (medians of log-normal lengths, σ {self.sigma:g}, at most {MOST} times "
            lengths += "as many; the responses are given)"
        return (
            f"{self.model}, {precision}: {self.batch} samples of {lengths}, mini-batches of "
            f"{self.mini_batch}, {self.epochs} epochs; reference {self.reference}: "
            f"{REFERENCES[self.reference]}"
        )


_LARGE = {"batch": 64, "query": 128, "response": 256, "mini_batch": 8}
_TOYS = (
    Iteration(models.TOY, 4, 8, 8, 2),
    Iteration(models.TOY_QWEN, 4, 8, 8, 2),
    Iteration(models.TOY, 4, 4, 6, 2, sigma=1.0),
)


# Lengths as those of prompts and responses are: some are many times as long as most.
RAGGED = Iteration(models.SMALL, 16, 12, 24, 8, 2, sigma=1.0)
_RAGGED_AND_LARGER = dataclasses.replace(RAGGED, mini_batch=16)
_UNPADDED = (
    Goal("speedup", 6.0, against=TRL_CLASSIC),
    *(Goal(POSITIONS.format(phase), 1.05) for phase in ("scores", "update")),
)
# The shape of a model that people train.
REAL = Iteration(models.QWEN, 8, 64, 32, 4, 2, "adapter", "bf16")


def cases(run: Run) -> list[Case]:
    """Each model with each reference, the quickest first; all references with `full`."""
    peer = peer_of(run)
    if run.toy:
        found: tuple[tuple[Iteration, float, Goal | None], ...] = tuple(
            (w, 1.0, None) for w in _TOYS
        )
    elif run.device.type == "cpu":
        sizes = {"batch": 16, "query": 16, "response": 48, "mini_batch": 4}
        half = dataclasses.replace(models.SMALL, dtype="bf16")
        found = (
            (Iteration(models.SMALL, **sizes), 200.0, Goal("speedup", 2.7, against=peer)),
            (Iteration(half, **sizes), 200.0, Goal("speedup", 3.2, against=peer)),
        )
    else:
        goal = Goal("speedup", 5.0, ("nvidia", "amd"), against=peer)
        found = (
            (Iteration(models.GPT2, **_LARGE), 180.0, goal),
            (Iteration(models.QWEN, **_LARGE), 420.0, goal),
        )
    references = ["copy"]
    if peer == TRL_CLASSIC:
        references += ["adapter", "trunk", *(["offload", "none"] if run.full else [])]
    iterations = [
        (dataclasses.replace(work, reference=reference), seconds, _goals(goal, reference))
        for work, seconds, goal in found
        for reference in references
        # On CPUs bf16 is a comparison of its own, of the policy with its copy.
        if reference == "copy" or work.model.dtype == found[0][0].model.dtype
    ]
    if run.device.type == "cpu" and not run.toy:
        iterations.append((RAGGED, 200.0, _UNPADDED))
        if run.full:
            iterations.append((_RAGGED_AND_LARGER, 200.0, _UNPADDED))
        if run.full and peer == TRL_CLASSIC:
            iterations.append((REAL, 600.0, (Goal("speedup", 2.0, against=peer),)))
    return [
        Case(
            "ppo",
            work.model.name,
            work.label,
            work.what,
            work,
            goals=goals,
            main=work not in (REAL, _RAGGED_AND_LARGER),
            seconds=seconds,
        )
        for work, seconds, goals in iterations
    ]


def _goals(goal: Goal | None, reference: str) -> tuple[Goal, ...]:
    return (goal,) if goal and reference == "copy" else ()


def peer_of(run: Run) -> str:
    """TRL on a CPU, and on a GPU's machine where an interpreter is named; else plain PyTorch."""
    if run.toy or not run.peers:
        return EAGER
    return TRL_CLASSIC if run.peer_python or run.device.type == "cpu" else EAGER


def disagreements(
    ours: Statistics,
    theirs: Statistics,
    unknown: Collection[str] = (),
    exact: Statistics | None = None,
) -> Iterator[str]:
    """A line for each of the peer's statistics that fastrl lacks or computes otherwise; those that
    are unknown to fastrl must be NaN.

    Where ``exact``, float64's statistics, are given, fastrl's number may stand if it is within
    rounding of float64's, or nearer to it than the peer's.
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
    fastrl may have none of those that are unknown to it."""
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        for key, value in expected.items():
            if key not in found:
                yield f"step {step}: {key} is missing"
            elif not math.isfinite(found[key]) and key not in unknown:
                yield f"step {step}: {key} is {found[key]}"
            if not math.isfinite(value):
                yield f"step {step}: {key} is {value}, the peer's"


def apart(ours: Statistics, theirs: Statistics, unknown: Collection[str] = ()) -> str:
    """How far KL, losses and entropy of the first step lie apart, where no tolerance holds."""
    told = ("objective/kl", "ppo/loss/policy", "ppo/loss/value", "ppo/policy/entropy")
    found = [key for key in told if key in theirs[0] and key not in unknown]
    differ = [f"{k} {abs(ours[0][k] - theirs[0][k]):.1e} (of {theirs[0][k]:.2g})" for k in found]
    return f"|Δ| of the first step's statistics, of the peer's own: {', '.join(differ)}"


def trained_otherwise(ours: dict[str, int], theirs: dict[str, int]) -> Iterator[str]:
    """A line for each parameter that one side trains and the other does not, or not as large."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield (
                f"{name}: fastrl trains {ours.get(name, 0)} numbers of it, "
                f"the peer {theirs.get(name, 0)}"
            )


def wrong_steps(
    measurement: Measurement, work: Iteration, peer: str, python: Path
) -> Iterator[str]:
    """What is wrong with fastrl's two steps of gradient descent."""
    unknown = UNKNOWN.get(work.reference, set())
    options = {"reference": work.reference, "optimizer": "sgd"}
    with worker.pair(measurement, peer, python, "ppo", work.shape, **options) as sides:
        ours, theirs = (side.ask("check") for side in sides.values())
    yield from trained_otherwise(ours["trained"], theirs["trained"])
    both = ours["statistics"], theirs["statistics"]
    if any(disagreements(*both, unknown)):
        device = measurement.run.device.type
        with Worker(Path(sys.executable), "float64", "ppo", work.shape, device, **options) as judge:
            judge.ready()
            exact = judge.ask("check")["statistics"]
        yield from disagreements(*both, unknown, exact)


def test_iteration(measurement: Measurement, case: Case, run: Run, python: Path) -> None:
    if case.of.model.dtype == "bf16" and (why := without_bf16(run.device)):
        pytest.skip(run.leave(case, why))
    try:
        measure(measurement, case.of, peer_of(run), python)
    except Absent as why:
        pytest.skip(run.leave(case, str(why)))


def measure(measurement: Measurement, work: Iteration, peer: str, python: Path) -> None:
    """Gate, then turns of both sides."""
    unknown, device = UNKNOWN.get(work.reference, set()), measurement.run.device
    if wrong := list(wrong_steps(measurement, work.exact, peer, python)):
        measurement.refuse("by gradient descent in fp32: " + "; ".join(wrong))
    options = {"reference": work.reference}
    with worker.pair(measurement, peer, python, "ppo", work.shape, **options) as workers:
        ours, theirs = checks = [side.ask("check") for side in workers.values()]
        both = ours["statistics"], theirs["statistics"]
        wrong = [*not_finite(*both, unknown)]
        if wrong := [*wrong, *trained_otherwise(ours["trained"], theirs["trained"])]:
            measurement.refuse("; ".join(wrong))
        if work.model.dtype != "fp32":
            measurement.entry["remarks"].append(apart(*both, unknown))
        sides = {name: asking(side) for name, side in workers.items()}
        for side, check in zip(sides.values(), checks, strict=True):
            side.facts = {"trained parameters": sum(check["trained"].values())}
            if work.sigma:
                found = check["positions"].items()
                side.facts |= {POSITIONS.format(phase): number for phase, number in found}
            if check["at rest"] is not None:
                side.memory["at rest"] = check["at rest"]
        products = of_head(work.model, work.mini_batch * work.response)
        measurement.entry["roofs"] = roofs(products, work.model.dtype, device)
        measurement.measure({OURS: sides[OURS], peer: sides[peer]}, 7)
