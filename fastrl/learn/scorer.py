"""Forwards over batches for what models say of response tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import fastrl_kernels
from fastrl.data.token_batch import ModelPass, Padded, TokenBatch
from fastrl.learn.experience import Scored
from fastrl.learn.kl import KLPenalty
from fastrl.learn.memory import MicroBatches, PositionCount
from fastrl.learn.ref_model import RefModel
from fastrl.models.routing import without_routing
from fastrl.models.scoring import PassLimit, ScoringRequest, TokenScores
from fastrl.models.utils import evaluating
from fastrl.run.processes import OneProcess, Processes

# What a model says of the tokens of a request, from arguments of its forward.
Score = Callable[[dict[str, Any], ScoringRequest], TokenScores]


class Scorer:
    """Runs policy and reference over a batch, without gradients, some samples at a time; both are
    softmax(logits / temperature). Where memory runs out, half as many are run at a time.

    Each of several processes runs its share of the batch, in as many passes as the others, and
    returns all of it.

    Args:
        critic: gives the values, in the same passes, where that is not the policy's value head.
    """

    def __init__(
        self,
        policy: nn.Module,
        reference: RefModel,
        penalty: KLPenalty,
        limit: PassLimit,
        precision: torch.dtype = torch.float32,
        temperature: float = 1.0,
        processes: Processes | None = None,
        critic: nn.Module | None = None,
    ):
        self.policy = policy
        self.reference = reference
        self.penalty = penalty
        self.limit = limit
        self.precision = precision
        self.temperature = temperature
        self.processes = processes or OneProcess()
        self.critic = critic
        self.slices = MicroBatches("scoring", "lower mini_batch_size")
        self.positions = PositionCount()

    @torch.no_grad()
    def __call__(self, batch: TokenBatch, known: tuple[Tensor, Tensor] | None = None) -> Scored:
        """What policy and reference say.

        Args:
            known: log-probs and values of the response tokens, [N] each, with which the policy
                itself is not run.
        """
        if known is None:
            return Scored(**self._in_passes(batch, self._score))
        logprobs, values = (batch.scatter(x, batch.rows()) for x in known)
        found = {"values": values, **self._in_passes(batch, self._score_reference)}
        return Scored(logprobs, **found)

    @torch.no_grad()
    def kl_operands(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """:attr:`Scored.kl_operands` alone: no values are computed, a critic is not run."""
        return Scored(**self._in_passes(batch, self._score_both)).kl_operands

    def _in_passes(
        self, batch: TokenBatch, score: Callable[[TokenBatch], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        samples = batch.counting() or range(len(batch))
        shares = shares_of(batch, samples, self.processes)
        order = shares  # of the samples in what is found

        def in_parts(size: int) -> dict[str, Tensor]:
            nonlocal order
            limit = self.limit._replace(samples=size)
            passes = [batch.parts(share, limit) for share in shares]
            order = [[i for part in parts for i in part] for parts in passes]
            own, number = passes[self.processes.index], max(map(len, passes))
            return _in_turn(batch, own, number, samples[0], score, self.positions)

        most = max(map(len, shares))
        found = self.slices(in_parts, min(self.limit.samples, most))
        tokens = batch.response_mask.sum(-1).tolist()
        rows = batch.rows_of(i for share in order for i in share)
        counts = [sum(tokens[i] for i in share) for share in order]
        every = self.processes.joined(torch.stack(list(found.values()), 1), counts)
        columns = zip(found, every.unbind(1), strict=True)
        return {name: batch.scatter(x, rows) for name, x in columns}

    def policy_scores(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and values by the policy alone, each [B, T-1]."""
        found = scored_in_parts(self.policy, batch, self.limit, temperature=self.temperature)
        return found["logprobs"], found["values"]

    def _score_reference(self, part: TokenBatch) -> dict[str, Tensor]:
        model_pass = part.model_pass
        request = self._request(part, model_pass, values=False)
        reference = self.reference.score(without_routing(model_pass.inputs), request)
        scored = {"ref_logprobs": reference.logprobs}
        return {**scored, **self._values(model_pass, request)}

    def _values(self, model_pass: ModelPass, request: ScoringRequest) -> dict[str, Tensor]:
        """Returns the critic's values, if there is a critic."""
        if self.critic is None:
            return {}
        return {"values": self.critic(**model_pass.inputs, scoring=request).values}

    def _score(self, part: TokenBatch) -> dict[str, Tensor]:
        return self._score_both(part, values=True)

    def _score_both(self, part: TokenBatch, values: bool = False) -> dict[str, Tensor]:
        """Scores a part by policy and reference."""
        model_pass = part.model_pass
        request = self._request(part, model_pass, logits=self.penalty.needs_logits, values=values)
        policy = self.policy(**model_pass.inputs, scoring=request)
        inputs = without_routing(model_pass.inputs)
        reference = self.reference.score(inputs, request._replace(values=False))
        scored = {"logprobs": policy.logprobs, "ref_logprobs": reference.logprobs}
        if values:
            scored["values"] = policy.values
        if self.penalty.needs_logits:
            assert reference.logits is not None
            scored["kls"] = fastrl_kernels.full_kl(
                policy.logits, reference.logits, temperature=self.temperature
            )
        return {**scored, **self._values(model_pass, request)} if values else scored

    def _request(self, part: TokenBatch, model_pass: ModelPass, **options: Any) -> ScoringRequest:
        return scoring_request(part, model_pass, temperature=self.temperature, **options)


