"""A batch of prompts with one or two responses each, whatever the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastrl.data.batch import TokenBatch, pad
from fastrl.data.examples import Example
from fastrl.ppo.experience import Experience


class Batch(dict[str, Any]):
    """What trainers, losses and reweighters are given; everything lies on the host.

    ``prompt``: B texts; ``prompt_token_ids``, ``prompt_attention_mask``: [B, P] int64, padded on
    the left. For i = 1, and 2 where there are pairs: ``generation{i}``: B texts, prompt and
    response; ``generation{i}_response_only``: B texts; ``generation{i}_token_ids``,
    ``generation{i}_attention_mask``: [B, T] int64, prompt and response, padded on the right;
    ``generation{i}_reward``: [B] fp32, or None; ``generation{i}_weight``: [B] fp32.

    Args:
        examples: each with one or two responses.

    Attributes:
        rollout_logprobs: of the responses' tokens when they were sampled, a list of B tensors per
            generation; None where they come from the data.
        scores: what an annotator has said of the responses, B numbers per generation; None where
            it has only compared them.
        tokens: the same for a model, where it has been made.
        experience: what a policy-gradient update reads of it, where it has been computed.
    """

    def __init__(self, examples: Sequence[Example], pad_token_id: int | None):
        super().__init__()
        self.examples, self.pad_token_id = list(examples), pad_token_id
        self.rollout_logprobs: list[list[Tensor]] | None = None
        self.scores: list[list[float]] | None = None
        self.tokens: TokenBatch | None = None
        self.experience: Experience | None = None
        self._prompts = [_ids(example.prompt_ids) for example in examples]
        self._responses = [
            [_ids(example.responses[i].ids) for example in examples]
            for i in range(len(examples[0].responses))
        ]
        self["prompt"] = [example.prompt for example in examples]
        padded = pad(self._prompts, pad_token_id, "left")
        self["prompt_token_ids"] = padded["input_ids"]
        self["prompt_attention_mask"] = padded["attention_mask"]
        for i in range(self.generations):
            self |= self._generation(i)

    @property
    def size(self) -> int:
        return len(self.examples)

    @property
    def generations(self) -> int:
        """Responses per prompt, 1 or 2."""
        return len(self._responses)

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The data's other columns; None where a row has none of that name."""
        return columns_of(self.examples)

    def prompts(self) -> list[Tensor]:
        """B 1-D tensors of token ids."""
        return self._prompts

    def responses(self, i: int) -> list[Tensor]:
        """Those of generation ``i``, 1 or 2, without their prompts."""
        return self._responses[i - 1]

    def rewards(self, i: int) -> Tensor:
        """[B] fp32 of generation ``i``.

        Raises:
            ValueError: the task has none.
        """
        rewards = self[f"generation{i}_reward"]
        if rewards is None:
            raise ValueError("this batch has no rewards: choose a task that has some")
        return rewards

    def weights(self) -> Tensor:
        """[B] fp32, of samples: a pair's is √(w₁·w₂), which is w where both are w, and 0 where
        either is."""
        every = [self[f"generation{i}_weight"] for i in range(1, self.generations + 1)]
        return (
            every[0]
            if len(every) == 1
            else torch.where(every[0] == every[1], every[0], (every[0] * every[1]).sqrt())
        )

    def weigh(self, i: int, weights: Tensor | Sequence[float]) -> None:
        """Sets the weights [B] of generation ``i``.

        Raises:
            ValueError: not B numbers, or one that is negative or not finite, named by its index.
        """
        self[f"generation{i}_weight"] = checked_weights(weights, self.size)

    def select(self, indices: Sequence[int]) -> Batch:
        """Some samples, with their rewards, weights and what is known of them."""
        chosen = list(indices)
        part = Batch([self.examples[i] for i in chosen], self.pad_token_id)
        for name in part:
            if name.endswith(("_reward", "_weight")) and self[name] is not None:
                part[name] = self[name][chosen]
        if self.rollout_logprobs is not None:
            part.rollout_logprobs = [[side[i] for i in chosen] for side in self.rollout_logprobs]
        if self.scores is not None:
            part.scores = [[side[i] for i in chosen] for side in self.scores]
        return part

    def mismatched(self) -> Batch:
        """Every prompt with the first response of the next one; the last with that of the first."""
        following = [*self.examples[1:], self.examples[0]]
        return Batch(
            [
                replace(one, responses=other.responses[:1], rewards=None)
                for one, other in zip(self.examples, following, strict=True)
            ],
            self.pad_token_id,
        )

    def _generation(self, i: int) -> dict[str, Any]:
        """The entries of one generation, counted from 0."""
        joined = [torch.cat(both) for both in zip(self._prompts, self._responses[i], strict=True)]
        padded = pad(joined, self.pad_token_id, "right")
        rewards = [None if e.rewards is None else e.rewards[i] for e in self.examples]
        weights = [e.weights[i] if e.weights else 1.0 for e in self.examples]
        name = f"generation{i + 1}"
        return {
            name: [e.prompt + e.responses[i].text for e in self.examples],
            f"{name}_response_only": [e.responses[i].text for e in self.examples],
            f"{name}_token_ids": padded["input_ids"],
            f"{name}_attention_mask": padded["attention_mask"],
            f"{name}_reward": None if None in rewards else _fp32(rewards),
            f"{name}_weight": _fp32(weights),
        }


def checked_weights(weights: Tensor | Sequence[float], size: int) -> Tensor:
    """[size] fp32 on the host.

    Raises:
        ValueError: another number of them, or one that is negative or not finite, or no number.
    """
    try:
        given = torch.as_tensor(weights, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, of what is no number
        raise ValueError(f"weights must be numbers, one per sample: {error}") from error
    if given.shape != (size,):
        raise ValueError(f"weights have shape {tuple(given.shape)}: return one per sample, {size}")
    wrong = (~(given >= 0) | given.isinf()).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"weights[{i}] is {float(given[i])}: weights must be finite numbers of 0 or more"
        )
    return given


def columns_of(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """The data's other columns; None where a row has none of that name."""
    names = dict.fromkeys(name for example in examples for name in example.columns)
    return {name: [example.columns.get(name) for example in examples] for name in names}


def _fp32(numbers: Sequence[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def _ids(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.long)
