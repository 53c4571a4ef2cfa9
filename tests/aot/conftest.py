"""Toy kernels, some with known faults, through the gate."""

from pathlib import Path

import pytest

from tests.aot import __main__ as aot
from tests.aot.worker import Report

TOY_TARGETS = ("sm_80", "gfx942")  # the one that compiles everything, and another


@pytest.fixture(scope="session")
def toy_reports() -> dict[str, Report]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        return {r.target: r for r in aot.run_targets(TOY_TARGETS, "toy_cases")}
