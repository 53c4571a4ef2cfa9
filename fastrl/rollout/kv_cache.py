"""Keys, values and state of running samples: buffers of fixed size and address, a row per slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.models.host_memory import to_device
from fastrl.models.routing import UNKNOWN
from fastrl_kernels import SlotBuffers
from fastrl_kernels.types import EOS, IDLE, LENGTH, NAN, STOP

DEAD_END = IDLE + 1  # the state of a slot whose grammar allows no token
FINISH_REASONS = {EOS: "eos", LENGTH: "length", STOP: "stop", NAN: "nan", DEAD_END: "grammar"}
# Numbers kept per token, fp32, in the order of ``fastrl_kernels.SlotBuffers``.
FIELDS = ("logprobs", "logprobs_t1", "entropies", "values")


class StateShape(NamedTuple):
    """Shape of what a recurrent layer keeps of a text, whatever its length."""

    kind: str  # CONVOLUTION or RECURRENT
    number: int  # among those of this kind in the layer
    shape: tuple[int, ...]
    dtype: torch.dtype


CONVOLUTION, RECURRENT = "convolution", "recurrent"


class LayerShape(NamedTuple):
    """Shapes of one token's keys and values in a layer, 0 without attention, and of its states."""

    heads: int
    key_width: int
    value_width: int
    states: tuple[StateShape, ...] = ()
    latent: bool = False  # the values are the first numbers of the keys, kept once

    @property
    def numbers(self) -> int:
        """The numbers that are kept of a token."""
        return self.heads * (self.key_width + (0 if self.latent else self.value_width))


