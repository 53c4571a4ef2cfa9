"""A cache of the activations of layers that policy and reference share, for a batch's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.data.token_batch import TokenBatch
from fastrl.models.host_memory import to_device
from fastrl.models.scoring import PassLimit
from fastrl.models.trunk import Trunk

TOKENS_PER_PASS = 8192  # unless the caller sets it

MakeContext = Callable[[], AbstractContextManager]


class Part(NamedTuple):
    """A prompt, or a sample's response."""

    kind: str  # "prompt" or "response"
    number: int  # a prompt's number, or the sample's index, in the batch


class Budget(NamedTuple):
    """Bytes that may be kept: on the model's device first, then in pinned host memory."""

    device: int
    host: int = 0


class TrunkCache:
    """The trunk's activations for the samples of a batch, [L, H] each, kept within a byte budget;
    a prompt that several samples share is kept once.

    Where device or host has room for all activations, they are computed together at the first call;
    else when they are needed, and again where there was no room for them.

    Args:
        trunk: runs the bottom layers.
        batch: on the model's device; its padding says how the layers run.
        budget: bytes of activations that may be kept.
        tokens_per_pass: the most positions of one pass through the layers.
        autocast: makes the context in which the layers run.
        whole: makes the context in which the model's weights are whole, if they are spread over
            processes; all processes enter it equally often.
    """

    def __init__(
        self,
        trunk: Trunk,
        batch: TokenBatch,
        budget: Budget,
        tokens_per_pass: int | None = None,
        autocast: MakeContext = nullcontext,
        whole: MakeContext = nullcontext,
    ):
        self.trunk, self.batch = trunk, batch
        self.limit = PassLimit(len(batch), tokens_per_pass or TOKENS_PER_PASS)
        self.autocast, self.whole = autocast, whole
        self._left = budget
        self._kept: dict[Part, Tensor] = {}

    def padded(self, samples: Sequence[int], left_padded: bool) -> Tensor:
        """Activations of padded rows, see :class:`fastrl.data.token_batch.TrunkActivations`."""
        states = self._of(samples)
        return torch.nn.utils.rnn.pad_sequence(
            [torch.cat([states[part] for part in self._parts(i)]) for i in samples],
            batch_first=True,
            padding_side="left" if left_padded else "right",
        )

    def packed(self, samples: Sequence[int], groups: Sequence[Sequence[int]]) -> Tensor:
        """Activations of a packed row, see :class:`fastrl.data.token_batch.TrunkActivations`."""
        states = self._of(samples)
        prompts: list[Tensor] = []
        responses: list[Tensor] = []
        for group in groups:
            parts = [self._parts(samples[place]) for place in group]
            response_states = [states[response] for _, response in parts]
            prompts.append(states[parts[0][0]])
            (responses if len(group) > 1 else prompts).extend(response_states)
        return torch.cat(prompts + responses).unsqueeze(0)

    def missing(self) -> list[int]:
        """Samples whose activations are not kept, or not all of them."""
        samples = range(len(self.batch))
        return [i for i in samples if not all(part in self._kept for part in self._parts(i))]

    def stored(self) -> list[Tensor]:
        """The activations that are kept, [L, H] each."""
        return list(self._kept.values())

    def _parts(self, sample: int) -> tuple[Part, Part]:
        """A sample's prompt, by its number, and its response."""
        return Part("prompt", self.batch.prompts[sample]), Part("response", sample)

    def _of(self, samples: Sequence[int]) -> dict[Part, Tensor]:
        """Activations of samples' prompts and responses, [L, H] each, on the device."""
        fit = self._all_fit()
        missing = self.missing()
        if not fit:
            missing = sorted(set(missing) & set(samples))
        # All processes enter it: if all fit they lack the same samples, else each lacks others.
        with self.whole() if missing or not fit else nullcontext():
            made = self._run(missing)
        device = self.batch.input_ids.device
        needed = {part for i in samples for part in self._parts(i)}
        return {
            part: made[part] if part in made else self._kept[part].to(device, non_blocking=True)
            for part in needed
        }

    def _run(self, samples: Sequence[int]) -> dict[Part, Tensor]:
        made: dict[Part, Tensor] = {}
        for chosen in self.batch.parts(samples, self.limit):
            part = self.batch.select(chosen)
            model_pass = part.model_pass
            with self.autocast():
                hidden = self.trunk(**model_pass.inputs)
            rows = hidden.flatten(0, 1)[to_device(model_pass.places, hidden.device)]
            lengths = [n for pair in zip(part.query_lengths, part.response_lengths, strict=True)
                       for n in pair]  # fmt: skip
            split = rows.split(lengths)
            for place, i in enumerate(chosen):
                for which, x in zip(self._parts(i), split[2 * place : 2 * place + 2], strict=True):
                    if which not in made:
                        made[which] = x
                        if which not in self._kept:
                            self._keep(which, x)
        return made

    def _all_fit(self) -> bool:
        """Whether device or host alone has room for all activations not kept yet, if fp32."""
        width = self.trunk.model.config.get_text_config().hidden_size
        batch = self.batch
        lengths = {
            part: n
            for i in range(len(batch))
            for part, n in zip(
                self._parts(i), (batch.query_lengths[i], batch.response_lengths[i]), strict=True
            )
        }
        left = sum(n for part, n in lengths.items() if part not in self._kept)
        return 4 * width * left <= max(self._left)

    def _keep(self, part: Part, boundary: Tensor) -> None:
        size = boundary.numel() * boundary.element_size()
        on_device, on_host = self._left
        if size <= on_device:
            self._left = Budget(on_device - size, on_host)
            self._kept[part] = boundary.clone()  # a view would keep the whole pass alive
        elif size <= on_host:
            self._left = Budget(on_device, on_host - size)
            pinned = torch.empty(boundary.shape, dtype=boundary.dtype, pin_memory=boundary.is_cuda)
            self._kept[part] = pinned.copy_(boundary, non_blocking=True)
