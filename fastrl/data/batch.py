"""From lists of queries, responses and scores to one checked, padded batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastrl.models.trunk import TrunkCache

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class TokenBatch:
    """Queries and responses, padded to [B, T]. What is counted is known on the host.

    Per-token quantities have shape [B, T-1]: position t belongs to the token at t+1, so a
    response's first token stands at len(query)-1.
    """

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] int64
    position_ids: Tensor | None  # [B, T] int64; None where positions simply count columns
    mask: Tensor  # [B, T-1] bool, True where a response token counts
    counted: Tensor  # the same on the CPU
    query_lengths: list[int]
    response_lengths: list[int]
    left_padded: bool
    # What a reference's trunk makes of these samples, and which of them these are.
    boundaries: TrunkCache | None = None
    samples: Sequence[int] = ()

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        query_lengths: list[int],
        response_lengths: list[int],
        response_masks: Sequence[Tensor] | None = None,
    ) -> TokenBatch:
        """From model inputs [B, T] on the CPU, padded on either side."""
        first = attention_mask.argmax(-1)
        columns = torch.arange(input_ids.shape[1])
        begin = (first + torch.tensor(query_lengths) - 1)[:, None]
        end = begin + torch.tensor(response_lengths)[:, None]
        counted = (columns[:-1] >= begin) & (columns[:-1] < end)
        if response_masks is not None:
            inside = counted.clone()
            counted[inside] = torch.cat(list(response_masks)).bool()
        left_padded = bool(first.any())
        return cls(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=(columns - first[:, None]).clamp(min=0) if left_padded else None,
            mask=counted,
            counted=counted,
            query_lengths=query_lengths,
            response_lengths=response_lengths,
            left_padded=left_padded,
        )

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        """Made anew at every look."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids
        if self.boundaries is not None:
            inputs["boundary"] = self.boundaries.of(self.samples, self.left_padded)
        return inputs

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each query, wherever the model reads it."""
        return self.query_lengths

    def sequences(self) -> list[Tensor]:
        """Queries with their responses, without padding."""
        lengths = map(sum, zip(self.query_lengths, self.response_lengths, strict=True))
        rows = zip(self.input_ids, lengths, strict=True)
        return [row[-length:] if self.left_padded else row[:length] for row, length in rows]

    def on(self, boundaries: TrunkCache | None) -> Self:
        """The same, whose model inputs hold boundaries where there are any."""
        return replace(self, boundaries=boundaries, samples=range(len(self)))

    def __len__(self) -> int:
        return len(self.query_lengths)

    def counting(self) -> list[int]:
        """Samples of which at least one token counts; the others take no part in anything."""
        return self.counted.any(-1).nonzero()[:, 0].tolist()

    def to(self, device: torch.device) -> Self:
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("input_ids", "attention_mask", "mask")
        }
        positions = self.position_ids
        return replace(
            self, **moved, position_ids=None if positions is None else positions.to(device)
        )

    def rows(self) -> Tensor:
        """Flat positions b·T + t of the counted tokens, [N] on the batch's device."""
        flat = self.counted.nonzero()
        rows = flat[:, 0] * self.input_ids.shape[1] + flat[:, 1]
        return rows.to(self.input_ids.device, non_blocking=True)

    def counted_of_responses(self) -> Tensor:
        """Which of all responses' tokens, one after the other, count; on the CPU."""
        columns = torch.arange(self.counted.shape[1])
        width = self.input_ids.shape[1]
        lengths = torch.tensor([self.query_lengths, self.response_lengths])
        first = width - lengths.sum(0) if self.left_padded else torch.zeros_like(lengths[0])
        begin = (first + lengths[0] - 1)[:, None]
        inside = (columns >= begin) & (columns < begin + lengths[1][:, None])
        return self.counted[inside]

    def spread(self, per_row: Tensor, rows: Tensor) -> Tensor:
        """[N] values of ``rows()`` as [B, T-1], zero elsewhere; differentiable."""
        flat = per_row.new_zeros(self.input_ids.numel()).index_copy(0, rows, per_row)
        return flat.view(self.input_ids.shape)[:, :-1]

    def columns(self, indices: Sequence[int]) -> slice:
        """Columns of [B, T] that samples ``indices`` need: padding common to all is left out."""
        width = self.input_ids.shape[1]
        longest = max(self.query_lengths[i] + self.response_lengths[i] for i in indices)
        return slice(width - longest, width) if self.left_padded else slice(0, longest)

    def select(self, indices: Sequence[int]) -> Self:
        """Some samples, without the padding that none of them needs."""
        columns = self.columns(indices)
        shifted = slice(columns.start, columns.stop - 1)
        index = torch.as_tensor(list(indices))
        there = index.to(self.input_ids.device, non_blocking=True)
        positions = self.position_ids
        return replace(
            self,
            input_ids=self.input_ids[there, columns],
            attention_mask=self.attention_mask[there, columns],
            position_ids=None if positions is None else positions[there, columns],
            mask=self.mask[there, shifted],
            counted=self.counted[index, shifted],
            query_lengths=[self.query_lengths[i] for i in indices],
            response_lengths=[self.response_lengths[i] for i in indices],
            samples=[self.samples[i] for i in indices] if self.boundaries is not None else (),
        )


