"""A batch of prompts with one or two responses each, whatever the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.data.batch import TokenBatch, pad
from fastrl.data.examples import Example, Response
from fastrl.ppo.experience import Experience


@dataclass(frozen=True)
class Sample:
    """An example with the responses that are learned from, wherever they come from.

    Attributes:
        responses: one or two.
        rewards: one each, or None.
        weights: one each.
    """

    example: Example
    responses: tuple[Response, ...]
    rewards: tuple[float, ...] | None = None
    weights: tuple[float, ...] = ()


class Batch(dict[str, Any]):
    """What trainers, losses and reweighters are given; everything lies on the host.

    ``prompt``: B texts; ``prompt_token_ids``, ``prompt_attention_mask``: [B, P] int64, padded on
    the left. For i = 1, and 2 where there are pairs: ``generation{i}``: B texts, prompt and
    response; ``generation{i}_response_only``: B texts; ``generation{i}_token_ids``,
    ``generation{i}_attention_mask``: [B, T] int64, prompt and response, padded on the right;
    ``generation{i}_reward``: [B] fp32, or None; ``generation{i}_weight``: [B] fp32.

    Attributes:
        known: what else is known of each response, by name: a list of B tensors per generation,
            such as "logprobs", those of the responses' tokens when they were written.
        tokens: the same for a model, where it has been made.
        experience: what a policy-gradient update reads of it, where it has been computed.
    """

    def __init__(self, samples: Sequence[Sample], pad_token_id: int | None):
        super().__init__()
        self.samples, self.pad_token_id = list(samples), pad_token_id
        self.known: dict[str, list[list[Tensor]]] = {}
        self.tokens: TokenBatch | None = None
        self.experience: Experience | None = None
        prompts = [sample.example for sample in samples]
        self["prompt"] = [example.prompt for example in prompts]
        padded = _padded([example.prompt_ids for example in prompts], pad_token_id, "left")
        self["prompt_token_ids"], self["prompt_attention_mask"] = padded
        for i in range(len(samples[0].responses)):
            self |= _generation(samples, i, pad_token_id)

    @property
    def size(self) -> int:
        return len(self.samples)

    @property
    def generations(self) -> int:
        """Responses per prompt, 1 or 2."""
        return len(self.samples[0].responses)

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The data's other columns; None where a row has none of that name."""
        rows = [sample.example.columns for sample in self.samples]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def prompts(self) -> list[Tensor]:
        """B 1-D tensors of token ids."""
        return [torch.tensor(sample.example.prompt_ids) for sample in self.samples]

    def responses(self, i: int) -> list[Tensor]:
        """Those of generation ``i``, 1 or 2, without their prompts."""
        return [torch.tensor(sample.responses[i - 1].ids) for sample in self.samples]

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
        part = Batch([self.samples[i] for i in chosen], self.pad_token_id)
        for name in part:
            if name.endswith(("_reward", "_weight")) and self[name] is not None:
                part[name] = self[name][chosen]
        part.known = {
            name: [[of_one[i] for i in chosen] for of_one in of_all]
            for name, of_all in self.known.items()
        }
        return part

    def mismatched(self) -> Batch:
        """Every prompt with the first response of the next one; the last with that of the first."""
        following = [*self.samples[1:], self.samples[0]]
        return Batch(
            [
                replace(one, responses=other.responses[:1], rewards=None)
                for one, other in zip(self.samples, following, strict=True)
            ],
            self.pad_token_id,
        )


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


def _generation(samples: Sequence[Sample], i: int, pad_token_id: int | None) -> dict[str, Any]:
    """The entries of one generation, counted from 0."""
    responses = [sample.responses[i] for sample in samples]
    pairs = list(zip([sample.example for sample in samples], responses, strict=True))
    ids, mask = _padded([[*e.prompt_ids, *r.ids] for e, r in pairs], pad_token_id, "right")
    rewards = [None if sample.rewards is None else sample.rewards[i] for sample in samples]
    weights = [sample.weights[i] if sample.weights else 1.0 for sample in samples]
    name = f"generation{i + 1}"
    return {
        name: [example.prompt + response.text for example, response in pairs],
        f"{name}_response_only": [response.text for response in responses],
        f"{name}_token_ids": ids,
        f"{name}_attention_mask": mask,
        f"{name}_reward": None if None in rewards else torch.tensor(rewards, dtype=torch.float32),
        f"{name}_weight": torch.tensor(weights, dtype=torch.float32),
    }


def _padded(
    sequences: Sequence[Sequence[int]], pad_token_id: int | None, side: str
) -> tuple[Tensor, Tensor]:
    padded = pad([torch.tensor(list(s), dtype=torch.long) for s in sequences], pad_token_id, side)
    return padded["input_ids"], padded["attention_mask"]
