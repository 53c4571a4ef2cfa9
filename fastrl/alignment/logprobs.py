"""Policies, references and reward models, as losses and reweighters call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from fastrl.alignment.batch import Batch
from fastrl.data.batch import BatchMaker, pad
from fastrl.data.padding_free import join_sides
from fastrl.data.token_batch import TokenBatch
from fastrl.learn.preferences import Side, sides_of
from fastrl.learn.ref_model import RefModel
from fastrl.learn.scorer import Score, response_scores
from fastrl.models.reward_head import padding_of, rewards_at, rewards_of_padded
from fastrl.models.scoring import PassLimit, ScoringRequest, TokenScores
from fastrl.trainers.passes import DeferredGradients, fill, in_order, too_long


class Tokens:
    """Makes a batch's tokens, once per batch: all its responses, each behind its prompt,
    generation 1 first.

    Args:
        batches: makes a model's inputs from prompts and responses.
        device: the models' device.
        reference: the reference model; outputs of layers that it shares with the policy are cached.
        most: the most tokens of a forward pass; None: no limit.
    """

    def __init__(
        self,
        batches: BatchMaker,
        device: torch.device,
        reference: RefModel,
        most: int | None = None,
    ):
        self.batches, self.device, self.reference = batches, device, reference
        self.most = most

    def __call__(self, batch: Batch) -> TokenBatch:
        if batch.tokens is None:
            tokens = self.batches(batch.prompts() * batch.generations, batch.all_responses())
            tokens = tokens.to(self.device)
            batch.tokens = tokens.on(self.reference.trunk_cache(tokens))
        return batch.tokens

    def parts(self, tokens: TokenBatch) -> list[list[int]]:
        """The indices in ``tokens`` of the samples of each forward pass; raises ValueError where a
        sample has more tokens than a pass may have."""
        samples = range(len(tokens))
        if self.most is None:
            return [list(samples)]
        for i in samples:
            size = tokens.padding.tokens(tokens, [i])
            if size > self.most:
                raise too_long(self.most, f"response {i} of the batch has with its prompt", size)
        return tokens.parts(samples, PassLimit(len(tokens), self.most))


class TrainedPolicy:
    """The language model that is trained; scores all responses of a batch in one forward pass, or
    in several where the batch has more tokens than a pass may have.

    Attributes:
        model: the model as accelerate has wrapped it.
        tokens: makes the model's inputs.
        processes: the processes that train the model together.
        passes: runs a batch's forward passes, and keeps what their gradients need.
    """

    def __init__(self, model: nn.Module, tokens: Tokens, passes: DeferredGradients):
        self.model, self.tokens, self.processes = model, tokens, passes.processes
        self.passes = passes

    def logprobs(self, batch: Batch) -> tuple[Side, ...]:
        """Returns the responses' log-probs, one side per generation."""
        return response_logprobs(self._score, self.tokens, batch, self.passes)

    def _score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        return self.model(**inputs, scoring=request)


class SharedPolicy:
    """A policy that reweighters call with the batch of all processes: each process scores a share,
    without gradients."""

    def __init__(self, policy: TrainedPolicy):
        self.policy = policy

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> tuple[Side, ...]:
        """Returns the log-probs of all processes' responses, one side per generation."""
        processes = self.policy.processes
        shares = processes.shares(range(batch.size))
        places, lengths = shares[processes.index], list(map(len, shares))
        logprobs = self.policy.logprobs(batch.select(places or [0]))
        return tuple(
            Side(*(processes.joined(x[: len(places)], lengths) for x in (part.sums, part.tokens)))
            for part in logprobs
        )


class ReferencePolicy:
    """The reference model, without gradients."""

    def __init__(self, reference: RefModel, tokens: Tokens):
        self.reference, self.tokens = reference, tokens

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> tuple[Side, ...]:
        """Returns the responses' log-probs, one side per generation."""
        return response_logprobs(self.reference.score, self.tokens, batch)


