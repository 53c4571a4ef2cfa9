"""A batch of queries and responses, and the places of its tokens in the model's input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fastrl.data.grouping import passes_that_fit
from fastrl.models.host_memory import to_device
from fastrl.models.routing import Routing
from fastrl.models.scoring import PassLimit
from fastrl_kernels import TokenSets

if TYPE_CHECKING:
    from typing import Self


class ModelPass(NamedTuple):
    """One forward pass over a batch: its arguments, and the places of the tokens in them."""

    inputs: dict[str, Any]
    rows: Tensor  # [N] int64, flat positions that predict the response tokens that count
    places: Tensor  # [Σ L] int64 on the CPU, flat positions of all tokens, sample after sample


class Padding(Protocol):
    """How a batch's tokens are laid out in the model's input: padded, or packed."""

    def model_pass(self, batch: TokenBatch) -> ModelPass:
        """The forward pass over a batch."""

    def tokens(self, batch: TokenBatch, samples: Sequence[int]) -> int:
        """The number of positions in a forward pass over some of the batch's samples."""


class Padded:
    """A row for each sample, [B, T].

    Args:
        masked: False for models that need no attention mask for a right-padded batch: a causal
            model's real tokens do not see the padding, and without a mask flash attention can run.
    """

    def __init__(self, masked: bool = True):
        self.masked = masked

    def model_pass(self, batch: TokenBatch) -> ModelPass:
        inputs = batch.padded_inputs
        if not self.masked and not batch.left_padded:
            inputs["attention_mask"] = None
        if batch.boundaries is not None:
            inputs["boundary"] = batch.boundaries.padded(batch.samples, batch.left_padded)
        places = [
            np.arange(start, start + n)
            for start, n in zip(batch.starts, batch.lengths, strict=True)
        ]
        return ModelPass(inputs, batch.rows(), torch.from_numpy(np.concatenate(places)))

    def tokens(self, batch: TokenBatch, samples: Sequence[int]) -> int:
        return batch.padded_positions(samples)


class TrunkActivations(Protocol):
    """The output of a model's frozen bottom layers for the samples of a batch, computed once."""

    def padded(self, samples: Sequence[int], left_padded: bool) -> Tensor:
        """[b, T, H] of some samples, padded with zeros to the longest of them."""

    def packed(self, samples: Sequence[int], groups: Sequence[Sequence[int]]) -> Tensor:
        """[1, T, H] of some samples as they stand in a packed row.

        Args:
            groups: the samples of each prompt, as indices in ``samples``.
        """


# Kinds of columns: :meth:`TokenBatch.select` cuts a column by its kind.
POSITIONS = {"kind": "[B, T]"}
PREDICTIONS = {"kind": "[B, T-1]"}
ON_HOST = {"kind": "[B, T-1] on the CPU"}
ENCODED = {"kind": "[B, S]"}
LIST = {"kind": "an element for each sample"}


def known_columns(record: Any) -> Iterator[tuple[str, Any, str]]:
    """The columns of a dataclass that are not None: name, column and kind."""
    for name, each in record.__dataclass_fields__.items():
        column = getattr(record, name)
        if each.metadata and column is not None:
            yield name, column, each.metadata["kind"]


