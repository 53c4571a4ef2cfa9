"""Two processes do together what one does alone: the same samples, numbers and weights."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastrl.run.state import load_tree
from tests.processes.jobs import JOBS

ROOT = Path(__file__).parents[2]
# Sums of gradients are rounded in another order.
TOLERANCE = 1e-5
_OF_SPEED = ("time/", "perf/", "epoch")


TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*arguments, starter=TWO, module="jobs"):
    """Runs jobs, on two processes."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *starter, "-m", f"tests.processes.{module}", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder with what each job did, as one process and as two."""
    folder = tmp_path_factory.mktemp("jobs")
    for starter in ((), TWO):
        ended = run(folder, *JOBS, starter=starter)
        assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


def trees(done, name):
    return [load_tree(done / f"{name}-{which}") for which in ("1-0", "2-0", "2-1")]


def assert_close(one, two, place=""):
    """Trees of tensors and plain values that are the same but for rounding."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), place
        for name in one:
            if not name.startswith(_OF_SPEED):
                assert_close(one[name], two[name], f"{place}/{name}")
    elif isinstance(one, list):
        assert len(one) == len(two), place
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_close(a, b, f"{place}/{i}")
    elif isinstance(one, torch.Tensor):
        assert float((one - two).abs().max()) <= TOLERANCE, place
    elif isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(two)
        assert both_nan or abs(one - two) <= TOLERANCE * max(1.0, abs(one)), (place, one, two)
    else:
        assert one == two, (place, one, two)


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_do_what_one_does(done, name):
    one, *both = trees(done, name)
    for each in both:
        assert_close(one, each)
    for parameter, value in both[0]["weights"].items():
        assert torch.equal(value, both[1]["weights"][parameter]), parameter


@pytest.mark.parametrize("name", JOBS)
def test_it_learned(done, name):
    """Or weights that nobody has changed would be equal."""
    one = trees(done, name)[0]
    assert one["evaluations"][0] != one["evaluations"][-1]
