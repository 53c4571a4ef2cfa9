"""`python -m benchmarks ops [OP …]`: every op beside its peers, on the shapes of real models.

A gate comes first: an op whose error against float64 exceeds twice that of eager PyTorch gets no
figure. Then the implementations take turns. Each op's result file is the header of `record.py` and
{"versions", "threads", "roofline": {"copy", "gemm"}, "cases": [`measure.measure`'s entries],
 "skipped": [{"label", "reason"}]}.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.before import cases, record, timing
from benchmarks.before.measure import Effort, measure, render, too_much
from benchmarks.before.peers import versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks ops`."""
    parser.add_argument(
        "ops", nargs="*", metavar="OP", help=f"of {', '.join(cases.available())}; default: all"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--main", action="store_true", help="each op's main case only")
    parser.add_argument("--full", action="store_true", help="every combination of the axes")
    parser.add_argument("--only", metavar="TEXT", help="cases whose label contains TEXT")
    parser.add_argument(
        "--rounds", type=int, default=9, help="of timing, a case's implementations in turns"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="that a case may take, about",
    )
    parser.add_argument(
        "--memory-gib", type=float, metavar="GIB", help="a case may need; default: half of it all"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    parser.add_argument("--no-peers", action="store_true", help="beside eager PyTorch alone")
    parser.add_argument("--no-save", action="store_true", help="write no result file")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where result files go")


def run(args: argparse.Namespace) -> int:
    """Measure, print and save op by op; 1 where a gate is red, 2 where the request is wrong."""
    wrong = [op for op in args.ops if op not in cases.available()]
    if wrong:
        print(f"no op {', '.join(wrong)}: choose of {', '.join(cases.available())}")
        return 2
    device = pick_device(args.device)
    if device is None:
        print("no GPU here: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    threads = args.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    record.warn_if_busy(record.machine())
    roof = timing.roofline(device)
    name = device_name(device)
    print(
        f"{name}, {threads} threads: copies {roof.copy / 1e9:.3g} GB/s; matrix products "
        + ", ".join(f"{x / 1e12:.3g} TFLOP/s in {dtype}" for dtype, x in roof.gemm.items())
    )
    memory = args.memory_gib * 2**30 if args.memory_gib else all_memory(device) / 2
    effort = Effort(args.rounds, args.seconds, int(memory), peers=not args.no_peers)

    red = False
    for op in args.ops or cases.available():
        result = start_of_result(op, device, roof, threads)
        for case in cases.grid(op, device.type, args.full):
            if (args.main and not case.main) or (args.only and args.only not in case.label):
                continue
            reason = too_much(case, effort, roof, device)
            if reason:
                result["skipped"].append({"label": case.label, "reason": reason})
                print(f"\n{op}: {case.label}\n  skipped: {reason}")
                continue
            entry = measure(case, device, effort)
            result["cases"].append(entry)
            red = red or bool(entry["red"])
            print("\n" + render(entry, name), flush=True)
            free(device)
        if result["cases"] and not args.no_save:
            path = file_of(result, args.results)
            print(f"\nsaved as {record.save(result, path)}")
    return 1 if red else 0


def pick_device(wanted: str) -> torch.device | None:
    """The device, or None where a GPU is asked for and there is none."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        return None
    return torch.device(wanted)


def device_name(device: torch.device) -> str:
    """`NVIDIA H100 80GB HBM3`, or `cpu` and the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu: {record.machine()['cpu']}"


def all_memory(device: torch.device) -> int:
    """Bytes of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def start_of_result(
    benchmark: str, device: torch.device, roof: timing.Roofline, threads: int
) -> dict[str, Any]:
    """A result without cases."""
    header = record.header(benchmark)
    if device.type == "cpu":
        header["machine"].pop("accelerator", None)
    return {
        **header,
        "versions": {"python": platform.python_version(), **versions()},
        "threads": threads,
        "roofline": roof._asdict(),
        "cases": [],
        "skipped": [],
    }


def file_of(result: dict[str, Any], folder: Path | None) -> Path | None:
    """Where a result goes below `folder`; None: its place in the repository."""
    if folder is None:
        return None
    return folder / record.place(result)


def free(device: torch.device) -> None:
    """Gives a case's memory back before the next one."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def as_case(entry: dict[str, Any]) -> cases.Case:
    """The case of an entry in a result file."""
    goal = cases.Goal(**entry["goal"]) if entry["goal"] else None
    return dataclasses.replace(cases.Case.read(entry["case"]), goal=goal)
