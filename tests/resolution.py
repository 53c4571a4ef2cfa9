"""`python -m tests.resolution`: does what `make` installs resolve, on machines that are not here?

Versions alone are resolved, from the packages' metadata: nothing is installed. For each Python and
processor that `pyproject.toml` admits, as a stock machine does, with no settings of its own and the
public index; with the wheel of torch for CUDA that is there, and with one for CPUs, which wants no
triton; and once more without constraints, as ``pip install fastrl-lm`` does. Then for this machine,
by its own pip with its own settings. PART=WORD draws one Python.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

from tests.part import drawn

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# What `make test` installs, and what `make docs` does besides; flash-attn would have to be built.
EXTRAS = ("dev", "docs", "trackers")
# By glibc: that of torch's wheels, where fastrl is used, and that of llguidance's (of Debian 11),
# where it is developed.
PLATFORMS: dict[str, tuple[str, ...]] = {
    f"{processor}-manylinux_{glibc}": extras
    for processor in ("x86_64", "aarch64")
    for glibc, extras in (("2_28", ()), ("2_31", EXTRAS))
}
# The requirements of torch's wheels for CPUs, which have an index of their own.
_CPU_WHEEL = """
[[dependency-metadata]]
name = "torch"
requires-dist = [
    "filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3",
    "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5",
]
"""
WHEELS = ("cuda", "cpu", "unconstrained")
_SHOWN = ("torch", "triton", "transformers", "numpy")


class Case(NamedTuple):
    python: str
    platform: str
    wheel: str


class Found(NamedTuple):
    where: str
    versions: dict[str, str]
    error: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Resolve, print a line for each machine, and return 1 where one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.resolution",
        description="resolve what make installs for every Python and processor, without installing",
    )
    parser.add_argument(
        "--constraints", type=Path, default=ROOT / "constraints.txt", help="another set of versions"
    )
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only this one")
    parser.add_argument("--wheel", action="append", choices=WHEELS, help="only this one of torch")
    parser.add_argument("--no-pip", action="store_true", help="leave this machine out")
    args = parser.parse_args(argv)
    pythons = args.python or drawn(PYTHONS, "python")
    cases = [Case(*case) for case in product(pythons, PLATFORMS, args.wheel or WHEELS)]
    failed, count = 0, 0
    for found in _all(cases, args.constraints, here=not args.no_pip):
        versions = ", ".join(f"{name} {found.versions.get(name, '-')}" for name in _SHOWN)
        print(f"{found.where}: {found.error or f'{versions}, {len(found.versions)} packages'}")
        failed, count = failed + bool(found.error), count + 1
    print(f"{'FAILED' if failed else 'passed'}: {count - failed} of {count} machines resolve")
    return int(failed > 0)


def _all(cases: Sequence[Case], constraints: Path, here: bool) -> Iterator[Found]:
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield from pool.map(lambda case: elsewhere(case, constraints), cases)
    if here:
        yield on_this_machine(constraints)


def elsewhere(case: Case, constraints: Path) -> Found:
    """As a stock machine resolves it, by uv."""
    where = f"Python {case.python}, {case.platform}, torch: {case.wheel}"
    stock = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "uv.toml")  # in place of the user's and the machine's
        settings.write_text(_CPU_WHEEL if case.wheel == "cpu" else "", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "--config-file", str(settings), "--quiet"]
        command += ["pip", "compile", str(ROOT / "pyproject.toml"), "--only-binary=:all:"]
        command += ["--no-annotate", "--no-header", "--python-version", case.python]
        command += ["--python-platform", case.platform]
        command += [f"--extra={name}" for name in PLATFORMS[case.platform]]
        if case.wheel != "unconstrained":
            command += ["--constraint", str(constraints)]
        done = subprocess.run(command, env=stock, capture_output=True, text=True)
    if done.returncode:
        return Found(where, {}, done.stderr.strip() or f"uv ended with {done.returncode}")
    return Found(where, dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE)))


def on_this_machine(constraints: Path) -> Found:
    """As this machine's pip resolves it, whatever its settings are."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        command += ["--dry-run", "--ignore-installed", "--report", str(report)]
        command += ["--constraint", str(constraints), f"{ROOT}[{','.join(EXTRAS)}]"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return Found("this machine", {}, done.stderr.strip())
        packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = (package["metadata"] for package in packages)
    return Found("this machine", {x["name"].lower(): x["version"] for x in found})


if __name__ == "__main__":
    sys.exit(main())
