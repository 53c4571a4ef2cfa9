"""Which test runs which line of the mutated rooms, and how long each takes.

One run of the tests, with a counter before each statement, writes a file from which mutants get
their tests. Lines of today are found in it by their text, so that it serves until much has changed.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib.abc
import importlib.machinery
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest

from tests import thorough

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = ("learn", "collect", "data", "run", "trainers")
# These start processes, build, compile kernels or draw pages: a line is seen in the tests' own
# process alone.
_LEFT_OUT = {
    *("aot", "benchmarks", "counts", "demo", "device", "families", "faults", "kernels"),
    *("mutants", "processes", "ptx", "serving", "test_documents.py", "test_examples.py"),
    *("test_learning_pages.py", "test_more_examples.py", "test_notebooks.py"),
    *("test_packaging.py", "test_thorough.py"),
}
# What other packages have imported is not rewritten by their plugins any more.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
_COUNTER = "__lines_that_ran__"


def sources(root: Path = ROOT) -> dict[str, str]:
    """The texts of the mutated rooms, by their paths from the root."""
    paths = sorted(x for room in ROOMS for x in (root / "fastrl" / room).rglob("*.py"))
    return {str(x.relative_to(root)): x.read_text(encoding="utf-8") for x in paths}


def files_of_tests() -> list[str]:
    """Files and rooms of the tests that mutants are given."""
    rooms = [x.parent for x in (ROOT / "tests").glob("*/test_*.py")]
    found = [*(ROOT / "tests").glob("test_*.py"), *rooms]
    return sorted({str(x.relative_to(ROOT)) for x in found if x.name not in _LEFT_OUT})


class Importer(importlib.abc.MetaPathFinder):
    """Has modules run other code than their files say."""

    def __init__(self, code: Callable[[str, str], CodeType | None], root: Path = ROOT):
        """
        Args:
            code: gets a module's path from the root and its file's name for tracebacks; returns
                what is to be run, or None where that is what the file says.
        """
        self._code, self._root = code, root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("fastrl."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            return spec
        file = Path(spec.origin).resolve()
        if file.is_relative_to(self._root):
            code = self._code(str(file.relative_to(self._root)), spec.origin)
            if code is not None:
                spec.loader = _Loader(name, spec.origin, code)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType):
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code


def counting(text: str, first: int) -> ast.Module:
    """The source with a counter before each statement, whose number is ``first`` + its line."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [x for y in statements for x in _counted(node, y, first)])
    return ast.fix_missing_locations(tree)


def _counted(parent: ast.AST, statement: ast.stmt, first: int) -> Iterator[ast.stmt]:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if not is_text and not isinstance(parent, ast.Module):
        counter = ast.parse(f"{_COUNTER}[{first + statement.lineno}] = 1").body[0]
        for node in ast.walk(counter):
            ast.copy_location(node, statement)
        yield counter
    yield statement


class Reach:
    """Tests, what each takes and which lines it runs."""

    def __init__(
        self,
        texts: dict[str, str],
        rows: dict[str, Any],
        seconds: dict[str, tuple[float, float]],
    ):
        """
        Args:
            texts: sources as they were when the lines were counted.
            rows: bits of each test, one for each line of all sources.
            seconds: of each test, for itself and for fixtures that others share.
        """
        self.texts, self.rows, self.seconds = texts, rows, seconds
        self._firsts = firsts(texts)
        self._names = list(rows)
        bits = [np.unpackbits(x) for x in rows.values()]
        self._ran = np.stack(bits).astype(bool) if bits else np.zeros((0, 0), bool)
        self._lines: dict[str, dict[int, int]] = {}

    def known(self, file: str, text: str, lines: Sequence[int]) -> list[int]:
        """The counted lines that these lines of a file's text of today were."""
        if file not in self._lines:
            self._lines[file] = dict(_same_lines(text, self.texts.get(file, "")))
        return [self._lines[file][x] for x in lines if x in self._lines[file]]

    def tests(self, file: str, text: str, lines: Sequence[int]) -> list[str]:
        """Those that run one of these lines of a file's text of today."""
        columns = [self._firsts[file] + x for x in self.known(file, text, lines)]
        ran = self._ran[:, columns].any(axis=1)
        return [self._names[i] for i in np.flatnonzero(ran)]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        about = json.dumps({"texts": self.texts, "seconds": self.seconds, "names": self._names})
        with path.open("wb") as out:
            np.savez_compressed(out, rows=np.stack(list(self.rows.values())), about=np.array(about))

    @classmethod
    def read(cls, path: Path) -> Reach:
        with np.load(path) as found:
            about = json.loads(str(found["about"]))
            rows = dict(zip(about["names"], found["rows"], strict=True))
        return cls(about["texts"], rows, about["seconds"])


