"""The states of all random number generators: of Python, NumPy, torch and its devices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states, as a tree that :func:`fastrl.run.state.save_tree` takes."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.uint64), "gauss": gauss},
        "numpy": numpy_state(np.random.mtrand._rand),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restores the states; those of devices only where there are as many."""
    python = state["python"]
    random.setstate((python["version"], tuple(map(int, python["words"])), python["gauss"]))
    set_numpy_state(np.random.mtrand._rand, state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Context after which all generators are as before."""
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
    words = (state["words"], state["position"], state["has_gauss"], state["gauss"])
    generator.set_state(("MT19937", *words))
