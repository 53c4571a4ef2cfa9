"""A ready reward: does a response's code pass tests?"""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastrl.data.chat import TextOrMessages, as_text
from fastrl.rewards import code_sides
from fastrl.rewards.sandbox import CannotIsolate, Sandbox, check_isolation, in_memory
from fastrl.rewards.text_rewards import check_positive, last_block

LONGEST = 1_000_000  # characters of code that is run
_RUN = "import sys; exec(compile(open(int(sys.argv.pop()), 'rb').read(), 'main.py', 'exec'))"
_MIB = 1 << 20
_FORMS = (
    "tests must be Python texts, or objects with the texts input and output; or one such, or its "
    "JSON"
)


def make_code_reward(
    *,
    seconds: float = 5.0,
    memory_mib: int = 512,
    disk_mib: int = 64,
    processes: int = 4,
    workers: int | None = None,
    allow_unisolated: bool = False,
) -> Callable[..., list[float | None]]:
    """The ready reward ``code``: the share of a row's tests that a response's code passes; None
    where the row has no tests.

    The code is the last block fenced as ``python``, ``py``, ``python3`` or without a language, else
    the whole response. It runs with the standard library, in a sandbox: docs/ready_rewards.md says
    what that keeps out. The column ``tests`` holds, for each row, a list of

    - objects with ``input`` and ``output``: the code, as a program, must end with exit status 0 and
      write that output for that input, but for blanks at the ends of lines and of the output;
    - or Python texts, as ``assert add(1, 2) == 3``: they run in a sandbox of their own, one after
      the other, and call the code's functions by their names. A column ``entry_point`` says which
      names are the code's; without it, all names that the code defines are, but for those of
      builtins and of the standard library's modules.

    Args:
        seconds: the processor time of each process, for a program's run or for all Python texts of
            a row together; by the clock it may be twice as long.
        memory_mib: address space of a process, in MiB.
        disk_mib: what a program's files may hold, in MiB.
        processes: the number that a program may have at a time, threads among them.
        workers: programs that run at a time; None: one for each processor of this process.
        allow_unisolated: where this machine lets no process shut another one in, run code that
            nobody has read with this process's own rights, and warn; else that is an error.

    Raises:
        CannotIsolate: the machine does not let a process shut another one in.
        OSError: this is not Linux.
        ValueError: a limit that is not positive.
    """
    for name, value in (
        *(("seconds", seconds), ("memory_mib", memory_mib), ("disk_mib", disk_mib)),
        *(("processes", processes), ("workers", 1 if workers is None else workers)),
    ):
        check_positive(name, value)
    isolated = True
    try:
        check_isolation()
    except CannotIsolate as error:
        if not allow_unisolated:
            raise CannotIsolate(
                f"the reward code cannot shut programs in on this machine: {error}. Let processes "
                "make user namespaces (sysctl kernel.unprivileged_userns_clone=1 or "
                "kernel.apparmor_restrict_unprivileged_userns=0; in a container a seccomp profile "
                "that allows unshare and mount); allow_unisolated=True runs code that nobody has "
                "read with your own rights"
            ) from None
        isolated = False
        warnings.warn(
            f"the reward code runs what the policy writes with this process's own rights, because "
            f"this machine does not let it shut programs in ({error}): code may read and delete "
            "your files, use the network, and end this process",
            stacklevel=2,
        )
    sandbox = Sandbox(seconds, memory_mib * _MIB, disk_mib * _MIB, processes, isolated=isolated)

    def code_reward(
        completions: Sequence[TextOrMessages],
        tests: Sequence[Any],
        entry_point: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float | None]:
        names = [None] * len(tests) if entry_point is None else entry_point
        runs: list[tuple[int, Callable[[], float]]] = []
        read = [tests_of(cases, row) for row, cases in enumerate(tests)]
        for row, (completion, cases, name) in enumerate(zip(completions, read, names, strict=True)):
            code = last_block(as_text(completion), ("python", "py", "python3", ""))
            if len(code) > LONGEST:
                cases = []
            for run in _runs(sandbox, code.encode("utf-8", "surrogatepass"), cases or [], name):
                runs.append((row, run))
        with ThreadPoolExecutor(workers or _processors()) as pool:
            passed: list[list[float]] = [[] for _row in tests]
            for (row, _run), share in zip(runs, pool.map(lambda x: x[1](), runs), strict=True):
                passed[row].append(share)
        return [
            None if not cases else sum(shares) / max(1, len(shares))
            for cases, shares in zip(read, passed, strict=True)
        ]

    return code_reward


