"""What ``PPOTrainer.step`` is given: this process's samples, and those of all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.data import batch as data
from fastrl.data.batch import BatchMaker, to_host, without_tokens
from fastrl.data.token_batch import TokenBatch
from fastrl.learn.correction import sampler_logprobs
from fastrl.learn.experience import LogprobsAndValues
from fastrl.learn.nonfinite import NonFiniteNumbers, check_a_sample_is_left, samples_left_out
from fastrl.learn.old_logprobs import with_zeros, zero_left_out
from fastrl.learn.score_scaling import RunningMoments, ScoreTransform
from fastrl.models.host_memory import to_device
from fastrl.ppo.rollouts import Rollouts
from fastrl.run.processes import Processes
from fastrl.samples import Samples


@dataclass(frozen=True)
class StepInput:
    """Scored samples; each list has one element for each of the B samples."""

    queries: Sequence[Tensor]
    responses: Sequence[Tensor]
    scores: Tensor  # [B] fp32 on the CPU
    masks: Sequence[Tensor] | None  # which tokens of the responses count; None: all
    weights: Tensor | None  # [B]
    logprobs: Sequence[LogprobsAndValues] | None  # of the rollout; None where they are not known
    nan: Sequence[int] = ()  # samples that ended in NaN logits
    finish_reasons: Sequence[str] | None = None
    sampled: Sequence[Tensor] | None = None  # the sampler's log-probs, where they are wanted
    token_scores: Sequence[Tensor] | None = None  # of the responses' tokens, whose sums scores are
    experts: Sequence[Tensor] | None = None  # choices of the rollout, where they are replayed

    def of_all(self, processes: Processes) -> StepInput:
        """The samples of all processes, in the processes' order.

        Raises:
            ValueError: in some processes scores are per token, in others not.
        """
        if processes.count == 1:
            return self
        known = self.logprobs
        own = replace(
            self,
            queries=to_host(self.queries),
            responses=to_host(self.responses),
            masks=None if self.masks is None else to_host(self.masks),
            weights=None if self.weights is None else self.weights.cpu(),
            logprobs=None if known is None else [_on_host(each) for each in known],
            sampled=None if self.sampled is None else [x.cpu() for x in self.sampled],
        )
        parts = processes.objects(own)
        first = [sum(len(part.queries) for part in parts[:i]) for i in range(len(parts))]
        return StepInput(
            _all([part.queries for part in parts]) or [],
            _all([part.responses for part in parts]) or [],
            torch.cat([part.scores for part in parts]),
            _all([part._masks_if(parts) for part in parts]),
            _weights_of([part.weights for part in parts], [len(part.queries) for part in parts]),
            _all([part.logprobs for part in parts]),
            [first[i] + j for i, part in enumerate(parts) for j in part.nan],
            _all([part.finish_reasons for part in parts]),
            _all([part.sampled for part in parts]),
            _all([part._token_scores_if(parts) for part in parts]),
            _all([part.experts for part in parts]),
        )

    def without(self, left_out: Sequence[int]) -> StepInput:
        """The same samples, but no token of those that are left out counts; their scores are
        NaN."""
        if not left_out:
            return self
        scores = self.scores.clone()
        scores[list(left_out)] = torch.nan
        responses, masks = without_tokens(self.queries, self.responses, self.masks, left_out)
        return replace(
            self,
            scores=scores,
            responses=responses,
            masks=masks,
            logprobs=zero_left_out(self.logprobs, responses, left_out),
            sampled=with_zeros(self.sampled, responses, left_out),
            token_scores=with_zeros(self.token_scores, responses, left_out),
        )

    def placed(
        self, scores: Tensor, moments: RunningMoments, transform: ScoreTransform, batch: TokenBatch
    ) -> Tensor:
        """The scores as ``PPOTrainer.compute_rewards`` takes them, 0 for samples without one: [B],
        or of tokens [B, T-1].

        Args:
            scores: [B], transformed; ``moments`` are those that they come with.
        """
        if self.token_scores is None:
            return scores.nan_to_num()
        counted = torch.cat(list(self.token_scores))[batch.mask_of_responses()]
        on_device = to_device(transform.of_tokens(counted, moments), scores.device)
        return batch.scatter(on_device, batch.rows())

    def sampled_tokens(self, batch: TokenBatch) -> Tensor | None:
        """The sampler's log-probs, [B, T-1]; None where they are not known."""
        if self.sampled is None:
            return None
        counted = torch.cat(list(self.sampled))[batch.mask_of_responses()]
        return batch.scatter(to_device(counted, batch.input_ids.device), batch.rows())

    def _masks_if(self, parts: Sequence[StepInput]) -> Sequence[Tensor] | None:
        """All tokens count where another process has masks, and this one none."""
        if self.masks is None and any(part.masks is not None for part in parts):
            return [torch.ones_like(response) for response in self.responses]
        return self.masks

    def _token_scores_if(self, parts: Sequence[StepInput]) -> Sequence[Tensor] | None:
        """One score for each response is one for each token, where all have one token."""
        if self.token_scores is None and any(part.token_scores is not None for part in parts):
            if any(len(response) != 1 for response in self.responses):
                raise ValueError(
                    "in one process scores are numbers for each token, in another one number for "
                    "each response: pass the same kind in all"
                )
            return list(self.scores.view(-1, 1))
        return self.token_scores


