"""Responses that are learned from, and what is known of their tokens, in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.data.batch import pad
from fastrl.data.token_batch import Padded, Padding, TokenBatch
from fastrl.learn.experience import Experience, Minibatch
from fastrl.models.host_memory import to_device


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
    # Choices of a mixture's experts, None where they are not replayed; None of a dense model.
    experts: list[Tensor | None] | None = None
    # Columns of a trainer's subclass, [B, ...] or lists of B; others are the whole batch's.
    further: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def counts(self) -> list[int]:
        """How many tokens of each are learned."""
        return [int(mask.sum()) for mask in self.masks]

    def select(self, indices: Sequence[int]) -> SampledResponses:
        def some(column: Sequence[Any] | None) -> Any:
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
            some(self.experts),
            {name: self._part(x, indices) for name, x in self.further.items()},
        )

    def _part(self, column: Any, indices: Sequence[int]) -> Any:
        if isinstance(column, Tensor) and column.dim() and len(column) == len(self):
            return column[list(indices)]
        if isinstance(column, list) and len(column) == len(self):
            return [column[i] for i in indices]
        return column

    def learned(self, column: Sequence[Tensor]) -> Tensor:
        """What a column says of the tokens that are learned, [N]."""
        return torch.cat([x[mask] for x, mask in zip(column, self.masks, strict=True)])

    def spread(self, numbers: Tensor, elsewhere: float = 0.0) -> list[Tensor]:
        """Numbers [N] of the tokens that are learned as a column."""
        each = zip(self.masks, numbers.split(self.counts), strict=True)
        return [torch.full((len(mask),), elsewhere).masked_scatter(mask, own) for mask, own in each]

    def batch(self, pad_token: int, padding: Padding | None = None) -> TokenBatch:
        """The input of a model, on the host."""
        sequences = list(map(torch.cat, zip(self.prompt_ids, self.completion_ids, strict=True)))
        padded = pad(sequences, pad_token, "right")
        found = TokenBatch.from_padded(
            padded["input_ids"],
            padded["attention_mask"],
            list(map(len, self.prompt_ids)),
            list(map(len, self.completion_ids)),
            self.masks,
        )
        return replace(found, padding=padding or Padded(), experts=self.experts)

    def minibatch(
        self, pad_token: int, padding: Padding, device: torch.device, kl_coef: float
    ) -> Minibatch:
        """These, with what is known of their tokens, on a device: in one upload of numbers beside
        those of ids.

        Args:
            kl_coef: β of the KL to the reference in the loss, where its log-probs are known; 0:
                there is none.
        """
        given = (self.old, self.ref if kl_coef else None, self.sampler_weights, self.sampled)
        columns = [None if x is None else self.learned(x) for x in given]
        there = [self.advantages, *(x for x in columns if x is not None)]
        numbers = iter(to_device(torch.cat(there), device).split([len(x) for x in there]))
        of_each = next(numbers)
        old, ref, weights, sampled = (None if x is None else next(numbers) for x in columns)
        tokens = self.batch(pad_token, padding).to(device)
        total = sum(self.counts)
        advantages = of_each.repeat_interleave(tokens.mask.sum(-1), output_size=total)
        kl = None if ref is None else fastrl_kernels.KLTerm(ref, kl_coef, "k3")
        experience = Experience(
            old, None, advantages, None, kl, None, weights, None, None, sampled, of_each
        )
        return Minibatch(tokens, experience, range(len(self)))

    def state(self) -> dict[str, Any]:
        """A tree of tensors and plain values."""
        return dict(vars(self))

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> SampledResponses:
        return cls(**state)
