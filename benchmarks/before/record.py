"""Where and on what a measurement was taken, and the file that keeps it.

A result file is `benchmarks/results/<device>/<date>-<commit>-<benchmark>.json`; every benchmark's
has {"benchmark", "date", "time", "commit", "machine"} beside its own entries.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
UNCOMMITTED = "uncommitted"


def machine() -> dict[str, Any]:
    """The machine's processor, its cores and memory, and its accelerator where it has one.

    `load` is how many processes wanted a core in the minute before: figures count where it is
    well below the number of cores.
    """
    found = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def warn_if_busy(machine: dict[str, Any]) -> None:
    """Says so where other work takes a share of the cores."""
    load, cores = machine["load"], machine["cores"]
    if load > cores / 4:
        print(f"other work runs here (load {load} on {cores} cores): expect unsteady figures")


def device_slug(machine: dict[str, Any]) -> str:
    """A folder's name for a machine: `nvidia-h100-80gb-hbm3`, `cpu-2core`."""
    if "accelerator" in machine:
        return re.sub(r"[^a-z0-9]+", "-", machine["accelerator"].lower()).strip("-")
    return f"cpu-{machine['cores']}core"


def commit() -> str:
    """The commit that was measured; `uncommitted` where the measured code differs from it.

    A tree that was copied without its repository says which it is in FASTRL_COMMIT.
    """
    if named := os.environ.get("FASTRL_COMMIT"):
        return named
    measured = ["fastrl", "kernels", "benchmarks/*.py"]
    try:
        if _git("status", "--porcelain", "--", *measured):
            return UNCOMMITTED
        return _git("rev-parse", "--short", "HEAD")
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return UNCOMMITTED


def versions(*packages: str) -> dict[str, str]:
    """Python's and those of the packages; what is missing is left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def header(benchmark: str) -> dict[str, Any]:
    """What every result begins with; date and time are UTC."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "benchmark": benchmark,
        "date": now.date().isoformat(),
        "time": now.strftime("%H:%M:%S"),
        "commit": commit(),
        "machine": machine(),
    }


def place(result: dict[str, Any]) -> Path:
    """A result's file, below the folder of all results."""
    name = f"{result['date']}-{result['commit']}-{result['benchmark']}.json"
    return Path(device_slug(result["machine"])) / name


def save(result: dict[str, Any], output: Path | None = None) -> Path:
    """Writes a result to `output`, or to its place under `results/`."""
    output = output or RESULTS / place(result)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    return output


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if named:
            return named[1]
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
