"""`python -m benchmarks predict`: what each case of a GPU should take, by what can be counted.

A case's time is that of its products, of its bytes or of the instructions on them, whichever is
more, and of its launches:

    t = flops / F + max(bytes / B, Σ instructions per byte · bytes / I) + launches · L

(`linear_sample` multiplies as the weight arrives: the longer of flops / F and bytes / B there.)
Bytes and flops are the case's least work; those of ops with a head are counted on tensors without
memory (`head_counts`). Launches are those of its call; instructions come from the machine code of
its kernels for sm_90. `results/predictions.json` holds counts, times, what peers published, and
what a GPU measured: `python -m benchmarks gpu` and `report` fill that in by a case's name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import ROOT, ops
from benchmarks.cases import OURS, Case, duration, phase_of, size
from benchmarks.environments import source_tree
from benchmarks.gate import backward
from benchmarks.markdown import table
from benchmarks.ops import Compiled, Expect, Shape
from benchmarks.ops.head_counts import counted
from benchmarks.published import published
from benchmarks.python_time import nothing_launched
from benchmarks.results import RESULTS, Result, device_of
from benchmarks.timing import DTYPES

FILE = "predictions.json"
PACKAGE = ops.PACKAGE  # what `compiled` is to be judged with, as `benchmarks.ops` has it
FAR = 1.5  # times the prediction, from which on a measurement is marked


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a GPU does in a second, in practice, and what a launch costs on it."""

    name: str
    bytes_per_second: float
    flops_per_second: float  # of products in half precision
    instructions_per_second: float  # of all threads
    launch_seconds: float = 2e-6  # from one kernel's end to the next one's work


_HOPPER = 132 * 4 * 32 * 1.76e9  # multiprocessors, schedulers, threads, clock
# Nine tenths of the memory's peak, 3.35 and 4.8 TB/s.
H100 = Gpu("H100", 3.0e12, 700e12, _HOPPER)
H200 = Gpu("H200", 4.3e12, 700e12, _HOPPER)
GPUS = (H100, H200)

# They read what another kernel left of a row, and no pass's bytes.
_OF_REMAINS = ("*_merge_kernel", "*_reduce_kernel", "*_draw_kernel", "*_candidates_kernel")
# The smallest call with the kernels of a case: rows of a vocabulary, slots, and a head's sizes do
# not change which they are.
_FEW_ROWS = 4
_HEAD_ROWS, _HEAD_WIDTH, _HEAD_VOCABULARY = 32, 8, 8192

