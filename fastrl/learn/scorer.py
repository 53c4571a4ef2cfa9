"""Forward passes over batches for the log-probs and values of response tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fastrl_kernels
from fastrl.data.token_batch import ModelPass, Padded, TokenBatch
from fastrl.learn.experience import Experience
from fastrl.learn.kl_penalty import KLPenalty
from fastrl.learn.memory import MicroBatches, PositionCount
from fastrl.learn.ref_model import RefModel
from fastrl.models.scoring import PassLimit, ScoringRequest, TokenScores
from fastrl.models.utils import evaluating
from fastrl.run.processes import OneProcess, Processes

# Returns a model's scores of a request's tokens, from arguments of its forward.
Score = Callable[[dict[str, Any], ScoringRequest], TokenScores]
# Returns scores of the response tokens of a part of a batch, [N] each, logits [N, V], by name.
ScorePart = Callable[[TokenBatch], dict[str, Tensor]]
_OF_TOKENS = ("logprobs", "values", "logits")  # fields of TokenScores


class Scorer:
    """Runs policy and reference over a batch, without gradients, some samples at a time; both are
    softmax(logits / temperature). Where memory runs out, a lone process runs half as many samples.

    Each of several processes runs its share of the batch, in as many passes as the others, and
    returns the scores of the whole batch.

    Args:
        critic: gives the values, in the same passes; None: the policy's value head, if any, does.
        reference_support: "sampled": the reference's log-probs are over the sets that the policy's
            are over; "full": over the whole vocabulary.
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
        reference_support: str = "sampled",
    ):
        self.policy = policy
        self.reference = reference
        self.penalty = penalty
        self.limit = limit
        self.precision = precision
        self.temperature = temperature
        self.processes = processes or OneProcess()
        self.critic = critic
        self.reference_support = reference_support
        self.slices = MicroBatches("scoring", "lower mini_batch_size")
        self.positions = PositionCount()

    @torch.no_grad()
    def __call__(
        self,
        batch: TokenBatch,
        known: tuple[Tensor, Tensor] | None = None,
        values: bool = True,
    ) -> Experience:
        """Scores a batch's response tokens by policy, reference and critic, in columns [B, T-1].

        Args:
            known: log-probs and values of the response tokens, [N] each; with them the policy
                itself is not run.
            values: False where no values are wanted: a critic is not run.
        """
        shares = shares_of(batch, batch.counting() or range(len(batch)), self.processes)
        score = partial(self._score, runs_policy=known is None, values=values)
        for attempt in self.slices(min(self.limit.samples, max(map(len, shares)))):
            with attempt as size:
                limit = self.limit._replace(samples=size)
                scored = in_passes(batch, score, limit, self.processes, shares, self.positions)
        if known is not None:
            logprobs, of_policy = (batch.scatter(x, batch.rows()) for x in known)
            scored = {"logprobs": logprobs, "values": of_policy, **scored}
        columns: Any = scored
        return Experience(tokens=batch, **columns)

    def policy_scores(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and values by the policy alone, each [B, T-1]."""
        score = scores_of(scored_by(self.policy), temperature=self.temperature)
        scored = in_passes(batch, score, self.limit)
        return scored["logprobs"], scored["values"]

    def _score(self, part: TokenBatch, runs_policy: bool, values: bool) -> dict[str, Tensor]:
        """Scores of a part's tokens, [N] each, by the names of :class:`Experience`."""
        model_pass, scored = part.model_pass, {}
        request = scoring_request(part, model_pass, temperature=self.temperature, values=values)
        if runs_policy:
            request = request._replace(logits=self.penalty.needs_logits)
            policy = self.policy(**model_pass.inputs, scoring=request)
            scored["logprobs"] = policy.logprobs
            if values:
                scored["values"] = policy.values
        of_reference = request._replace(values=False)
        if self.reference_support == "full":
            of_reference = of_reference._replace(support=None)
        reference = self.reference.score(model_pass.inputs, of_reference)
        scored["ref_logprobs"] = reference.logprobs
        if request.logits:
            assert reference.logits is not None
            scored["kls"] = fastrl_kernels.full_kl(
                policy.logits, reference.logits, temperature=self.temperature
            )
        if values and self.critic is not None:
            scored["values"] = self.critic(**model_pass.inputs, scoring=request).values
        return scored


@torch.no_grad()
def in_passes(
    batch: TokenBatch,
    score: ScorePart,
    limit: PassLimit,
    processes: Processes | None = None,
    shares: Sequence[Sequence[int]] | None = None,
    positions: PositionCount | None = None,
) -> dict[str, Tensor]:
    """Scores of a batch's response tokens by ``score``, [B, T-1] each, logits [B, T-1, V]; zero
    where masked.

    All processes run the same number of passes, because weights may be gathered for each pass: one
    that has fewer runs a sample whose scores it drops.

    Args:
        limit: the most samples and tokens of a pass.
        shares: the samples of each process, which all have the same batch, and get all of its
            columns; None: each has a batch of its own.
        positions: counts the positions that are run.
    """
    processes, counting = processes or OneProcess(), batch.counting()
    all_parts = [batch.parts(share, limit) for share in ([counting] if shares is None else shares)]
    own_parts = all_parts[0 if shares is None else processes.index]
    number = max(map(len, all_parts))
    if shares is None:
        number = max(1, *processes.objects(len(own_parts)))
        batch = batch if counting else replace(batch, padding=Padded())
    columns: dict[str, list[Tensor]] = {}
    for k in range(number):
        counts = k < len(own_parts)
        part = batch.select(own_parts[k] if counts else (counting or [0])[:1])
        if positions is not None:
            positions.add(part)
        for name, per_row in score(part).items():
            columns.setdefault(name, []).append(per_row if counts else per_row[:0])
    of_tokens = {name: torch.cat(parts) for name, parts in columns.items()}
    if shares is not None and processes.count > 1:
        tokens = batch.response_mask.sum(-1).tolist()
        counts_of = [sum(tokens[i] for part in parts for i in part) for parts in all_parts]
        every = processes.joined(torch.stack(list(of_tokens.values()), 1), counts_of)
        of_tokens = dict(zip(of_tokens, every.unbind(1), strict=True))
    rows = batch.rows_of(i for parts in all_parts for part in parts for i in part)
    return {name: batch.scatter(x, rows) for name, x in of_tokens.items()}


def scores_of(score: Score, **options: Any) -> ScorePart:
    """Makes a function that runs a model over a part of a batch and returns its tokens' scores.

    Args:
        options: further fields of the :class:`ScoringRequest`.
    """

    def score_part(part: TokenBatch) -> dict[str, Tensor]:
        model_pass = part.model_pass
        request = scoring_request(part, model_pass, **options)
        scores = score(dict(model_pass.inputs), request)._asdict()
        return {name: scores[name] for name in _OF_TOKENS if scores[name] is not None}

    return score_part


def check_tokens(
    most: int | None,
    prompts: Sequence[int],
    responses: Sequence[int],
    name_of: Callable[[int], str] = "queries[{0}] and responses[{0}]".format,
) -> None:
    """Raises ValueError where a sample has more tokens than a forward may have.

    Args:
        most: the most tokens of a forward, ``micro_batch_tokens``; None: there is no limit.
        prompts, responses: how many tokens each sample's prompt and response have, or may have.
        name_of: names a sample, for messages.
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
    groups that share a prompt where the number of processes divides the number of groups, else
    samples, whose numbers differ by one at most."""
    groups = batch.groups(samples)
    units = [[i] for i in samples] if len(groups) % processes.count else groups
    sizes = [batch.padding.tokens(batch, unit) for unit in units]
    return [sorted(i for k in part for i in units[k]) for part in processes.balanced(sizes)]


def scoring_request(batch: TokenBatch, model_pass: ModelPass, **options: Any) -> ScoringRequest:
    """Requests scores of the batch's response tokens, each predicted by the position before it."""
    labels = batch.input_ids.flatten()[batch.rows() + 1]
    fields = {"support": batch.support(), **options}
    return ScoringRequest(rows=model_pass.rows, labels=labels, **fields)


def response_scores(
    score: Callable[[dict[str, Any], ScoringRequest], Any], batch: TokenBatch, **options: Any
) -> tuple[Tensor, Any]:
    """Log-probs of a batch's response tokens [B, T-1], 0 elsewhere, from one forward; and all that
    ``score`` returned.

    Args:
        score: such as :data:`Score`; what it returns has ``logprobs`` [N].
        options: further fields of the :class:`ScoringRequest`.
    """
    model_pass = batch.model_pass
    request = scoring_request(batch, model_pass, values=False, **options)
    scores = score(dict(model_pass.inputs), request)
    return batch.scatter(scores.logprobs, batch.rows()), scores


def scored_by(model: nn.Module) -> Score:
    """Makes a function that scores by a model in evaluation mode, without gradients."""

    @torch.no_grad()
    def score(inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        with evaluating(model):
            return model(**inputs, scoring=request)

    return score
