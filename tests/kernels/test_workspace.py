"""Memory of large results that is used again."""

import gc
import os
import subprocess
import sys

import pytest
import torch

from fastrl_kernels import linear_logprobs, linear_nll_loss, workspace
from fastrl_kernels.workspace import clear, result_like

LARGE = (2500, 1000)  # 10 MB in fp32


@pytest.fixture(autouse=True)
def nothing_remembered():
    clear()
    yield
    clear()


def test_memory_is_used_again_once_nobody_holds_it():
    weight = torch.empty(LARGE)
    first = result_like(weight, torch.float32)
    place = first.data_ptr()
    second = result_like(weight, torch.float32)
    assert second.data_ptr() != place
    held = second.view(-1)[7:]
    place = second.data_ptr()
    del second
    assert result_like(weight, torch.float32).data_ptr() != place  # a view holds it
    del held, first
    third = result_like(weight, torch.float32)
    place = third.data_ptr()
    del third
    assert result_like(weight, torch.float32).data_ptr() == place
    assert place % 64 == 0


def test_autograd_adds_to_it_in_place():
    """As to other memory: it is as much one tensor's own."""
    weight = torch.zeros(LARGE, requires_grad=True)

    class Dense(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.new_zeros(())

        @staticmethod
        def backward(ctx, grad):
            result = result_like(weight, torch.float32).fill_(2.0)
            places.append(result.data_ptr())
            return result

    places: list[int] = []
    (Dense.apply(weight) + Dense.apply(weight)).backward()
    assert weight.grad.data_ptr() in places
    assert weight.grad.eq(4).all()


def test_a_gradient_that_is_kept_is_not_written_to():
    hidden, labels = torch.randn(6, 40), torch.arange(6)
    weight = torch.randn(60_000, 40, requires_grad=True)
    kept = []
    for scale in (1.0, 2.0, 3.0):
        loss, _ = linear_nll_loss(hidden * scale, weight, labels)
        loss.backward()
        kept.append((weight.grad, weight.grad.clone()))
        weight.grad = None
    for gradient, at_first in kept:
        assert torch.equal(gradient, at_first)


def live_logits() -> int:
    """Bytes of all workspaces but the idle one."""
    clear()
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dtype == torch.uint8]
    return sum(x.untyped_storage().nbytes() for x in tensors)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("budget", [1 << 14, 1 << 12], ids=["whole", "chunks"])
def test_ten_live_graphs_keep_two_workspaces_of_logits(backend, budget, device):
    """Others compute theirs again; who drops a graph, or goes backward, makes room."""
    hidden, labels = torch.randn(12, 6, device=device), torch.arange(12, device=device)
    weight = torch.randn(300, 6, device=device, requires_grad=True)
    before = live_logits()

    def forward() -> torch.Tensor:
        return linear_logprobs(hidden, weight, labels, workspace_bytes=budget, backend=backend)

    def backward(logprobs: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(logprobs.sum(), weight)[0]

    alone = backward(forward())
    graphs = [forward() for _ in range(10)]
    assert budget < live_logits() - before <= 2 * budget
    for gradient in map(backward, reversed(graphs)):
        torch.testing.assert_close(gradient, alone)
    assert live_logits() == before

    graphs = [forward() for _ in range(10)]
    full = live_logits()
    del graphs[0]
    assert live_logits() < full
    graphs.append(forward())
    assert live_logits() == full


def test_which_memory_is_idle_changes_no_bits():
    """A graph that is alone keeps its logits, also in memory of a larger one."""
    hidden, labels = torch.randn(96, 64), torch.arange(96)
    weight = torch.randn(9001, 64, requires_grad=True)

    def gradient(budget: int | None) -> torch.Tensor:
        logprobs = linear_logprobs(hidden, weight, labels, workspace_bytes=budget, backend="torch")
        return torch.autograd.grad(logprobs.sum(), weight)[0]

    first = gradient(400_000)
    clear()
    gradient(None)  # leaves memory for all logits
    assert torch.equal(gradient(400_000), first)


STEPS = """
import resource
import torch
from fastrl_kernels import workspace

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():  # 480 MiB in blocks of 4 MiB
    return [torch.ones(1 << 20) for _ in range(120)]

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

workspace.keep_all_freed_memory()
step()
before = faults()
for _ in range(5):
    step()
print(faults() - before, resident())
workspace.clear()
print(resident())
"""


@pytest.mark.skipif(workspace._glibc is None, reason="malloc is not glibc's")
def test_a_step_takes_no_new_pages_from_the_system(tmp_path):
    """Where freed memory went back, five steps would have some 600,000 page faults."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    faults, kept, after = map(int, done.stdout.split())
    assert faults < 40_000
    assert kept - after > 120