Prediction = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks predict`."""
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument(
        "--keep-instructions",
        action="store_true",
        help="compile nothing: take instructions per byte from the file as it is",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the file; measurements in it stay."""
    path = args.results / FILE
    known = read(path)
    instructions = (
        {(each["name"], each["label"]): each["counted"]["instructions per byte"] for each in known}
        if args.keep_instructions
        else compiled_instructions()
    )
    measured = {(each["name"], each["label"]): each["measured"] for each in known}
    write(path, predictions(instructions, measured))
    return 0


def read(path: Path) -> list[Prediction]:
    """The cases of a file; none where there is no file."""
    return json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else []


def write(path: Path, cases: list[Prediction]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = {"devices": [dataclasses.asdict(gpu) for gpu in GPUS], "cases": cases}
    path.write_text(json.dumps(text, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def all_cases() -> list[Case]:
    """The main cases of a GPU, of every measured op."""
    return [case for op in ops.available() for case in ops.cases(op, "cuda")]


def predictions(
    instructions: Mapping[tuple[str, str], Mapping[str, float]],
    measured: Mapping[tuple[str, str], dict[str, Any]],
) -> list[Prediction]:
    """Every case with its counts, times and peers.

    Args:
        instructions: per thread and byte, of each kernel of a case, by the case's name and label.
        measured: what is known of it already.
    """
    found, cases = [], all_cases()
    for case, started in zip(cases, launched(case.of for case in cases), strict=True):
        key = case.name, case.label
        counts = count(case.of, started) | {
            "instructions per byte": dict(instructions.get(key, {}))
        }
        found.append(
            {
                "name": case.name,
                "label": case.label,
                "counted": counts,
                "predicted": {gpu.name: predict(counts, gpu) for gpu in GPUS},
                "published": [
                    {k: v for k, v in dataclasses.asdict(peer).items() if v is not None}
                    for peer in published(case.name, case.of.sampling)
                ],
                "measured": measured.get(key, {}),
            }
        )
    return found


class Started(NamedTuple):
    """What a call starts, by name."""

    kernels: list[str]
    others: list[str]  # operations of PyTorch


def count(shape: Shape, started: Started) -> dict[str, Any]:
    """Bytes, flops and launches of a case, and what is counted; bytes of its forward pass too."""
    work = ops.work(shape)
    if not shape.hidden or _in_one_pass(shape):
        forward = dataclasses.replace(shape, backward=False)
        return {
            "bytes": round(work.bytes),
            "forward bytes": round(ops.work(forward).bytes if shape.backward else work.bytes),
            "flops": work.flops,
            "launches": len(started.kernels) + len(started.others),
            "what": work.what,
            **({"in one pass": True} if shape.hidden else {}),
        }
    options = {"entropy": True} if shape.entropy != "off" else {}
    options |= {"teacher": shape.teacher, "beta": shape.beta} if shape.teacher else {}
    counts = counted(
        shape.op, shape.rows, shape.hidden, shape.vocabulary, DTYPES[shape.dtype], shape.head,
        **options,
    )  # fmt: skip
    # The small call has other chunks, and products of this CPU's library with its casts, but the
    # same kernels on values per token.
    of_logits = ("lm_head", "divergence")
    per_token = sum(not any(x in name for x in of_logits) for name in started.kernels)
    return {
        "bytes": counts.beside,
        "forward bytes": counts.beside,
        "flops": counts.flops,
        "launches": counts.launches - counts.small + per_token,
        "what": f"{work.what}; bytes read and written beside them",
    }


def _in_one_pass(shape: Shape) -> bool:
    """Whether an op with a head multiplies as the weight arrives, and writes no logits."""
    return shape.op == "linear_sample"


def predict(counts: Mapping[str, Any], gpu: Gpu) -> dict[str, Any]:
    """Seconds on a GPU, and what takes most of them."""
    shares = {
        "products": counts["flops"] / gpu.flops_per_second,
        "memory": counts["bytes"] / gpu.bytes_per_second,
        "instructions": _instructions(counts) / gpu.instructions_per_second,
        "launches": counts["launches"] * gpu.launch_seconds,
    }
    one_pass = counts.get("in one pass", False)
    if one_pass:  # its tiles' instructions are for logits, not for bytes of the weight
        del shares["instructions"]
    over = max(shares["memory"], shares.get("instructions", 0.0))
    both = max if one_pass else sum
    seconds = both((shares["products"], over)) + shares["launches"]
    return {"seconds": float(f"{seconds:.4g}"), "most of it": max(shares, key=shares.__getitem__)}


def _instructions(counts: Mapping[str, Any]) -> float:
    """Of all threads: each pass's bytes, times what its hungriest kernel takes for a byte."""
    most = {"forward": 0.0, "backward": 0.0}
    for kernel, per_byte in counts["instructions per byte"].items():
        if not any(fnmatch(kernel, pattern) for pattern in _OF_REMAINS):
            half = "backward" if "_bwd_" in kernel else "forward"
            most[half] = max(most[half], per_byte)
    forward = counts["forward bytes"]
    if not counts["flops"]:
        return most["forward"] * forward + most["backward"] * (counts["bytes"] - forward)
    return max(most.values()) * forward


def launched(shapes: Iterable[Shape]) -> list[Started]:
    """What each case's call starts, forward and backward. For a process of its own: Triton is
    changed."""
    found = []
    with nothing_launched() as direct:
        for shape in shapes:
            problem = ops.problem(_smallest(shape), "cpu", backend="triton")
            problem.results(problem.ours)  # what is made once is made now
            direct.clear()
            with _Watch() as watch:
                backward(problem.forward(problem.ours))
            found.append(Started([launch.name for launch in direct], watch.others))
    return found


_FREE = ("empty", "new_empty", "detach", "promote_types")


class _Watch(TorchDispatchMode):
    """Collects what a GPU would be told to do besides kernels, without allocations and views."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        arguments, name = function._schema.arguments, function.overloadpacket.__name__
        viewing = any(x.alias_info and not x.alias_info.is_write for x in arguments)
        if not viewing and not name.startswith(_FREE):
            self.others.append(name)
        return function(*args, **(kwargs or {}))


def _smallest(shape: Shape) -> Shape:
    if shape.hidden:
        few = {"rows": _HEAD_ROWS, "hidden": _HEAD_WIDTH, "vocabulary": _HEAD_VOCABULARY}
        return dataclasses.replace(shape, **few, teacher=min(shape.teacher, _HEAD_WIDTH))
    if shape.vocabulary or shape.attention:
        return dataclasses.replace(shape, rows=_FEW_ROWS)
    return shape


def compiled() -> Iterator[tuple[str, Compiled]]:
    """(op, call) of every case, for the ahead-of-time compiler."""

    def call(shape: Shape) -> None:
        problem = ops.problem(shape, "cpu", backend="triton")
        problem.results(problem.ours)

    for case in all_cases():
        made = partial(call, _smallest(case.of))
        yield case.name, Compiled(case.label, made, Expect(load_bytes=0, any_tile=True))


def compiled_instructions() -> dict[tuple[str, str], dict[str, float]]:
    """Instructions per thread and byte of the main loop of each case's kernels, on sm_90: by the
    ahead-of-time compiler, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "tests.aot.worker", "--target", "sm_90", "--full"]
        command += ["--calls", "benchmarks.predict", "--out", str(out)]
        misleading = ("TRITON_INTERPRET", "FASTRL_KERNELS_BACKEND")
        environment = {k: v for k, v in os.environ.items() if k not in misleading}
        environment["PYTHONPATH"] = source_tree()
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        report = json.loads(out.read_text(encoding="utf-8"))
    if report["errors"]:
        raise RuntimeError("; ".join(f"{e['case']}: {e['message']}" for e in report["errors"]))
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in report["rows"]:
        for case in row["cases"]:
            name, _, label = case.removesuffix("]").partition("[")
            per_byte = row["per_byte"].rstrip("!").rpartition("/")[2]
            if per_byte != "-":
                kernels = found.setdefault((name, label), {})
                kernel = row["kernel"].rpartition(".")[2]
                kernels[kernel] = max(kernels.get(kernel, 0.0), float(per_byte))
    return {key: dict(sorted(kernels.items())) for key, kernels in found.items()}


def fill(cases: list[Prediction], results: Iterable[Result]) -> bool:
    """Puts what GPUs measured into the cases of the same names; whether there was any."""
    by_name = {(case["name"], case["label"]): case for case in cases}
    filled = False
    for result in sorted(results, key=lambda each: (each["date"], each.get("time", ""))):
        if result["benchmark"] != "ops" or "accelerator" not in result["machine"]:
            continue
        for entry in result["entries"]:
            case = by_name.get((entry["name"], entry["label"]))
            if case is None or OURS not in entry["sides"]:
                continue
            seconds = statistics.median(phase_of(entry["sides"][OURS]))
            told = {name: result[name] for name in ("date", "commit")}
            case["measured"][device_of(result)] = {"seconds": float(f"{seconds:.4g}"), **told}
            filled = True
    return filled


def fill_file(folder: Path) -> bool:
    """Fills the file of a folder with its result files; one is begun from the committed one where
    the folder has none. Whether a GPU's figures were among them."""
    path = folder / FILE
    cases = read(path if path.exists() else RESULTS / FILE)
    results = [json.loads(each.read_text()) for each in sorted(folder.glob("*/*.json"))]
    filled = fill(cases, [each for each in results if "entries" in each])
    if filled:
        write(path, cases)
    return filled


def gpu_of(device: str) -> str | None:
    """Which prediction is of a device, by its name."""
    return next((gpu.name for gpu in GPUS if gpu.name.lower() in device.lower()), None)


def verdict(case: Prediction, device: str) -> str:
    """A measured time, its share of the prediction's, and a mark where it is far off."""
    seconds = case["measured"][device]["seconds"]
    gpu = gpu_of(device)
    if gpu is None:
        return f"{duration(seconds)} ({device})"
    expected = case["predicted"][gpu]["seconds"]
    said = f"{duration(seconds)} ({gpu}), {expected / seconds:.0%}"
    return said + (f", **{seconds / expected:.1f}× the prediction**" * (seconds > FAR * expected))


def rows(cases: Iterable[Prediction]) -> Iterator[list[str]]:
    """A line of the table for each case: counts, predictions, measurements, the best peer."""
    for case in cases:
        counts = case["counted"]
        work = [f"{counts['flops'] / 1e12:.3g} TFLOP"] if counts["flops"] else []
        count = counts["launches"]
        work += [size(counts["bytes"]), f"{count} launch" + "es" * (count != 1)]
        predicted = [
            f"{duration(found['seconds'])}, {found['most of it']}"
            for found in case["predicted"].values()
        ]
        measured = [verdict(case, device) for device in case["measured"]]
        peers = "; ".join(_told(peer, counts["bytes"]) for peer in case["published"][:1])
        yield [
            f"`{case['name']}` {case['label']}", ", ".join(work), *predicted,
            "; ".join(measured) or "not yet", peers or "none known",
        ]  # fmt: skip


HEAD = ("case", "counted", *(gpu.name for gpu in GPUS), "measured, share", "a peer's own figure")


def section(cases: list[Prediction]) -> str:
    """The table, and how to read it; empty without predictions."""
    if not cases:
        return ""
    gpus = "; ".join(
        f"{gpu.name}: {gpu.bytes_per_second / 1e12:g} TB/s, {gpu.flops_per_second / 1e12:g} "
        f"TFLOP/s, {gpu.instructions_per_second / 1e12:.0f} trillion instructions of threads a "
        f"second, {duration(gpu.launch_seconds)} for a launch"
        for gpu in GPUS
    )
    return "\n\n".join(
        [
            "## Predictions, beside what peers published",
            "Written by `python -m benchmarks predict` before any of it was measured: products, "
            "then bytes or the instructions on them, whichever takes longer, then launches, with "
            f"what takes most. {gpus}. A measurement's share is the predicted time over the "
            f"measured one; beyond {FAR:g} times the prediction it is marked. Peers' figures are "
            "their own, of the shapes and devices named, and most are not of the same work: the "
            "tables of measured ops hold those that ran beside ours.",
            table(HEAD, rows(cases)),
        ]
    )


def _told(peer: Mapping[str, Any], nbytes: int) -> str:
    said = f"{peer['peer']}: {peer['figure']}"
    if rate := peer.get("bytes_per_second"):
        said += f", {duration(nbytes / rate)} of these bytes"
    return f"{said}, {peer['device']}, {peer['shape']} ({peer['source']})"
