"""Runs before anything imports triton: without a GPU, its kernels run in the interpreter."""

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# One worker per core: threads of their own would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="module")
def _pytorch_path_on_cpu(request):
    """The interpreter is for the kernels' own tests; elsewhere a CPU takes its users' path.

    Of a module's scope, so that its fixtures do so too."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available() and "kernels" not in request.path.parts:
            patch.setenv("FASTRL_KERNELS_BACKEND", "torch")
        yield


def pytest_collection_finish() -> None:
    """What the imports made is there to stay: to look through it again and again takes a tenth of
    the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def pytest_sessionfinish() -> None:
    """Or it would be taken for leaked."""
    gc.unfreeze()
