"""A figure that a GPU will charge for and that can be counted without one."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Count:
    """
    Attributes:
        what: is counted, on which shape.
        unit: of the figure, such as "launches".
        goal: it may be at most that.
        take: counts.
        exact: whether it is the same on every machine, so that it can be a gate.
    """

    what: str
    unit: str
    goal: float
    take: Callable[[], float]
    exact: bool = True
