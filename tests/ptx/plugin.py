"""Has pytest run the kernels' tests on compiled kernels, and tell what was run.

``pytest -p tests.ptx.plugin``: it has to come before anything imports Triton.
"""

import os
from pathlib import Path
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "0"

from tests.ptx.launching import Emulator
from tests.ptx.record import RECORD_VARIABLE, Record
from tests.ptx.selection import left_out

_emulator = Emulator()
_of_workers: list[Record] = []


def pytest_configure(config: pytest.Config) -> None:
    _emulator.install()
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_Controller())


class _Controller:
    def pytest_testnodedown(self, node: Any) -> None:
        if "ptx" in getattr(node, "workeroutput", {}):
            _of_workers.append(Record.from_json(node.workeroutput["ptx"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gone = [item for item in items if left_out(item)]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in set(gone)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["ptx"] = _emulator.record.to_json()
        return
    whole = _whole()
    if path := os.environ.get(RECORD_VARIABLE):
        Path(path).write_text(whole.to_json(), encoding="utf-8")


def _whole() -> Record:
    record = Record()
    for each in [_emulator.record, *_of_workers]:
        record.add(each)
    return record
