"""Runs before anything imports triton: without a GPU, its kernels run in the interpreter."""

import gc
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch

# Torch's own, whose deprecations at their import pytest.warns would give another module's name.
import torch.utils.mkldnn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests import quick_interpreter, thorough, variables

pytest_plugins = ["tests.isolation", "tests.order"]

variables.leave_out_users()
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
else:  # where nothing is said trainers compute in bf16, whose numbers no tolerance here is about
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
# One worker per core: threads of their own would wait for each other. A given number is kept.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1").split(",")[0]))
# Inductor's cache takes code for one instruction set to be code for another, which then writes past
# its buffers: each has a folder of its own.
_cache = f"torchinductor-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), _cache))
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
# A shell has its background jobs ignore Ctrl-C, which some tests send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Where TRL is not installed, tests/trl would be taken for it.
if getattr(importlib.util.find_spec("trl"), "origin", None) is None:
    sys.modules["trl"] = None  # type: ignore[assignment]
if os.environ.get("TRITON_INTERPRET") == "1":
    quick_interpreter.patch_once()


@pytest.fixture(autouse=True, scope="module")
def _users_path_on_cpu(request):
    """The interpreter is for the kernels' own tests; elsewhere a CPU takes its users' path.

    Of a module's scope, so that its fixtures do so too."""
    from fastrl_kernels._cpu.native.build import why_not

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available() and "kernels" not in request.path.parts:
            patch.setenv("FASTRL_KERNELS_BACKEND", "torch" if why_not() else "native")
        yield


# Rooms whose tests start servers of processes, or share what took several processes long to make.
_FIRST = {"processes", "faults"}


def pytest_collection_modifyitems(config, items) -> None:
    """They come first: with several workers one of them has them all, and none is left with them at
    the end. Workers take from the ends of one another's lists."""
    thorough.choose(config, items)
    items.sort(key=lambda item: _FIRST.isdisjoint(item.path.parts))


def pytest_collection_finish() -> None:
    gc.set_threshold(100_000, 50, 50)
    _keep_what_is_there()


@pytest.fixture(autouse=True, scope="module")
def _kept():
    yield
    _keep_what_is_there()


def _keep_what_is_there() -> None:
    """What imports and caches made is there to stay. Every trainer has garbage collected: to look
    through all of it each time takes a fifth of the tests' time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Or it would be taken for leaked."""
    gc.unfreeze()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of devices of this process alone."""
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
