"""Mutants run, each in a fork of a process that has imported what it needs.

A function's change is put into a process that has collected all tests; what runs at import is
changed in one that has imported other packages alone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

from tests.mutants import draw
from tests.mutants.draw import Mutant
from tests.mutants.reach import OPTIONS, ROOT, Importer, Reach

_FILE_SECONDS = 0.5  # to import a file of tests
_START_SECONDS = 180
_RAN = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
# Other packages, which take long to import and are the same for all mutants.
_WARM = ("torch", "transformers", "transformers.trainer", "datasets", "accelerate", "peft", "trl")


def warm() -> None:
    """Imports what no mutant changes, as tests do: their settings come first."""
    importlib.import_module("tests.conftest")
    for name in _WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def apart(work: Callable[[], Any]) -> int:
    """Does the work in a process of its own, which imports what mutants import themselves. Returns
    the process."""
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    return process


class Verdict(NamedTuple):
    """What became of a mutant: killed, survived, or not run by any test."""

    status: str
    by: str = ""  # the first test that failed
    how: str = ""
    ran: int = 0  # tests until then
    of: int = 0  # that run its line


def chosen(names: Sequence[str], reach: Reach, seconds: float) -> list[str]:
    """The tests that a mutant is given: the cheapest first, one setting of each test before a
    second of any, until they would take so long."""

    def cost(name: str) -> float:
        own, shared = reach.seconds[name]
        file = name.partition("::")[0]
        return own + (0 if file in files else shared + _FILE_SECONDS)

    files, settings = set[str](), defaultdict[str, int](int)
    numbered = []
    for name in sorted(names, key=cost):
        test = name.partition("[")[0]
        numbered.append((settings[test], cost(name), name))
        settings[test] += 1
    found, left = [], seconds
    for _, _, name in sorted(numbered):
        if found and cost(name) > left:
            continue
        left -= cost(name)
        files.add(name.partition("::")[0])
        found.append(name)
    return found


def tests_of(mutant: Mutant, text: str, reach: Reach) -> list[str]:
    """All tests that run its line, or, where that was not counted, a line of its function; of what
    runs at import those that run what it is part of."""
    _, site = draw.site_of(mutant, text)
    for lines in site.lines:
        names = reach.tests(mutant.file, text, lines)
        if names or (not site.at_import and reach.known(mutant.file, text, lines)):
            return names
    return list(reach.rows) if site.at_import else []


def verdicts(
    mutants: Sequence[Mutant],
    texts: dict[str, str],
    tests: Callable[[Mutant], tuple[list[str], int]],
    control: bool = False,
) -> Iterator[tuple[Mutant, Verdict]]:
    """Runs mutants, those of functions first.

    Args:
        tests: of a mutant, in their order, and how many there would be without a limit of time.
        control: leave the sources as they are: nothing should be killed.
    """
    given = {x: tests(x) for x in mutants}
    hot, cold = [], []
    for mutant in mutants:
        if not given[mutant][0]:
            yield mutant, Verdict("not run")
        else:
            text = texts[mutant.file]
            (hot if _pairs(mutant, text) is not None else cold).append(mutant)
    if hot:
        yield from _hot(hot, texts, given, control)
    for mutant in cold:
        names, of = given[mutant]
        text = None if control else texts[mutant.file]
        verdict = _forked(lambda out, x=mutant, y=text, z=names: _cold(x, y, z, out))
        yield mutant, verdict._replace(of=of)


def changed(mutant: Mutant, text: str, name: str) -> CodeType:
    """The mutated module's code."""
    tree, site = draw.site_of(mutant, text)
    site.change()
    return compile(tree, name, "exec")


def _pairs(mutant: Mutant, text: str, name: str = "x") -> list[tuple[CodeType, CodeType]] | None:
    """Functions' code as it is and as it is changed; None where the change is not one of functions
    that keep what they close over."""
    site = draw.site_of(mutant, text)[1]
    if site.at_import:
        return None
    before, after = compile(text, name, "exec"), changed(mutant, text, name)
    both = list(_side_by_side(before, after))
    if any(x is None or y is None or x.co_freevars != y.co_freevars for x, y in both):
        return None
    return [(x, y) for x, y in both if x != y and x.co_name != "<module>"]


def _side_by_side(before: CodeType, after: CodeType) -> Iterator[tuple[Any, Any]]:
    yield before, after
    inner = [[x for x in code.co_consts if isinstance(x, CodeType)] for code in (before, after)]
    if [x.co_name for x in inner[0]] != [x.co_name for x in inner[1]]:
        yield None, None
        return
    for one, other in zip(*inner, strict=True):
        yield from _side_by_side(one, other)


def _put_in(mutant: Mutant, text: str, functions: Sequence[FunctionType]) -> None:
    """Changes those functions that are the mutant's."""
    path = str(ROOT / mutant.file)
    functions = [x for x in functions if os.path.realpath(x.__code__.co_filename) == path]
    for name in {x.__code__.co_filename for x in functions}:
        by_code = dict(_pairs(mutant, text, name) or [])
        for function in functions:
            if function.__code__ in by_code:
                function.__code__ = by_code[function.__code__]


