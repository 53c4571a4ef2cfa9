"""DPOTrainer: a policy from pairs of a chosen and a rejected completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import fastrl_kernels
from fastrl.data.preferences import OF_A_PAIR, PairCollator, prepare_pairs_of_ids
from fastrl.data.tables import is_stream
from fastrl.run.model_card import DPO
from fastrl.trainers.passes import fill
from fastrl.trl.completions import Completions
from fastrl.trl.dpo_config import SMOOTHED, DPOConfig
from fastrl.trl.preference import EXTRAS, CompletionScores, PreferenceTrainer, token_parts

_REFS = ("ref_chosen_logps", "ref_rejected_logps")


class DPOTrainer(PreferenceTrainer):
    """Trains a policy to prefer the chosen completion of each pair, with TRL 1.x's interface.

    loss = Σ_k w_k·mean over pairs of loss_k, with the losses of :func:`fastrl_kernels.pair_loss` on
    r = log π - log ref of whole completions. "ipo" and "sigmoid_norm" read r per token; "sft" is
    the negative log-likelihood of the chosen completions' tokens. Both sides go through the model
    in one forward, and the LM head runs on completions alone.

    Args:
        model: a causal language model, with or without an adapter, or its path.
        ref_model: the reference, or its path; None: the policy as training begins.
        args: a :class:`DPOConfig`.
        data_collator: by default :class:`fastrl.data.preferences.PairCollator`; another one must
            make the same kind of batches.
        train_dataset: pairs, see :func:`fastrl.data.preferences.prepare_pairs_of_ids`; a
            ``Dataset`` or an ``IterableDataset``.
        eval_dataset: the same, or a dict of such.
        processing_class: the tokenizer, by default the one saved with the model.
        compute_metrics: gets the logits of all tokens, and the tokens.
        callbacks, optimizers: of transformers' Trainer.
        quantization_config: of a model that is given by its path.
        peft_config: adds an adapter to the model.

    Attributes:
        ref_model: the reference as a model of its own, or None.

    Raises:
        ValueError: data that cannot be used, settings that do not go together.
        TypeError: args of another class.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "fastrl", "dpo"]
    config_class = DPOConfig
    collator_class = PairCollator
    ref_columns = _REFS
    short_name: ClassVar[str] = "DPO"
    example: ClassVar[str] = "pair"
    method = DPO

    def prepare_rows(self, dataset: Any) -> Any:
        args = self._settings
        longest = self._longest_prompt if args.truncation_mode == "keep_start" else None
        return prepare_pairs_of_ids(dataset, self._tokenizer, args.dataset_num_proc, longest)

    def sizes(self, dataset: Any) -> Iterable[int]:
        if is_stream(dataset):
            return ()
        most = self._max_length or 10**9
        columns = (dataset[name] for name in OF_A_PAIR)
        pairs = (
            (min(len(p) + len(c), most), min(len(p) + len(r), most))
            for p, c, r in zip(*columns, strict=True)
        )
        if not self._settings.padding_free:
            return (2 * max(pair) for pair in pairs)
        return map(sum, pairs)

    def micro_batches(self, inputs: Any, most: int) -> list[tuple[Any, float]]:
        mask = inputs["attention_mask"]
        pairs, width = len(mask) // 2, mask.shape[1]
        lengths = mask.sum(-1).view(2, pairs).sum(0).tolist()
        sizes = lengths if self._is_padding_free() else [2 * width] * pairs
        parts = []
        for chosen in fill(sizes, most, self.example):
            both = [*chosen, *(i + pairs for i in chosen)]
            part = {name: x[chosen if len(x) == pairs else both] for name, x in inputs.items()}
            parts.append((part, len(chosen) / pairs))
        return parts

    def _sums(self, logprobs: Tensor, completions: Completions) -> Tensor:
        """[2B] log-probs of whole completions; behind the shorter one's length by ``ld_alpha``."""
        alpha = self.args.ld_alpha
        if alpha is None:
            return logprobs.sum(1)
        position = completions.mask.cumsum(1)
        counts = completions.mask.sum(1).view(2, -1)
        shared = counts.min(0).values.repeat(2)[:, None]
        return torch.where(position <= shared, logprobs, alpha * logprobs).sum(1)

    def ref_logprobs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        completions = self.completions(batch)
        return self._sums(self.ref_score(completions), completions).chunk(2)

    def losses(
        self, model: nn.Module, batch: Mapping[str, Any]
    ) -> tuple[Tensor, Any, dict[str, tuple[Tensor, Tensor]]]:
        completions = self.completions(batch)
        wanted = (*EXTRAS, "log_sum_sq_probs") if self.args.use_weighting else EXTRAS
        scored = self.score(model, completions, wanted)
        policy = self._sums(scored.logprobs, completions)
        if self.args.precompute_ref_log_probs:
            reference = torch.cat([batch[name] for name in _REFS])
        else:
            reference = self._sums(self.ref_score(completions), completions)
        losses = self._weighted_losses(policy, reference, scored, completions)
        return losses, scored.output, self._pair_metrics(policy, reference, scored, completions)

    def _weighted_losses(
        self, policy: Tensor, reference: Tensor, scored: CompletionScores, completions: Completions
    ) -> Tensor:
        """[B], the weighted sum of all losses."""
        args = self.args
        weights = args.loss_weights or [1.0] * len(args.loss_type)
        pairs = [
            weight * self._losses_of(name, policy, reference, scored, completions)
            for name, weight in zip(args.loss_type, weights, strict=True)
        ]
        losses = torch.stack(pairs).sum(0)
        if not args.use_weighting:
            return losses
        log_sum_sq: Any = scored.extras.log_sum_sq_probs
        aligned = completions.spread(scored.scores.logprobs.detach() - log_sum_sq)
        of_side = torch.exp(aligned.sum(1) / completions.lengths).chunk(2)
        return losses * of_side[0] * of_side[1]

    def _losses_of(
        self,
        name: str,
        policy: Tensor,
        reference: Tensor,
        scored: CompletionScores,
        completions: Completions,
    ) -> Tensor:
        """[B], those of one of ``loss_type``."""
        args = self.args
        if name == "sft":
            chosen, mask = (x.chunk(2)[0] for x in (scored.logprobs, completions.mask))
            return -(chosen.sum() / mask.sum()).expand(len(chosen))
        smoothing = args.label_smoothing if name in SMOOTHED else 0.0
        options = {"beta": args.beta, "label_smoothing": smoothing, "tau": args.discopop_tau}
        per_token = name in ("ipo", "sigmoid_norm")
        name = "sigmoid" if name == "sigmoid_norm" else name
        if args.f_divergence_type == "reverse_kl" and not per_token:
            sides = (*policy.chunk(2), *reference.chunk(2))
        else:
            scores = fastrl_kernels.f_divergence_scores(
                policy - reference,
                divergence=args.f_divergence_type,
                alpha=args.f_alpha_divergence_coef,
            )
            if per_token:
                scores = scores / completions.lengths
            sides = (*scores.chunk(2), *torch.zeros_like(scores).chunk(2))
        return fastrl_kernels.pair_loss(*sides, kind=name, **options)

    @torch.no_grad()
    def _pair_metrics(
        self, policy: Tensor, reference: Tensor, scored: CompletionScores, completions: Completions
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Metrics by TRL's names, as sums and counts."""
        rewards = (self.args.beta * (policy - reference)).chunk(2)
        logps = policy.chunk(2)
        pairs = len(logps[0])
        count = torch.tensor(float(pairs), device=policy.device)
        is_chosen = torch.arange(2 * pairs, device=policy.device) < pairs
        parts = token_parts(scored, completions, {"chosen": is_chosen, "rejected": ~is_chosen})
        of_chosen = is_chosen[completions.places // completions.mask.shape[1]]
        is_top1: Any = scored.extras.is_top1
        right = is_top1 & of_chosen
        parts["mean_token_accuracy"] = (right.sum(), of_chosen.sum())
        for k, name in enumerate(("chosen", "rejected")):
            parts[f"rewards/{name}"] = (rewards[k].sum(), count)
            parts[f"logps/{name}"] = (logps[k].sum(), count)
        parts["rewards/accuracies"] = ((rewards[0] > rewards[1]).sum(), count)
        return parts
