"""Which sample runs in which slot: first in, first out, on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Sample:
    """One response to be generated."""

    index: int  # in the output
    prompt: int  # which of the prompts
    limit: int  # most tokens


@dataclass
class _Running:
    sample: Sample
    left: int  # steps until the limit ends it
    tokens: int  # at most, that its slot holds before the next step, plus the one to come


def bucket_sizes(slots: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, …: as many rows as a step may have."""
    sizes = {slots}
    for power in range(slots.bit_length()):
        sizes |= {1 << power, 3 << power}
    return sorted(size for size in sizes if size <= slots)


class Schedule:
    """Queue and slots. Running samples lie in the first slots, without gaps after :meth:`pack`."""

    def __init__(self, samples: Iterable[Sample], slots: int):
        self.waiting = deque(samples)
        self.slots: list[_Running | None] = [None] * slots
        self._sizes = bucket_sizes(slots)
        self.decode_steps = self.rows_run = 0

    @property
    def running(self) -> list[int]:
        """Slots that are taken."""
        return [slot for slot, running in enumerate(self.slots) if running is not None]

    @property
    def samples(self) -> list[Sample | None]:
        """By slot."""
        return [None if running is None else running.sample for running in self.slots]

    def admit(self, prompt_lengths: list[int]) -> list[tuple[int, Sample]]:
        """Fills free slots; returns which sample came where."""
        admitted = []
        for slot, running in enumerate(self.slots):
            if running is None and self.waiting:
                sample = self.waiting.popleft()
                self.slots[slot] = _Running(sample, sample.limit, prompt_lengths[sample.prompt])
                admitted.append((slot, sample))
        return admitted

    def pack(self) -> list[tuple[int, int, int]]:
        """Closes gaps from the end: (from, to, tokens) of samples that move."""
        moves: list[tuple[int, int, int]] = []
        while True:
            taken = self.running
            gap = next((slot for slot, running in enumerate(self.slots) if running is None), None)
            if not taken or gap is None or gap > taken[-1]:
                return moves
            last = taken[-1]
            running = self.slots[last]
            assert running is not None
            self.slots[gap], self.slots[last] = running, None
            moves.append((last, gap, running.tokens))

    @property
    def bucket(self) -> int:
        """Rows of the next steps."""
        highest = self.running[-1] + 1
        return next(size for size in self._sizes if size >= highest)

    def span(self, steps: int) -> int:
        """What the longest slot holds after so many steps."""
        return max(running.tokens for running in self.slots if running is not None) + steps - 1

    def steps(self, most: int) -> int:
        """How many to run before somebody reaches a limit, at most ``most``."""
        return min(most, *(running.left for running in self.slots if running is not None))

    def advance(self, steps: int) -> list[int]:
        """After so many steps: the slots whose samples have reached their limit."""
        self.decode_steps += steps
        self.rows_run += steps * self.bucket
        ended = []
        for slot, running in enumerate(self.slots):
            if running is not None:
                running.left -= steps
                running.tokens += steps
                if running.left == 0:
                    ended.append(slot)
        return ended

    def release(self, slots: Iterable[int]) -> list[tuple[int, Sample]]:
        """Frees slots; returns which sample was where."""
        freed = []
        for slot in slots:
            running = self.slots[slot]
            assert running is not None
            self.slots[slot] = None
            freed.append((slot, running.sample))
        return freed