def _functions() -> list[FunctionType]:
    """All of fastrl that there are."""
    gc.unfreeze()
    found = [x for x in gc.get_objects() if type(x) is FunctionType]
    gc.freeze()
    return [x for x in found if "fastrl" in x.__code__.co_filename]


def _files(names: Sequence[str]) -> list[str]:
    """Those of these tests, as long as they are there."""
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    return [x for x in files if (ROOT / x).exists()]


def _named(items: Sequence[pytest.Item], names: Sequence[str]) -> list[pytest.Item]:
    """The tests of these names, in their order: tests, all settings of one, or files."""

    def is_of(test: str, name: str) -> bool:
        return test == name or test.startswith((f"{name}::", f"{name}["))

    return [x for name in names for x in items if is_of(x.nodeid, name)]


class _Report:
    """A plugin that tells the parent what runs and what fails."""

    def __init__(self, out: int, names: Sequence[str] | None = None):
        """
        Args:
            names: the tests to run; None where they are chosen elsewhere.
        """
        self._out, self._names = out, names

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._names is not None:
            items[:] = _named(items, self._names)

    def tell(self, **what: Any) -> None:
        os.write(self._out, (json.dumps(what) + "\n").encode())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell(test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.tell(failed=report.nodeid, how=_last_line(report))

    def pytest_collectreport(self, report: Any) -> None:
        self.pytest_runtest_logreport(report)


def _last_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr).strip().rpartition("\n")[2]
    return text.partition("\n")[0][:200]


def _forked(work: Callable[[int], None]) -> Verdict:
    """Does the work in a process of its own, and follows what it tells."""
    into, out = os.pipe()
    process = os.fork()
    if process == 0:
        os.setpgid(0, 0)
        os.close(into)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        try:
            work(out)
        except BaseException:
            os.write(out, (json.dumps({"error": traceback.format_exc()}) + "\n").encode())
        finally:
            os._exit(0)
    os.close(out)
    try:
        return _followed(into)
    finally:
        os.close(into)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _followed(into: int) -> Verdict:
    test, ran, text = "", 0, b""
    limit = _START_SECONDS
    while True:
        ready, _, _ = select.select([into], [], [], limit)
        if not ready:
            return Verdict("killed", test, f"still running after {limit} seconds", ran)
        read = os.read(into, 1 << 16)
        if not read:
            return Verdict("killed", test, "the process ended", ran)
        text += read
        *lines, text = text.split(b"\n")
        for line in map(json.loads, lines):
            if "error" in line:
                return Verdict("error", test, line["error"], ran)
            if "failed" in line:
                return Verdict("killed", line["failed"] or test, line["how"], ran)
            if "done" in line:
                return Verdict("survived", ran=ran)
            test, ran, limit = line["test"], ran + 1, 60


def _hot(
    mutants: Sequence[Mutant],
    texts: dict[str, str],
    given: dict[Mutant, tuple[list[str], int]],
    control: bool,
) -> Iterator[tuple[Mutant, Verdict]]:
    """Has a process collect all tests of these mutants and fork one for each."""
    files = _files([name for x in mutants for name in given[x][0]])
    into, out = os.pipe()
    loop = _Loop(mutants, texts, given, out, control)
    process = apart(lambda: pytest.main([*OPTIONS, *files], plugins=[loop]))
    os.close(out)
    left = dict(enumerate(mutants))
    with os.fdopen(into) as lines:
        for line in lines:
            number, *verdict = json.loads(line)
            yield left.pop(number), Verdict(*verdict)
    os.waitpid(process, 0)
    if left:
        raise RuntimeError(f"the tests could not be collected for {len(left)} mutants")


class _Loop:
    """A plugin that runs mutants in place of the tests."""

    def __init__(
        self,
        mutants: Sequence[Mutant],
        texts: dict[str, str],
        given: dict[Mutant, tuple[list[str], int]],
        out: int,
        control: bool,
    ):
        self._mutants, self._texts, self._given = mutants, texts, given
        self._out, self._control = out, control

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._functions = _functions()
        for number, mutant in enumerate(self._mutants):
            names, of = self._given[mutant]
            tests = _named(session.items, names)
            verdict = _forked(lambda out, x=mutant, y=tests: self._child(session, x, y, out))
            line = json.dumps([number, *verdict._replace(of=of)]) + "\n"
            os.write(self._out, line.encode())
        return True

    def _child(self, session: pytest.Session, mutant: Mutant, tests: list[Any], out: int) -> None:
        report = _Report(out)
        session.config.pluginmanager.register(report)
        if not self._control:
            _put_in(mutant, self._texts[mutant.file], self._functions)
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            session.config._tmp_path_factory._basetemp = Path(folder)  # type: ignore[attr-defined]
            for item, following in zip(tests, [*tests[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        report.tell(done=True)


def _cold(mutant: Mutant, text: str | None, names: Sequence[str], out: int) -> None:
    def code(file: str, name: str) -> CodeType | None:
        return changed(mutant, text, name) if text and file == mutant.file else None

    sys.meta_path.insert(0, Importer(code))
    report = _Report(out, names)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        args = ["-x", f"--basetemp={folder}/tests", *_files(names)]
        if pytest.main([*OPTIONS, *args], plugins=[report]) not in _RAN:
            report.tell(failed=names[0], how="no test could begin")
    report.tell(done=True)
