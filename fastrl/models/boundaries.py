"""What the frozen bottom layers made of a batch, computed once and kept under a byte budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.models.modes import context_length
from fastrl.models.trunk import Trunk

# Sequences run in widths that are a multiple of it: their own length alone decides which, so that
# a boundary's bits depend on nothing but its sequence.
_WIDTH = 32
_TOKENS = 8192  # that run at a time

Autocast = Callable[[], contextlib.AbstractContextManager]


class Budget(NamedTuple):
    """Bytes that may be kept: on the model's device first, then in pinned host memory."""

    device: int
    host: int = 0


class Boundaries:
    """Boundaries [L, H] of the sequences of a batch.

    Where the budget holds them all, they run together when the first is asked for; else each when
    it is, and what there is no room for runs again.

    Args:
        trunk: runs the bottom layers.
        sequences: 1-D token ids, without padding, on the model's device.
        budget: of what is kept.
        autocast: makes the context in which they run.
    """

    def __init__(
        self,
        trunk: Trunk,
        sequences: Sequence[Tensor],
        budget: Budget,
        autocast: Autocast = contextlib.nullcontext,
    ):
        self.trunk, self.sequences, self.autocast = trunk, list(sequences), autocast
        self._left = budget
        self._kept: dict[int, Tensor] = {}

    def of(self, samples: Sequence[int], left_padded: bool) -> Tensor:
        """Boundaries [b, T, H] of some samples, padded with zeros to the longest of them."""
        asked = range(len(self.sequences)) if self._all_fit() else samples
        made = self._run([i for i in dict.fromkeys(asked) if i not in self._kept])
        device = self.sequences[0].device
        rows = [(self._kept[i] if i in self._kept else made[i]) for i in samples]
        return torch.nn.utils.rnn.pad_sequence(
            [row.to(device, non_blocking=True) for row in rows],
            batch_first=True,
            padding_side="left" if left_padded else "right",
        )

    def _run(self, samples: Sequence[int]) -> dict[int, Tensor]:
        by_width: dict[int, list[int]] = {}
        for i in samples:
            by_width.setdefault(self._width(len(self.sequences[i])), []).append(i)
        made: dict[int, Tensor] = {}
        for width, members in by_width.items():
            size = max(1, _TOKENS // width)
            for start in range(0, len(members), size):
                part = members[start : start + size]
                ids = self.sequences[0].new_zeros(len(part), width)
                for row, i in enumerate(part):
                    ids[row, : len(self.sequences[i])] = self.sequences[i]
                with self.autocast():
                    hidden = self.trunk(ids)
                for row, i in enumerate(part):
                    made[i] = hidden[row, : len(self.sequences[i])]
                    self._keep(i, made[i])
        return made

    def _all_fit(self) -> bool:
        """Whether what is not kept yet has room, in fp32, which it has at most."""
        width = self.trunk.model.config.get_text_config().hidden_size
        left = [len(x) for i, x in enumerate(self.sequences) if i not in self._kept]
        return 4 * width * sum(left) <= max(self._left)

    def _width(self, length: int) -> int:
        whole = -(-length // _WIDTH) * _WIDTH
        return min(whole, context_length(self.trunk.model) or whole)

    def _keep(self, sample: int, boundary: Tensor) -> None:
        size = boundary.numel() * boundary.element_size()
        on_device, on_host = self._left
        if size <= on_device:
            self._left = Budget(on_device - size, on_host)
            self._kept[sample] = boundary.clone()  # not the padding beside it
        elif size <= on_host:
            self._left = Budget(on_device, on_host - size)
            pinned = torch.empty(boundary.shape, dtype=boundary.dtype, pin_memory=boundary.is_cuda)
            self._kept[sample] = pinned.copy_(boundary, non_blocking=True)
