"""RLOOTrainer: REINFORCE with a leave-one-out baseline, by TRL 1.x's interface."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fastrl.learn.baselines import EPS, all_equal, deviation, grouped, leave_one_out
from fastrl.learn.objective import Pass, TokenLoss
from fastrl.learn.samples import of_learned
from fastrl.run.metric_means import Parts, mean_of
from fastrl.run.model_card import policy_gradient
from fastrl.samples import Samples
from fastrl.trainers.groups.judged import nanstd
from fastrl.trainers.groups.methods import OverridableTrainer
from fastrl.trainers.groups.policy_loss import loss_of_rloo, note_clips
from fastrl.trainers.groups.rloo_config import RLOOConfig


class RLOOTrainer(OverridableTrainer):
    """Trains a causal language model on the rewards of its own responses, with the mean
    reward of a prompt's other responses as baseline (Ahmadian et al., "Back to basics", 2024), by
    the names, arguments and logs of TRL 1.x.

    R' = clip(R, *reward_clip_range) - beta·Σ_t (log π_old - log π_ref); A is R' less the mean R' of
    the prompt's other responses. The loss is the mean over responses of -min(ρ·A, clip(ρ, 1 - ε,
    1 + ε_high)·A), ρ = Π_t π(y_t)/π_old(y_t). Arguments are those of
    :class:`fastrl.trainers.groups.grpo.GRPOTrainer`, with a :class:`RLOOConfig`.
    """

    config: ClassVar[type] = RLOOConfig
    _tag_names: ClassVar[list[str]] = ["trl", "rloo"]
    method = policy_gradient("RLOO")
    needs_old: ClassVar[bool] = True
    divides_loss: ClassVar[bool] = False
    learns_kl: ClassVar[bool] = True

    def advantages_of(
        self, judged: Samples, kl: Tensor | None, group: int, mode: str
    ) -> tuple[Tensor, Tensor]:
        rewards = judged.scores
        if self.args.reward_clip_range is not None:
            rewards = rewards.clamp(*self.args.reward_clip_range)
        if kl is not None:
            rewards = rewards - kl
        groups, counts = grouped(rewards, group)
        several = counts.sum(-1, keepdim=True) > 1
        advantages = torch.where(counts & several, leave_one_out(groups, counts), torch.nan)
        advantages = advantages.flatten()
        if self.args.normalize_advantages:
            advantages = (advantages - advantages.nanmean()) / (nanstd(advantages) + EPS)
            # Where all rewards of a group are equal, advantages are 0 but for rounding.
            advantages = advantages.masked_fill(all_equal(groups).repeat_interleave(group), 0.0)
        spread = deviation(groups, counts).flatten()
        return advantages.nan_to_num(nan=0.0), torch.isclose(spread, torch.zeros_like(spread))

    def _kl_metric(self, learnable: Samples) -> Parts:
        old, ref = learnable.old_logprobs, learnable.ref_logprobs
        assert old is not None
        assert ref is not None
        of_tokens = of_learned(learnable, old) - of_learned(learnable, ref)
        return {"kl": mean_of(of_tokens)}

    def _make_loss(self) -> TokenLoss:
        return loss_of_rloo(self.args)

    def note_batch(self, batch: Pass, loss: TokenLoss, mode: str) -> None:
        ratios = loss.ratios(batch.whole, batch.logprobs)
        note_clips(self._metrics[mode], ratios.units, ratios.advantages, self.args)
