"""`python -m benchmarks sft`: fastrl's SFTTrainer beside TRL's.

Two workers (`sft_worker.py`), one per library, hold a trainer on the same weights and texts. First
a gate: both train the same epoch, and the losses of its steps must agree, or there are no figures.
Then each says what memory a step takes, and they take turns, fastrl, peer, fastrl, peer, …, one
epoch at a time, so that a machine that slows down slows both.

The result file: the header of `record.py`, and
{"versions": {"fastrl": {...}, "peer": {...}}, "peer", "shape": {...}, "tokens": of an epoch,
 "difference": largest relative one of the losses,
 "sides": {"fastrl" and "peer": {"seconds": [of an epoch], "peak", "beyond_gradients": bytes}}}
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import record, sft_worker, timing
from benchmarks.measure import size
from benchmarks.peer import peer_python
from benchmarks.ppo import Worker, WorkerError

Result = dict[str, Any]

SCRIPT = Path(__file__).with_name("sft_worker.py")
PEER = "trl==1.16.0"
RELATIVE = 1e-4  # of two losses
SPEEDUP, MEMORY = 1.3, 0.5  # the goals on CPUs: at least, at most


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT-2 and texts: lengths in tokens, everything in fp32. An epoch has ten steps."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    vocabulary: int = 50257
    texts: int = 80
    shortest: int = 32
    longest: int = 128
    batch: int = 8
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)


QUICK = Shape(layers=2, width=32, vocabulary=503, texts=20, shortest=4, longest=12, batch=2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks sft`."""
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


def run(args: argparse.Namespace) -> int:
    """Gate, measure, print, save. 1 where the losses differ or a worker fails."""
    shape = QUICK if args.quick else Shape()
    if args.threads:
        shape = dataclasses.replace(shape, threads=args.threads)
    try:
        result = measure(args, shape)
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    if result is None:
        return 1
    print(render(result))
    if not (args.no_save or args.quick):
        print(f"\nsaved as {record.save(result, args.output)}")
    return 0


def measure(args: argparse.Namespace, shape: Shape) -> Result | None:
    """The result of one run; None where the gate is red."""
    python = args.peer_python or peer_python(args.peer)
    header = record.header("sft")
    record.warn_if_busy(header["machine"])
    with contextlib.ExitStack() as stack:
        workers = {
            side: stack.enter_context(Worker(path, implementation, shape, script=SCRIPT))
            for side, path, implementation in (
                ("fastrl", Path(sys.executable), "fastrl"),
                ("peer", python, args.peer.split("==")[0]),
            )
        }
        versions = {side: worker.ready() for side, worker in workers.items()}
        losses = [worker.ask("check")["losses"] for worker in workers.values()]
        wrong = list(disagreements(*losses))
        if wrong:
            print(f"no figures: fastrl and {args.peer} disagree\n" + "\n".join(wrong))
            return None
        print(f"fastrl and {args.peer} agree on the losses of {len(losses[0])} steps")
        sides = {side: {"seconds": [], **w.ask("memory")} for side, w in workers.items()}
        for turn in range((2 if args.quick else args.repeats) + 1):
            for side, worker in workers.items():
                seconds = worker.ask("epoch")["seconds"]
                if turn:  # the first one warms up
                    sides[side]["seconds"].append(seconds)
    return {
        **header,
        "versions": versions,
        "peer": args.peer,
        "shape": vars(shape),
        "tokens": sum(map(len, sft_worker.texts(vars(shape)))),
        "difference": max(
            abs(mine - theirs) / abs(theirs) for mine, theirs in zip(*losses, strict=True)
        ),
        "sides": sides,
    }


def disagreements(ours: list[float], theirs: list[float]) -> Iterator[str]:
    """A line for each step whose losses are apart, or that one of the sides lacks."""
    if len(ours) != len(theirs) or not ours:
        yield f"fastrl made {len(ours)} steps, the peer {len(theirs)}"
        return
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if not math.isclose(found, expected, rel_tol=0, abs_tol=RELATIVE * abs(expected)):
            yield f"step {step}: the loss is {found:.7g}, the peer's {expected:.7g}"


