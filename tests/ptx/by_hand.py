"""Kernels written as PTX, for what Triton would not compile to."""

import numpy as np

from tests.ptx.execution import Kernel

_MODULE = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry by_hand(
{parameters}
)
.reqntid {threads}
{{
	.reg .pred 	%p<8>;
	.reg .b16 	%rs<16>;
	.reg .b32 	%r<32>;
	.reg .b64 	%rd<16>;
{loads}
	mov.u32 	%r30, %tid.x;
	mov.u32 	%r31, %ctaid.x;
{body}
	ret;
}}
"""


def kernel(body: str, *, arrays: int = 1, threads: int = 64, shared_bytes: int = 0) -> Kernel:
    """A kernel whose arrays' addresses are in ``%rd0`` and those that follow; ``%r30`` is the
    thread, ``%r31`` the program."""
    names = [f"by_hand_param_{i}" for i in range(arrays)]
    module = _MODULE.format(
        parameters=",\n".join(f"\t.param .u64 .ptr .global .align 1 {name}" for name in names),
        loads="\n".join(f"\tld.param.b64 \t%rd{i}, [{name}];" for i, name in enumerate(names)),
        threads=threads,
        body=body,
    )
    return Kernel(module, shared_bytes)


def run(kernel: Kernel, *arrays: np.ndarray, programs: int = 1) -> None:
    """Launches it on arrays, which it may touch and nothing else."""
    starts = [x.ctypes.data for x in arrays]
    ends = [x.ctypes.data + x.nbytes for x in arrays]
    kernel.launch(programs, starts, zip(starts, ends, strict=True))


def aligned(count: int, dtype: type = np.uint32) -> np.ndarray:
    """Zeros that begin where a sector of memory does, and end so that nothing of theirs follows."""
    room = np.zeros(count + 64, dtype)
    first = -room.ctypes.data % 64 // room.itemsize
    return room[first : first + count]
