"""GRPOTrainer: group relative policy optimisation and its variants, with TRL 1.x's interface."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastrl.learn.baselines import (
    EPS,
    all_equal,
    centred,
    compared,
    deviation,
    grouped,
    standardised,
)
from fastrl.learn.experience import Experience
from fastrl.learn.objective import Pass, TokenLoss
from fastrl.models.scoring import PolicyObjective
from fastrl.registry import GROUP_ADVANTAGES
from fastrl.run.metric_means import mean_of
from fastrl.run.model_card import policy_gradient
from fastrl.samples import Samples
from fastrl.trainers.groups.grpo_config import GRPOConfig
from fastrl.trainers.groups.judged import nanstd
from fastrl.trainers.groups.methods import OverridableTrainer
from fastrl.trainers.groups.policy_loss import (
    LOSSES_BY_NAME,
    high_of,
    loss_of_grpo,
    note_clips,
)

_LOGGER = logging.getLogger(__name__)


class GRPOTrainer(OverridableTrainer):
    """Trains a causal language model on the rewards of its own responses (Shao et al.,
    "DeepSeekMath", 2024), by the names, arguments and logs of TRL 1.x.

    Advantages are by default A = (R - mean R) / (std R + 1e-4) over the responses to a prompt. The
    loss is ``args.loss_type``'s, see :data:`fastrl.trainers.groups.policy_loss.GRPO_LOSSES`, plus
    beta times the KL to the reference model.

    Args:
        model: a causal LM, a PEFT model around one, or its path or Hub id.
        reward_funcs: one or a list of functions, sequence classifiers, or their paths, see
            :class:`fastrl.trainers.groups.reward_functions.RewardFunctions`.
        args: a :class:`GRPOConfig`.
        train_dataset, eval_dataset: ``datasets`` with a column ``prompt`` of texts or of chats;
            other columns go to the reward functions. ``eval_dataset`` may be a dict of them.
        processing_class: the tokenizer; by default the one saved with the model.
        reward_processing_classes: tokenizers in the order of ``reward_funcs``, for classifiers.
        callbacks, optimizers: as transformers' Trainer takes them.
        quantization_config: for a model that the trainer loads.
        peft_config: adds an adapter; without ``sync_ref_model`` the reference is the base model.
        rollout_func: maps the prompts and this trainer to a dict of ``prompt_ids``,
            ``completion_ids``, ``logprobs`` and further columns for reward functions, in place of
            sampling. If ``logprobs`` is not None, the settings may weight the loss by it, see
            :class:`fastrl.trainers.groups.rollout_correction.RolloutCorrection`.
        tools: functions that the policy may call, with type hints and docstrings in Google's
            format; ``async def`` too. See :class:`fastrl.collect.tools.ToolLoop`.
        environment_factory: a function that makes an object whose methods are tools;
            ``train_dataset`` may then be left out. Or a dict of such functions by the names in the
            data's column ``environment``. See :class:`fastrl.collect.environments.Environments`.

    Raises:
        ValueError, TypeError: a setting or argument that fastrl does not honour; says what to do.
    """

    config: ClassVar[type] = GRPOConfig
    _tag_names: ClassVar[list[str]] = ["trl", "grpo"]
    method = policy_gradient("GRPO")
    needs_old: ClassVar[bool] = False
    divides_loss: ClassVar[bool] = True

    def _make_loss(self) -> TokenLoss:
        args = self.args
        if args.cast_lm_head_to_fp32:
            _check_head(self.model, args)
        self.loss_type, self.scale_rewards = args.loss_type, args.scale_rewards
        self.entropy_coef, self.use_adaptive_entropy = args.entropy_coef, args.use_adaptive_entropy
        self._last_entropy = math.inf  # the mean entropy of the last optimizer step
        self._entropy_of_step: Tensor | None = None  # Σ entropies and count of this optimizer step
        loss, level = loss_of_grpo(args), args.importance_sampling_level
        row = LOSSES_BY_NAME[args.loss_type]
        whole = loss.row.of_response or loss.objective.loss.reads_sequences
        if whole and args.teacher_kl_coef and args.teacher_kl_in == "reward":
            raise ValueError(
                "teacher_kl_in='reward' gives each token an advantage of its own, and ratios of "
                f"whole responses (loss_type={args.loss_type!r}, importance_sampling_level="
                f"{level!r}) have one: choose teacher_kl_in='loss', or a ratio of tokens"
            )
        if level == "sequence" and row.sums_tokens:
            _LOGGER.warning(
                "importance_sampling_level='sequence' with loss_type=%r, which sums tokens, "
                "weights each sequence by its completion length: GSPO is loss_type='grpo'",
                args.loss_type,
            )
        if row.level not in (None, level):
            meant = f"importance_sampling_level={row.level!r}"
            _LOGGER.warning("loss_type=%r is meant for %s", args.loss_type, meant)
        if loss.row.of_response and level != "token":
            _LOGGER.warning(
                "loss_type=%r has a ratio of whole responses of its own: "
                "importance_sampling_level changes nothing, leave it at 'token'",
                args.loss_type,
            )
        return loss

    def advantages_of(
        self, judged: Samples, kl: Tensor | None, group: int, mode: str
    ) -> tuple[Tensor, Tensor]:
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            by_function = list(judged.rewards_by_function.values())
            columns = [grouped(column, group) for column in by_function]
            parts = torch.stack([standardised(*x).flatten() for x in columns], 1)
            equal = torch.stack([all_equal(x) for x, _ in columns]).all(0).repeat_interleave(group)
            parts = torch.where(torch.stack(by_function, 1).isnan(), 0.0, parts)
            rewards = (parts * self.reward_weights).sum(1)
            rewards[judged.scores.isnan()] = torch.nan
            std = torch.tensor(nanstd(rewards)).nan_to_num().expand_as(rewards)
            advantages = (rewards - rewards.nanmean()) / (std + EPS)
            advantages = advantages.nan_to_num(nan=0.0).masked_fill(equal, 0.0)
            return advantages, torch.isclose(std, torch.zeros_like(std))
        rewards = judged.scores
        groups, counts = grouped(rewards, group)
        spread = deviation(groups, counts).expand_as(groups)
        if self.args.advantage is not None:
            advantages = compared(GROUP_ADVANTAGES[self.args.advantage], groups, counts)
        elif self.scale_rewards == "group":
            advantages = standardised(groups, counts)
        else:
            advantages = centred(groups, counts)
            if self.scale_rewards == "batch":
                spread = torch.tensor(nanstd(rewards)).nan_to_num().expand_as(groups)
                advantages = advantages / (spread + EPS)
        advantages = torch.where(counts, advantages, 0.0).flatten()
        return advantages, torch.isclose(spread, torch.zeros_like(spread)).flatten()

    def note_batch(self, batch: Pass, loss: TokenLoss, mode: str) -> None:
        metrics, entropies, chosen = self._metrics[mode], batch.entropies, batch.part.chosen
        if self._has_bonus:
            if chosen is None and self.args.top_entropy_quantile < 1:
                chosen = self._chosen(entropies)
            weights = torch.ones_like(entropies) if chosen is None else chosen
            assert batch.loss is not None
            metrics.add({"policy_loss": mean_of(batch.loss.detach()[None])})
            if mode == "train":
                self._adapt_entropy((entropies * weights).sum(), weights.sum())
        if self.kl_coef:
            kl = loss.kl(batch.whole, batch.logprobs)
            metrics.add({"kl": mean_of(kl)})
        self._note_clips(batch.whole, batch.logprobs, loss, mode)

    def _chosen(self, entropies: Tensor) -> Tensor:
        ones, least = torch.ones_like(entropies), 1 - self.args.top_entropy_quantile
        return self.get_high_entropy_mask(entropies.detach(), ones, least).float()

    def _objective(self, given: Pass) -> PolicyObjective | None:
        if self.args.top_entropy_quantile < 1 and "get_high_entropy_mask" in self.overrides:
            return None  # a program's own choice of tokens sees all entropies first
        return super()._objective(given)

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """Which tokens count and have a high entropy: at least a quantile of the entropies of all
        processes' tokens that count. A bool tensor like ``mask``.

        Args:
            entropies, mask: [B, T] or [N]; the mask is 1 for tokens that count.
            threshold: the quantile's level, in [0, 1].
        """
        counts = mask.bool()
        absent = -1e9  # entropies are not negative
        padded = self.accelerator.pad_across_processes(
            entropies[counts].float(), dim=0, pad_index=absent
        )
        gathered = self.accelerator.gather(padded)
        gathered = gathered[gathered != absent]
        if not len(gathered):
            return torch.zeros_like(counts)
        return (entropies * mask.float() >= torch.quantile(gathered, threshold)) & counts

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """1 for responses to keep, else 0, [B, 1] in the mask's dtype. Kept are responses whose
        advantage is not negative, or whose mean_t(log π_sampled - log π) is at most the threshold
        (DeepSeek-V3.2).

        Args:
            advantages: [B, 1].
            per_token_logps, sampling_per_token_logps, mask: [B, T]; NaN counts as no difference.
        """
        kl = (sampling_per_token_logps - per_token_logps.detach()).nan_to_num(nan=0.0) * mask
        mean = kl.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return ((advantages >= 0) | (mean <= off_policy_threshold)).to(mask.dtype)

    @property
    def _has_bonus(self) -> bool:
        return self.entropy_coef != 0 or self.use_adaptive_entropy

    def _coefficient(self) -> float:
        above = self._last_entropy > self.args.entropy_target
        return 0.0 if self.use_adaptive_entropy and above else self.entropy_coef

    def _adapt_entropy(self, total: Tensor, count: Tensor) -> None:
        """Adds a batch's entropies to the optimizer step's; at the step's end moves the entropy
        bonus's coefficient, if it is adaptive, and logs it, adaptive or not.

        Args:
            total, count: sum and number of a batch's entropies.
        """
        args, ends_step = self.args, self.accelerator.sync_gradients
        if self.use_adaptive_entropy:
            sums, before = torch.stack([total, count]), self._entropy_of_step
            self._entropy_of_step = sums if before is None else before + sums
            if ends_step:
                totals = self.processes.sums(self._entropy_of_step).cpu()
                self._last_entropy = float(totals[0] / totals[1].clamp(min=1))
                self._entropy_of_step = None
                below = self._last_entropy <= args.entropy_target
                step = args.entropy_coef_delta if below else -args.entropy_coef_delta
                self.entropy_coef = min(
                    max(self.entropy_coef + step, args.entropy_coef_min), args.entropy_coef_max
                )
        if ends_step:
            self._metrics["train"].add_number("entropy_coef", self.entropy_coef)

    def _note_clips(self, part: Experience, logprobs: Tensor, loss: TokenLoss, mode: str) -> None:
        args, metrics = self.args, self._metrics[mode]
        ratios = loss.ratios(part, logprobs)
        rho, advantages = ratios.units, ratios.advantages
        if loss.row.bounded_above:
            cut = (rho > high_of(args)) & (advantages > 0)
            metrics.add({"cispo_clip_ratio": mean_of(cut)})
        if loss.row.of_response:
            gammas = part.means(loss.gammas(part, logprobs))[part.counts > 0]
            metrics.add({"vespo/phi_seq_mean": mean_of(gammas)})
        if not loss.row.clips:
            return
        if args.delta is not None:
            rho = rho.clamp(max=args.delta)
        means = None if ratios.by_sequence else lambda x: part.sums(x) / part.counts
        note_clips(metrics, rho, advantages, args, means)

    def own_state(self) -> dict[str, Any]:
        entropy = [self.entropy_coef, self._last_entropy]
        return {**super().own_state(), "entropy": entropy}

    def begin_training(self, resumed: Any) -> None:
        super().begin_training(resumed)
        self._entropy_of_step = None  # an earlier train() may have failed within a step
        if resumed is not None:
            self.entropy_coef, self._last_entropy = resumed["own"]["entropy"]

    def own_mark(self) -> dict[str, Any]:
        return {**super().own_mark(), "entropy": (self.entropy_coef, self._last_entropy)}

    def own_rewind(self, mark: Mapping[str, Any]) -> None:
        super().own_rewind(mark)
        self.entropy_coef, self._last_entropy = mark["entropy"]


def _check_head(model: Any, args: Any) -> None:
    """Raises ValueError for a head whose products are not in float32."""
    dtype = model.get_output_embeddings().weight.dtype
    lower = next((name for name in ("bf16", "fp16") if getattr(args, name)), None)
    if dtype != torch.float32 or lower is not None:
        setting = f"{lower}=True" if lower else f"a head in {str(dtype).removeprefix('torch.')}"
        raise ValueError(
            f"cast_lm_head_to_fp32=True, but {setting}: load the model in float32 and set "
            "bf16=False and fp16=False; or leave cast_lm_head_to_fp32 out, as log-probs are summed "
            "in float32 all the same"
        )