class CachedReference:
    """The reference model's log-probs, computed before training, so that no model need be kept.

    Args:
        compute: scores tokens by the reference model; released by :meth:`close`.
        tokens: makes the reference model's inputs.
    """

    def __init__(self, compute: Score, tokens: Tokens):
        self.tokens = tokens
        self._compute: Score | None = compute
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    @torch.no_grad()
    def learn(self, batch: Batch) -> None:
        """Computes and keeps the log-probs of responses that are not known yet."""
        assert self._compute is not None
        new = [
            i for i in range(batch.size) if not all(key in self._known for key in _keys(batch, i))
        ]
        if not new:
            return
        part = batch.select(new)
        logprobs = response_logprobs(self._compute, self.tokens, part)
        sums = torch.stack([each.sums for each in logprobs], dim=1).tolist()
        for i, row in enumerate(sums):
            self._known |= dict(zip(_keys(part, i), row, strict=True))

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._compute is None

    def close(self) -> None:
        """Releases the reference model; nothing more can be learned."""
        self._compute = None

    def logprobs(self, batch: Batch) -> tuple[Side, ...]:
        """Returns the responses' log-probs, one side per generation.

        Raises:
            ValueError: a response, with its prompt, that was in no batch of :meth:`learn`.
        """
        try:
            rows = [[self._known[key] for key in _keys(batch, i)] for i in range(batch.size)]
        except KeyError:
            raise ValueError(
                "the batch holds a response whose reference log-prob was not computed before "
                "training: pass such data when the trainer is made, or choose reference='copy'"
            ) from None
        device = self.tokens.device
        sums = torch.tensor(rows, device=device)
        counts = [
            torch.tensor([len(e.responses[i].ids) for e in batch.examples], device=device)
            for i in range(batch.generations)
        ]
        return tuple(map(Side, sums.unbind(1), counts))


class RewardModel:
    """A sequence classifier with one label, whose logit is a response's reward.

    Attributes:
        model: the classifier as accelerate has wrapped it.
        device: the classifier's device.
        padding_free: whether batches run without padding; then the common beginning of a prompt's
            sequences is computed once.
        padded_on: the side of padding where batches are padded, see
            :func:`fastrl.data.choose_padding.classifier_side`.
        passes: runs a batch's forward passes, and keeps what their gradients need.
        most: the most tokens of a forward pass; None: no limit.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        padding_free: bool,
        padded_on: str | None,
        passes: DeferredGradients,
        most: int | None = None,
    ):
        self.model, self.device, self.padding_free = model, device, padding_free
        self.padded_on = padded_on
        self.passes, self.most = passes, most

    def rewards(self, batch: Batch) -> tuple[Tensor, ...]:
        """The rewards of each generation, [B] fp32; raises ValueError where the sequences of a
        sample have more tokens than ``most``, counted as padded where they are padded."""
        prompts = batch.prompts() * batch.generations
        sequences = [torch.cat(x) for x in zip(prompts, batch.all_responses(), strict=True)]
        size, generations = batch.size, batch.generations
        parts = self._parts([sequences[i::size] for i in range(size)])

        def score(samples: Sequence[int]) -> Tensor:
            """Returns the rewards of each sample's generations, [samples, generations]."""
            sides = [[sequences[k * size + i] for i in samples] for k in range(generations)]
            return self._rewards(sides, batch.pad_token_id).view(generations, -1).T

        return self.passes(score, parts).unbind(1)

    def _parts(self, samples: list[list[Tensor]]) -> list[list[int]]:
        """The indices of the samples of each forward pass; ``samples`` has each one's sequences."""
        if self.most is None:
            return [list(range(len(samples)))]
        lengths = [[len(x) for x in sequences] for sequences in samples]
        longest = max(max(each) for each in lengths)
        padded = [longest * len(each) for each in lengths]
        sizes = list(map(sum, lengths)) if self.padding_free else padded
        return fill(sizes, self.most, "sample")

    def _rewards(self, sides: list[list[Tensor]], pad_token_id: int | None) -> Tensor:
        """Rewards [N] of the N sequences of all sides, side after side."""
        plain = extract_model_from_parallel(self.model)
        padding = padding_of(plain)
        if self.padding_free:
            model_pass = join_sides(sides, self.device, padding)
            rewards = rewards_at(self.model, plain, model_pass.rows, **model_pass.inputs)
            return rewards.float().squeeze(-1)
        inputs = pad([x for side in sides for x in side], pad_token_id, "right")
        inputs = {name: x.to(self.device) for name, x in inputs.items()}
        rewards = rewards_of_padded(self.model, inputs, self.padded_on, padding)
        return rewards.float().squeeze(-1)


def response_logprobs(
    score: Score, make_tokens: Tokens, batch: Batch, passes: DeferredGradients | None = None
) -> tuple[Side, ...]:
    """Sums the log-probs of each response's tokens; returns one side per generation.

    Args:
        score: scores tokens by the model.
        passes: runs the forward passes, and keeps what their gradients need; None: no gradients.
    """
    tokens = make_tokens(batch)

    def sums_of(samples: Sequence[int]) -> Tensor:
        part = tokens if len(samples) == len(tokens) else tokens.select(samples)
        return response_scores(score, part)[0].sum(-1)

    parts = make_tokens.parts(tokens)
    sums = in_order(map(sums_of, parts), parts) if passes is None else passes(sums_of, parts)
    return sides_of(batch.generations, sums, tokens.mask.sum(-1))


def _keys(batch: Batch, i: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The token ids of sample ``i``: its prompt with each of its responses."""
    example = batch.examples[i]
    return [(example.prompt_ids, response.ids) for response in example.responses]
