"""The random numbers that the sampling kernel draws with, by themselves."""

import torch
import triton
import triton.language as tl

from fastrl_kernels._triton.sampling import exponential, race_state


@triton.jit
def _noise_kernel(keys_ptr, out_ptr, first, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    state = race_state(tl.load(keys_ptr + row))
    tl.store(out_ptr + row * COLUMNS + column, exponential(state, column.to(tl.int64) + first))


def exponentials(keys: torch.Tensor, columns: int, first: int = 0) -> torch.Tensor:
    """[keys, columns] fp32, of counters from ``first`` on."""
    out = torch.empty(len(keys), columns, device=keys.device)
    _noise_kernel[(len(keys),)](keys, out, first, COLUMNS=columns)
    return out
