"""The pretended device computes as the CPU does, and does not forgive what a GPU does not."""

import pytest
import torch

from tests import tiny_models
from tests.device.pretended import DEVICE, absent, pretended_device


def test_a_model_computes_and_learns_there_what_it_does_on_the_cpu(device):
    ids = torch.arange(20).view(2, 10) + 3
    models = [tiny_models.language_model("llama") for _ in range(2)]
    weight = models[1].lm_head.weight
    models[1].to(DEVICE)
    assert weight is models[1].lm_head.weight
    assert weight.is_cuda
    found = []
    for model, place in zip(models, ("cpu", DEVICE), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            out = model(input_ids=ids.to(place), labels=ids.to(place))
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([out.logits, *(model.state_dict().values())])
    for one, other in zip(*found, strict=True):
        assert other.is_cuda
        # Adam divides by |g|: the rounding of gradients near 0 moves weights by some lr.
        torch.testing.assert_close(other.cpu(), one, rtol=1e-3, atol=1e-4)


def test_views_share_memory_and_data_can_be_replaced(device):
    x = torch.zeros(3, 4, device=DEVICE)
    x[1:].view(-1)[2:4].add_(1)
    assert x.tolist() == [[0] * 4, [0, 0, 1, 1], [0] * 4]
    host = torch.nn.Parameter(torch.ones(2))
    host.data = host.data.to(DEVICE)
    assert host.is_cuda
    assert host.tolist() == [1, 1]


@pytest.mark.parametrize("mix", [
    lambda x: x + torch.ones(3),
    lambda x: torch.cat([x, torch.ones(3, 3)]),
    lambda x: x.index_select(0, torch.tensor([1])),
    lambda x: torch.where(x > 0, torch.ones(3), x),
    lambda x: x.addmm_(torch.ones(3, 3), torch.ones(3, 3).to(DEVICE)),
], ids=["add", "cat", "index_select", "where", "addmm_"])  # fmt: skip
def test_tensors_of_both_devices_are_refused(device, mix):
    with pytest.raises(RuntimeError, match="device"):
        mix(torch.zeros(3, 3, device=DEVICE))


def test_a_number_of_the_host_is_no_tensor_of_it(device):
    x = torch.zeros(3, device=DEVICE) + torch.tensor(2.0)
    assert (x * 2 + 1).tolist() == [5, 5, 5]


def test_a_copy_that_does_not_block_needs_pinned_memory(device):
    with pytest.raises(RuntimeError, match="not pinned"):
        torch.ones(3).to(DEVICE, non_blocking=True)
    x = torch.ones(3).pin_memory().to(DEVICE, non_blocking=True)
    assert device.count() == 0
    with pytest.raises(RuntimeError, match="not pinned"):
        torch.empty(3).copy_(x, non_blocking=True)


def test_what_comes_to_the_host_is_there_behind_an_event(device):
    x, there = torch.ones(3, device=DEVICE), torch.zeros(3, pin_memory=True)
    there.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    assert there.isnan().all()
    copied.record()
    x.fill_(2)
    copied.synchronize()
    assert there.tolist() == [1, 1, 1]


READS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "condition": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "assigned by a mask": lambda x: x.index_put_((x > 0,), torch.ones(3, device=DEVICE)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(3, device=DEVICE).long()),
}
UPLOADS = {
    "list": lambda x: x[[0, 1]],
    "host tensor": lambda x: x[torch.tensor([0, 1])],
    "to": lambda x: torch.ones(3).to(DEVICE),
    "tensor": lambda x: torch.tensor([1.0], device=DEVICE),
    "new_tensor": lambda x: x.new_tensor([1.0]),
}
FREE = {
    "filled by a mask": lambda x: x.masked_fill_(x > 0, 0),
    "row": lambda x: x[1].add_(1),
    "arange": lambda x: torch.arange(3, device=DEVICE),
    "full": lambda x: torch.full((3,), 2.0, device=DEVICE),
    "repeat_interleave": lambda x: x.repeat_interleave(
        torch.full((3,), 2, device=DEVICE), output_size=6
    ),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, each in (("read", READS), ("upload", UPLOADS)) for name in each],
)
def test_what_the_host_waits_for_is_counted(device, kind, name):
    x = torch.ones(3, device=DEVICE)
    use = {"read": READS, "upload": UPLOADS}[kind][name]
    with device.watched():
        use(x)
        assert device.count(kind) == device.count() > 0, device.table()
    with device.capture(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="capturing"):
        use(x)


@pytest.mark.parametrize("name", FREE)
def test_what_it_does_not_wait_for_is_not(device, name):
    x = torch.ones(3, device=DEVICE)
    with device.watched():
        FREE[name](x)
        assert device.count() == 0, device.table()


def test_a_graph_holds_addresses_and_numbers(device):
    x, step = torch.zeros(3, device=DEVICE), 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_((x + step).clamp(min=2))
    x.zero_()
    step = 100
    graph.replay()
    assert x.tolist() == [2, 2, 2]
    graph.replay()
    assert x.tolist() == [5, 5, 5]


def test_nothing_is_left_of_it():
    if absent() is not None:
        pytest.skip(str(absent()))
    with pretended_device():
        kept = torch.zeros(3, device=DEVICE)
        assert torch.accelerator.is_available()
    assert not torch.cuda.is_available()
    assert not torch.accelerator.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(3, device=DEVICE)
    del kept
