"""`python -m tests.aot`: the ahead-of-time gate. Every kernel, every dtype, four targets, no GPU.

Each target gets a process (kernels cache per device, and the interpreter must be off). sm_80
compiles every specialisation of the calls. The other targets compile every shape (dtypes,
alignments, tiles, formulas) with the most options that it comes with, and every value of every
option at least once (`covering` in worker.py); with `--full`, everything, and with `--quick`, as
in `make test`, of each kernel and dtype what has the most options, and of each kernel what has the
fewest (`extremes`).

The installed Triton compiles, or each `--triton VERSION`, downloaded at first; `--triton all` are
those that kernels are held to (`versions.py`), for each compiles otherwise; one of them that
PART=WORD draws.

The gate fails on a spill into memory, on more shared memory than the target has, on a narrow load
in a main loop or more instructions per byte than its bound (`bounds.py`), on a call that raises,
and on a kernel of the package that no call compiled.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tests.aot import versions
from tests.aot.worker import TARGETS, CaseError, Report, Row
from tests.part import drawn

CALLS = "benchmarks.ops"
COLUMNS = (
    "kernel", "case", "warps", "regs", "smem", "spills", "scalar", "blocks", "KiB", "instr/B",
    "loads", "stores", "verdict",
)  # fmt: skip
# Each would change what is compiled: the interpreter, a forced backend, stripped line information.
_MISLEADING = ("TRITON_INTERPRET", "FASTRL_KERNELS_BACKEND", "TRITON_DISABLE_LINE_INFO")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print, and return 1 where anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.aot", description="compile all kernels")
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="only this target (repeatable)"
    )
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--full", action="store_true", help="every specialisation on every target")
    much.add_argument(
        "--quick",
        action="store_true",
        help="the fullest specialisation of each kernel and dtype, and the barest of each kernel",
    )
    parser.add_argument(
        "--triton", action="append", metavar="VERSION",
        help=f"this version of Triton (repeatable), or all: {', '.join(versions.SUPPORTED)}",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write the reports to this file")
    parser.add_argument(
        "--verbose", action="store_true", help="offending assembly lines, and full tracebacks"
    )
    args = parser.parse_args(argv)

    asked = args.triton or [versions.installed()]
    if asked == ["all"]:
        asked = drawn(versions.SUPPORTED, "triton")
    reports, passed = list[Report](), True
    for version in dict.fromkeys(asked):
        try:
            folder = versions.folder_of(version)
        except versions.Unavailable as error:
            print(f"skipped: {error}")
            continue
        found = _run(version, folder, args)
        reports += found
        passed &= all(report.passed for report in found)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(r) for r in reports], indent=1), encoding="utf-8")
    return 0 if reports and passed else 1


def _run(version: str, folder: Path | None, args: argparse.Namespace) -> list[Report]:
    """Compile with one version, and print."""
    start = time.monotonic()
    targets = list(dict.fromkeys(args.target or drawn([*TARGETS], "target")))
    reports = []
    options = [f"--{name}" for name in ("full", "quick") if getattr(args, name)]
    for report in run_targets(targets, CALLS, args.op, options, folder):
        reports.append(report)
        _print_table(report.target, report.rows)
    for reason in dict.fromkeys(row.let_pass for report in reports for row in report.rows):
        if reason:
            print(f"let pass: {reason}")
    for report in reports:
        _print_problems(report, args.verbose)
    passed = all(report.passed for report in reports)
    count = sum(len(report.rows) for report in reports)
    print(
        f"{'passed' if passed else 'FAILED'} with triton {version}: {count} specialisations for "
        f"{', '.join(targets)} in {time.monotonic() - start:.0f} s"
        + (" (kernels of other ops not checked)" if args.op else "")
    )
    return reports


def run_targets(
    targets: Sequence[str],
    calls: str,
    ops: Sequence[str] = (),
    options: Sequence[str] = (),
    folder: Path | None = None,
) -> Iterator[Report]:
    """One process per target, as many at a time as there are cores; reports in order.

    Args:
        folder: that modules are looked for in first.
    """
    first = [] if folder is None else [str(folder)]
    with ThreadPoolExecutor(max_workers=min(len(targets), os.cpu_count() or 1)) as pool:
        yield from pool.map(lambda target: _run_worker(target, calls, ops, options, first), targets)


def _run_worker(
    target: str, calls: str, ops: Sequence[str], options: Sequence[str], first: Sequence[str]
) -> Report:
    environment = {k: v for k, v in os.environ.items() if k not in _MISLEADING}
    # What this process can import, the worker can: a bare checkout has no installed packages.
    paths = [*first, *(path or os.getcwd() for path in sys.path)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "tests.aot.worker", "--target", target]
        command += ["--calls", calls, "--out", str(out), *(f"--op={op}" for op in ops)]
        command += options
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if out.exists():
            return Report.from_json(json.loads(out.read_text(encoding="utf-8")))
    last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    message = f"the worker ended with exit code {done.returncode}: {last}"
    return Report(target, errors=[CaseError("worker", message, done.stderr)])


def _cells(row: Row) -> tuple[str, ...]:
    more = f" +{len(row.cases) - 1}" if len(row.cases) > 1 else ""
    numbers: tuple[int, ...] = (row.warps, row.registers, row.shared, row.spills, row.scalar_spills)
    verdict = "ok" if not row.faults else "; ".join(row.faults)
    numbers += (row.resident, row.in_flight // 1024)
    told = (row.per_byte, row.loads, row.stores, verdict)
    return (row.kernel, row.cases[0] + more, *map(str, numbers), *told)


def _print_table(target: str, rows: Sequence[Row]) -> None:
    if not rows:
        return
    cells = [_cells(row) for row in sorted(rows, key=lambda r: (r.op, r.kernel))]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
    print(
        f"{target}: spilled scalar registers, which go into a vector register; blocks per "
        "multiprocessor and the KiB that they ask for before they use any; "
        "instructions per byte and thread in the main loops, least/most, ! where they are too many "
        "to keep up with the memory; bytes per thread of their loads and stores, widest/narrowest"
    )
    for line in (COLUMNS, *cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def _print_problems(report: Report, verbose: bool) -> None:
    for error in report.errors:
        print(f"{report.target}: {error.case}: {error.message}")
        if verbose:
            print(error.trace)
    for kernel in report.missing:
        print(f"{report.target}: {kernel}: no call compiled it; add one to benchmarks/ops/")
    for row in report.rows:
        for fault in row.faults:
            print(f"{report.target}: {row.kernel} {row.cases[0]}: {fault}")
        for line in row.lines if verbose else ():
            print(f"    {line}")
    if not (report.rows or report.errors):
        print(f"{report.target}: no kernel was compiled")


if __name__ == "__main__":
    sys.exit(main())