class StepInputs:
    """Checks and completes what a trainer's ``step`` is given.

    Args:
        size: samples of a step and process.
        masks_truncated: whether responses that were cut do not learn.
        per_token: whether it matters which tokens scores are of.
        rollouts: may know the responses.
        temperature: of the policy.
        reads_sampler: whether the log-probs are wanted with which the responses were sampled.
        name_in: of queries, names one by its index.
        device: of weights.
    """

    def __init__(
        self,
        size: int,
        *,
        masks_truncated: bool,
        per_token: bool,
        rollouts: Rollouts,
        batches: BatchMaker,
        scores: ScoreTransform,
        temperature: float,
        reads_sampler: bool,
        nonfinite: NonFiniteNumbers,
        name_in: Callable[[Sequence[Tensor]], Callable[[int], str]],
        device: torch.device,
        processes: Processes,
    ):
        self.size, self.device, self.processes = size, device, processes
        self.masks_truncated, self.per_token = masks_truncated, per_token
        self.rollouts, self.batches, self.scores = rollouts, batches, scores
        self.temperature, self.reads_sampler = temperature, reads_sampler
        self.nonfinite, self.name_in = nonfinite, name_in

    def __call__(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        masks: list[Tensor] | None,
        rollout: Samples | None,
        weights: Tensor | Sequence[float] | None,
    ) -> StepInput:
        """The samples of all processes.

        Raises:
            ValueError, FloatingPointError: as ``step``, in all processes.
        """
        with self.processes.together():
            data.check_batch_size(queries, responses, self.size)
            queries, responses, masks = data.on_host(queries, responses, masks)
            known = self.rollouts.logprobs(queries, responses, rollout)
            experts = self.rollouts.experts(queries, responses, rollout)
            starts = self.batches.starts(responses)
            totals, of_tokens = data.check_scores(scores, self.size, responses, masks, starts)
            of_tokens = of_tokens if self.per_token else None
            self.scores.check(of_tokens is not None)
            own = StepInput(
                queries,
                responses,
                totals,
                masks,
                self._weights(data.check_weights(weights, self.size, self.device), rollout),
                known,
                self._nan_samples(queries, rollout),
                None if rollout is None else rollout.finish_reasons,
                sampler_logprobs(rollout, known, self.temperature) if self.reads_sampler else None,
                of_tokens,
                experts,
            )
        given = own.of_all(self.processes)
        check_a_sample_is_left(len(given.nan), len(given.queries))
        return given

    def _weights(self, weights: Tensor | None, rollout: Samples | None) -> Tensor | None:
        """The samples' weights, 0 where ``mask_truncated_completions`` leaves them out.

        Raises:
            ValueError: it is not known how the responses ended.
        """
        if not self.masks_truncated:
            return weights
        if rollout is None:
            raise ValueError(
                "mask_truncated_completions needs to know how responses ended: pass rollout= to "
                "step(), or turn it off"
            )
        whole = torch.tensor([float(reason != "length") for reason in rollout.finish_reasons])
        whole = to_device(whole, self.device)
        return whole if weights is None else whole * weights

    def _nan_samples(self, queries: Sequence[Tensor], rollout: Samples | None) -> list[int]:
        """Indices of samples that ended in NaN logits."""
        if rollout is None or len(rollout.finish_reasons) != len(queries):
            return []
        return samples_left_out(rollout, self.nonfinite, self.name_in(queries), self.processes)


def _on_host(known: LogprobsAndValues) -> LogprobsAndValues:
    return LogprobsAndValues(known.logprobs.cpu(), known.values.cpu())


def _all(parts: Sequence[Any]) -> list[Any] | None:
    """The elements of all lists; None where one is None."""
    if any(part is None for part in parts):
        return None
    return [element for part in parts for element in part]


def _weights_of(parts: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    if all(part is None for part in parts):
        return None
    return torch.cat(
        [torch.ones(n) if part is None else part for part, n in zip(parts, sizes, strict=True)]
    )
