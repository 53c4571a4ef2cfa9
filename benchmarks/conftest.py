"""`pytest benchmarks`: options, the session's run, and its report at the end.

Each `test_*.py` has ``cases(run)``, and a test that takes a ``case`` and its ``measurement``. It
fails where its gate fails, never for its times.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.cases import EAGER, Case
from benchmarks.environments import TRL_CLASSIC, Uninstallable, peer_python
from benchmarks.harness import Measurement, Run
from benchmarks.memory import free
from benchmarks.results import RESULTS, device_of, machine, why_not_recorded
from benchmarks.terminal import render

RUN = pytest.StashKey[Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastrl's benchmarks")
    group.addoption("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.addoption("--full", action="store_true", help="more cases than the main ones")
    group.addoption("--toy", action="store_true", help="tiny cases, two rounds; nothing is saved")
    group.addoption("--rounds", type=int, metavar="N", help="counted turns of each side")
    group.addoption("--minutes", type=float, metavar="M", help="skip what would take longer")
    group.addoption("--threads", type=int, metavar="N", help="of each side; default: all cores")
    group.addoption("--no-peers", action="store_true", help="without other libraries")
    group.addoption(
        "--peer-python", type=Path, metavar="PATH", help="an interpreter that has TRL 0.11.4"
    )
    group.addoption(
        "--results", type=Path, metavar="FOLDER", nargs="?", const=RESULTS,
        help="save result files there; without FOLDER, in benchmarks/results",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    option = config.getoption
    for name in ("rounds", "minutes", "threads"):
        if option(name) is not None and option(name) <= 0:
            raise pytest.UsageError(f"--{name} must be above 0, got {option(name)}")
    unsaved = option("toy") or option("results") is None
    if not unsaved and (why := why_not_recorded()):
        raise pytest.UsageError(f"--results: {why}, or save nothing")
    wanted = option("device")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("no GPU here: torch.cuda.is_available() is False")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(option("threads") or os.cpu_count() or 1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config.stash[RUN] = Run(
        torch.device(wanted),
        rounds=option("rounds"),
        full=option("full"),
        toy=option("toy"),
        peers=not option("no_peers"),
        minutes=option("minutes"),
        results=option("results"),
        peer_python=option("peer_python"),
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # a library's warning is no failure of a measurement
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        found = metafunc.module.cases(metafunc.config.stash[RUN])
        metafunc.parametrize("case", found, ids=str)


def pytest_report_header(config: pytest.Config) -> str:
    here, run = machine(config.stash[RUN].device), config.stash[RUN]
    busy = here["load"] > here["cores"] / 4
    return f"measuring on {run.device.type}, {torch.get_num_threads()} threads" + (
        f"; other work runs here (load {here['load']}): expect unsteady figures" if busy else ""
    )


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Run:
    return request.config.stash[RUN]


@pytest.fixture
def measurement(run: Run, case: Case, benchmark: object) -> Iterator[Measurement]:
    """The measurement of a case, if there is time for it."""
    if why := run.obstacle(case):
        pytest.skip(why)
    benchmark.group = case.benchmark
    yield Measurement(run, case, benchmark.pedantic, benchmark.extra_info)
    free(run.device)


@pytest.fixture
def python(run: Run, case: Case, request: pytest.FixtureRequest) -> Path:
    """An interpreter that has the peer of the test's module."""
    peer = request.module.peer_of(run)
    if peer == EAGER:
        return Path(sys.executable)
    try:
        return (run.peer_python if peer == TRL_CLASSIC else None) or peer_python(peer)
    except Uninstallable as why:
        pytest.skip(run.leave(case, str(why)))


def pytest_terminal_summary(terminalreporter: object, config: pytest.Config) -> None:
    run = config.stash[RUN]
    for result in run.results.values():
        for entry in result["entries"]:
            terminalreporter.write_line("\n" + render(entry, device_of(result)))
    for path in run.saved.values():
        terminalreporter.write_line(f"\nsaved as {path}")
