"""Starting programs on one process or several, and comparing what they did."""

import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

ROOT = Path(__file__).parents[2]
# Sums of gradients are rounded in another order.
TOLERANCE = 1e-5
_OF_SPEED = ("time/", "perf/", "epoch")


# How many processes the tests start, one number after the other; ``make processes`` sets more.
COUNTS = tuple(int(n) for n in os.environ.get("PROCESSES", "2").split(","))


def torchrun(processes):
    """Arguments of Python that start a program on several processes; none for a single one."""
    if processes == 1:
        return ()
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))


def accelerate_launch(processes):
    """The same by accelerate. Without GPUs ``--multi_gpu`` starts as many, too; ``--cpu`` does
    not."""
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--main_process_port", "0")
    return (*launcher, "--num_processes", str(processes))


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
    with subprocess.Popen(
        [sys.executable, *starter, *map(str, program)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            out, err = launcher.communicate(timeout=timeout)
        except BaseException:  # a launcher that is killed leaves its processes behind
            os.killpg(launcher.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(launcher.args, launcher.returncode, out, err)


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
