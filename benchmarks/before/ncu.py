"""Bytes that a case moves to and from a GPU's memory, as Nsight Compute counts them.

`count` starts `ncu` on this very module, which makes the case's call once to compile and once
between the profiler's start and stop.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

import torch

from benchmarks.before import build, record
from benchmarks.before.cases import Case
from benchmarks.before.problem import results

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
COMMAND = (
    "ncu",
    "--csv",
    "--print-units",
    "base",
    "--profile-from-start",
    "off",
    "--metrics",
    ",".join(METRICS),
)


class Refused(RuntimeError):
    """ncu ran, and counted nothing; the message says why."""


def available() -> bool:
    """True where `ncu` is on the path."""
    return shutil.which("ncu") is not None


def count(case: Case, timeout: float) -> dict[str, int]:
    """{"read", "written", "kernels"} of one call."""
    described = json.dumps({k: v for k, v in dataclasses.asdict(case).items() if k != "goal"})
    done = subprocess.run(
        [*COMMAND, sys.executable, "-m", "benchmarks.before.ncu", described],
        cwd=record.ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources()))},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return parse(done.stdout.splitlines())


def sources() -> tuple[object, ...]:
    """What a bare checkout has on its path."""
    return record.ROOT, record.ROOT / "kernels" / "torch-ext"


def parse(lines: Iterable[str]) -> dict[str, int]:
    """The sums over all kernels of ncu's CSV, which begins after lines of `==PROF== …`."""
    lines = list(lines)
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        notes = [line for line in lines if "ERROR" in line or "ERR_" in line]
        raise Refused((notes or lines or ["ncu printed nothing"])[0][:300])
    sums, kernels = dict.fromkeys(METRICS, 0.0), set()
    for row in csv.DictReader(lines[start:]):
        if row["Metric Name"] in sums:
            sums[row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))
            kernels.add(row["ID"])
    read, written = (int(sums[metric]) for metric in METRICS)
    return {"read": read, "written": written, "kernels": len(kernels)}


def main(described: str) -> None:
    """The profiled side."""
    problem = build.problem(Case.read(json.loads(described)), "cuda")
    results(problem, problem.ours)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    results(problem, problem.ours)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(sys.argv[1])
