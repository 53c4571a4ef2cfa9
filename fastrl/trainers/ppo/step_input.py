"""The arguments of ``PPOTrainer.step`` of all processes, as samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastrl.data import batch as data
from fastrl.data.batch import BatchMaker, without_tokens
from fastrl.data.token_batch import TokenBatch
from fastrl.learn.correction import sampler_logprobs
from fastrl.learn.nonfinite import NonFiniteNumbers, check_a_sample_is_left, samples_left_out
from fastrl.learn.score_scaling import RunningMoments, ScoreTransform
from fastrl.models.host_memory import to_device
from fastrl.run.processes import Processes
from fastrl.samples import COLUMNS, TOKEN, Samples
from fastrl.trainers.ppo.rollouts import Rollouts
from fastrl.trainers.teachers import TeacherModels
from fastrl_kernels import TokenSets


def without(samples: Samples, left_out: Sequence[int]) -> Samples:
    """The same samples, but no token of those that are left out counts; their scores are NaN."""
    if not left_out:
        return samples
    rewards = samples.rewards.clone()
    rewards[list(left_out)] = torch.nan
    responses, masks = without_tokens(
        samples.prompt_ids, samples.sequences, samples.masks, left_out
    )
    columns: dict[str, Any] = {
        name: [x.new_zeros(len(responses[i])) if i in left_out else x for i, x in enumerate(column)]
        for name, column in samples.known().items()
        if COLUMNS[name]["kind"] == TOKEN and name not in ("experts", "supports")
    }
    if samples.supports is not None:
        columns["supports"] = [
            TokenSets.whole(len(responses[i]), sets.vocabulary) if i in left_out else sets
            for i, sets in enumerate(samples.supports)
        ]
    columns |= {"sequences": responses, "masks": masks}
    return replace(samples, rewards=rewards, **columns)


def placed_scores(
    samples: Samples,
    scores: Tensor,
    moments: RunningMoments,
    transform: ScoreTransform,
    batch: TokenBatch,
) -> Tensor:
    """The scores as ``PPOTrainer.compute_rewards`` takes them, 0 for samples without one: [B], or
    of tokens [B, T-1].

    Args:
        scores: [B], which ``transform`` returned together with ``moments``.
    """
    if samples.token_scores is None:
        return scores.nan_to_num()
    counted = torch.cat(samples.token_scores)[batch.mask_of_responses()]
    on_device = to_device(transform.of_tokens(counted, moments), scores.device)
    return batch.scatter(on_device, batch.rows())


def sampled_tokens(samples: Samples, batch: TokenBatch) -> Tensor | None:
    """The sampler's log-probs, [B, T-1]; None where they are not known."""
    return None if samples.sampler_logprobs is None else batch.placed(samples.sampler_logprobs)


class StepInputs:
    """Checks the arguments of a trainer's ``step``, and makes samples of them.

    Args:
        size: the number of samples that each process has in a step.
        masks_truncated: whether responses that were cut get the weight 0.
        per_token: whether it matters to advantages which token of a response a score is for.
        rollouts: keeps log-probs of responses that it has generated.
        reads_sampler: whether the sampler's log-probs are needed.
        name_in: a function of queries; it returns a function that names, for messages, the query
            at an index.
        device: the device of the samples' weights.
        teachers: what the policy learns of beside the scores; None: nobody.
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
        teachers: TeacherModels | None = None,
    ):
        self.size, self.device, self.processes = size, device, processes
        self.masks_truncated, self.per_token = masks_truncated, per_token
        self.rollouts, self.batches, self.scores = rollouts, batches, scores
        self.temperature, self.reads_sampler = temperature, reads_sampler
        self.nonfinite, self.name_in, self.teachers = nonfinite, name_in, teachers

    def __call__(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        masks: list[Tensor] | None,
        rollout: Samples | None,
        weights: Tensor | Sequence[float] | None,
        of_teachers: list[Tensor] | None = None,
        teachers: Sequence[str] | None = None,
    ) -> Samples:
        """The samples of all processes.

        Raises:
            TypeError, ValueError, FloatingPointError: see ``step``; raised in all processes.
        """
        with self.processes.together():
            data.check_batch_size(queries, responses, self.size)
            queries, responses, masks = data.on_host(queries, responses, masks)
            known = self.rollouts.known(queries, responses, rollout)
            starts = self.batches.starts(responses)
            totals, of_tokens = data.check_scores(scores, self.size, responses, masks, starts)
            of_tokens = of_tokens if self.per_token else None
            self.scores.check(of_tokens is not None)
            sampled = None
            if self.reads_sampler:
                sampled = sampler_logprobs(rollout, known.old_logprobs, self.temperature)
            reasons: Any = None if rollout is None else rollout.finish_reasons
            nan = self._nan_samples(queries, rollout)
            with_scores = replace(
                known,
                prompt_ids=queries,
                sequences=responses,
                rewards=totals,
                masks=masks,
                weights=self._weights(data.check_weights(weights, self.size, self.device), rollout),
                left_out=[i in nan for i in range(len(queries))],
                finish_reasons=reasons,
                sampler_logprobs=sampled,
                token_scores=of_tokens,
                **self._of_teachers(queries, responses, of_teachers, teachers),
            )
        samples = with_scores.gathered(self.processes, tokens=True)
        check_a_sample_is_left(sum(samples.left_out), len(samples), samples.finish_reasons)
        return samples

    def _of_teachers(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        of_teachers: list[Tensor] | None,
        names: Sequence[str] | None,
    ) -> dict[str, Any]:
        """The columns that teachers read; raises ValueError where there are none to read them."""
        if self.teachers is not None:
            return self.teachers.columns_of(queries, responses, of_teachers, names)
        if of_teachers is not None or names is not None:
            raise ValueError(
                "teacher_queries and teachers are for teachers, and there are none: set "
                "PPOConfig.teacher_kl_coef and pass PPOTrainer a teacher_model, or leave them out"
            )
        return {}

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
