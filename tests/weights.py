"""Where weights lie in memory, and what two models have in common.

CPU libraries choose their instructions by where an array begins: a product of the same numbers may
have other last bits off a boundary of 16, 32 or 64 bytes. Torch's own allocations begin at 64; a
file that is mapped into memory begins wherever its header ends.
"""

import ctypes

import torch
from torch import Tensor, nn

BOUNDARY = 64  # bytes


def misaligned(model: nn.Module, shift: int = 1) -> nn.Module:
    """The model, each parameter and buffer moved ``shift`` elements past a 64-byte boundary.

    Each gets a storage of its own that begins there, as `safetensors` hands them out of a mapped
    file. Ties stay, values do too.
    """
    moved: dict[int, Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        place = tensor.data_ptr()
        if tensor.numel() == 0:
            continue
        if place not in moved:
            moved[place] = _misaligned(tensor.data, shift)
        tensor.data = moved[place].view(tensor.shape)
    return model


def aligned(model: nn.Module) -> bool:
    """Whether every parameter and buffer begins at a 64-byte boundary."""
    return all(x.data_ptr() % BOUNDARY == 0 for x in [*model.parameters(), *model.buffers()])


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    """Name by name and bit by bit: weights that were saved are copied, not computed."""
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert torch.equal(found[name], x), name


def _misaligned(x: Tensor, shift: int) -> Tensor:
    memory = bytearray(x.nbytes + 2 * BOUNDARY)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = (shift * x.element_size() - address) % BOUNDARY
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=start)
    return copy.copy_(x.flatten())
