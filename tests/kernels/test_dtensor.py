"""Parameters that torch's own sharding made: the linear ops refuse them and say what to pass."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fastrl_kernels import (
    TeacherHead,
    linear_kl,
    linear_kl_loss,
    linear_logprobs,
    linear_ppo_loss,
    workspace,
)
from tests.kernels.launches import watched
from tests.kernels.test_linear_logprobs import LEAVES, Inputs, batch

OPS = pytest.mark.parametrize(
    "op",
    [linear_logprobs, linear_ppo_loss, linear_kl, linear_kl_loss],
    ids=["logprobs", "loss", "kl", "kl loss"],
)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    transport = "nccl" if DEVICE == "cuda" else "gloo"
    try:
        dist.init_process_group(transport, store=dist.HashStore(), rank=0, world_size=1)
        yield init_device_mesh(DEVICE, (1,))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def arguments(op: Any) -> Inputs:
    inputs = batch(4, 60, bias=True)
    if op is linear_ppo_loss:
        inputs["old_logprobs"], inputs["advantages"] = torch.full((4,), -5.0), torch.ones(4)
        inputs["mask"] = torch.tensor([True, True, False, True])
    inputs = {name: x.to(DEVICE) for name, x in inputs.items()}
    if op in (linear_kl, linear_kl_loss):
        inputs["teacher"] = TeacherHead(inputs["hidden"], inputs["weight"] / 2, inputs["bias"])
    return inputs


def total(results: Any) -> Tensor:
    return (results[0] if isinstance(results, tuple) else results).sum()


@OPS
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("name", LEAVES)
def test_a_dtensor_is_refused_before_anything_is_done(backend, mesh, op, name, placement):
    inputs = arguments(op)
    inputs[name] = nn.Parameter(distribute_tensor(inputs[name], mesh, [placement]))
    assert isinstance(inputs[name], DTensor)
    message = rf"{name} is a DTensor: pass {name}\.full_tensor\(\), or call where the module"
    with watched() as calls, pytest.raises(TypeError, match=message):
        op(**inputs, backend=backend)
    assert calls == []
    assert workspace._idle == []


@pytest.mark.parametrize("op", [linear_kl, linear_kl_loss], ids=["kl", "kl loss"])
@pytest.mark.parametrize("name", LEAVES)
def test_a_teachers_dtensor_is_refused(backend, mesh, op, name):
    inputs = arguments(op)
    sharded = distribute_tensor(getattr(inputs["teacher"], name), mesh, [Shard(0)])
    inputs["teacher"] = inputs["teacher"]._replace(**{name: sharded})
    message = rf"teacher\.{name} is a DTensor: pass teacher\.{name}\.full_tensor\(\)"
    with pytest.raises(TypeError, match=message):
        op(**inputs, backend=backend)
    assert workspace._idle == []


@OPS
@pytest.mark.parametrize("name", LEAVES)
def test_what_the_refusal_asks_for_is_taken(backend, mesh, op, name):
    """Values as without sharding, and a gradient that is sharded as the parameter is."""
    inputs = arguments(op)
    plain = inputs[name].clone().requires_grad_()
    expected = total(op(**{**inputs, name: plain}, backend=backend))
    expected.backward()
    sharded = nn.Parameter(distribute_tensor(inputs[name], mesh, [Shard(0)]))
    found = total(op(**{**inputs, name: sharded.full_tensor()}, backend=backend))
    found.backward()
    assert torch.equal(found, expected)
    assert isinstance(sharded.grad, DTensor)
    assert sharded.grad.placements == (Shard(0),)
    assert torch.equal(sharded.grad.full_tensor(), plain.grad)
