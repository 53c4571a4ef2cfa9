"""`python -m benchmarks ppo`: a whole PPO iteration on fastrl and on TRL's classic trainer.

Two workers (`ppo_worker.py`), one per library and each in its own environment, hold a trainer on
the same weights and queries. First a gate: both make the same two steps, and their statistics must
agree, or no time is printed. Then they take turns, fastrl, peer, fastrl, peer, …, one iteration at
a time (generate, then step), so that a machine that slows down slows both. All of it once for each
way of keeping the reference.

The result file: the header of `record.py`, and
{"versions": {"fastrl": {...}, "peer": {...}}, "peer", "shape": {...}, "references": [
 {"reference", "absent": None or why, "red": None or what disagrees, "trained": numbers that the
  optimizer has, "phases": {name: {"fastrl": [seconds], "peer": [seconds],
                                   "ratio": median of peer / fastrl}}}]};
older files have "phases" in place of "references", and mean a copy.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks import record, timing
from benchmarks.peer import peer_python
from benchmarks.timing import spread

WORKER = Path(__file__).with_name("ppo_worker.py")
PHASES = {
    "generate": "generate",
    "forward_pass": "old and reference scores",
    "rewards_advantages": "rewards, advantages",
    "optimize_step": "update",
    "calc_stats": "statistics",
    "step": "step(), whole",
    "iteration": "iteration, whole",
}
# What both sides do for each `--reference`, in words.
REFERENCES = {
    "copy": "a frozen copy of the policy, on both sides",
    "adapter": "a LoRA of rank 8 on c_attn is trained, the reference is its base, on both sides",
    "trunk": "embeddings, the head that is tied to them and the bottom half of the layers are "
    "frozen, on both sides; fastrl stores them once and step() runs them once per sample, the peer "
    "stores them twice and runs them in every forward",
    "offload": "fastrl's copy is in host memory; the peer keeps one as ever",
    "none": "the KL coefficient is 0; fastrl has no reference, the peer keeps a copy",
}
UNKNOWN = {"none": {"objective/kl"}}  # to fastrl, without a reference
RELATIVE, ABSOLUTE = 1e-3, 1e-5  # as the golden tests


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT-2 and a batch: lengths in tokens, everything in fp32."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    vocabulary: int = 50257
    batch: int = 16
    query: int = 16
    response: int = 48
    mini_batch: int = 4
    epochs: int = 4
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)


QUICK = Shape(layers=2, width=32, vocabulary=503, batch=4, query=8, response=8, mini_batch=2)


class WorkerError(RuntimeError):
    """A worker ended instead of answering."""


class Absent(RuntimeError):
    """A side cannot have this reference in its environment."""


class Worker:
    """A trainer in a process of its own; idle, it waits on its input and costs nothing."""

    def __init__(
        self, python: Path, implementation: str, shape: Any, *arguments: str, script: Path = WORKER
    ) -> None:
        self.implementation = implementation
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            [python, script, "--impl", implementation, "--shape", json.dumps(vars(shape))]
            + list(arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=_environment(implementation),
        )

    def ready(self) -> dict[str, str]:
        """Waits for the trainer; the versions it runs on.

        Raises:
            Absent: its environment lacks something.
        """
        answer = self._answer()
        if "absent" in answer:
            raise Absent(f"{self.implementation}: {answer['absent']}")
        return answer["ready"]

    def ask(self, command: str) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        with contextlib.suppress(BrokenPipeError):  # it ended: _answer says how
            print(json.dumps({"command": command}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.log.seek(0)
        raise WorkerError(f"the {self.implementation} worker ended:\n{self.log.read()[-4000:]}")

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.stdin.close()
        if error is not None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks ppo`."""
    parser.add_argument("--peer", choices=("trl==0.11.4",), default="trl==0.11.4")
    parser.add_argument(
        "--peer-python",
        type=Path,
        metavar="PATH",
        help="an interpreter that has the peer; without it, one is made under .benchmarks/",
    )
    parser.add_argument(
        "--reference",
        nargs="+",
        choices=tuple(REFERENCES),
        default=["copy"],
        help="how the reference is kept, one or more: "
        + "; ".join(f"{name} ({what})" for name, what in REFERENCES.items()),
    )
    parser.add_argument("--repeats", type=int, default=7, help="counted iterations of each side")
    parser.add_argument("--threads", type=int, metavar="N", help="of each side; default: all cores")
    parser.add_argument("--quick", action="store_true", help="a toy shape, twice; nothing is saved")
    parser.add_argument("--output", type=Path, metavar="PATH", help="the result file")
    parser.add_argument("--no-save", action="store_true", help="write no result file")


