"""Kernels with known faults, for the ahead-of-time gate's own tests."""

import triton
import triton.language as tl


@triton.jit
def _wide_kernel(x_ptr, y_ptr, stride, V, BLOCK: tl.constexpr):
    """Unmasked interior tiles, a masked last one: 16-byte loads and stores in the loop."""
    row = tl.program_id(0).to(tl.int64) * stride
    offsets = tl.arange(0, BLOCK)
    interior = V // BLOCK * BLOCK
    for start in range(0, interior, BLOCK):
        x = tl.load(x_ptr + row + start + offsets)
        tl.store(y_ptr + row + start + offsets, x * 2)
    tail = interior + offsets
    x = tl.load(x_ptr + row + tail, mask=tail < V)
    tl.store(y_ptr + row + tail, x * 2, mask=tail < V)


@triton.jit
def _narrow_kernel(x_ptr, y_ptr, stride, V, BLOCK: tl.constexpr):
    """A mask per element on rows of any alignment: one element per load."""
    row = tl.program_id(0).to(tl.int64) * stride
    offsets = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        here = start + offsets
        x = tl.load(x_ptr + row + here, mask=here < V)
        tl.store(y_ptr + row + here, x * 2, mask=here < V)


@triton.jit
def _spilling_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """A tile that outgrows the registers of the warps that have to hold it."""
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets).to(tl.float32)
    tl.store(y_ptr + offsets, (x / tl.sum(x, 0)).to(y_ptr.dtype.element_ty))


@triton.autotune([triton.Config({"BLOCK": block}) for block in (1024, 2048)], key=[])
@triton.jit
def _tuned_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Every candidate must pass, since timing may pick any."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@triton.jit
def _optional_kernel(x_ptr, mask_ptr, scale_ptr, BLOCK: tl.constexpr):
    """Two options, each of which is off in one specialisation and on in another."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if mask_ptr is not None:
        x = tl.where(tl.load(mask_ptr + at), x, 0.0)
    if scale_ptr is not None:
        x *= tl.load(scale_ptr)
    tl.store(x_ptr + at, x)


@triton.jit
def _busy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Sixty-four exponentials for four bytes."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + start + offsets)
        for _ in tl.static_range(64):
            x = tl.exp2(x)
        total += x
    tl.store(y_ptr + offsets, total)


@triton.jit
def _forgotten_kernel(x_ptr):
    """No case compiles it."""
    tl.store(x_ptr, 0.0)
