"""Keys of random draws: hashes of seed, sample and token, on which alone a draw depends."""

from __future__ import annotations

import torch
from torch import Tensor

from .argument_types import explains_types
from .dispatch import choose
from .operators import joined, operator, split
from .splitmix import GAMMA, mixed


def _bits(x: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(x, Tensor):
        return x.view(torch.int64) if x.dtype == torch.uint64 else x.long()
    x &= (1 << 64) - 1
    return torch.full((), x - (1 << 64) if x >> 63 else x, dtype=torch.int64, device=device)


def is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def sample_states(seed: int | Tensor, sample_ids: Tensor) -> Tensor:
    """h(seed, sample id) of :func:`sample_keys`, [N] int64: what the keys of a sample's tokens have
    in common, of checked arguments."""
    state = mixed(_bits(seed, sample_ids.device) + GAMMA)
    return mixed((state ^ _bits(sample_ids, sample_ids.device)) + GAMMA)


def token_keys(states: Tensor, token_index: int | Tensor, backend: str) -> Tensor:
    """The keys of tokens [N] whose :func:`sample_states` are known: one hash instead of three."""
    if backend == "triton":
        from ._triton.rng import keys

        return keys(None, states, token_index)
    return mixed((states ^ _bits(token_index, states.device)) + GAMMA)


def _hashed(
    seed: int | Tensor, sample_ids: Tensor, token_index: int | Tensor, backend: str
) -> Tensor:
    """``sample_keys`` of checked arguments."""
    if backend == "triton":
        from ._triton.rng import keys

        return keys(seed, sample_ids, token_index)
    return token_keys(sample_states(seed, sample_ids), token_index, backend)


@operator()
def _sample_keys(
    seed: Tensor | None,
    seed_number: int,
    sample_ids: Tensor,
    token_index: Tensor | None,
    token_index_number: int,
    backend: str,
) -> Tensor:
    index = joined(token_index, token_index_number)
    return _hashed(joined(seed, seed_number), sample_ids, index, backend)


@_sample_keys.register_fake
def _(seed: Tensor | None, _: int, ids: Tensor, index: Tensor | None, __: int, ___: str) -> Tensor:
    return _hashed(joined(seed, 0), ids, joined(index, 0), "torch")


@explains_types
def sample_keys(
    seed: int | Tensor, sample_ids: Tensor, token_index: int | Tensor, *, backend: str = "auto"
) -> Tensor:
    """The key of each draw, a hash of (seed, sample id, token index) and of nothing else:

        h(seed) = mix(seed + γ),
        h(…, x) = mix((h(…) ⊕ x) + γ) for x = sample id, then token index,

    with splitmix64's γ and mix, modulo 2⁶⁴. For one seed and sample, no two token indices share a
    key, and for one seed, no two samples share what their keys are made of.

    Args:
        seed: an integer in [0, 2⁶⁴), or an int64 tensor of its bits that broadcasts.
        sample_ids: [N] integers; whatever tells one sample from the others.
        token_index: of the token to draw, within its sample: an integer in [0, 2⁶⁴), or integers
            [N].
        backend: "auto", "triton" or "torch"; see ``explain``. The bits are the same.

    Returns:
        [N] int64, the bit patterns of unsigned integers; on the device of ``sample_ids``.

    Raises:
        TypeError: anything but integers, or sample ids that are no tensor.
        ValueError: a number out of its range.

    Source: Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number generators"; mix is
    variant 13 of Stafford, as in ``java.util.SplittableRandom``.
    """
    if not isinstance(sample_ids, Tensor):
        raise TypeError(f"sample_ids must be integers in a tensor, got {type(sample_ids).__name__}")
    for name, x in (("seed", seed), ("sample_ids", sample_ids), ("token_index", token_index)):
        if not (is_integer(x) if isinstance(x, Tensor) else isinstance(x, int)):
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be integers, got {got}")
        if isinstance(x, int) and not 0 <= x < 1 << 64:
            raise ValueError(f"{name} must be in [0, 2**64), got {x}: others would share its keys")
    chosen = choose(backend, sample_ids)
    if not torch.compiler.is_compiling():
        return _hashed(seed, sample_ids, token_index, chosen)
    # An operator's integers are signed.
    seed, token_index = (
        x - (1 << 64) if not isinstance(x, Tensor) and x >= 1 << 63 else x
        for x in (seed, token_index)
    )
    return _sample_keys(*split(seed), sample_ids, *split(token_index), chosen)