def run(args: argparse.Namespace) -> int:
    """Gate, measure, print, save. 1 where the two libraries disagree or a worker fails."""
    shape = QUICK if args.quick else Shape()
    if args.threads:
        shape = dataclasses.replace(shape, threads=args.threads)
    result = measure(args, shape)
    print(render(result))
    red = any(entry["red"] for entry in result["references"])
    if not (args.no_save or args.quick or (red and not timed(result))):
        print(f"\nsaved as {record.save(result, args.output)}")
    return 1 if red else 0


def measure(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """The result of one run, an entry for each reference."""
    python = args.peer_python or peer_python(args.peer)
    header = record.header("ppo")
    record.warn_if_busy(header["machine"])
    versions: dict[str, dict[str, str]] = {"fastrl": {}, "peer": {}}
    entries = []
    for reference in dict.fromkeys(args.reference):
        entry = {"reference": reference, "absent": None, "red": None, "trained": 0, "phases": {}}
        try:
            entry |= measure_one(args, python, shape, reference, versions)
        except Absent as why:
            entry["absent"] = str(why)
        except WorkerError as error:
            print(error, file=sys.stderr)
            entry["red"] = str(error).strip().splitlines()[-1]
        entries.append(entry)
    body = {"versions": versions, "peer": args.peer, "shape": vars(shape), "references": entries}
    return {**header, **body}


def measure_one(
    args: argparse.Namespace,
    python: Path,
    shape: Shape,
    reference: str,
    versions: dict[str, dict[str, str]],
) -> dict[str, Any]:
    """What is found out with one reference; notes the versions that it ran on.

    Raises:
        Absent: a side cannot have it.
        WorkerError: a side ended.
    """
    with contextlib.ExitStack() as stack:
        fastrl = stack.enter_context(
            Worker(Path(sys.executable), "fastrl", shape, "--reference", reference)
        )
        peer = stack.enter_context(
            Worker(python, args.peer.split("==")[0], shape, "--reference", reference)
        )
        versions["fastrl"] |= fastrl.ready()
        versions["peer"] |= peer.ready()
        ours, theirs = (side.ask("check") for side in (fastrl, peer))
        unknown = UNKNOWN.get(reference, set())
        wrong = [
            *disagreements(ours["statistics"], theirs["statistics"], unknown),
            *trained_otherwise(ours["trained"], theirs["trained"]),
        ]
        if wrong:
            lines = "\n".join(wrong)
            print(f"no figures for {reference}: fastrl and {args.peer} disagree\n{lines}")
            return {"red": "; ".join(wrong)}
        but = "".join(f", {key} aside" for key in sorted(unknown))
        print(f"{reference}: fastrl and {args.peer} agree on every statistic of two steps{but}")
        repeats = 2 if args.quick else args.repeats
        timings = [
            {"fastrl": fastrl.ask("iterate"), "peer": peer.ask("iterate")}
            for _ in _progress(repeats + 1)
        ][1:]  # the first one warms up
    return {
        "trained": sum(ours["trained"].values()),
        "phases": {phase: summary(timings, phase) for phase in PHASES},
    }


def disagreements(
    ours: list[dict[str, float]], theirs: list[dict[str, float]], unknown: Collection[str] = ()
) -> Iterator[str]:
    """A line for each of the peer's statistics that fastrl lacks or has otherwise; those that are
    unknown to fastrl must be NaN."""
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        for key, value in expected.items():
            if key not in found:
                yield f"step {step}: {key} is missing"
            elif key in unknown:
                if not math.isnan(found[key]):
                    yield f"step {step}: {key} is {found[key]:.7g}, which cannot be known"
            elif not math.isclose(
                found[key], value, rel_tol=0, abs_tol=ABSOLUTE + RELATIVE * abs(value)
            ):
                yield f"step {step}: {key} is {found[key]:.7g}, the peer has {value:.7g}"


def trained_otherwise(ours: dict[str, int], theirs: dict[str, int]) -> Iterator[str]:
    """A line for each parameter that one side trains and the other does not, or not as large."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield (
                f"{name}: fastrl trains {ours.get(name, 0)} numbers of it, "
                f"the peer {theirs.get(name, 0)}"
            )


def entries(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A result's references; files from before there were several mean a copy."""
    if "references" in result:
        return result["references"]
    copied = {"reference": "copy", "absent": None, "red": None, "phases": result["phases"]}
    return [copied]


def timed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The references with figures."""
    return [entry for entry in entries(result) if entry["phases"]]


def summary(timings: list[dict[str, Any]], phase: str) -> dict[str, Any]:
    """A phase's seconds on both sides, and the median of the ratios of neighbouring iterations."""
    seconds = {
        side: [timing[side]["seconds"][phase] for timing in timings] for side in ("fastrl", "peer")
    }
    return {**seconds, "ratio": statistics.median(ratios(seconds))}


def ratios(phase: dict[str, Any]) -> list[float]:
    """Peer's seconds over fastrl's, pair by pair."""
    return timing.ratios(phase["peer"], phase["fastrl"])


def render(result: dict[str, Any]) -> str:
    """A table for each reference, for a terminal: medians, and their range in brackets."""
    machine, shape = result["machine"], result["shape"]
    peer = result["peer"]
    where = machine.get("accelerator", f"{machine['cores']} cores, threads: {shape['threads']}")
    lines = [
        f"{describe(shape)}",
        f"on {machine['cpu']} ({where}); "
        + "; ".join(
            f"{side}: " + ", ".join(f"{name} {v}" for name, v in versions.items())
            for side, versions in result["versions"].items()
        ),
    ]
    for entry in entries(result):
        lines += ["", f"reference {entry['reference']}: {REFERENCES[entry['reference']]}"]
        if not entry["phases"]:
            lines.append(why_none(entry))
            continue
        lines.append(
            f"{'seconds, median (range)':<26}{'fastrl':>28}{peer:>28}{peer + ' / fastrl':>28}"
        )
        for name, phase in entry["phases"].items():
            columns = [spread(phase["fastrl"], ".3g"), spread(phase["peer"], ".3g")]
            columns.append(spread(ratios(phase), ".2f"))
            lines.append(f"{PHASES[name]:<26}{columns[0]:>28}{columns[1]:>28}{columns[2]:>28}")
    return "\n".join(lines)


def why_none(entry: dict[str, Any]) -> str:
    """Why a reference has no figures."""
    return f"red: {entry['red']}" if entry["red"] else f"absent: {entry['absent']}"


def describe(shape: dict[str, Any]) -> str:
    """One sentence on what an iteration is."""
    return (
        f"GPT-2 of {shape['layers']} layers, width {shape['width']}, {shape['heads']} heads, "
        f"vocabulary {shape['vocabulary']}, fp32: {shape['batch']} samples of {shape['query']} + "
        f"{shape['response']} tokens, mini-batches of {shape['mini_batch']}, "
        f"{shape['epochs']} epochs"
    )


def _progress(rounds: int) -> Iterator[int]:
    for i in range(rounds):
        if sys.stderr.isatty():
            print(f"\riteration {i + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        yield i
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)


def _environment(implementation: str) -> dict[str, str]:
    """A worker's environment: fastrl's finds this source tree, the peer's finds nothing of ours."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONSAFEPATH"] = "1"  # else the worker's folder hides packages of equal names
    if implementation == "fastrl":
        sources = (record.ROOT, record.ROOT / "kernels" / "torch-ext")
        environment["PYTHONPATH"] = os.pathsep.join(map(str, sources))
    return environment
