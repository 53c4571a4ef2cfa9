"""Starting programs on one process or several, and comparing what they did."""

import gc
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

from fastrl.run.launcher import process_count
from fastrl.run.state import load_tree, save_tree
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "accelerate"
# Sums of gradients are rounded in another order.
TOLERANCE = 1e-5
_OF_SPEED = ("time/", "perf/", "epoch")


# How many processes the tests start, one number after the other; ``make processes`` sets more.
COUNTS = tuple(int(n) for n in os.environ.get("PROCESSES", "2").split(","))


def torchrun(processes):
    """Arguments of Python that start a program on several processes."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))


def accelerate_launch(processes):
    """The same by accelerate and the example's file."""
    launcher = ("-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "ddp.yaml")
    return (*launcher, "--num_processes", str(processes))


def launch(*program, starter=(), **variables):
    """Runs a program to its end; where it hangs, all of its processes are killed.

    Args:
        program: what follows ``python`` (``-m``, its module, its arguments).
        starter: Python's arguments of a launcher, such as :func:`torchrun` gives.
        variables: added to the environment.

    Returns:
        ``returncode``, ``stderr`` and ``stdout``.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
    with subprocess.Popen(
        [sys.executable, *map(str, (*starter, *program))],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        try:
            out, err = launcher.communicate(timeout=PATIENCE)
        except BaseException:  # a launcher that is killed leaves its processes behind
            os.killpg(launcher.pid, signal.SIGKILL)
            raise
    return SimpleNamespace(returncode=launcher.returncode, stdout=out, stderr=err)


_TO_SPEAK = 2  # seconds


def fork(target, *arguments, processes=2, grace=PATIENCE):
    """Calls a function in several processes, as torchrun does, but without the seconds that its
    imports take: they are forks of a server, which has imported all. Where one fails, the others
    get SIGTERM, once they have had the time to say what they know of it; those that do not end are
    killed.

    Args:
        target: of a module under tests/processes.
        grace: seconds for what others do at their ends; given where one of them never does.

    Returns:
        ``returncode``, that of the first that failed, and the ``stderr`` and ``stdout`` of all.
    """
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as free, mock.patch.dict(os.environ):
        # The path of users: on a CPU other tests run Triton's interpreter.
        os.environ.pop("TRITON_INTERPRET", None)
        jobs = ("jobs", "failing", "fitted", "sharded", "commands", "vocabulary")
        jobs = (*jobs, "inside_trl", "corrected", "killed")
        context.set_forkserver_preload([f"tests.processes.{name}" for name in jobs])
        forkserver.ensure_running()
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        calls = (target, arguments)
        ranks = [
            context.Process(target=_in_rank, args=(rank, processes, port, Path(folder), *calls))
            for rank in range(processes)
        ]
        for rank in ranks:
            rank.start()
        try:
            end, status, told = time.monotonic() + PATIENCE, 0, False
            while any(rank.is_alive() for rank in ranks):
                failed = [rank.exitcode for rank in ranks if rank.exitcode]
                if failed and not status:
                    status, end = failed[0], time.monotonic() + _TO_SPEAK + grace
                if status and not told and time.monotonic() > end - grace:
                    told = True
                    for rank in ranks:
                        rank.terminate()
                if time.monotonic() > end:
                    assert grace < PATIENCE, "it hangs"
                    break
                time.sleep(0.05)
            status = status or max(abs(rank.exitcode or 0) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        out, err = (
            "".join((Path(folder) / f"{rank}.{kind}").read_text() for rank in range(processes))
            for kind in ("out", "err")
        )
    return SimpleNamespace(returncode=status, stdout=out, stderr=err)


def _in_rank(rank, processes, port, folder, target, arguments):
    """Calls a function as one of several processes."""
    for descriptor, kind in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if processes > 1:
        os.environ |= variables
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # trainers collect garbage at their ends: not among what the imports made
    target(*arguments)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def keep(tree, name, folder):
    """Writes what a job did, of each process in a folder of its own."""
    target = folder / f"{name}-{process_count()}-{os.environ.get('RANK', '0')}"
    target.mkdir(parents=True)
    save_tree(tree, target)


def asked_for(request, jobs):
    """Those of a file's jobs by which its tests that are run are parametrized, as ``name``; so a
    part of the tests does a part of the jobs."""
    items = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    return [name for name in jobs if name in names]


def kept(folder, name, processes):
    """What a job did, of each of so many processes."""
    return [load_tree(folder / f"{name}-{processes}-{rank}") for rank in range(processes)]


def assert_close(one, other, place="", tolerance=TOLERANCE):
    """Trees of tensors and plain values that are the same but for rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for name in one:
            if not name.startswith(_OF_SPEED):
                assert_close(one[name], other[name], f"{place}/{name}", tolerance)
    elif isinstance(one, list):
        assert len(one) == len(other), place
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_close(a, b, f"{place}/{i}", tolerance)
    elif isinstance(one, torch.Tensor):
        assert float((one - other).abs().max()) <= tolerance, place
    elif isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(other)
        assert both_nan or abs(one - other) <= tolerance * max(1.0, abs(one)), (place, one, other)
    else:
        assert one == other, (place, one, other)
