"""Starting programs on one process or several, and comparing what they did."""

import math
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# Sums of gradients are rounded in another order.
TOLERANCE = 1e-5
_OF_SPEED = ("time/", "perf/", "epoch")


def torchrun(processes):
    """Arguments of Python that start a program on several processes; none for a single one."""
    if processes == 1:
        return ()
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))


def launch(*program, starter=(), timeout=120, **variables):
    """Runs a program to its end.

    Args:
        program: what follows ``python`` (``-m``, its module, its arguments).
        starter: Python's arguments of a launcher, such as :func:`torchrun` gives.
        timeout: seconds until it counts as hanging.
        variables: added to the environment.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
    return subprocess.run(
        [sys.executable, *starter, *map(str, program)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def assert_close(one, other, place=""):
    """Trees of tensors and plain values that are the same but for rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for name in one:
            if not name.startswith(_OF_SPEED):
                assert_close(one[name], other[name], f"{place}/{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), place
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_close(a, b, f"{place}/{i}")
    elif isinstance(one, torch.Tensor):
        assert float((one - other).abs().max()) <= TOLERANCE, place
    elif isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(other)
        assert both_nan or abs(one - other) <= TOLERANCE * max(1.0, abs(one)), (place, one, other)
    else:
        assert one == other, (place, one, other)
