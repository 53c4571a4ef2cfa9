"""Continuous batching: the queue and slots of samples, first in, first out; polls for finished
samples; and their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastrl.models.host_memory import to_device
from fastrl.rollout.kv_cache import FIELDS, FINISH_REASONS, Slots
from fastrl.samples import Samples
from fastrl_kernels.types import RUNNING

POLL_STEPS = 8  # decode steps between polls
# The least cost of a prefill, in replayed decode steps; with small models it is more.
PASS_STEPS = 2


@dataclass
class RolloutSample:
    """One response to be generated."""

    index: int  # in the output
    prompt: int  # which of the prompts
    limit: int  # most tokens
    state: int = 0  # the hash of seed and sample, from which its draws' keys are made


@dataclass
class _Running:
    sample: RolloutSample
    left: int  # decode steps until its limit
    tokens: int  # the most tokens in its slot after the next decode step


def bucket_sizes(slots: int) -> list[int]:
    """Numbers of rows that a decode step may have: 1, 2, 3, 4, 6, 8, 12, 16, … and ``slots``."""
    sizes = {slots}
    for power in range(slots.bit_length()):
        sizes |= {1 << power, 3 << power}
    return sorted(size for size in sizes if size <= slots)


class Scheduler:
    """Queue and slots. Running samples lie in the first slots; :meth:`pack` moves as few as it can.

    The samples of a prompt follow each other in the queue, so that each but the first finds its
    prompt in the slot of another that runs or has just ended: every prompt is run once. A prompt
    that has to be run can wait for others (``patience``) until free slots have idled for as long as
    a prefill takes, since a prefill costs about the same whatever it holds.

    Args:
        keeps_prompts: whether slots keep what a prompt left; else each sample's prompt is run.
        patience: decode steps of all slots that a prefill is worth; 0: no prompt waits.
    """

    def __init__(
        self,
        samples: Iterable[RolloutSample],
        slots: int,
        *,
        keeps_prompts: bool = True,
        patience: int = 0,
    ):
        self.waiting = deque(samples)
        self.slots: list[_Running | None] = [None] * slots
        self.keeps_prompts, self.patience = keeps_prompts, patience
        self._sizes = bucket_sizes(slots)
        self._left: dict[int, int] = {}  # prompts, by slot, of samples that have just ended
        self._idled = 0  # decode steps of free slots since the last prefill
        self.decode_steps = self.rows_run = 0

    @property
    def running(self) -> list[int]:
        """Slots that are taken."""
        return [slot for slot, running in enumerate(self.slots) if running is not None]

    @property
    def samples(self) -> list[RolloutSample | None]:
        """Samples by slot."""
        return [None if running is None else running.sample for running in self.slots]

    def admit(
        self, prompt_lengths: list[int]
    ) -> tuple[list[tuple[int, RolloutSample]], dict[int, int]]:
        """Fills free slots; returns (slot, sample) of each new sample, and by prompt the slot that
        held the prompt already."""
        held = {prompt: slot for slot, prompt in self._left.items()}
        for slot, running in enumerate(self.slots):
            if running is not None:
                held[running.sample.prompt] = slot
        held = held if self.keeps_prompts else {}
        passes = not self.running or self._idled >= self.patience * len(self.slots)
        admitted = []
        for slot, running in enumerate(self.slots):
            if running is None and self.waiting:
                sample = self.waiting[0]
                if sample.prompt not in held:
                    if not passes:
                        break
                    self._idled = 0
                self.waiting.popleft()
                self.slots[slot] = _Running(sample, sample.limit, prompt_lengths[sample.prompt])
                admitted.append((slot, sample))
        return admitted, held

    def pack(self) -> list[tuple[int, int, int]]:
        """Moves samples so that decode steps run the fewest rows; returns (from, to, tokens)."""
        taken = self.running
        size = self._bucket_of(len(taken))
        gaps = (slot for slot, running in enumerate(self.slots) if running is None)
        moves = []
        # The first ``size`` slots have at least as many gaps as samples lie behind them.
        for source, target in zip((slot for slot in taken if slot >= size), gaps, strict=False):
            running = self.slots[source]
            assert running is not None
            moves.append((source, target, running.tokens))
        for source, target, _ in moves:
            self.slots[target], self.slots[source] = self.slots[source], None
        return moves

    @property
    def bucket(self) -> int:
        """Rows of the next decode steps."""
        return self._bucket_of(self.running[-1] + 1)

    def _bucket_of(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)

    def span(self, steps: int) -> int:
        """Tokens of the longest slot after ``steps`` decode steps."""
        return max(running.tokens for running in self.slots if running is not None) + steps - 1

    def steps(self, most: int) -> int:
        """Number of decode steps until a sample reaches its limit, at most ``most``."""
        return min(most, *(running.left for running in self.slots if running is not None))

    def advance(self, steps: int) -> list[int]:
        """Counts decode steps; returns the slots whose samples have reached their limit."""
        self._left.clear()  # decode steps may write over these prompts
        self._idled += steps * self.slots.count(None) if self.waiting else 0
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

    def release(self, slots: Iterable[int]) -> list[tuple[int, RolloutSample]]:
        """Frees slots; returns (slot, sample) of each."""
        freed = []
        for slot in slots:
            running = self.slots[slot]
            assert running is not None
            self.slots[slot], self._left[slot] = None, running.sample.prompt
            freed.append((slot, running.sample))
        return freed


class FinishPoll:
    """Finds finished samples, once in ``POLL_STEPS`` decode steps.

    Args:
        read: returns their slots: :class:`SynchronousRead` or :class:`AsynchronousRead`.
    """

    def __init__(self, read: Callable[[], list[int]]):
        self.read = read
        self.due = POLL_STEPS  # decode steps until the next poll

    def after(self, steps: int) -> list[int]:
        """Slots of samples that are known to have finished, after ``steps`` more decode steps."""
        self.due -= steps
        if self.due:
            return []
        self.due = POLL_STEPS
        return self.read()


class SynchronousRead:
    """Reads finish reasons at once: on a CPU the steps are done by then."""

    def __init__(self, slots: Slots, scheduler: Scheduler):
        self.slots, self.scheduler = slots, scheduler

    def __call__(self) -> list[int]:
        reasons = self.slots.state.reason.tolist()
        return [slot for slot in self.scheduler.running if reasons[slot] != RUNNING]


class AsynchronousRead:
    """Reads the finish reasons of the poll before, so that the device is never idle. Two buffers in
    pinned memory alternate."""

    def __init__(self, slots: Slots, scheduler: Scheduler):
        self.slots, self.scheduler = slots, scheduler
        reason = slots.state.reason
        self._buffers = [
            torch.empty_like(reason, device="cpu", pin_memory=reason.is_cuda) for _ in range(2)
        ]
        self._before: tuple[torch.cuda.Event, Tensor, list[RolloutSample | None]] | None = None

    def __call__(self) -> list[int]:
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        buffer.copy_(self.slots.state.reason, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        before, self._before = self._before, (copied, buffer, self.scheduler.samples)
        if before is None:
            return []
        copied, buffer, samples = before
        copied.synchronize()
        reasons = zip(buffer.tolist(), samples, strict=True)
        ended = {id(sample) for reason, sample in reasons if sample and reason != RUNNING}
        # Since then samples may have moved, and others may be in their slots.
        return [slot for slot, now in enumerate(self.scheduler.samples) if id(now) in ended]


def make_finish_poll(slots: Slots, scheduler: Scheduler) -> FinishPoll:
    read = AsynchronousRead if slots.tokens.is_cuda else SynchronousRead
    return FinishPoll(read(slots, scheduler))


class Results:
    """Finished samples, collected on the device and brought to the host once."""

    def __init__(self, samples: int, length: int, device: torch.device):
        self.tokens = torch.zeros(samples, length, dtype=torch.long, device=device)
        self.per_token = torch.zeros(len(FIELDS), samples, length, device=device)
        self.counts = torch.zeros(samples, dtype=torch.long, device=device)
        self.reasons = torch.zeros(samples, dtype=torch.long, device=device)

    def take(self, slots: Slots, ended: list[tuple[int, RolloutSample]]) -> None:
        """Copies samples out of their slots."""
        device, length = self.tokens.device, self.tokens.shape[1]
        pairs = torch.tensor([(slot, sample.index) for slot, sample in ended]).t().contiguous()
        source, target = to_device(pairs, device)
        self.tokens[target] = slots.tokens[source, :length]
        self.per_token[:, target] = slots.per_token[:, source, :length]
        self.counts[target] = slots.state.num_generated[source]
        self.reasons[target] = slots.state.reason[source]

    def output(self, *, values: bool) -> Samples:
        on_host = torch.column_stack([self.counts, self.reasons, self.tokens]).cpu()
        counts = on_host[:, 0].tolist()
        reasons = [FINISH_REASONS[code] for code in on_host[:, 1].tolist()]
        real = torch.arange(self.tokens.shape[1]) < on_host[:, :1]

        def split(rows: Tensor) -> list[Tensor]:
            return list(rows[real].split(counts))

        output = Samples(sequences=split(on_host[:, 2:]), finish_reasons=reasons)
        for field, rows in zip(FIELDS, self.per_token.cpu(), strict=True):
            if values or field != "values":
                setattr(output, field, split(rows))
        return output
