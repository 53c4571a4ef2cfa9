"""How the host learns which samples have ended."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.rollout.scheduler import Sample, Schedule
from fastrl.rollout.slots import RUNNING, Slots

POLL_STEPS = 8  # between looks


class Poll:
    """Looks at once: on a CPU the steps are done when it does."""

    def __init__(self, slots: Slots, schedule: Schedule):
        self.slots, self.schedule = slots, schedule
        self.due = POLL_STEPS  # steps until the next look

    def after(self, steps: int) -> list[int]:
        """Slots whose samples are known to have ended, once so many more steps have run."""
        self.due -= steps
        if self.due:
            return []
        self.due = POLL_STEPS
        return self._look()

    def _look(self) -> list[int]:
        reasons = self.slots.rows.reason.tolist()
        return [slot for slot in self.schedule.running if reasons[slot] != RUNNING]


class LatePoll(Poll):
    """Looks at what was there one look ago: the device has its next steps already and is never
    idle. Two flags in pinned memory take turns."""

    def __init__(self, slots: Slots, schedule: Schedule):
        super().__init__(slots, schedule)
        reason = slots.rows.reason
        self._flags = [
            torch.empty_like(reason, device="cpu", pin_memory=reason.is_cuda) for _ in range(2)
        ]
        self._before: tuple[torch.cuda.Event, Tensor, list[Sample | None]] | None = None

    def _look(self) -> list[int]:
        flags = self._flags.pop(0)
        self._flags.append(flags)
        flags.copy_(self.slots.rows.reason, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        before, self._before = self._before, (copied, flags, self.schedule.samples)
        if before is None:
            return []
        copied, flags, samples = before
        copied.synchronize()
        reasons = zip(flags.tolist(), samples, strict=True)
        ended = {id(sample) for reason, sample in reasons if sample and reason != RUNNING}
        # Since then samples have moved to other slots, and others have taken theirs.
        return [slot for slot, now in enumerate(self.schedule.samples) if id(now) in ended]


def make_poll(slots: Slots, schedule: Schedule) -> Poll:
    return (LatePoll if slots.tokens.is_cuda else Poll)(slots, schedule)