def _runs(
    sandbox: Sandbox, code: bytes, tests: list[Any], entry_point: Any
) -> list[Callable[[], float]]:
    """Functions that run a response's code; each returns the share of its tests that are passed."""
    if tests and isinstance(tests[0], str):
        names = [entry_point] if isinstance(entry_point, str) else list(entry_point or ())
        return [lambda: share_passed(sandbox, code, tests, names)]
    return [lambda pair=pair: float(writes(sandbox, code, *pair)) for pair in tests]  # type: ignore[misc]


def writes(sandbox: Sandbox, code: bytes, stdin: str, wanted: str) -> bool:
    """Whether a program writes what is wanted for what it is given on stdin."""
    with in_memory(code) as file:
        stdout, well = sandbox.run(
            _RUN, str(file), files=[file], stdin=stdin.encode("utf-8", "surrogatepass")
        )
    return well and _lines(stdout) == _lines(wanted.encode("utf-8", "surrogatepass"))


def share_passed(
    sandbox: Sandbox, code: bytes, tests: Sequence[str], entry_point: Sequence[str]
) -> float:
    """The share of Python tests that pass with code that stands in another process."""
    job = json.dumps({"tests": tests, "entry_point": entry_point}).encode()
    source = Path(code_sides.__file__).read_text(encoding="utf-8")
    with ExitStack() as stack:
        codes, jobs = (stack.enter_context(in_memory(x)) for x in (code, job))
        pipes = [*os.pipe(), *os.pipe()]
        ends = [stack.enter_context(os.fdopen(x, "rwrw"[i] + "b")) for i, x in enumerate(pipes)]
        asked, asks, hears, says = pipes
        sides = []
        for side, files, stdout in (
            ("serve", [codes, asked, says], subprocess.DEVNULL),
            ("judge", [jobs, asks, hears], subprocess.PIPE),
        ):
            numbers = map(str, files)
            started = sandbox.started(source, side, *numbers, files=files, stdout=stdout)
            sides.append(stack.enter_context(started))
        for end in ends:  # so that a side hears when the other one has ended
            end.close()
        verdicts, _ = sandbox.output_of(sides[1])
        sandbox.end(sides[0])
    return verdicts.count(b"1") / len(tests)


def tests_of(tests: Any, row: int) -> list[str] | list[tuple[str, str]] | None:
    """The tests of a row: Python texts, or pairs of input and output; None: it has none.

    Raises:
        ValueError: anything else, or a text that is no Python; the message names the row.
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with suppress(json.JSONDecodeError):  # else it is Python
            tests = json.loads(tests)
    if isinstance(tests, Mapping) and isinstance(tests.get("input"), list):  # columns of a table
        columns = [tests["input"], tests.get("output") or ()]
        tests = [
            dict(zip(("input", "output"), pair, strict=True)) for pair in zip(*columns, strict=True)
        ]
    elif isinstance(tests, str | Mapping):
        tests = [tests]
    if tests is None or not len(tests):
        return None
    if all(isinstance(test, str) for test in tests):
        for test in tests:
            _check_python(test, row)
        return list(tests)
    pairs: list[tuple[str, str]] = []
    for test in tests:
        match test:
            case {"input": str(asked), "output": str(wanted)}:
                pairs.append((asked, wanted))
            case _:
                raise ValueError(f"row {row} of the column tests has {test!r:.80}: {_FORMS}")
    return pairs


@lru_cache(maxsize=4096)
def _check_python(test: str, row: int) -> None:
    try:
        compile(test, "tests", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"row {row} of the column tests has a text that is no Python ({error}): {_FORMS}"
        ) from None


def _lines(written: bytes) -> list[bytes]:
    return [line.rstrip() for line in written.rstrip().split(b"\n")]


def _processors() -> int:
    """This process's share of the processors that the launcher's processes here have together."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
