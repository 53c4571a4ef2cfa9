"""KTOTrainer: trains a policy on single completions that are desirable or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastrl.data.preferences import CompletionCollator, prepare_completions_of_ids
from fastrl.data.token_batch import TokenBatch
from fastrl.learn.preferences import UNPAIRED_LOSSES, Side, mismatched_kl
from fastrl.models.scorer import ScoredPass
from fastrl.models.utils import evaluating
from fastrl.run.model_card import KTO
from fastrl.trainers.pairs.kto_config import KTOConfig
from fastrl.trainers.pairs.preference import EXTRAS, PreferenceTrainer, token_parts

_KL = "KL_"


class KTOTrainer(PreferenceTrainer):
    """Trains a policy from completions that are labelled desirable or undesirable, with TRL 1.x's
    interface.

    "kto" is :func:`fastrl_kernels.kto_loss`; its KL is the mean r = log π - log ref of mismatched
    completions, over the batch of all processes: each prompt with the completion of the row before
    it in its batch. "apo_zero_unpaired" is the same with a KL of 0.

    Args:
        model: a causal language model, with or without an adapter, or its path.
        ref_model: the reference, or its path; None: the policy as training begins.
        args: a :class:`KTOConfig`.
        data_collator: by default :class:`fastrl.data.preferences.CompletionCollator`; another one
            must make the same kind of batches.
        train_dataset: completions or pairs, see
            :func:`fastrl.data.preferences.prepare_completions_of_ids`; a ``Dataset`` or an
            ``IterableDataset``.
        eval_dataset: examples as in ``train_dataset``, or a dict of such data sets.

    Further arguments, attributes and errors are those of :class:`fastrl.DPOTrainer`.

    Raises:
        ValueError: "kto" with batches of one example.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "fastrl", "kto"]
    config_class = KTOConfig
    collator_class = CompletionCollator
    short_name: ClassVar[str] = "KTO"
    example: ClassVar[str] = "completion"
    id_columns = ("prompt_ids", "completion_ids")
    method = KTO

    def _settings_of(self, args: Any, model: Any, settings: dict[str, Any]) -> Any:
        args = super()._settings_of(args, model, settings)
        self._row = UNPAIRED_LOSSES[args.loss_type]
        if self._row.has_kl and args.per_device_train_batch_size < 2:
            raise ValueError(
                f"per_device_train_batch_size must be at least 2 for {args.loss_type}, whose KL is "
                "that of completions behind another example's prompt; or choose "
                "loss_type='apo_zero_unpaired'"
            )
        return args

    @property
    def computed_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("ref_logps", "ref_KL_logps") if self._row.has_kl else ("ref_logps",)

    def prepare_rows(self, dataset: Any) -> Any:
        args = self.args
        return prepare_completions_of_ids(
            dataset,
            self.processing_class,
            args.dataset_num_proc,
            self._longest_prompt,
            args.per_device_train_batch_size if self._row.has_kl else None,
            args.cuts,
        )

    def ref_logprobs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        return tuple(self.ref_score(x).sum(1) for x in self._completions(batch))

    def _completions(self, batch: Mapping[str, Any]) -> list[TokenBatch]:
        """The completions of the examples, and the mismatched ones where the loss has a KL."""
        return [self.completions(batch, x) for x in (("", _KL) if self._row.has_kl else ("",))]

    def losses(
        self, model: nn.Module, batch: Mapping[str, Any]
    ) -> tuple[Tensor, ScoredPass, dict[str, tuple[Tensor, Tensor]]]:
        args = self.args
        completions, *mismatched = both = self._completions(batch)
        if args.precompute_ref_log_probs:
            reference, *of_kl = (batch[name] for name in self.computed_columns)
        else:
            reference, *of_kl = (self.ref_score(x).sum(1) for x in both)
        kl = self._kl(model, mismatched[0], of_kl[0]) if mismatched else reference.new_zeros(())
        logprobs, scored = self.score(model, completions, EXTRAS)
        side = Side(logprobs.sum(1), completions.mask.sum(1), reference)
        desirable = batch["label"].bool()
        weights = {"desirable_weight": args.desirable_weight}
        weights |= {"undesirable_weight": args.undesirable_weight}
        losses = self._row(side, desirable, kl, beta=args.beta, **weights)
        with torch.no_grad():
            counts = self.counting(len(desirable))
            sides = {"chosen": desirable & counts, "rejected": ~desirable & counts}
            parts = {"kl": (kl.clamp(min=0), torch.ones_like(kl))}
            parts |= token_parts(scored, completions, sides)
            rewards = args.beta * side.ratio
            for name, which in sides.items():
                parts[f"rewards/{name}"] = ((rewards * which).sum(), which.sum())
                parts[f"logps/{name}"] = ((side.sums * which).sum(), which.sum())
        return losses, scored, parts

    @torch.no_grad()
    def _kl(self, model: nn.Module, completions: TokenBatch, reference: Tensor) -> Tensor:
        with evaluating(model):
            logprobs, _ = self.score(model, completions)
        side = Side(logprobs.sum(1), completions.mask.sum(1), reference)
        return mismatched_kl(side, self.processes, 1 / self.processes.count)
