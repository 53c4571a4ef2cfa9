"""Responses that a trainer has sampled and judged, and learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.data.batch import pad
from fastrl.data.token_batch import Padded, Padding, TokenBatch


@dataclass
class SampledResponses:
    """B responses. Tensors of a response are as long as that, on the host."""

    prompt_ids: list[Tensor]
    completion_ids: list[Tensor]
    masks: list[Tensor]  # bool: the tokens that are learned
    advantages: Tensor  # [B]
    generated: float  # learned tokens of all that were generated together, by all processes
    old: list[Tensor] | None = None  # log-probs of the policy that sampled them
    ref: list[Tensor] | None = None  # of the reference model
    sampler_weights: list[Tensor] | None = None  # of tokens that another engine sampled
    sampled: list[Tensor] | None = None  # log-probs of that engine, NaN where it gave none

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def counts(self) -> list[int]:
        """How many tokens of each are learned."""
        return [int(mask.sum()) for mask in self.masks]

    def select(self, indices: Sequence[int]) -> SampledResponses:
        def some(column: list[Tensor] | None) -> Any:
            return None if column is None else [column[i] for i in indices]

        return SampledResponses(
            some(self.prompt_ids),
            some(self.completion_ids),
            some(self.masks),
            self.advantages[list(indices)],
            self.generated,
            some(self.old),
            some(self.ref),
            some(self.sampler_weights),
            some(self.sampled),
        )

    def learned(self, column: Sequence[Tensor]) -> Tensor:
        """What a column says of the tokens that are learned, [N]."""
        return torch.cat([x[mask] for x, mask in zip(column, self.masks, strict=True)])

    def batch(self, pad_token: int, padding: Padding | None = None) -> TokenBatch:
        """The input of a model, on the host."""
        sequences = [
            torch.cat(pair) for pair in zip(self.prompt_ids, self.completion_ids, strict=True)
        ]
        padded = pad(sequences, pad_token, "right")
        found = TokenBatch.from_padded(
            padded["input_ids"],
            padded["attention_mask"],
            list(map(len, self.prompt_ids)),
            list(map(len, self.completion_ids)),
            self.masks,
        )
        return replace(found, padding=padding or Padded())

    def state(self) -> dict[str, Any]:
        """A tree of tensors and plain values."""
        return dict(vars(self))

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> SampledResponses:
        return cls(**state)