@torch.no_grad()
def in_passes(
    batch: TokenBatch,
    score: Callable[[TokenBatch], dict[str, Tensor]],
    limit: PassLimit,
    processes: Processes,
) -> dict[str, Tensor]:
    """What ``score`` says of a batch's response tokens, [N] each, from passes over its samples.

    Each process has a batch of its own, and runs as many passes as the others: weights may be
    gathered for each.
    """
    counting = batch.counting()
    passes = batch.parts(counting, limit)
    if not counting:
        batch = replace(batch, padding=Padded())
    number, spare = max(1, *processes.objects(len(passes))), (counting or [0])[0]
    found = _in_turn(batch, passes, number, spare, score, PositionCount())
    order = batch.rows_of(i for part in passes for i in part).argsort()
    return {name: x[order] for name, x in found.items()}


def _in_turn(
    batch: TokenBatch,
    passes: Sequence[Sequence[int]],
    number: int,
    spare: int,
    score: Callable[[TokenBatch], dict[str, Tensor]],
    positions: PositionCount,
) -> dict[str, Tensor]:
    """What ``score`` says of the samples of some passes, in that order, [N] each.

    Args:
        number: of passes, of all processes: one that has fewer takes part with the sample
            ``spare``, for nothing.
    """
    columns: dict[str, list[Tensor]] = {}
    for k in range(number):
        counts = k < len(passes)
        part = batch.select(passes[k] if counts else [spare])
        positions.add(part)
        for name, per_row in score(part).items():
            columns.setdefault(name, []).append(per_row if counts else per_row[:0])
    return {name: torch.cat(parts) for name, parts in columns.items()}


@torch.no_grad()
def scored_in_parts(
    model: nn.Module, batch: TokenBatch, limit: PassLimit, **options: Any
) -> dict[str, Tensor]:
    """A model's scores of a batch's response tokens, without gradients.

    Args:
        options: of the :class:`ScoringRequest`.

    Returns:
        ``logprobs`` and ``values`` [B, T-1], ``logits`` [B, T-1, V] where they are asked for; zero
        where masked.
    """
    shape, found = batch.input_ids.shape, {}
    for chosen in batch.parts(range(len(batch)), limit):
        part, rows = batch.select(chosen), batch.rows_of(chosen)
        model_pass = part.model_pass
        scores = model(**model_pass.inputs, scoring=scoring_request(part, model_pass, **options))
        for name in ("logprobs", "values", "logits"):
            per_row = getattr(scores, name)
            if per_row is None:
                continue
            if name not in found:
                found[name] = per_row.new_zeros(shape.numel(), *per_row.shape[1:])
            found[name].index_copy_(0, rows, per_row)
    return {name: flat.unflatten(0, shape)[:, :-1] for name, flat in found.items()}


def check_tokens(
    most: int | None,
    prompts: Sequence[int],
    responses: Sequence[int],
    name_of: Callable[[int], str] = "queries[{0}] and responses[{0}]".format,
) -> None:
    """
    Args:
        most: the tokens of a forward, ``micro_batch_tokens``.
        prompts, responses: the tokens of each sample's, or as many as it may have.
        name_of: names a sample.

    Raises:
        ValueError: a sample has more tokens than a forward may have.
    """
    lengths = [n + m for n, m in zip(prompts, responses, strict=True)]
    if most is None or not lengths:
        return
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > most:
        raise ValueError(
            f"micro_batch_tokens={most}, but {name_of(longest)} have {lengths[longest]} tokens: "
            "raise it to that, or shorten prompts or responses (max_new_tokens)"
        )


def shares_of(batch: TokenBatch, samples: Sequence[int], processes: Processes) -> list[list[int]]:
    """Each process's part of some samples, in ascending order, with about as many tokens: whole
    groups that share a prompt, where there is a multiple of the processes of them, else as many
    samples for each."""
    groups = batch.groups(samples)
    units = [[i] for i in samples] if len(groups) % processes.count else groups
    sizes = [batch.padding.tokens(batch, unit) for unit in units]
    return [sorted(i for k in part for i in units[k]) for part in processes.balanced(sizes)]


def scoring_request(batch: TokenBatch, model_pass: ModelPass, **options: Any) -> ScoringRequest:
    """The batch's response tokens, each predicted by the position before it."""
    labels = batch.input_ids.flatten()[batch.rows() + 1]
    return ScoringRequest(rows=model_pass.rows, labels=labels, **options)


def response_scores(
    score: Callable[[dict[str, Any], ScoringRequest], Any], batch: TokenBatch, **options: Any
) -> tuple[Tensor, Any]:
    """Log-probs of a batch's response tokens [B, T-1], 0 elsewhere, from one forward; and all that
    was found there.

    Args:
        score: such as :data:`Score`; what it returns has ``logprobs`` [N].
        options: of the :class:`ScoringRequest`.
    """
    model_pass = batch.model_pass
    request = scoring_request(batch, model_pass, values=False, **options)
    found = score(dict(model_pass.inputs), request)
    return batch.scatter(found.logprobs, batch.rows()), found


def scored_by(model: nn.Module) -> Score:
    """A model's log-probs in evaluation mode, without gradients."""

    @torch.no_grad()
    def score(inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        with evaluating(model):
            return model(**inputs, scoring=request)

    return score
