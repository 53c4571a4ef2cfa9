"""Random numbers of a run: seeds for its draws, and the states of all generators (Python's,
NumPy's, torch's and those of devices)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_at(seed: int, *place: int | str) -> int:
    """A seed of 62 bits for the draws at a place of a run, such as ("responses", step).

    It depends on the arguments alone: not on the state of any generator, which rewards and
    callbacks may set or draw from, nor on the number of processes.

    Args:
        seed: the run's seed.
        place: what is drawn, and when.
    """
    digest = hashlib.sha256(repr((int(seed), *place)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Context in which torch draws from a seed, on the host and one device; afterwards the host's
    generator, and the device's if it is a CUDA one, is in its earlier state."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds all devices, too
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(seed)
        yield


def random_state() -> dict[str, Any]:
    """The states of all generators, as a tree that :func:`fastrl.run.state.save_tree` takes."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.uint64), "gauss": gauss},
        "numpy": numpy_state(np.random.mtrand._rand),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def same_state(one: Any, other: Any) -> bool:
    """Whether two states of :func:`random_state` are the same."""
    if isinstance(one, Mapping):
        return all(same_state(x, other[name]) for name, x in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return np.array_equal(one, other)


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restores :func:`random_state`; devices' states only if the number of devices is the same."""
    python = state["python"]
    random.setstate((python["version"], tuple(map(int, python["words"])), python["gauss"]))
    set_numpy_state(np.random.mtrand._rand, state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Context at whose end all generators have their earlier states again."""
    before = random_state()
    try:
        yield
    finally:
        restore_random_state(before)


def numpy_state(generator: np.random.RandomState) -> dict[str, Any]:
    """The state of a Mersenne twister of NumPy."""
    _, words, position, has_gauss, gauss = generator.get_state()
    return {"words": words, "position": position, "has_gauss": has_gauss, "gauss": gauss}


def set_numpy_state(generator: np.random.RandomState, state: Mapping[str, Any]) -> None:
    """Sets a Mersenne twister of NumPy to a :func:`numpy_state`."""
    words = (state["words"], state["position"], state["has_gauss"], state["gauss"])
    generator.set_state(("MT19937", *words))