class KVCache:
    """Keys and values of all layers, [slots, length, heads, width] each, and the states of
    recurrent ones, [slots, ...]; zero at first.

    In memory a head's tokens lie together, [slots, heads, length, width]: slots and heads are one
    batch of matrix products.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.layers, self.slots, self.length = tuple(layers), slots, length

        def zeros(heads: int, width: int) -> Tensor:
            x = torch.zeros(slots, heads, length, width, dtype=dtype, device=device)
            return x.transpose(1, 2)

        self.keys = [zeros(layer.heads, layer.key_width) for layer in layers]
        self.values = [
            keys[..., : layer.value_width]
            if layer.latent
            else zeros(layer.heads, layer.value_width)
            for layer, keys in zip(layers, self.keys, strict=True)
        ]
        kept_apart = zip(layers, self.values, strict=True)
        self._of_tokens = [*self.keys, *(x for layer, x in kept_apart if not layer.latent)]
        self.states = {
            (i, state.kind, state.number): torch.zeros(
                slots, *state.shape, dtype=state.dtype, device=device
            )
            for i, layer in enumerate(layers)
            for state in layer.states
        }
        self.of_prompts: dict[tuple[int, str, int], Tensor] = {}  # states at prompts' ends
        # The most tokens that a layer's query reads, None: all; filled in as layers attend.
        self.windows: list[int | None] = [None] * len(layers)
        self.experts: list[Tensor] = []  # choices of each router, [slots, length, k] int16

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """The buffers [slots, length, heads, width] of the two tensors that a layer hands to its
        cache: keys and values, or latents and rotated keys."""
        keys, width = self.keys[layer], self.layers[layer].value_width
        if self.layers[layer].latent:
            return keys[..., :width], keys[..., width:]
        return keys, self.values[layer]

    def keep_experts(self, chosen: Sequence[int]) -> None:
        """Keeps routers' choices, too; ``chosen`` has each router's number of experts per token."""
        at = self.slots, self.length
        device = self.keys[0].device
        self.experts = [
            torch.full((*at, k), UNKNOWN, dtype=torch.int16, device=device) for k in chosen
        ]

    def chosen(self, slot: int) -> Tensor:
        """The choices of all L routers in a slot, [length, L, k]."""
        return torch.stack([x[slot] for x in self.experts], dim=1)

    @staticmethod
    def bytes_per_slot(layers: Sequence[LayerShape], length: int, dtype: torch.dtype) -> int:
        of_tokens = sum(layer.numbers for layer in layers) * length * dtype.itemsize
        return of_tokens + 2 * state_bytes(layers)  # twice, for states at prompts' ends

    def tensors(self) -> list[Tensor]:
        """The tensors of keys, values and states."""
        return [*self._of_tokens, *self.states.values(), *self.of_prompts.values()]

    @property
    def keeps_prompts(self) -> bool:
        """Whether a slot still has what its prompt left there while and after its sample runs, so
        that others can :meth:`copy` it. A sample's keys and values lie behind its prompt's; states,
        which decode steps overwrite, are kept apart where :meth:`keep_prompts` was called."""
        return not self.states or bool(self.of_prompts)

    def clear(self, slots: Sequence[int]) -> None:
        """Zeroes slots: a NaN left there would reach the next sample, as 0·NaN is NaN."""
        where = to_device(torch.tensor(list(slots)), self.keys[0].device)
        for x in self.tensors():
            x.index_fill_(0, where, 0)
        for x in self.experts:
            x.index_fill_(0, where, UNKNOWN)

    def keep_prompts(self) -> None:
        """Keeps states at the ends of prompts apart, for samples that get a slot later."""
        if not self.of_prompts:
            self.of_prompts = {key: torch.zeros_like(x) for key, x in self.states.items()}

    def begin_states(self, key: tuple[int, str, int], slots: Tensor, states: Tensor) -> None:
        """Stores a layer's states [n, ...] at the ends of the prompts of slots [n]."""
        for kept in (self.states, self.of_prompts):
            if key in kept:
                kept[key][slots] = states.to(kept[key].dtype)

    def copy(self, copies: Sequence[PromptCopy]) -> None:
        """Copies prompts from slots that have them to others, or the same, whose other tokens
        become zero. All are read before any is written."""
        device = self.keys[0].device
        where = [to_device(torch.tensor(copy.targets), device) for copy in copies]
        for x in (*self._of_tokens, *self.experts):
            copied = [x[copy.source, : copy.tokens].clone() for copy in copies]
            for targets, prompt in zip(where, copied, strict=True):
                x.index_fill_(0, targets, UNKNOWN if x.dtype == torch.int16 else 0)
                x[targets, : len(prompt)] = prompt
        for key, x in self.of_prompts.items():
            states = [x[copy.source].clone() for copy in copies]
            for targets, state in zip(where, states, strict=True):
                self.begin_states(key, targets, state.expand(len(targets), *state.shape))

    def move(self, moves: Moves, tokens: int) -> None:
        """Copies the first ``tokens`` of slots to other slots, whose further tokens become zero."""
        for x in self._of_tokens:
            x.index_fill_(0, moves.targets, 0)
            x[moves.targets, :tokens] = x[moves.sources, :tokens]
        for x in (*self.states.values(), *self.of_prompts.values()):
            x[moves.targets] = x[moves.sources]
        for x in self.experts:
            x.index_fill_(0, moves.targets, UNKNOWN)
            x[moves.targets, :tokens] = x[moves.sources, :tokens]


def state_bytes(layers: Sequence[LayerShape]) -> int:
    """Bytes of a slot's states."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for layer in layers for x in layer.states)


class PromptCopy(NamedTuple):
    """A prompt that slots get from one that has it."""

    source: int
    targets: list[int]
    tokens: int


class Moves(NamedTuple):
    """Slots whose samples go to others, which are free, [n] int64 each on the slots' device."""

    sources: Tensor
    targets: Tensor

    @classmethod
    def of(cls, moves: Sequence[tuple[int, int]], device: torch.device) -> Moves:
        """The moves of pairs (from, to) of slots."""
        return cls(*to_device(torch.tensor(moves).t().contiguous(), device))


class SlotState(NamedTuple):
    """State of the sample in each slot, int64 [S]; a decode step gets the first rows of it."""

    token: Tensor  # the last one, whose keys and values are not stored yet
    position: Tensor  # the position of that token
    num_generated: Tensor  # tokens generated so far
    limit: Tensor  # the most tokens to generate
    sample: Tensor  # the hash of seed and sample, from which its draws' keys are made
    reason: Tensor  # RUNNING, or why it ended; IDLE where a slot has no sample

    def first(self, count: int) -> SlotState:
        return SlotState(*(x[:count] for x in self))


