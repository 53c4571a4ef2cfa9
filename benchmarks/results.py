"""Result files: what they say of the machine, the commit and the versions, and where they lie."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.memory import all_memory

RESULTS = ROOT / "benchmarks" / "results"
WAIT_POLICY = "OMP_WAIT_POLICY"  # whether torch's threads spin or sleep between operations

Result = dict[str, Any]


def start_of_result(benchmark: str, device: torch.device) -> Result:
    """A result without entries; date and time are UTC."""
    at = datetime.datetime.now(datetime.timezone.utc)
    return {
        "benchmark": benchmark,
        "date": at.date().isoformat(),
        "time": at.strftime("%H:%M:%S"),
        "commit": commit(),
        "machine": machine(device),
        "threads": torch.get_num_threads(),
        "versions": {},
        "left": {},  # cases that were not measured: why
        "entries": [],
    }


def machine(device: torch.device) -> dict[str, Any]:
    """The processor, its cores and memory, and the accelerator if it is the one measured.

    `load` is how many processes wanted a core in the minute before; figures are steady where it is
    well below the number of cores. `wait_policy` is OMP_WAIT_POLICY; None where it is not set.
    """
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    found = {
        "cpu": named[1] if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(all_memory(torch.device("cpu")) / 2**30),
        "load": round(os.getloadavg()[0], 2),
        "wait_policy": os.environ.get(WAIT_POLICY),
    }
    if torch.cuda.is_available() and device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def device_of(result: Result) -> str:
    """The device as goals name it: the accelerator, or `cpu`."""
    return result["machine"].get("accelerator", "cpu")


def why_not_recorded() -> str | None:
    """Why figures of this process would not be the machine's; None where they may be saved.

    Each small operation waits for threads that sleep, and workers inherit the variable.
    """
    if os.environ.get(WAIT_POLICY, "").strip().lower() != "passive":
        return None
    return (
        f"{WAIT_POLICY}=passive lets threads sleep between operations, so that figures would be "
        f"those of a slower machine: unset it (env -u {WAIT_POLICY} …)"
    )


def commit() -> str:
    """The measured commit; `uncommitted` where the measured code differs from it.

    FASTRL_COMMIT names it for a tree that was copied without its repository.
    """
    if named := os.environ.get("FASTRL_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        return subprocess.run(["git", *arguments], **options).stdout.strip()

    try:
        if git("status", "--porcelain", "--", "fastrl", "kernels", "benchmarks/*.py"):
            return "uncommitted"
        return git("rev-parse", "--short", "HEAD")
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return "uncommitted"


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def place(result: Result) -> Path:
    """A result's file below the folder of all: `<device>/<date>-<commit>-<benchmark>.json`."""
    found = result["machine"]
    slug = re.sub(r"[^a-z0-9]+", "-", device_of(result).lower()).strip("-")
    folder = slug if "accelerator" in found else f"cpu-{found['cores']}core"
    return Path(folder) / f"{result['date']}-{result['commit']}-{result['benchmark']}.json"


def save(result: Result, folder: Path, saved: Path | None = None) -> Path:
    """Writes a result to its place below the folder of all results: beside an earlier run's of the
    same day and commit, and over what this run has `saved` of it so far."""
    first = folder / place(result)
    others = (first.with_stem(f"{first.stem}-{n}") for n in itertools.count(2))
    path = saved or next(x for x in itertools.chain([first], others) if not x.exists())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def newest_of(folder: Path, benchmark: str) -> Result | None:
    """The newest result of a benchmark in the folder of all results; None where there is none."""
    paths = sorted(folder.glob(f"*/*-{benchmark}*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return max(found, key=lambda result: (result["date"], result["time"]), default=None)