def pad(sequences: Sequence[Tensor], pad_token_id: int | None, side: str) -> dict[str, Tensor]:
    """CPU sequences as ``input_ids`` and ``attention_mask`` [B, T]; ``side`` is left or right."""
    lengths = torch.tensor([len(s) for s in sequences])
    width = int(lengths.max())
    columns = torch.arange(width)
    first = (width - lengths if side == "left" else torch.zeros_like(lengths))[:, None]
    real = (columns >= first) & (columns < first + lengths[:, None])
    input_ids = torch.full(real.shape, pad_token_id or 0, dtype=torch.long)
    input_ids[real] = torch.cat(list(sequences))
    return {"input_ids": input_ids, "attention_mask": real.long()}


def need_pad_token(lengths: Iterable[int], pad_token_id: int | None, tokenizer: Any) -> None:
    """Refuse to pad without a pad token; samples of one length need none.

    Raises:
        ValueError: lengths differ and the tokenizer has no pad token.
    """
    if pad_token_id is None and len(set(lengths)) > 1:
        raise ValueError(
            f"{type(tokenizer).__name__} has no pad token and the samples differ in length: set "
            "tokenizer.pad_token = tokenizer.eos_token, say, before making the trainer"
        )


def check_token_lists(
    queries: Any, responses: Any, response_masks: Any, *, vocab_size: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
    """Queries, responses and masks as CPU tensors.

    Raises:
        ValueError: names the list and the element that is wrong, and says how.
    """
    names = {"queries": queries, "responses": responses}
    if response_masks is not None:
        names["response_masks"] = response_masks
    for name, tensors in names.items():
        _check_list_of_tensors(name, tensors)
        if len(tensors) != len(queries):
            raise ValueError(f"{name} has {len(tensors)} elements, queries {len(queries)}")
    for name in ("queries", "responses"):
        for i, ids in enumerate(names[name]):
            if ids.dim() != 1:
                raise ValueError(f"{name}[{i}] must be 1-D token ids, got shape {tuple(ids.shape)}")
            if ids.dtype.is_floating_point or ids.dtype == torch.bool:
                raise ValueError(f"{name}[{i}] must hold integer token ids, got {ids.dtype}")
            if len(ids) == 0:
                raise ValueError(f"{name}[{i}] is empty: every sample needs at least one token")
    for i, mask in enumerate(response_masks or ()):
        if mask.shape != responses[i].shape:
            raise ValueError(
                f"response_masks[{i}] has shape {tuple(mask.shape)}, responses[{i}] "
                f"{tuple(responses[i].shape)}: they must be equal"
            )
    host_queries, host_responses = to_host(queries), to_host(responses)
    for name, tensors in (("queries", host_queries), ("responses", host_responses)):
        ids = torch.cat(tensors)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            for i, tensor in enumerate(tensors):
                wrong = tensor[(tensor < 0) | (tensor >= vocab_size)]
                if len(wrong):
                    raise ValueError(
                        f"{name}[{i}] holds token id {int(wrong[0])}, outside the vocabulary of "
                        f"{vocab_size}: was it made by another tokenizer?"
                    )
    return host_queries, host_responses, to_host(response_masks) if response_masks else None


def check_batch_size(queries: Any, responses: Any, batch_size: int) -> None:
    """
    Raises:
        ValueError: not lists of ``batch_size`` elements.
    """
    for name, tensors in (("queries", queries), ("responses", responses)):
        _check_list_of_tensors(name, tensors)
        if len(tensors) != batch_size:
            raise ValueError(f"{name} has {len(tensors)} elements, batch_size is {batch_size}")


def check_scores(scores: Any, batch_size: int, left_out: Sequence[int] = ()) -> Tensor:
    """Scores as one fp32 tensor [batch_size] on the CPU; NaN for those of samples that are left
    out, whatever is given.

    Raises:
        ValueError: not ``batch_size`` tensors of one finite number each; names the element.
    """
    _check_list_of_tensors("scores", scores)
    if len(scores) != batch_size:
        raise ValueError(f"scores has {len(scores)} elements, batch_size is {batch_size}")
    for i, score in enumerate(scores):
        if score.dim() > 1 or score.numel() != 1:
            raise ValueError(
                f"scores[{i}] must be one number (0-D, or 1-D of one element), got shape "
                f"{tuple(score.shape)}"
            )
    values = torch.stack([s.detach().reshape(()).float() for s in scores]).cpu()
    known = torch.isfinite(values)
    known[list(left_out)] = True
    wrong = (~known).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"scores[{i}] is {float(values[i])}: scores must be finite")
    values[list(left_out)] = torch.nan
    return values


