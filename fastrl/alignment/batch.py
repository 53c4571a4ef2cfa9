"""A batch of prompts with one or two responses each, for every task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastrl.data.batch import check_weights, pad
from fastrl.data.examples import Example
from fastrl.data.token_batch import TokenBatch
from fastrl.learn.experience import Experience
from fastrl.run.processes import Processes
from fastrl.samples import Samples


class Batch(dict[str, Any]):
    """The samples that losses and reweighters are called with, on the host.

    ``prompt``: B texts; ``prompt_token_ids``, ``prompt_attention_mask``: [B, P] int64, padded on
    the left. For i = 1, and 2 where there are pairs: ``generation{i}``: B texts, prompt and
    response; ``generation{i}_response_only``: B texts; ``generation{i}_token_ids``,
    ``generation{i}_attention_mask``: [B, T] int64, prompt and response, padded on the right;
    ``generation{i}_reward``: [B] fp32, None without rewards; ``generation{i}_weight``: [B] fp32.

    Args:
        examples: each with one or two responses.
        pad_token_id: fills up rows of token ids; None: 0 does.

    Attributes:
        rollout_logprobs: the engine's log-probs of the responses' tokens at temperature 1, a list
            of B tensors per generation; None where it gave none, and for responses from the data.
        rollout: what the engine returned, the responses to a prompt one after the other; None for
            responses from the data.
        scores: the annotator's scores of the responses, B numbers per generation; None where it
            gave none, and for responses from the data.
        tokens: the padded model inputs, once they have been made.
        experience: log-probs, values and advantages for a policy-gradient update, once they have
            been computed.
        places: the indices of the batch's samples among the samples of all processes; empty for a
            process without samples, which takes part only because the other processes wait for it.
        total: how many samples all processes have.
        weight_in_step: what the mean loss of a mini-batch is multiplied by in its optimizer step.
        seed: seeds what a loss draws for the batch, the same in all processes.
    """

    def __init__(self, examples: Sequence[Example], pad_token_id: int | None):
        super().__init__()
        self.examples, self.pad_token_id = list(examples), pad_token_id
        self.rollout_logprobs: list[list[Tensor]] | None = None
        self.rollout: Samples | None = None
        self.scores: list[list[float]] | None = None
        self.tokens: TokenBatch | None = None
        self.experience: Experience | None = None
        self.places: Sequence[int] = range(len(self.examples))
        self.total = len(self.examples)
        self.weight_in_step = 1.0
        self.seed = 0
        self._whole: Batch | None = None
        self._prompts = [torch.tensor(example.prompt_ids, dtype=torch.long) for example in examples]
        self._responses = [
            [torch.tensor(example.responses[i].ids, dtype=torch.long) for example in examples]
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
    def fraction(self) -> float:
        """The batch's share of the samples of all processes: 1 with one process."""
        return len(self.places) / self.total

    @property
    def whole(self) -> Batch:
        """The batch of all processes, the same in each; with one process this batch itself.

        Raises:
            ValueError: it was not gathered, because the loss's ``reads_all`` is False.
        """
        if self._whole is not None:
            return self._whole
        if len(self.places) != self.total:
            raise ValueError(
                "the samples of all processes were not gathered: set reads_all = True in the "
                "class of the loss that reads batch.whole"
            )
        return self

    def gather(self, processes: Processes) -> None:
        """Joins the batches of all processes into :attr:`whole`; every process calls it."""
        if processes.count == 1:
            return
        sampled: dict[str, Any] = {x: getattr(self, x) for x in ("rollout_logprobs", "scores")}
        parts = [x for x in processes.objects((self.places, self.examples, sampled)) if x[0]]
        where = {place: (part, i) for part in parts for i, place in enumerate(part[0])}
        rows = [where[place] for place in range(self.total)]
        whole = Batch([part[1][i] for part, i in rows], self.pad_token_id)
        whole.seed = self.seed
        for name in sampled:
            if all(part[2][name] is not None for part in parts):
                sides = range(self.generations)
                setattr(whole, name, [[part[2][name][s][i] for part, i in rows] for s in sides])
        self._whole = whole

    def take_weights(self) -> None:
        """Copies this batch's weights from :attr:`whole`."""
        for i in range(1, self.generations + 1):
            weights = self.whole[f"generation{i}_weight"][list(self.places)]
            self.weigh(i, weights if self.places else torch.zeros(self.size))

    @property
    def generations(self) -> int:
        """Responses per prompt, 1 or 2."""
        return len(self._responses)

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The data's columns, see :func:`columns_of`."""
        return columns_of(self.examples)

    def prompts(self) -> list[Tensor]:
        """B 1-D tensors of token ids."""
        return self._prompts

    def responses(self, i: int) -> list[Tensor]:
        """B 1-D tensors of generation ``i``, 1 or 2, without their prompts."""
        return self._responses[i - 1]

    def all_responses(self) -> list[Tensor]:
        """Returns the responses of all generations, one generation after the other."""
        return [response for side in self._responses for response in side]

    def rewards(self, i: int) -> Tensor:
        """The rewards of generation ``i``, [B] fp32.

        Raises:
            ValueError: a task without rewards.
        """
        rewards = self[f"generation{i}_reward"]
        if rewards is None:
            raise ValueError("this batch has no rewards: choose a task that has some")
        return rewards

    def given_scores(self) -> Tensor:
        """The annotator's scores of all responses, 1-D fp32, generation after generation, without
        pairs of equal responses, which it does not judge; empty if it only compares."""
        if self.generations == 1:
            return self.rewards(1)
        texts = zip(*(self[f"generation{i}"] for i in (1, 2)), strict=True)
        asked = [i for i, (one, other) in enumerate(texts) if one != other]
        return torch.tensor([side[i] for side in self.scores or () for i in asked])

    def weights(self) -> Tensor:
        """The samples' weights, [B] fp32; a pair's is √(w₁·w₂), exactly w where both are w."""
        first = self["generation1_weight"]
        if self.generations == 1:
            return first
        second = self["generation2_weight"]
        return torch.where(first == second, first, (first * second).sqrt())

    def weigh(self, i: int, weights: Tensor | Sequence[float]) -> None:
        """Sets the weights [B] of generation ``i``; those of pairs that the annotator has no
        opinion of stay 0.

        Raises:
            ValueError: not B numbers, or one that is negative or not finite, named by its index.
        """
        if weights is None:
            raise ValueError("weights is None: pass one number per sample")
        counts = torch.tensor([not e.weights or e.weights[i - 1] > 0 for e in self.examples])
        checked = check_weights(weights, self.size)
        assert checked is not None
        self[f"generation{i}_weight"] = checked * counts

    def select(self, indices: Sequence[int]) -> Batch:
        """Returns some of the samples, with rewards, weights, scores and rollout log-probs."""
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
        """Returns this batch's prompts, each with the first response to the next prompt among the
        samples of all processes; the first prompt comes behind the last."""
        examples = self.whole.examples
        following = [examples[(i + 1) % len(examples)] for i in self.places] or self.examples
        return Batch(
            [
                replace(one, responses=other.responses[:1], rewards=None)
                for one, other in zip(self.examples, following, strict=True)
            ],
            self.pad_token_id,
        )

    def _generation(self, i: int) -> dict[str, Any]:
        """The entries of generation ``i`` + 1."""
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
            f"{name}_reward": None if None in rewards else torch.tensor(rewards).float(),
            f"{name}_weight": torch.tensor(weights).float(),
        }


def columns_of(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """The data's columns beside prompts, responses and labels; None where a row lacks one."""
    names = dict.fromkeys(name for example in examples for name in example.columns)
    return {name: [example.columns.get(name) for example in examples] for name in names}
