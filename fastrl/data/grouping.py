"""How samples are put into passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def passes_that_fit(
    items: Iterable[int], joined: Callable[[T | None, int], T], fits: Callable[[T], bool]
) -> list[list[int]]:
    """Puts items into passes, in their order: an item joins the last pass as long as it fits there,
    and begins another otherwise, even where it does not fit alone.

    Args:
        joined: returns the size of a pass with a further item, from the pass's size before; None
            instead of that asks for the size of the item alone.
        fits: whether a pass of that size fits.
    """
    passes: list[list[int]] = []
    so_far: T | None = None
    for item in items:
        together = joined(so_far, item) if passes else None
        if together is None or not fits(together):
            passes.append([])
            together = joined(None, item)
        passes[-1].append(item)
        so_far = together
    return passes


def passes_by_size(items: Iterable[int], sizes: Callable[[int], int], most: int) -> list[list[int]]:
    """Puts items into passes of at most ``most`` tokens each, see :func:`passes_that_fit`.

    Args:
        sizes: returns the number of tokens of an item.
    """
    return passes_that_fit(
        items, lambda total, i: (total or 0) + sizes(i), lambda total: total <= most
    )