@dataclass(frozen=True)
class TokenBatch:
    """Queries and responses, padded to [B, T]. A column that is not known is None.

    Per-token quantities have shape [B, T-1]: position t belongs to the token at t+1. A response's
    first token has position len(query)-1, counted from its row's first token.
    """

    input_ids: Tensor = field(metadata=POSITIONS)  # int64
    attention_mask: Tensor = field(metadata=POSITIONS)  # int64
    position_ids: Tensor | None = field(metadata=POSITIONS)  # int64; None: positions count columns
    mask: Tensor = field(metadata=PREDICTIONS)  # bool, True where a response token counts
    response_mask: Tensor = field(metadata=ON_HOST)  # the same
    query_lengths: list[int] = field(metadata=LIST)
    response_lengths: list[int] = field(metadata=LIST)
    left_padded: bool
    prompts: list[int] = field(metadata=LIST)  # numbers of the prompts, equal ones of equal prompts
    samples: Sequence[int] = field(metadata=LIST)  # their numbers in the batch that this is part of
    padding: Padding = field(default_factory=Padded)
    boundaries: TrunkActivations | None = None  # of the layers shared with a reference model
    # The experts that routers chose for each sample's tokens, [≤ T, routers, k], None where not
    # known; None for a dense model.
    experts: Sequence[Tensor | None] | None = field(default=None, metadata=LIST)
    # The numbers of the samples' teachers; None: all have the first.
    teachers: Sequence[int] | None = field(default=None, metadata=LIST)
    # Ids and log-probs [n, K] at each sample's tokens that count, by teachers that are functions.
    likely: Sequence[tuple[Tensor, Tensor]] | None = field(default=None, metadata=LIST)
    # The n sets that each sample's tokens that count were drawn from; None: the whole vocabulary.
    supports: Sequence[TokenSets] | None = field(default=None, metadata=LIST)

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        query_lengths: list[int],
        response_lengths: list[int],
        response_masks: Sequence[Tensor] | None = None,
    ) -> TokenBatch:
        """Makes a batch from model inputs [B, T] on the CPU, padded on either side; by default all
        tokens of responses count."""
        first = attention_mask.argmax(-1)
        columns = torch.arange(input_ids.shape[1])
        begin = (first + torch.tensor(query_lengths) - 1)[:, None]
        end = begin + torch.tensor(response_lengths)[:, None]
        response_mask = (columns[:-1] >= begin) & (columns[:-1] < end)
        if response_masks is not None:
            inside = response_mask.clone()
            response_mask[inside] = torch.cat(list(response_masks)).bool()
        left_padded = bool(first.any())
        return cls(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=(columns - first[:, None]).clamp(min=0) if left_padded else None,
            mask=response_mask,
            response_mask=response_mask,
            query_lengths=query_lengths,
            response_lengths=response_lengths,
            left_padded=left_padded,
            prompts=_numbered(
                row[start : start + n]
                for row, start, n in zip(input_ids, first.tolist(), query_lengths, strict=True)
            ),
            samples=range(len(input_ids)),
        )

    def with_experts(self, experts: Sequence[Tensor | None] | None) -> Self:
        """Returns the batch with the experts that routers chose, as far as they are known."""
        return replace(self, experts=experts or [None] * len(self))

    @property
    def model_pass(self) -> ModelPass:
        """The forward pass over all samples."""
        model_pass = self.padding.model_pass(self)
        if self.experts is not None:
            ids = model_pass.inputs["input_ids"]
            routing = Routing.of(model_pass.places, self.lengths, self.experts, ids)
            model_pass.inputs["routing"] = routing
        return model_pass

    @property
    def padded_inputs(self) -> dict[str, Any]:
        """Arguments of the model's forward, a row for each sample."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids
        return inputs

    @property
    def prompt_lengths(self) -> list[int]:
        """The number of tokens of each query, whether the decoder or the encoder reads it."""
        return self.query_lengths

    def prompt(self, i: int) -> Tensor:
        """The query of sample ``i``, without padding."""
        return self.sequences()[i][: self.query_lengths[i]]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each query with its response."""
        return list(map(sum, zip(self.query_lengths, self.response_lengths, strict=True)))

    @property
    def starts(self) -> list[int]:
        """The flat position b·T + t of each sample's first token."""
        width, left = self.input_ids.shape[1], self.left_padded
        return [i * width + (width - n if left else 0) for i, n in enumerate(self.lengths)]

    def sequences(self) -> list[Tensor]:
        """Queries with their responses, without padding."""
        rows = zip(self.input_ids, self.lengths, strict=True)
        return [row[-length:] if self.left_padded else row[:length] for row, length in rows]

    def on(self, boundaries: TrunkActivations | None) -> Self:
        """The batch with activations of layers that policy and reference share, or without."""
        return replace(self, boundaries=boundaries, samples=range(len(self)))

    def __len__(self) -> int:
        return len(self.query_lengths)

    def padded_positions(self, samples: Sequence[int]) -> int:
        """The number of positions of some samples as rows of one width."""
        lengths = self.lengths
        return len(samples) * max(lengths[i] for i in samples)

    def groups(self, samples: Iterable[int] | None = None) -> list[list[int]]:
        """Samples grouped by prompt, in the order of first samples; by default of all samples."""
        groups: dict[int, list[int]] = {}
        for i in range(len(self)) if samples is None else samples:
            groups.setdefault(self.prompts[i], []).append(i)
        return list(groups.values())

    def parts(self, samples: Sequence[int], limit: PassLimit) -> list[list[int]]:
        """Lists of samples that share a forward pass, each in ascending order; samples of a prompt
        share a pass as far as they fit."""

        def fits(part: list[int]) -> bool:
            most = limit.tokens
            fewer = most is None or self.padding.tokens(self, part) <= most
            return len(part) <= limit.samples and fewer

        order = (i for group in self.groups(samples) for i in group)
        return list(map(sorted, passes_that_fit(order, lambda part, i: [*(part or ()), i], fits)))

    def counting(self) -> list[int]:
        """The indices of samples of which at least one token counts."""
        return self.response_mask.any(-1).nonzero()[:, 0].tolist()

    def to(self, device: torch.device) -> Self:
        """Returns the batch with its tensors on a device, but for ``response_mask`` and lists."""
        moved: Any = {
            name: to_device(x, device)
            for name, x, kind in known_columns(self)
            if kind not in (ON_HOST["kind"], LIST["kind"])
        }
        return replace(self, **moved)

    def rows(self) -> Tensor:
        """Flat positions b·T + t of [B, T] that predict the response tokens that count, [N] on the
        batch's device."""
        flat = self.response_mask.nonzero()
        rows = flat[:, 0] * self.input_ids.shape[1] + flat[:, 1]
        return to_device(rows, self.input_ids.device)

    def support(self) -> TokenSets | None:
        """The sets that the tokens that count were drawn from, [N] on the batch's device; None
        where all are the whole vocabulary."""
        if self.supports is None:
            return None
        sets = TokenSets.joined(self.supports)
        return sets.to(self.input_ids.device) if sets.cuts(slice(0, len(sets))) else None

    def rows_of(self, samples: Iterable[int]) -> Tensor:
        """Returns the ``rows()`` that predict tokens of these samples, one after the other."""
        rows = self.rows()
        of_each = rows.split(self.response_mask.sum(-1).tolist())
        return torch.cat([rows[:0], *(of_each[i] for i in samples)])

    def mask_of_responses(self) -> Tensor:
        """Which tokens of the concatenated responses count, [Σ responses] bool on the CPU."""
        columns = torch.arange(self.response_mask.shape[1])
        width = self.input_ids.shape[1]
        lengths = torch.tensor([self.query_lengths, self.response_lengths])
        first = width - lengths.sum(0) if self.left_padded else torch.zeros_like(lengths[0])
        begin = (first + lengths[0] - 1)[:, None]
        inside = (columns >= begin) & (columns < begin + lengths[1][:, None])
        return self.response_mask[inside]

    def scatter(self, per_row: Tensor, rows: Tensor) -> Tensor:
        """Values [N, ...] of ``rows()`` as [B, T-1, ...], zero elsewhere; differentiable."""
        flat = per_row.new_zeros(self.input_ids.numel(), *per_row.shape[1:])
        return flat.index_copy_(0, rows, per_row).unflatten(0, self.input_ids.shape)[:, :-1]

    def placed(self, of_responses: Sequence[Tensor]) -> Tensor:
        """Numbers of each response's tokens, on the host, as [B, T-1] on the batch's device, zero
        elsewhere."""
        counted = torch.cat(list(of_responses))[self.mask_of_responses()]
        return self.scatter(to_device(counted, self.input_ids.device), self.rows())

    def columns(self, indices: Sequence[int]) -> slice:
        """The columns of [B, T] in which samples ``indices`` are not all padding."""
        width = self.input_ids.shape[1]
        longest = max(self.query_lengths[i] + self.response_lengths[i] for i in indices)
        return slice(width - longest, width) if self.left_padded else slice(0, longest)

    def select(self, indices: Sequence[int]) -> Self:
        """Returns some samples, without columns that are padding in all of them."""
        columns = self.columns(indices)
        shifted = slice(columns.start, columns.stop - 1)
        index = torch.as_tensor(list(indices))
        on_device = to_device(index, self.input_ids.device)
        cuts = {
            POSITIONS["kind"]: (on_device, columns),
            PREDICTIONS["kind"]: (on_device, shifted),
            ON_HOST["kind"]: (index, shifted),
            ENCODED["kind"]: (on_device, slice(max(self.prompt_lengths[i] for i in indices))),
        }
        some: Any = {
            name: x[cuts[kind]] if kind in cuts else [x[i] for i in indices]
            for name, x, kind in known_columns(self)
        }
        return replace(self, **some)


