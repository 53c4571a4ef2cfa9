"""Runs before anything imports triton: without a GPU, its kernels run in the interpreter."""

import gc
import os
import random
import signal
import sys
import tempfile
import zlib

import numpy as np
import pytest
import torch

from tests import quick_interpreter, thorough

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
else:  # where nothing is said trainers compute in bf16, whose numbers no tolerance here is about
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "no")
# One worker per core: threads of their own would wait for each other. A given number is kept.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1").split(",")[0]))
# Inductor's cache takes code for one instruction set to be code for another, which then writes past
# its buffers: each has a folder of its own.
_cache = f"torchinductor-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), _cache))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# A shell has its background jobs ignore Ctrl-C, which some tests send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


if os.environ.get("TRITON_INTERPRET") == "1":
    quick_interpreter.patch_once()


def seed_draws(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws depends neither on the run nor on the tests before it."""
    seed_draws(int(os.environ.get("FASTRL_TEST_SEED", "0")))  # of tests/headroom.py


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What a fixture of a wider scope draws depends on its name alone, since it is set up by
    whichever test comes first, and moves no generator of that test."""
    if fixturedef.scope == "function":
        return (yield)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_draws(zlib.crc32(fixturedef.argname.encode()))
    try:
        return (yield)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@pytest.fixture(autouse=True, scope="module")
def _pytorch_path_on_cpu(request):
    """The interpreter is for the kernels' own tests; elsewhere a CPU takes its users' path.

    Of a module's scope, so that its fixtures do so too."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available() and "kernels" not in request.path.parts:
            patch.setenv("FASTRL_KERNELS_BACKEND", "torch")
        yield


def forget_device() -> None:
    """Has accelerate choose anew, which keeps the first choice of a process: with a GPU, some tests
    ask for the CPU, some take what there is, and an Accelerator that asks for another device than
    the one before it fails."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(autouse=True, scope="module")
def _device_of_the_module():
    """No test computes elsewhere for those of other modules that came before it."""
    if torch.cuda.is_available():
        forget_device()


# Rooms whose tests start servers of processes, or share what took several processes long to make.
_FIRST = {"processes", "faults"}


def pytest_collection_modifyitems(config, items) -> None:
    """They come first: with several workers one of them has them all, and none is left with them at
    the end. Workers take from the ends of one another's lists."""
    thorough.choose(config, items)
    items.sort(key=lambda item: _FIRST.isdisjoint(item.path.parts))


def pytest_collection_finish() -> None:
    """What the imports made is there to stay: to look through it again and again takes a tenth of
    the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def pytest_sessionfinish() -> None:
    """Or it would be taken for leaked."""
    gc.unfreeze()
