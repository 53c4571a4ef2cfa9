"""A log of memory as it is taken and freed: how much is held, of which kind, and each phase's
peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from fastrl.run.contexts import attributes_set

PARAMETERS = "parameters"
REFERENCE = "reference"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
KV_CACHE = "KV cache"
CASTS = "rollout weights"  # copies, packed or in another precision
HEAD = "head workspace"
ACTIVATIONS = "activations"
KINDS = (PARAMETERS, REFERENCE, GRADIENTS, OPTIMIZER, KV_CACHE, CASTS, HEAD, ACTIVATIONS)


@dataclass
class Peak:
    """The most bytes of a phase, and how many of them were of each kind."""

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)


class MemoryLog:
    """Adds up allocations and releases.

    Attributes:
        now: bytes that are allocated now, by kind.
        peaks: the peak of each phase, in the order in which phases began.
    """

    def __init__(self) -> None:
        self.now = dict.fromkeys(KINDS, 0)
        self.peaks: dict[str, Peak] = {}
        self._total = 0
        self._live: dict[int, tuple[int, str]] = {}
        self._kind: str | None = None
        self._outside = False
        self._phase = ""

    @property
    def total(self) -> int:
        return self._total

    def allocated(self, key: int, nbytes: int) -> None:
        kind = self._kind or ACTIVATIONS
        nbytes = 0 if self._outside else nbytes
        self._live[key] = (nbytes, kind)
        self.now[kind] += nbytes
        self._total += nbytes
        self._look()

    def freed(self, key: int) -> None:
        nbytes, kind = self._live.pop(key)
        self.now[kind] -= nbytes
        self._total -= nbytes

    def is_kind(self, key: int | None, kind: str, since: str | None = None) -> None:
        """Changes the kind of the allocation ``key``; does nothing where there is none.

        Args:
            since: a phase at whose peak the allocation existed: it is of the new kind there, too.
        """
        if key not in self._live:
            return
        assert key is not None
        nbytes, before = self._live[key]
        self._live[key] = (nbytes, kind)
        at_peak = [self.peaks[since].by_kind] if since in self.peaks else []
        for counts in (self.now, *at_peak):
            counts[before] -= nbytes
            counts[kind] += nbytes

    def elsewhere(self, key: int | None) -> None:
        """Counts the allocation ``key`` no more, because it is not on the device."""
        if key in self._live:
            assert key is not None
            nbytes, kind = self._live[key]
            self._live[key] = (0, kind)
            self.now[kind] -= nbytes
            self._total -= nbytes

    def kind(self, kind: str) -> AbstractContextManager[None]:
        """Context in which new allocations are of this kind."""
        return attributes_set((self, "_kind", kind))

    def outside(self) -> AbstractContextManager[None]:
        """Context in which new allocations are not on the device, and not counted."""
        return attributes_set((self, "_outside", True))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context of a phase; a phase within another does not count for the outer one."""
        with attributes_set((self, "_phase", name)):
            self._look()
            yield

    def enter(self, name: str) -> None:
        """Begins a phase that lasts wherever no other phase is on."""
        self._phase = name

    def note(self, name: str) -> None:
        """Records the bytes that are allocated now as a phase of their own."""
        with self.phase(name):
            pass

    def _look(self) -> None:
        peak = self.peaks.get(self._phase)
        if peak is None:
            peak = self.peaks[self._phase] = Peak()
        if self._total > peak.total or not peak.by_kind:
            peak.total, peak.by_kind = self._total, dict(self.now)
