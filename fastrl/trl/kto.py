"""KTOTrainer: a policy from single completions that are desirable or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import fastrl_kernels
from fastrl.data.preferences import CompletionCollator, prepare_completions_of_ids
from fastrl.data.tables import is_stream
from fastrl.models.utils import evaluating
from fastrl.run.model_card import KTO
from fastrl.trainers.passes import fill
from fastrl.trl.completions import Completions
from fastrl.trl.kto_config import KTOConfig
from fastrl.trl.preference import EXTRAS, CompletionScores, PreferenceTrainer, token_parts

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
        eval_dataset: the same, or a dict of such.

    Further arguments, attributes and errors are those of :class:`fastrl.DPOTrainer`.

    Raises:
        ValueError: "kto" with batches of one example.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "fastrl", "kto"]
    config_class = KTOConfig
    collator_class = CompletionCollator
    short_name: ClassVar[str] = "KTO"
    example: ClassVar[str] = "completion"
    method = KTO

    def _settings_of(self, args: Any, model: Any) -> Any:
        args = super()._settings_of(args, model)
        self._has_kl = args.loss_type == "kto"
        if self._has_kl and args.per_device_train_batch_size < 2:
            raise ValueError(
                "per_device_train_batch_size must be at least 2 for kto, whose KL is that of "
                "completions behind another example's prompt; or choose "
                "loss_type='apo_zero_unpaired'"
            )
        self.ref_columns = ("ref_logps", "ref_KL_logps") if self._has_kl else ("ref_logps",)
        return args

    def prepare_rows(self, dataset: Any) -> Any:
        args = self._settings
        return prepare_completions_of_ids(
            dataset,
            self._tokenizer,
            args.dataset_num_proc,
            self._longest_prompt,
            args.per_device_train_batch_size if self._has_kl else None,
        )

    def sizes(self, dataset: Any) -> Iterable[int]:
        if is_stream(dataset):
            return ()
        most = self._max_length or 10**9
        both = zip(dataset["prompt_ids"], dataset["completion_ids"], strict=True)
        return (min(len(p) + len(c), most) for p, c in both)

    def micro_batches(self, inputs: Any, most: int) -> list[tuple[Any, float]]:
        mask = inputs["attention_mask"]
        count, width = mask.shape
        sizes = mask.sum(-1).tolist() if self._is_padding_free() else [width] * count
        return [
            ({name: x[part] for name, x in inputs.items()}, len(part) / count)
            for part in fill(sizes, most, self.example)
        ]

    def ref_logprobs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        prefixes = ("", _KL) if self._has_kl else ("",)
        return tuple(self.ref_score(self.completions(batch, x)).sum(1) for x in prefixes)

    def losses(
        self, model: nn.Module, batch: Mapping[str, Any]
    ) -> tuple[Tensor, Any, dict[str, tuple[Tensor, Tensor]]]:
        if self.args.precompute_ref_log_probs:
            reference, *of_kl = (batch[name] for name in self.ref_columns)
        else:
            reference, *of_kl = self.ref_logprobs(batch)
        kl = self._kl(model, batch, of_kl[0]) if self._has_kl else reference.new_zeros(())
        completions = self.completions(batch)
        scored = self.score(model, completions, EXTRAS)
        policy, desirable = scored.logprobs.sum(1), batch["label"].bool()
        losses = fastrl_kernels.kto_loss(
            policy,
            reference,
            desirable,
            kl,
            beta=self.args.beta,
            desirable_weight=self.args.desirable_weight,
            undesirable_weight=self.args.undesirable_weight,
        )
        rewards = self.args.beta * (policy.detach() - reference)
        metrics = _metrics(policy.detach(), rewards, desirable, scored, completions)
        count = torch.ones((), device=kl.device)
        return losses, scored.output, {"kl": (kl.clamp(min=0), count), **metrics}

    @torch.no_grad()
    def _kl(self, model: nn.Module, batch: Mapping[str, Any], reference: Tensor) -> Tensor:
        """The mean r of mismatched completions, over all processes."""
        with evaluating(model):
            policy = self.score(model, self.completions(batch, _KL)).logprobs.sum(1)
        return self.accelerator.reduce((policy - reference).mean(), reduction="mean")


@torch.no_grad()
def _metrics(
    policy: Tensor,
    rewards: Tensor,
    desirable: Tensor,
    scored: CompletionScores,
    completions: Completions,
) -> dict[str, tuple[Tensor, Tensor]]:
    """By TRL's names, as sums and counts."""
    sides = {"chosen": desirable, "rejected": ~desirable}
    metrics = token_parts(scored, completions, sides)
    for name, which in sides.items():
        metrics[f"rewards/{name}"] = ((rewards * which).sum(), which.sum())
        metrics[f"logps/{name}"] = ((policy * which).sum(), which.sum())
    return metrics
