"""The rest of the classic PPOTrainer's surface: single phases, statistics, saving."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastrl.config import PPOConfig
from fastrl.core import entropy_from_logits
from fastrl.data import batch as data
from fastrl.models.modes import evaluating
from fastrl.ppo import stats
from fastrl.ppo.advantages import GAE
from fastrl.ppo.batches import JoinedBatches
from fastrl.ppo.experience import Experience, scoring_request
from fastrl.ppo.losses import MINIBATCH_FIELDS
from fastrl.ppo.update import PPOUpdate
from fastrl.run import hub, metrics
from fastrl.run.model_card import policy_gradient, write_model_card

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fastrl.models import PreTrainedModelWrapper
    from fastrl.ref_model import Reference


_LOOP_COLUMNS = ("label", "query", "response")


class ClassicSurface:
    """Methods that ``step()`` does not need, or that users call by themselves."""

    config: PPOConfig
    accelerator: Accelerator
    tokenizer: Any
    model: Any
    optimizer: Any
    current_device: torch.device
    current_step: int
    reference: Reference
    _unwrapped: PreTrainedModelWrapper
    _batches: JoinedBatches
    _advantages: GAE
    _update: PPOUpdate

    # ------------------------------------------------------------------ single phases

    def prepare_dataloader(self, dataset: Any, data_collator: Any = None) -> Any:
        """A shuffled loader of whole batches: of ``batch_size`` samples, or as many as there are
        groups in that.

        Of a ``datasets.Dataset``, columns that neither the model's forward nor the classic loop
        reads are dropped, unless ``remove_unused_columns`` is off. By default dicts become a dict
        of lists, and tuples and tensors what torch's ``default_collate`` makes of them (a list of
        tensors where their shapes differ). Fewer samples than a batch give an empty loader, and a
        warning.
        """
        arguments = inspect.signature(self._unwrapped.forward).parameters
        keep = (*arguments, *_LOOP_COLUMNS) if self.config.remove_unused_columns else None
        return data.make_dataloader(dataset, self.config.prompts_per_step, data_collator, keep)

    def prepare_model_inputs(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Queries and responses joined and padded: input_ids and attention_mask, [B, T] int64.

        The tokenizer's padding_side decides where the padding goes. For an encoder–decoder these
        are the queries', and decoder_input_ids and decoder_attention_mask those of the responses,
        behind the decoder's start token; padding goes to the end.
        """
        inputs = self._batches.model_inputs(queries, self._batches.own(responses)[0])
        return {name: tensor.to(self.current_device) for name, tensor in inputs.items()}

    @torch.no_grad()
    def batched_forward_pass(
        self,
        model: Any,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        model_inputs: dict[str, Tensor],
        return_logits: bool = False,
        response_masks: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Log-probs at ``PPOConfig.temperature``, logits (before it) or None, values and masks of
        the responses, without gradients.

        Args:
            model_inputs: what :meth:`prepare_model_inputs` returned for these queries.

        Returns:
            [B, T-1], [B, T-1, V] or None, [B, T-1], [B, T-1] bool; zero where the mask is False.
        """
        responses, response_masks = self._batches.own(responses, response_masks)
        batch = self._batches.from_inputs(model_inputs, queries, responses, response_masks)
        batch = batch.to(self.current_device)
        shape = batch.mask.shape
        logprobs, values = (torch.zeros(shape, device=self.current_device) for _ in range(2))
        logits = None
        with evaluating(model):
            for start in range(0, len(batch), self.config.mini_batch_size):
                chosen = range(start, min(start + self.config.mini_batch_size, len(batch)))
                columns = batch.columns(chosen)
                block = (slice(chosen.start, chosen.stop), slice(columns.start, columns.stop - 1))
                part = batch.select(chosen)
                request = scoring_request(
                    part, logits=return_logits, temperature=self.config.temperature
                )
                scores = model(**part.model_inputs, scoring=request)
                logprobs[block] = part.spread(scores.logprobs, request.rows)
                values[block] = part.spread(scores.values, request.rows)
                if return_logits:
                    if logits is None:
                        logits = scores.logits.new_zeros((*shape, scores.logits.shape[-1]))
                    logits[block][part.mask] = scores.logits
        return logprobs, logits, values, batch.mask

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

        Each of the two losses carries its own gradient. ``step()`` computes both in one pass, with
        the same figures. A KL term (``kl_in="loss"``) is not part of it.
        """
        loss = self._update.loss
        entropies = torch.zeros_like(logprobs)
        if logits is not None:
            entropies = entropy_from_logits(logits, self.config.temperature)
        old_logprobs, values, vpreds, logprobs, mask, advantages, returns, entropies = (
            torch.atleast_2d(x)
            for x in (
                old_logprobs,
                values,
                vpreds,
                logprobs,
                mask.bool(),
                advantages,
                returns,
                entropies,
            )
        )
        entropies = entropies.expand_as(mask)  # one number per sample will do
        weights = loss.aggregate.sample_weights(mask, None)
        old = Experience(old_logprobs, values, advantages, returns, weights=weights)
        arguments = (entropies.detach(), mask)
        joint, vector = loss(old, logprobs, vpreds, *arguments)
        of_policy, _ = loss(old, logprobs, vpreds.detach(), *arguments)
        policy_loss = vector[MINIBATCH_FIELDS.index("policy_loss")]
        value_loss = self.config.vf_coef * vector[MINIBATCH_FIELDS.index("value_loss")]
        # Values from the statistics, gradients from the joint loss: the constants cancel.
        gradient_of_policy = of_policy - of_policy.detach()
        gradient_of_values = (joint - joint.detach()) - gradient_of_policy
        named = stats.minibatch_stats(vector, loss.stats)
        return (
            policy_loss + gradient_of_policy,
            value_loss + gradient_of_values,
            {name.removeprefix("ppo/"): value for name, value in named.items()},
        )

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
        """One optimizer step on :meth:`loss`; returns its statistics.

        It is left out, with a warning, where the loss or its gradient is not finite.
        """
        policy_loss, value_loss, statistics = self.loss(
            old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns
        )
        self._update.minimise(policy_loss + value_loss)
        return statistics

    def _step_safety_checker(
        self,
        batch_size: int,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        masks: list[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
        """The checks of :meth:`step` under TRL's name; what was given, on the device, with scores
        as 0-D tensors.

        Raises:
            ValueError: as step() does.
        """
        data.check_scores(scores, batch_size)
        data.check_batch_size(queries, responses, batch_size)
        self._batches(queries, responses, masks)

        def here(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.to(self.current_device) for tensor in tensors]

        flat = [score.reshape(()) for score in here(scores)]
        return here(queries), here(responses), flat, None if masks is None else here(masks)

    # ------------------------------------------------------------------ statistics

    def record_step_stats(self, kl_coef: float, **step: Any) -> dict[str, Any]:
        """The statistics of a step, fetched from the device in one transfer."""
        batch, record = step["batch"], step["record"]
        of_groups = self._advantages.statistics(step["scores"])
        on_device = self.gather_stats({**stats.device_stats(**step), **of_groups})
        result: dict[str, Any] = {
            name: value.item() if value.ndim == 0 else value
            for name, value in stats.fetch(on_device).items()
        }
        result.update(stats.host_stats(batch, record))
        result["objective/kl_coef"] = kl_coef
        result["ppo/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        return result

    def gather_stats(self, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scalars averaged over processes, in one reduction; arrays stay each process's own."""
        if self.accelerator.num_processes == 1:
            return statistics
        names = [name for name, value in statistics.items() if value.dim() == 0]
        joined = torch.stack([statistics[name].float() for name in names])
        means = self.accelerator.reduce(joined, reduction="mean")
        return {**statistics, **dict(zip(names, means, strict=True))}

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: dict[str, Any],
        rewards: Sequence[Tensor | float] | Tensor,
        columns_to_log: Iterable[str] = ("query", "response"),
    ) -> None:
        """Log a step: to the tracker of ``log_with``, else as a table of samples on the console.

        Args:
            stats: what ``step()`` returned.
            batch: columns of texts, such as query and response.
            rewards: one number per sample.
            columns_to_log: the columns of ``batch`` that the table shows.
        """
        metrics.log_stats(
            self.accelerator,
            self.config.log_with,
            self.current_step,
            stats,
            batch,
            rewards,
            columns_to_log,
        )

    # ------------------------------------------------------------------ saving

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Save model with value head, tokenizer, and a model card where there is none.

        Raises:
            ValueError: layers that are shared with the reference have changed.
        """
        self.reference.verify()
        state_dict = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return
        card = Path(save_directory) / "README.md"
        own = card.read_bytes() if card.exists() else None
        self._unwrapped.save_pretrained(save_directory, state_dict=state_dict)
        self.tokenizer.save_pretrained(save_directory)
        # PEFT writes a card of its own.
        if own is None:
            self.create_model_card(save_directory)
        else:
            card.write_bytes(own)

    def create_model_card(self, path: str | Path, model_name: str | None = None) -> None:
        """Write ``README.md``: what the model is, how it was trained, and how to load it.

        The base model is what the model itself names, or else ``PPOConfig.model_name`` where that
        was set.
        """
        name = model_name or Path(path).absolute().name
        unset = PPOConfig.__dataclass_fields__["model_name"].default
        given = None if self.config.model_name == unset else self.config.model_name
        method = policy_gradient(self.config.method)
        write_model_card(path, name, self._unwrapped, method, given)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Upload model, tokenizer and model card, in one commit.

        Args:
            kwargs: see :func:`fastrl.run.hub.upload`, such as ``private``, ``token`` and
                ``commit_message``.
        """
        hub.check_options(kwargs)
        with tempfile.TemporaryDirectory() as folder:
            if self.accelerator.is_main_process:
                self.create_model_card(folder, repo_id)
            self.save_pretrained(folder)
            if self.accelerator.is_main_process:
                return hub.upload(folder, repo_id, **kwargs)
        return None