def speedups(result: Result) -> list[float]:
    """Tokens per second of fastrl over the peer's, epoch by epoch."""
    sides = result["sides"]
    return timing.ratios(sides["peer"]["seconds"], sides["fastrl"]["seconds"])


def share_of_memory(result: Result) -> float:
    """Fastrl's peak over the peer's."""
    return result["sides"]["fastrl"]["peak"] / result["sides"]["peer"]["peak"]


def verdicts(result: Result) -> list[tuple[str, bool]]:
    """Each goal in words, and whether it is reached; none on a GPU."""
    if "accelerator" in result["machine"]:
        return []
    faster = statistics.median(speedups(result))
    return [
        (f"≥ {SPEEDUP:g}× the tokens/s", faster >= SPEEDUP),
        (f"≤ {MEMORY:g}× the memory", share_of_memory(result) <= MEMORY),
    ]


def figures(result: Result) -> list[tuple[str, str, str, str]]:
    """What, fastrl's, the peer's, and their ratio."""
    sides = result["sides"]
    rates = [[result["tokens"] / s for s in sides[name]["seconds"]] for name in ("fastrl", "peer")]
    rows = [
        (
            "tokens per second of training",
            *(timing.spread(rate, ".0f") for rate in rates),
            timing.spread(speedups(result), ".2f"),
        )
    ]
    for name, title in (
        ("peak", "peak memory above the model"),
        ("beyond_gradients", "peak memory above model and gradients"),
    ):
        ours, theirs = (sides[side][name] for side in ("fastrl", "peer"))
        rows.append((title, size(ours), size(theirs), f"{ours / theirs:.2f}"))
    return rows


def render(result: Result) -> str:
    """The table for a terminal: medians, and their range in brackets."""
    machine, shape, peer = result["machine"], result["shape"], result["peer"]
    where = machine.get("accelerator", f"{machine['cores']} cores, threads: {shape['threads']}")
    lines = [
        describe(shape),
        f"on {machine['cpu']} ({where}); "
        + "; ".join(
            f"{side}: " + ", ".join(f"{name} {v}" for name, v in versions.items())
            for side, versions in result["versions"].items()
        ),
        f"losses differ by {result['difference']:.1e} at most",
        "",
        f"{'':<40}{'fastrl':>22}{peer:>22}{'fastrl / ' + peer:>24}",
    ]
    lines += [f"{a:<40}{b:>22}{c:>22}{d:>24}" for a, b, c, d in figures(result)]
    lines += [f"goal {g}: {'reached' if ok else 'MISSED'}" for g, ok in verdicts(result)]
    return "\n".join(lines)


def describe(shape: dict[str, Any]) -> str:
    """One sentence on what an epoch is."""
    return (
        f"GPT-2 of {shape['layers']} layers, width {shape['width']}, {shape['heads']} heads, "
        f"vocabulary {shape['vocabulary']}, fp32: {shape['texts']} texts of {shape['shortest']} "
        f"to {shape['longest']} tokens in batches of {shape['batch']}, AdamW, no checkpointing"
    )


def caption(result: Result, processor: str) -> str:
    """What was measured, where, when, and by which command."""
    return (
        f"SFT against {result['peer']} on {processor}, {describe(result['shape'])} "
        f"({len(result['sides']['peer']['seconds'])} paired epochs, {result['date']}, commit "
        f"{result['commit']}; losses within {result['difference']:.0e}; `python -m benchmarks sft "
        f"--peer {result['peer']}`):"
    )


def table(result: Result) -> str:
    """The figures for Markdown, each beside its goal."""
    peer = result["peer"]
    rows = [
        f"| training step | fastrl | {peer} | fastrl / {peer} | goal |",
        "| --- | --: | --: | --: | --- |",
    ]
    goals = [f"{g}: {'reached' if ok else '**missed**'}" for g, ok in verdicts(result)]
    for i, row in enumerate(figures(result)):
        rows.append("| " + " | ".join([*row, goals[i] if i < len(goals) else ""]) + " |")
    return "\n".join(rows)