@dataclass(frozen=True)
class EncodedBatch(TokenBatch):
    """A batch for an encoder–decoder: [B, T] is what the decoder reads, with its start token in
    place of the query; the encoder reads the queries."""

    encoder_ids: Tensor = field(kw_only=True, metadata=ENCODED)  # int64
    encoder_mask: Tensor = field(kw_only=True, metadata=ENCODED)  # int64
    encoder_lengths: list[int] = field(kw_only=True, metadata=LIST)

    @property
    def padded_inputs(self) -> dict[str, Any]:
        return {
            "input_ids": self.encoder_ids,
            "attention_mask": self.encoder_mask,
            "decoder_input_ids": self.input_ids,
            "decoder_attention_mask": self.attention_mask,
        }

    @property
    def prompt_lengths(self) -> list[int]:
        return self.encoder_lengths

    def padded_positions(self, samples: Sequence[int]) -> int:
        read = len(samples) * max(self.encoder_lengths[i] for i in samples)
        return read + super().padded_positions(samples)

    def prompt(self, i: int) -> Tensor:
        return self.encoder_ids[i, : self.encoder_lengths[i]]


def _numbered(prompts: Iterable[Tensor]) -> list[int]:
    """A number for each prompt; equal prompts have the same one."""
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(ids.numpy().tobytes(), len(numbers)) for ids in prompts]
