"""DPOTrainer: trains a policy on pairs of a chosen and a rejected completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastrl.data.preferences import OF_A_PAIR, PairCollator, prepare_pairs_of_ids
from fastrl.data.token_batch import TokenBatch
from fastrl.learn.preferences import Side, response_sums, sides_of
from fastrl.models.scorer import ScoredPass
from fastrl.rewards.identity import identities_of
from fastrl.run.model_card import DPO
from fastrl.trainers.pairs.dpo_config import DPOConfig
from fastrl.trainers.pairs.preference import EXTRAS, PreferenceTrainer, at_tokens, token_parts

_REFS = ("ref_chosen_logps", "ref_rejected_logps")


class DPOTrainer(PreferenceTrainer):
    """Trains a policy to prefer the chosen completion of each pair, with TRL 1.x's interface.

    loss = Σ_k w_k·mean over pairs of loss_k (``loss_weights``, ``loss_type``), each a row of
    :data:`fastrl.learn.preferences.PAIR_LOSSES`; "sft" is the mean of -log π over the tokens of
    chosen completions. Both sides go through the model in one forward pass, and the LM head runs
    on completions alone.

    Args:
        model: a causal language model, with or without an adapter, or its path.
        ref_model: the reference, or its path; None: the policy as training begins.
        args: a :class:`DPOConfig`.
        data_collator: by default :class:`fastrl.data.preferences.PairCollator`; another one must
            make the same kind of batches.
        train_dataset: pairs, see :func:`fastrl.data.preferences.prepare_pairs_of_ids`; a
            ``Dataset`` or an ``IterableDataset``.
        eval_dataset: pairs as in ``train_dataset``, or a dict of such data sets.
        processing_class: the tokenizer, by default the one saved with the model.
        compute_metrics: gets the logits of all tokens, and the tokens.
        callbacks, optimizers: as transformers' Trainer takes them.
        quantization_config: for a model that is given by its path.
        peft_config: adds an adapter to the model.

    Attributes:
        ref_model: the reference as a separate model; None where the policy serves as it.

    Raises:
        ValueError: data that cannot be used, settings that do not go together.
        TypeError: args of another class.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "fastrl", "dpo"]
    config_class = DPOConfig
    collator_class = PairCollator
    computed_columns = _REFS
    short_name: ClassVar[str] = "DPO"
    example: ClassVar[str] = "pair"
    id_columns = OF_A_PAIR
    method = DPO
    _lengths: Any = None  # of the completions that a subclass's dpo_loss gets

    def own_code(self) -> dict[str, Any]:
        rows = self.args.pair_losses.items()
        return identities_of(
            (f"the loss {name}", row.function) for name, (row, _) in rows if row.is_own
        )

    def prepare_rows(self, dataset: Any) -> Any:
        args = self.args
        longest = self._longest_prompt if args.truncation_mode == "keep_start" else None
        tokenizer = self.processing_class
        return prepare_pairs_of_ids(dataset, tokenizer, args.dataset_num_proc, longest, args.cuts)

    def ref_logprobs(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        return self._ref_sums(self.completions(batch)).chunk(2)

    def _ref_sums(self, completions: TokenBatch) -> Tensor:
        return response_sums(self.ref_score(completions), completions.mask, self.args.ld_alpha)

    def losses(
        self, model: nn.Module, batch: Mapping[str, Any]
    ) -> tuple[Tensor, ScoredPass, dict[str, tuple[Tensor, Tensor]]]:
        args, completions = self.args, self.completions(batch)
        wanted = (*EXTRAS, "log_sum_sq_probs") if args.use_weighting else EXTRAS
        logprobs, scored = self.score(model, completions, wanted)
        if args.precompute_ref_log_probs:
            reference = torch.cat([batch[name] for name in _REFS])
        else:
            reference = self._ref_sums(completions)
        lengths = completions.mask.sum(1).clamp(min=1)
        sums = response_sums(logprobs, completions.mask, args.ld_alpha)
        sides = sides_of(2, sums, lengths, reference)
        if "dpo_loss" in self.overrides:
            self._lengths = sides[0].tokens, sides[1].tokens
            columns = [column for i in (0, 2) for column in (sides[0][i], sides[1][i])]
            try:
                losses = self.dpo_loss(*columns)[0]
            finally:
                self._lengths = None
        else:
            losses = self._losses(sides, logprobs, completions.mask)
        if args.use_weighting:
            extras: Any = scored.scores.extras
            excess = scored.logprobs.detach() - extras.log_sum_sq_probs
            of_tokens = completions.scatter(excess, completions.rows())
            of_side = torch.exp(of_tokens.sum(1) / lengths).chunk(2)
            losses = losses * of_side[0] * of_side[1]
        return losses, scored, self._pair_metrics(sides, scored, completions)

    def _losses(self, sides: tuple[Side, ...], logprobs: Tensor, mask: Tensor) -> Tensor:
        """The weighted sum of all losses, [B]; "sft" alone reads log-probs and mask, [2·B, T-1]."""
        args, losses, rows = self.args, [], self.args.pair_losses
        for name in args.loss_type:
            if name in rows:
                row, options = rows[name]
                losses.append(row(*sides, **options))
            else:  # "sft", of tokens
                pairs = len(mask) // 2
                nll = -logprobs[:pairs].flatten().sum() / mask[:pairs].sum()
                losses.append(nll.expand(pairs))
        weights = args.loss_weights or [1.0] * len(losses)
        return torch.stack([w * x for w, x in zip(weights, losses, strict=True)]).sum(0)

    def dpo_loss(
        self,
        chosen_logps: Tensor,
        rejected_logps: Tensor,
        ref_chosen_logps: Tensor,
        ref_rejected_logps: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The losses of pairs, and the rewards β·(log π - log ref) of both sides, [B] each: TRL's
        method until 0.26. Training minimises the losses of a subclass's ``dpo_loss``. The lengths
        of completions, which some losses read, are known only as training or evaluation calls it.

        Args:
            chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps: Σ log π and Σ log
                ref of the completions, [B] fp32.

        Raises:
            ValueError: a loss that reads tokens, or one that reads lengths where none are known.
        """
        if of_tokens := [x for x in self.args.loss_type if x not in self.args.pair_losses]:
            raise ValueError(
                f"loss_type={of_tokens[0]!r} reads tokens: leave it out beside a dpo_loss"
            )
        rows = self.args.pair_losses.items()
        means = [x for x, (row, fixed) in rows if (row.defaults | fixed).get("length_means")]
        if self._lengths is None and means:
            raise ValueError(
                f"loss_type={means[0]!r} reads the completions' lengths, which dpo_loss has only "
                "while a batch is learned or evaluated: choose another loss_type"
            )
        columns = (
            (chosen_logps, rejected_logps),
            self._lengths or (None, None),
            (ref_chosen_logps, ref_rejected_logps),
        )
        sides = tuple(Side(*each) for each in zip(*columns, strict=True))
        losses = self._losses(sides, chosen_logps, torch.ones_like(chosen_logps))
        chosen, rejected = (self.args.beta * side.ratio.detach() for side in sides)
        return losses, chosen, rejected

    @torch.no_grad()
    def _pair_metrics(
        self, sides: tuple[Side, ...], scored: ScoredPass, completions: TokenBatch
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Metrics by TRL's names, as sums and counts."""
        rewards = [self.args.beta * side.ratio for side in sides]
        counts = self.counting(len(rewards[0]))
        count, none = counts.sum(), torch.zeros_like(counts)
        is_chosen, is_rejected = torch.cat([counts, none]), torch.cat([none, counts])
        parts = token_parts(scored, completions, {"chosen": is_chosen, "rejected": is_rejected})
        of_chosen = at_tokens(is_chosen, completions)
        extras: Any = scored.scores.extras
        parts["mean_token_accuracy"] = ((extras.is_top1 & of_chosen).sum(), of_chosen.sum())
        for name, reward, side in zip(("chosen", "rejected"), rewards, sides, strict=True):
            parts[f"rewards/{name}"] = ((reward * counts).sum(), count)
            parts[f"logps/{name}"] = ((side.sums * counts).sum(), count)
        parts["rewards/accuracies"] = (((rewards[0] > rewards[1]) & counts).sum(), count)
        return parts
