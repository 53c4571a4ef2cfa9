"""Nsight Compute and compute-sanitizer. Run as a module, this is the process they look at."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import torch

from benchmarks import ROOT, ops
from benchmarks.environments import source_tree
from benchmarks.ops import Shape, Sizes

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TOOLS = {
    "memcheck": "accesses outside of an allocation or misaligned",
    "racecheck": "races in shared memory",
}
# The kernels read whole vectors of 16 bytes, and PyTorch's allocations end in one: numbers of rows
# are multiples of 16, or the last whole load of an allocation would be reported.
SANITIZED = Sizes(
    rows=16, vocabulary=(5003, 8192), steps=(507, 512), hidden=64, tokens=(1023, 1024), width=64
)
EXIT_CODE = 86  # of compute-sanitizer where it finds errors


class Refused(RuntimeError):
    """A tool cannot do its work here; the message says why."""


def _run(
    tool: str, *options: str, timeout: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    if shutil.which(tool) is None:
        raise Refused(f"{tool} is not on the path")
    return subprocess.run(
        [tool, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": source_tree()} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def count_bytes(shape: Shape, timeout: float = 90.0) -> dict[str, int]:
    """{"read", "written", "kernels"} of one call, from and to a GPU's memory."""
    process = [sys.executable, "-m", "benchmarks.profilers"]
    options = ["--csv", "--print-units", "base", "--profile-from-start", "off"]
    options += ["--metrics", ",".join(METRICS), *process, json.dumps(dataclasses.asdict(shape))]
    return parse_ncu(_run("ncu", *options, timeout=timeout).stdout.splitlines())


def parse_ncu(lines: list[str]) -> dict[str, int]:
    """The sums over all kernels of ncu's CSV, which begins after lines of `==PROF== …`."""
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


def profiled(described: str) -> None:
    """What ncu looks at: a shape's call, once to compile and once between start and stop."""
    problem = ops.problem(Shape.read(json.loads(described)), "cuda")
    problem.results(problem.ours)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    problem.results(problem.ours)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def sanitize(tool: str, timeout: float = 180.0) -> dict[str, object]:
    """{"tool", "errors": how many, "first": lines on the first of them}, of one pass of every op's
    kernels. Every tensor has an allocation of its own, so that accesses beyond it are seen.

    Raises:
        Refused: the tool is missing, or ended without a summary.
        subprocess.TimeoutExpired: it did not end in time.
    """
    options = ["--tool", tool, "--error-exitcode", str(EXIT_CODE)]
    options += [sys.executable, "-m", "benchmarks.profilers"]
    done = _run("compute-sanitizer", *options, timeout=timeout, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return {"tool": tool} | parse_sanitizer(done.stdout, done.returncode)


def parse_sanitizer(text: str, code: int) -> dict[str, object]:
    """Errors and the first lines on them, of the tool's output and exit code."""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    own = [line for line in text.splitlines() if line.startswith("=========")]
    if not found or code not in (0, EXIT_CODE):
        lines = [line for line in own if "rror" in line] or text.strip().splitlines()[-1:]
        raise Refused((lines or ["it printed nothing"])[0][:300])
    errors = int(found[-1])
    return {"errors": errors, "first": own[1:9] if errors else []}


def sanitized(device: str = "cuda", sizes: Sizes = SANITIZED, backend: str = "auto") -> None:
    """What compute-sanitizer looks at: every op, in every dtype."""
    for op in ops.available():
        for shape in ops.OPS[op].checked(sizes):
            problem = ops.problem(shape, device, backend=backend, pick_rows=False)
            problem.results(problem.ours)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1:]:
        profiled(sys.argv[1])
    else:
        sanitized()