def firsts(texts: dict[str, str]) -> dict[str, int]:
    """The number that stands before each file's first line, among the lines of all."""
    found, number = {}, 0
    for file, text in texts.items():
        found[file] = number
        number += text.count("\n") + 2
    return found


def _same_lines(now: str, then: str) -> Iterator[tuple[int, int]]:
    matcher = difflib.SequenceMatcher(None, now.splitlines(), then.splitlines(), autojunk=False)
    for begin, other, length in matcher.get_matching_blocks():
        yield from ((begin + i + 1, other + i + 1) for i in range(length))


class Recorder:
    """A plugin of pytest that fills a :class:`Reach`; its modules have to be imported after it."""

    def __init__(self, path: Path):
        self.path, self.texts = path, sources()
        self._firsts = firsts(self.texts)
        self._ran = bytearray(sum(x.count("\n") + 2 for x in self.texts.values()))
        self._fixtures = defaultdict[Any, Any](lambda: [np.zeros(len(self._ran), np.uint8), 0.0])
        self._shared_seconds = 0.0
        self._rows: dict[str, Any] = {}
        self._seconds: dict[str, tuple[float, float]] = {}
        self._not_passed = set[str]()
        self._written = time.monotonic()
        setattr(builtins, _COUNTER, self._ran)
        sys.meta_path.insert(0, Importer(self._code))

    def _code(self, file: str, name: str) -> CodeType | None:
        if file not in self.texts:
            return None
        return compile(counting(self.texts[file], self._firsts[file]), name, "exec")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = list(thorough.quick_ones(items))

    def _take(self) -> Any:
        taken = np.frombuffer(bytes(self._ran), np.uint8)
        self._ran[:] = bytes(len(self._ran))
        return taken

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        if fixturedef.scope == "function":
            return (yield)
        before, begin = self._take(), time.monotonic()
        inner = self._shared_seconds
        try:
            return (yield)
        finally:
            took = time.monotonic() - begin - (self._shared_seconds - inner)
            self._shared_seconds += took
            known = self._fixtures[fixturedef.argname, fixturedef.baseid]
            known[0] |= self._take()
            known[1] = max(known[1], took)
            self._ran[:] = before.tobytes()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self._take()
        begin, shared = time.monotonic(), self._shared_seconds
        try:
            return (yield)
        finally:
            own = time.monotonic() - begin - (self._shared_seconds - shared)
            ran, of_fixtures = self._take().copy(), 0.0
            for name, fixtures in item._fixtureinfo.name2fixturedefs.items():
                lines, seconds = self._fixtures.get((name, fixtures[-1].baseid), (0, 0.0))
                ran |= lines
                of_fixtures += seconds
            if item.nodeid not in self._not_passed:
                self._rows[item.nodeid] = np.packbits(ran)
                self._seconds[item.nodeid] = own, of_fixtures
            if time.monotonic() - self._written > 60:
                self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._not_passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        Reach(self.texts, self._rows, self._seconds).write(self.path)
        self._written = time.monotonic()


def record(path: Path, arguments: Sequence[str] = ()) -> int:
    """Runs the tests and writes what they run."""
    args = [*OPTIONS, *(arguments or files_of_tests())]
    return int(pytest.main(args, plugins=[Recorder(path)]))
