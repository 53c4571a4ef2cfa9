"""One pass of every op's kernels, forward and backward, under NVIDIA's `compute-sanitizer`.

`check` starts it on this very module. Every tensor has an allocation of its own meanwhile, so that
a kernel which goes beyond one is seen. The kernels read whole vectors of 16 bytes, in which an
allocation of PyTorch's ends: numbers of rows are multiples of 16 here for the same reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import torch

from benchmarks.before import build, cases, gates, record
from benchmarks.before.ncu import sources
from benchmarks.before.problem import results

TOOLS = {
    "memcheck": "accesses outside of an allocation or misaligned",
    "racecheck": "races in shared memory",
}
SIZES = gates.Sizes(
    rows=16, vocabulary=(5003, 8192), steps=(507, 512), hidden=64, tokens=(1023, 1024), width=64
)
EXIT_CODE = 86  # of errors that were found
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


class Refused(RuntimeError):
    """The tool cannot work here; the message says why."""


def available() -> bool:
    """True where `compute-sanitizer` is on the path."""
    return shutil.which("compute-sanitizer") is not None


def check(tool: str, timeout: float) -> dict[str, object]:
    """{"tool", "errors": how many, "first": lines on the first of them}.

    Raises:
        Refused: it ended without a summary.
        subprocess.TimeoutExpired: it did not end in time.
    """
    done = subprocess.run(
        [
            *("compute-sanitizer", "--tool", tool, "--error-exitcode", str(EXIT_CODE)),
            *(sys.executable, "-m", "benchmarks.before.sanitizer"),
        ],
        cwd=record.ROOT,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, sources())),
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return {"tool": tool} | parse(done.stdout, done.returncode)


def parse(text: str, code: int) -> dict[str, object]:
    """Errors and the first lines on them, of the tool's output and exit code."""
    found = _SUMMARY.findall(text)
    own = [line for line in text.splitlines() if line.startswith("=========")]
    if not found or code not in (0, EXIT_CODE):
        lines = [line for line in own if "rror" in line] or text.strip().splitlines()[-1:]
        raise Refused((lines or ["it printed nothing"])[0][:300])
    errors = int(found[-1])
    return {"errors": errors, "first": own[1:9] if errors else []}


def main(device: str = "cuda", sizes: gates.Sizes = SIZES, backend: str = "auto") -> None:
    """The checked side."""
    for op in cases.available():
        for case in gates.cases_of(op, sizes):
            problem = build.problem(case, device, backend=backend, pick_rows=False)
            results(problem, problem.ours)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