class Slots:
    """Buffers of all slots that decode steps read and write, except keys and values.

    Args:
        slots: S.
        length: most generated tokens of a sample.
    """

    def __init__(self, slots: int, length: int, device: torch.device):
        def zeros() -> Tensor:
            return torch.zeros(slots, dtype=torch.long, device=device)

        self.state = SlotState(*(zeros() for _ in SlotState._fields))
        self.state.reason.fill_(IDLE)
        # Both buffers have one column more than needed: rows that have ended write there.
        self.tokens = torch.zeros(slots, length + 1, dtype=torch.long, device=device)
        self.per_token = torch.zeros(len(FIELDS), slots, length + 1, device=device)
        self.seen: Tensor | None = None  # [S, V] bool, tokens that occurred
        self.tail: Tensor | None = None  # [S, W] the last tokens, newest last; -1 before the first
        # [S, R, ⌈V/32⌉] the sets, as bits, that token n was drawn from, at n % R: a ring.
        self.support: Tensor | None = None
        # Buffers of earlier calls by dtype and columns: captured steps contain their addresses.
        self._of_calls: dict[tuple[torch.dtype, int], Tensor] = {}

    def tensors(self) -> list[Tensor]:
        """All buffers that a decode step of the call may write."""
        all_ = (*self.state, self.tokens, self.per_token, self.seen, self.tail, self.support)
        return [x for x in all_ if x is not None]

    def buffers(self, state: SlotState) -> SlotBuffers:
        """The buffers that a decode step of the first slots advances, for their ``state``."""
        columns = state.token, state.position, state.num_generated, state.limit, state.reason
        return SlotBuffers(*columns, self.tokens, self.per_token)

    def begin(
        self, vocabulary: int | None, tail: int | None, support: tuple[int, int] | None = None
    ) -> None:
        """Prepares a new call.

        Args:
            vocabulary: V where a repetition penalty needs the tokens that have occurred.
            tail: W where stop sequences need the last tokens.
            support: R and ⌈V/32⌉ where sets that tokens are drawn from are recorded.
        """
        self.seen = self._of_call(vocabulary, torch.bool)
        self.tail = self._of_call(tail, torch.long)
        ring = None if support is None else self._of_call(math.prod(support), torch.int32)
        self.support = None if ring is None or support is None else ring.view(-1, *support)
        for x in self.state:
            x.zero_()
        self.state.reason.fill_(IDLE)

    def _of_call(self, columns: int | None, dtype: torch.dtype) -> Tensor | None:
        if columns is None:
            return None
        if (dtype, columns) not in self._of_calls:
            rows, device = len(self.tokens), self.tokens.device
            self._of_calls[dtype, columns] = torch.zeros(rows, columns, dtype=dtype, device=device)
        return self._of_calls[dtype, columns]

    def remember(self, slots: Sequence[int], prompts: Sequence[Tensor]) -> None:
        """Records new samples' prompts: their tokens as seen, and no last tokens yet."""
        if self.seen is None and self.tail is None:
            return
        for slot, prompt in zip(slots, prompts, strict=True):
            if self.seen is not None:
                row = self.seen[slot].fill_(False)
                row.index_fill_(0, to_device(prompt, row.device), True)
            if self.tail is not None:
                self.tail[slot].fill_(-1)

    def fill(self, slots: Sequence[int], **columns: Sequence[int]) -> None:
        """Sets columns of the slots' state, by name."""
        table = torch.tensor([list(slots), *map(list, columns.values())], dtype=torch.long)
        where, *rows = to_device(table, self.tokens.device)
        for name, values in zip(columns, rows, strict=True):
            getattr(self.state, name).index_copy_(0, where, values)

    def empty(self, slots: Sequence[int]) -> None:
        """Marks slots idle: what decode steps write there is not read."""
        zero = [0] * len(slots)
        self.fill(slots, reason=[IDLE] * len(slots), position=zero, num_generated=zero, token=zero)

    def move(self, moves: Moves) -> None:
        for x in (*self.state, self.tokens, self.seen, self.tail):
            if x is not None:
                x[moves.targets] = x[moves.sources]
        self.per_token[:, moves.targets] = self.per_token[:, moves.sources]
        for x in (self.state.token, self.state.position, self.state.num_generated):
            x.index_fill_(0, moves.sources, 0)
        self.state.reason.index_fill_(0, moves.sources, IDLE)
