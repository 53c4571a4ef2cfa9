"""`python -m tests.ptx`: the kernels' tests on what Triton compiles for a GPU, without one.

Each launch of a Triton kernel is compiled to PTX for sm_90, and a machine for PTX runs it on the
CPU's memory. A launch fails the test that made it by an access out of bounds or misaligned, a race
between warps or between programs, a barrier that some threads do not come to, and by numbers, as
elsewhere.

Without arguments all tests of tests/kernels run that launch kernels, in the better part of an hour
on two cores; `--selection` runs those that stand for them, and fails where a kernel of the package
was not launched by one.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.ptx.record import RECORD_VARIABLE, Record
from tests.ptx.selection import KERNEL_TESTS, PACKAGE, SELECTION


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tests, prints what was run, and returns 1 where anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.ptx", description="the kernels' tests on compiled kernels"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--selection", action="store_true", help="tests that stand for the others")
    which.add_argument("tests", nargs="*", default=[], help="files or tests, as pytest takes them")
    parser.add_argument("--numprocesses", type=int, default=os.cpu_count(), help="of pytest")
    args = parser.parse_args(argv)

    start = time.monotonic()
    tests = SELECTION if args.selection else args.tests or [KERNEL_TESTS]
    status, record = run(tests, args.numprocesses)
    unused = sorted(defined(PACKAGE) - set(record.launches)) if args.selection else []
    print(
        f"{len(record.launches)} kernels, {record.specialisations} specialisations, "
        f"{sum(record.launches.values())} launches; compiled for {record.compiling:.0f} s, run for "
        f"{record.running:.0f} s, of {time.monotonic() - start:.0f} s in all"
    )
    for fault in dict.fromkeys(record.faults):
        print(f"fault: {fault}")
    for kernel in unused:
        print(f"no test of the selection launches {kernel}: add one in tests/ptx/selection.py")
    failed = bool(status or record.faults or unused or not record.launches)
    races = sum("race:" in fault for fault in record.faults)
    print(f"{'FAILED' if failed else 'passed'}: {races} races, {len(record.faults)} faults in all")
    return int(failed)


def run(tests: Sequence[str], processes: int | None = 0) -> tuple[int, Record]:
    """pytest's exit status, and what was launched."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(x or os.getcwd() for x in sys.path)}
    environment.pop("THOROUGH", None)  # which would leave out what `make test` runs
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        environment[RECORD_VARIABLE] = str(path)
        command = [
            sys.executable, "-m", "pytest", "-p", "tests.ptx.plugin", "-p", "no:cacheprovider",
            "-q",
        ]  # fmt: skip
        command += ["--numprocesses", str(processes or 0), "--dist", "worksteal", *tests]
        status = subprocess.run(command, env=environment).returncode
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    return status, Record.from_json(text) if text else Record()


def defined(package: str) -> set[str]:
    """The kernels of a package, by the names that a record has."""
    from tests.aot.worker import defined_kernels

    kernels, errors = defined_kernels(package)
    if errors:
        raise ImportError(errors[0].message)
    return kernels


def no_triton() -> bool:
    return importlib.util.find_spec("triton") is None


if __name__ == "__main__":
    sys.exit(main())
