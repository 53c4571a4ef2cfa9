"""What `python -m benchmarks sft` and `dpo` have in common: a fastrl trainer beside TRL's.

Two workers (`training_worker.py`), one per library, hold a trainer on the same weights and data.
First a gate: both train the same epoch, and the losses of its steps must agree, or there are no
figures. Then each says what memory a step takes, and they take turns, fastrl, peer, fastrl, peer,
…, one epoch at a time, so that a machine that slows down slows both.

A run of two workers: {"difference": largest relative one of the losses,
"sides": {"fastrl" and "peer": {"seconds": [of an epoch], "peak", "beyond_gradients": bytes}}}.
The result file: the header of `record.py`,
{"versions": {"fastrl": {...}, "peer": {...}}, "peer", "shape": {...}, a unit: how many an epoch
has}, and the run; where there are references, "references": [a run with "reference", ...].
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.before import record, timing
from benchmarks.before.measure import size
from benchmarks.before.peer import Uninstallable, peer_python
from benchmarks.before.worker import Worker, WorkerError

Result = dict[str, Any]
Run = dict[str, Any]

SCRIPT = Path(__file__).with_name("training_worker.py")
PEER = "trl==1.16.0"
RELATIVE = 1e-4  # of two losses
SPEEDUP, MEMORY = 1.3, 0.5  # the goals on CPUs: at least, at most


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT-2 and data: lengths in tokens, everything in fp32. An epoch has ten steps."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    vocabulary: int = 50257
    longest: int = 128
    batch: int = 8
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, and how it is spoken of.

    Attributes:
        name: of the command, of the workers' side and in the result file.
        title, heading: in a caption, and above it.
        shape, quick: what is measured, and a toy.
        unit, count: what an epoch is counted in, and how many it has.
        data: half a sentence on an epoch's data.
        references: ways of keeping the reference, where there is one; the first has goals.
        legend: what they are.
    """

    name: str
    title: str
    heading: str
    shape: type[Shape]
    quick: Shape
    unit: str
    count: Callable[[dict[str, Any]], int]
    data: Callable[[dict[str, Any]], str]
    references: tuple[str, ...] = ()
    legend: str = ""

    def arguments(self) -> list[list[str]]:
        """Of the workers, for each run."""
        common = ["--training", self.name]
        return [[*common, "--reference", name] for name in self.references] or [common]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks sft` and `dpo`."""
    parser.add_argument("--peer", choices=(PEER,), default=PEER)
    parser.add_argument(
        "--peer-python",
        type=Path,
        metavar="PATH",
        help="an interpreter that has the peer; without it, this one where it does, or else one is "
        "made under .benchmarks/",
    )
    parser.add_argument("--repeats", type=int, default=7, help="counted epochs of each side")
    parser.add_argument("--threads", type=int, metavar="N", help="of each side; default: all cores")
    parser.add_argument("--quick", action="store_true", help="a toy shape, twice; nothing is saved")
    parser.add_argument("--output", type=Path, metavar="PATH", help="the result file")
    parser.add_argument("--no-save", action="store_true", help="write no result file")


def run(training: Training, args: argparse.Namespace) -> int:
    """Gate, measure, print, save. 1 where the losses differ or a worker fails."""
    shape = training.quick if args.quick else training.shape()
    if args.threads:
        shape = dataclasses.replace(shape, threads=args.threads)
    try:
        result = measure(training, args, shape)
    except Uninstallable as why:
        print(why, file=sys.stderr)
        return 2
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    if result is None:
        return 1
    print(render(training, result))
    if not (args.no_save or args.quick):
        print(f"\nsaved as {record.save(result, args.output)}")
    return 0


def measure(training: Training, args: argparse.Namespace, shape: Shape) -> Result | None:
    """The result of all runs; None where a gate is red."""
    python = args.peer_python or peer_python(args.peer)
    header = record.header(training.name)
    record.warn_if_busy(header["machine"])
    versions, found = {}, []
    for arguments in training.arguments():
        with contextlib.ExitStack() as stack:
            workers = {
                side: stack.enter_context(
                    Worker(path, implementation, shape, *arguments, script=SCRIPT)
                )
                for side, path, implementation in (
                    ("fastrl", Path(sys.executable), "fastrl"),
                    ("peer", python, args.peer.split("==")[0]),
                )
            }
            versions = {side: worker.ready() for side, worker in workers.items()}
            entry = measure_run(workers, args)
        if entry is None:
            return None
        found.append(entry)
    if training.references:
        named = zip(training.references, found, strict=True)
        runs = {"references": [{"reference": name, **entry} for name, entry in named]}
    else:
        (runs,) = found
    return {
        **header,
        "versions": versions,
        "peer": args.peer,
        "shape": vars(shape),
        training.unit: training.count(vars(shape)),
        **runs,
    }


def measure_run(workers: dict[str, Worker], args: argparse.Namespace) -> Run | None:
    """What two workers say that wait to begin; None where the gate is red."""
    losses = [worker.ask("check")["losses"] for worker in workers.values()]
    wrong = list(disagreements(*losses))
    if wrong:
        print(f"no figures: fastrl and {args.peer} disagree\n" + "\n".join(wrong))
        return None
    print(f"fastrl and {args.peer} agree on the losses of {len(losses[0])} steps", flush=True)
    sides = {side: {"seconds": [], **w.ask("memory")} for side, w in workers.items()}
    for turn in range((2 if args.quick else args.repeats) + 1):
        for side, worker in workers.items():
            seconds = worker.ask("epoch")["seconds"]
            if turn:  # the first one warms up
                sides[side]["seconds"].append(seconds)
    difference = max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(*losses, strict=True))
    return {"difference": difference, "sides": sides}


def disagreements(ours: list[float], theirs: list[float]) -> Iterator[str]:
    """A line for each step whose losses are apart, or that one of the sides lacks."""
    if len(ours) != len(theirs) or not ours:
        yield f"fastrl made {len(ours)} steps, the peer {len(theirs)}"
        return
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if not math.isclose(found, expected, rel_tol=0, abs_tol=RELATIVE * abs(expected)):
            yield f"step {step}: the loss is {found:.7g}, the peer's {expected:.7g}"


def runs_of(result: Result) -> list[Run]:
    """One for each reference; else the result itself."""
    return result.get("references", [result])


def speedups(run: Run) -> list[float]:
    """The rate of fastrl over the peer's, epoch by epoch."""
    sides = run["sides"]
    return timing.ratios(sides["peer"]["seconds"], sides["fastrl"]["seconds"])


def share_of_memory(run: Run) -> float:
    """Fastrl's peak over the peer's."""
    return run["sides"]["fastrl"]["peak"] / run["sides"]["peer"]["peak"]


def verdicts(training: Training, result: Result) -> list[tuple[str, bool]]:
    """Each goal in words, and whether it is reached, in the order of the figures; none on a GPU."""
    if "accelerator" in result["machine"]:
        return []
    first = runs_of(result)[0]
    faster = statistics.median(speedups(first))
    return [
        (f"≥ {SPEEDUP:g}× the {training.unit}/s", faster >= SPEEDUP),
        (f"≤ {MEMORY:g}× the memory", share_of_memory(first) <= MEMORY),
    ]


def figures(training: Training, result: Result) -> list[tuple[str, str, str, str]]:
    """What, fastrl's, the peer's, and their ratio."""
    rows = []
    for run in runs_of(result):
        sides, count = run["sides"], result[training.unit]
        rates = [[count / s for s in sides[name]["seconds"]] for name in ("fastrl", "peer")]
        digits = ".0f" if min(map(min, rates)) >= 100 else ".3g"
        which = f"; reference {run['reference']}" if "reference" in run else ""
        rows.append(
            (
                f"{training.unit} per second of training{which}",
                *(timing.spread(rate, digits) for rate in rates),
                timing.spread(speedups(run), ".2f"),
            )
        )
        for name, title in (
            ("peak", "peak memory above weights"),
            ("beyond_gradients", "peak memory above weights and gradients"),
        ):
            ours, theirs = (sides[side][name] for side in ("fastrl", "peer"))
            rows.append((f"{title}{which}", size(ours), size(theirs), f"{ours / theirs:.2f}"))
    return rows


def render(training: Training, result: Result) -> str:
    """The table for a terminal: medians, and their range in brackets."""
    machine, shape, peer = result["machine"], result["shape"], result["peer"]
    where = machine.get("accelerator", f"{machine['cores']} cores, threads: {shape['threads']}")
    lines = [
        describe(training, shape),
        f"on {machine['cpu']} ({where}); "
        + "; ".join(
            f"{side}: " + ", ".join(f"{name} {v}" for name, v in versions.items())
            for side, versions in result["versions"].items()
        ),
        f"losses differ by {difference(result):.1e} at most",
        "",
        f"{'':<60}{'fastrl':>22}{peer:>22}{'fastrl / ' + peer:>24}",
    ]
    lines += [f"{a:<60}{b:>22}{c:>22}{d:>24}" for a, b, c, d in figures(training, result)]
    lines += [
        f"goal {goal}: {'reached' if reached else 'MISSED'}"
        for goal, reached in verdicts(training, result)
    ]
    return "\n".join(lines)


def difference(result: Result) -> float:
    """The largest relative one of all losses."""
    return max(run["difference"] for run in runs_of(result))


def describe(training: Training, shape: dict[str, Any]) -> str:
    """One sentence on what an epoch is."""
    return (
        f"GPT-2 of {shape['layers']} layers, width {shape['width']}, {shape['heads']} heads, "
        f"vocabulary {shape['vocabulary']}, fp32: {training.data(shape)}, AdamW, no checkpointing"
    )


def caption(training: Training, result: Result, processor: str) -> str:
    """What was measured, where, when, and by which command."""
    epochs = len(runs_of(result)[0]["sides"]["peer"]["seconds"])
    return (
        f"{training.title} against {result['peer']} on {processor}, "
        f"{describe(training, result['shape'])} ({epochs} paired epochs, {result['date']}, commit "
        f"{result['commit']}; losses within {difference(result):.0e}; `python -m benchmarks "
        f"{training.name} --peer {result['peer']}`):"
    )


def table(training: Training, result: Result) -> str:
    """The figures for Markdown, each beside its goal."""
    peer = result["peer"]
    rows = [
        f"| training step | fastrl | {peer} | fastrl / {peer} | goal |",
        "| --- | --: | --: | --: | --- |",
    ]
    goals = [f"{g}: {'reached' if ok else '**missed**'}" for g, ok in verdicts(training, result)]
    for i, row in enumerate(figures(training, result)):
        rows.append("| " + " | ".join([*row, goals[i] if i < len(goals) else ""]) + " |")
    return "\n".join([*rows, "", training.legend]).rstrip()