def without_tokens(
    queries: Any, responses: Any, response_masks: Any, left_out: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Responses and their masks where no token of the samples ``left_out`` counts; where one of
    those is empty, a token of its query takes the place that a batch has for it."""
    responses = list(responses)
    masks = [torch.ones_like(r) for r in responses] if response_masks is None else response_masks
    masks = list(masks)
    if len(masks) != len(responses):
        return responses, masks  # which is an error
    for i in left_out:
        responses[i] = responses[i] if len(responses[i]) else queries[i][-1:]
        masks[i] = torch.zeros_like(responses[i])
    return responses, masks


def check_weights(weights: Any, batch_size: int, device: torch.device) -> Tensor | None:
    """Samples' weights as one fp32 tensor [batch_size].

    Raises:
        ValueError: not ``batch_size`` finite numbers of 0 or more; names the element.
    """
    if weights is None:
        return None
    values = torch.as_tensor(weights, dtype=torch.float32).detach().cpu()
    if values.shape != (batch_size,):
        raise ValueError(
            f"weights has shape {tuple(values.shape)}: pass one number per sample, [{batch_size}]"
        )
    wrong = (~torch.isfinite(values) | (values < 0)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"weights[{i}] is {float(values[i])}: weights must be finite, 0 or more")
    return values.to(device)


def collate(examples: Sequence[Any]) -> Any:
    """A batch of examples, as the classic loop expects it.

    Dicts become a dict of lists, with ``input_ids`` as 1-D LongTensors. Tuples become a list of
    their fields' batches; tensors of one shape are stacked, others become a list; the rest is as in
    torch's ``default_collate``.
    """
    first = examples[0]
    if isinstance(first, Mapping):
        return collate_as_lists(examples)
    if isinstance(first, tuple):
        fields = [collate(field) for field in zip(*examples, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else fields
    if isinstance(first, Tensor) and len({example.shape for example in examples}) > 1:
        return list(examples)
    return torch.utils.data.default_collate(list(examples))


def collate_as_lists(examples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dicts as a dict of lists, ``input_ids`` as 1-D LongTensors."""
    batch = {key: [example[key] for example in examples] for key in examples[0]}
    if "input_ids" in batch:
        batch["input_ids"] = [torch.as_tensor(ids, dtype=torch.long) for ids in batch["input_ids"]]
    return batch


def make_dataloader(
    dataset: Any,
    batch_size: int,
    collator: Callable | None,
    keep_columns: Iterable[str] | None,
) -> torch.utils.data.DataLoader:
    """A shuffled loader of whole batches, with a warning where there is none.

    Args:
        collator: default :func:`collate`.
        keep_columns: of a ``datasets.Dataset``, other columns are dropped; None keeps all.
    """
    if len(dataset) < batch_size:
        warnings.warn(
            f"the dataset has {len(dataset)} samples, fewer than batch_size={batch_size}: the "
            "dataloader has no batch; lower batch_size or bring more data",
            stacklevel=4,
        )
    if keep_columns is not None and hasattr(dataset, "remove_columns"):
        unused = [c for c in dataset.column_names if c not in set(keep_columns)]
        dataset = dataset.remove_columns(unused)
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=collator or collate,
        shuffle=True,
        drop_last=True,
    )


def _check_list_of_tensors(name: str, tensors: Any) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise ValueError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}[{i}] must be a tensor, got {type(tensor).__name__}")


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """CPU int64 copies, in one transfer where all are on one device."""
    if len({tensor.device for tensor in tensors}) > 1:
        return [to_host([tensor])[0] for tensor in tensors]
    joined = torch.cat(list(tensors)).long().cpu()
    return list(joined.split([len(t) for t in tensors]))
