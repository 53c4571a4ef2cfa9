"""Counts what TRL's own functions are called, beside what fastrl.compat.patch counts."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastrl.compat.patch import rebind
from fastrl.compat.patch.replacement import Replacement


@contextmanager
def counted_originals(replacements: Sequence[Replacement]) -> Iterator[Counter[str]]:
    """Puts a counting wrapper around each of TRL's own, under every name; takes it off again.

    The wrappers come first, so that `patch_trl` takes them for TRL's own.
    """
    counts: Counter[str] = Counter()
    swaps, forwards, owners = [], [], []
    for replacement in replacements:
        original = replacement.original()
        if isinstance(original, type):  # an autograd function: its name stays, its forward counts
            forwards.append((original, vars(original)["forward"]))
            original.forward = staticmethod(_counting(original.forward, replacement.name, counts))
        else:
            swaps.append((original, _counting(original, replacement.name, counts)))
            owner = replacement.owner()[0]
            owners += [owner] if isinstance(owner, type) else []
    rebind("trl", owners, swaps)
    try:
        yield counts
    finally:
        rebind("trl", owners, [(wrapper, original) for original, wrapper in swaps])
        for function, forward in forwards:
            function.forward = forward


def _counting(function: Any, name: str, counts: Counter[str]) -> Any:
    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return counting
