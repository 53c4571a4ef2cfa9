"""Methods under TRL's names that programs call, and that ``PPOTrainer.step`` does not use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from fastrl.config import PPOConfig
from fastrl.core import entropy_from_logits
from fastrl.data import batch as data
from fastrl.data.batch import BatchMaker
from fastrl.learn.aggregate import Aggregate
from fastrl.learn.experience import Experience
from fastrl.learn.loss import UpdateLoss
from fastrl.learn.nonfinite import NonFiniteNumbers
from fastrl.learn.ref_model.adapter import SwitchedAdapter
from fastrl.learn.scorer import Scorer, in_passes, scored_by, scores_of
from fastrl.learn.update import Update
from fastrl.models.scoring import TokenScores, policy_loss_of
from fastrl.run import metrics
from fastrl.trainers.ppo.state import TrainerState


class ClassicMethods:
    """A PPOTrainer's methods for the parts of a step, one by one, and for its log. The trainer sets
    the attributes that they read."""

    config: PPOConfig
    tokenizer: Any
    accelerator: Accelerator
    current_device: torch.device
    batches: BatchMaker
    aggregate: Aggregate
    nonfinite: NonFiniteNumbers
    reference: Any
    scorer: Scorer
    update: Update
    _state: TrainerState

    @property
    def optional_peft_ctx(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes a context in which the policy's adapter is switched off, where the policy without
        its adapter is the reference; else a context in which nothing changes."""
        switched = isinstance(self.reference, SwitchedAdapter)
        return self.reference.as_policy if switched else nullcontext

    def prepare_model_inputs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Joins and pads queries and responses: input_ids and attention_mask, [B, T] int64.

        The tokenizer's padding_side decides where the padding goes. For an encoder–decoder, these
        hold the queries, and decoder_input_ids and decoder_attention_mask the responses, behind the
        decoder's start token; padding goes to the end.
        """
        inputs = self.batches.model_inputs(queries, self.batches.own(responses)[0])
        return {name: tensor.to(self.current_device) for name, tensor in inputs.items()}

    def batched_forward_pass(
        self,
        model: Any,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        model_inputs: dict[str, Tensor],
        return_logits: bool = False,
        response_masks: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Scores responses without gradients: log-probs at ``PPOConfig.temperature``, logits
        (before the temperature) or None, values and masks.

        Args:
            model_inputs: what :meth:`prepare_model_inputs` returned for the same queries and
                responses.

        Returns:
            [B, T-1], [B, T-1, V] or None, [B, T-1], [B, T-1] bool; zero where the mask is False.
        """
        responses, response_masks = self.batches.own(responses, response_masks)
        batch = self.batches.from_inputs(model_inputs, queries, responses, response_masks)
        batch = batch.to(self.current_device)
        temperature = self.config.temperature
        score = scores_of(scored_by(model), logits=return_logits, temperature=temperature)
        scored = in_passes(batch, score, self.scorer.limit, shares=[range(len(batch))])
        return scored["logprobs"], scored.get("logits"), scored["values"], batch.mask

    def loss(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logits: Tensor | None,
        vpreds: Tensor,
        logprobs: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Policy loss, vf_coef × value loss, and statistics; inputs [B, T-1], or [T-1] of a single
        sample, and logits with the vocabulary as one more dimension, for the entropy at
        ``PPOConfig.temperature``.

        Each of the two losses has its own gradient. ``step()`` computes both in one pass, to the
        same numbers. Neither has the KL term of ``kl_in="loss"``, or a term of entropies.

        Raises:
            ValueError: a separate critic learns the values.
        """
        if self.update.critic is not None:
            raise ValueError(
                "the policy's and the critic's losses are minimised apart, and this is that of "
                "one model: call step()"
            )
        update = self.update.gradient.loss
        assert isinstance(update, UpdateLoss)
        mask = torch.atleast_2d(mask.bool())
        lengths = mask.sum(-1)
        weights = self.aggregate.weights(lengths)

        def flat(x: Tensor) -> Tensor:
            return torch.atleast_2d(x).expand_as(mask)[mask]

        new, denominator = flat(logprobs), self.aggregate.denominator(lengths)
        old = Experience(logprobs=flat(old_logprobs), advantages=flat(advantages), weights=weights)
        objective = update.policy_objective(old, lengths, denominator, entropy_coef=0.0)
        objective = objective._replace(top_entropy=1.0)
        policy_loss, policy_stats = policy_loss_of(new, None, objective)
        entropies = torch.zeros_like(new)
        if logits is not None:
            entropies = flat(entropy_from_logits(logits, update.temperature)).detach()
        scores = TokenScores(new, entropies, flat(vpreds), None, policy_loss, policy_stats)
        value_loss, numbers = update.value_loss(scores, objective, flat(values), flat(returns))
        numbers["ppo/loss/total"] = (policy_loss + value_loss).detach()
        statistics = {name.removeprefix("ppo/"): value for name, value in numbers.items()}
        return policy_loss, value_loss, statistics

    def train_minibatch(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logprobs: Tensor,
        logits: Tensor | None,
        vpreds: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> dict[str, Tensor]:
        """Takes an optimizer step on :meth:`loss`; returns the statistics of that.

        The step is left out, with a warning, where the loss or its gradient is not finite.
        """
        policy_loss, value_loss, statistics = self.loss(
            old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns
        )
        self.update.minimise(policy_loss + value_loss)
        return statistics

    def _step_safety_checker(
        self,
        batch_size: int,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        masks: list[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
        """The checks of :meth:`step` under TRL's name; returns the arguments on the device, scores
        as 0-D tensors unless they are per token.

        Raises:
            ValueError: see ``step()``.
        """
        data.check_batch_size(queries, responses, batch_size)
        starts = self.batches.starts(responses)
        totals, of_tokens = data.check_scores(scores, batch_size, responses, masks, starts)
        self.nonfinite.scores(totals, (), self._name_in(queries))
        self.batches(queries, responses, masks)

        def on_device(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensor.to(self.current_device) for tensor in tensors]

        flat = on_device(scores)
        flat = [score.reshape(()) for score in flat] if of_tokens is None else flat
        masks = None if masks is None else on_device(masks)
        return on_device(queries), on_device(responses), flat, masks

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: dict[str, Any],
        rewards: Sequence[Tensor | float] | Tensor,
        columns_to_log: Iterable[str] = ("query", "response"),
    ) -> None:
        """Logs a step: to the tracker of ``log_with``, else as a table of samples on the console.

        Args:
            stats: what ``step()`` returned.
            batch: columns of texts, such as query and response.
            rewards: one number per sample, or one for each of its tokens, which are added up.
            columns_to_log: the columns of ``batch`` that the table shows.
        """
        metrics.log_stats(
            self.accelerator,
            self.config.log_with,
            self._state.step,
            stats,
            batch,
            rewards,
            columns_to_log,
        )

    def _name_in(self, queries: Sequence[Tensor]) -> Callable[[int], str]:
        """Names a sample by the text of its query."""
        return lambda i: repr(self.tokenizer.decode(queries[i]))
