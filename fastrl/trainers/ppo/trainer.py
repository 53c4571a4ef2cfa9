"""PPOTrainer: proximal policy optimisation under the names of TRL's classic PPOTrainer."""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrl.config import PPOConfig
from fastrl.core import PPODecorators, set_seed
from fastrl.data import batch as data
from fastrl.data.batch import make_batches
from fastrl.data.choose_padding import choose_padding
from fastrl.data.prompts import PromptStream
from fastrl.data.token_batch import TokenBatch
from fastrl.learn.advantages import check_estimates
from fastrl.learn.engine import Engine
from fastrl.learn.experience import Experience
from fastrl.learn.kl_penalty import make_kl_penalty, warn_of_negative_kl
from fastrl.learn.loss import UpdateLoss
from fastrl.learn.memory import Activations
from fastrl.learn.nonfinite import NonFiniteExperience, NonFiniteNumbers
from fastrl.learn.old_logprobs import OldLogprobs
from fastrl.learn.ref_model import choose_ref_model
from fastrl.learn.ref_model.adapter import SwitchedAdapter
from fastrl.learn.samples import learned_supports
from fastrl.learn.score_scaling import RunningMoments, ScoreTransform
from fastrl.learn.scorer import Scorer, check_tokens, in_passes, scored_by, scores_of
from fastrl.learn.update import Update
from fastrl.learn.warmup import CriticWarmup
from fastrl.models import PreTrainedModelWrapper
from fastrl.models.critic import Critic
from fastrl.models.fast_tokenizer import as_fast
from fastrl.models.host_memory import to_device
from fastrl.models.optimizers import check_optimizer, learning_rate_of
from fastrl.models.products import Products
from fastrl.models.routing import follow_routers, refuse_beside
from fastrl.models.scoring import PassLimit
from fastrl.models.utils import evaluating
from fastrl.overrides import check_overrides, overridden
from fastrl.rewards.weighted import RewardFunctions
from fastrl.run import hub, metrics
from fastrl.run.callbacks import TrainCallback, TrainResult
from fastrl.run.checkpoints import KEEP_LAST, SAVE_EVERY
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import Ledger
from fastrl.run.precision import refuse_fp16_twice
from fastrl.run.processes import processes_of
from fastrl.samples import Samples
from fastrl.timing import start_clock
from fastrl.trainers import rehearse
from fastrl.trainers.plan.passes import PassSize
from fastrl.trainers.plan.report import Plan
from fastrl.trainers.policy_support import check_policy_support
from fastrl.trainers.ppo import method, stats
from fastrl.trainers.ppo.critic import CriticLearner, checked_critic
from fastrl.trainers.ppo.loop import Loop, Numbers
from fastrl.trainers.ppo.persistence import ModelFiles, load_checkpoint, save_checkpoint
from fastrl.trainers.ppo.rollouts import Rollouts
from fastrl.trainers.ppo.saving import make_saving
from fastrl.trainers.ppo.setup import (
    checked_policies,
    choose_heads,
    choose_precision,
    fill_in_config,
    loads_once,
    make_accelerator,
    optimizer_of,
    precision_of,
    prepared,
    share_new_weights,
    warn_of_a_single_response,
)
from fastrl.trainers.ppo.state import TrainerState, deciding
from fastrl.trainers.ppo.step_input import StepInputs, placed_scores, sampled_tokens, without
from fastrl.trainers.ppo.teaching import StepTeaching, checked_teachers, teacher_settings

_LOOP_COLUMNS = ("label", "query", "response")


class PPOTrainer:
    """Proximal policy optimisation of a language model from scored responses.

    The classic loop: ``generate`` responses to queries, score them, ``step``; or :meth:`train` for
    all of it. Names and semantics are those of TRL 0.11's PPOTrainer, whose bugs are fixed
    (``docs/trl_classic.md`` lists them).

    Args:
        config: see :class:`fastrl.PPOConfig`.
        model: the policy with its value head: a causal language model, or an encoder–decoder,
            whose encoder reads the queries and whose decoder writes the responses. Where
            ``PPOConfig.advantage`` is not "gae" no values are learned: pass a
            :class:`fastrl.models.CausalLMPolicy`, or a plain causal language model, which is
            wrapped in one; a value head is frozen.
        ref_model: the reference policy; None makes it as ``PPOConfig.reference`` says.
        tokenizer: gives pad and EOS tokens, the padding side, and text.
        dataset: prompts for ``dataloader``, shuffled, in whole batches; train()'s by default.
        optimizer: in place of the configuration's ``optim``. Where weights are bfloat16 or float16
            it steps float32 masters of them (``PPOConfig.master_weights``).
        data_collator: makes the dataloader's batches; by default dicts become a dict of lists, and
            torch's ``default_collate`` takes tuples and tensors.
        num_shared_layers: bottom layers that policy and reference share, frozen; in place of the
            configuration's. Ignored, with a warning, where a ``ref_model`` shares none.
        lr_scheduler: stepped once per step(), and wrapped by accelerate; or a function that makes
            it of the optimizer.
        training_data_collator: pads model inputs in place of the trainer; gets dicts of
            ``input_ids`` and ``attention_mask``.
        critic: a separate model that learns the values, with a separate optimizer, so that the
            policy needs no value head; in place of ``PPOConfig.critic``: a sequence classifier with
            one label (a reward model, say) or its path.
        teacher_model: whose distributions the policy learns beside its scores, by
            ``PPOConfig.teacher_kl_coef``: a causal language model with the same tokenizer, of any
            width; its path or Hub id; that of an adapter on the policy's base; or a dict of these
            by name; in place of ``PPOConfig.teacher_model``. None: the policy's own weights, by
            ``PPOConfig.teacher_model_kind``. See docs/distillation.md.

    Attributes:
        autocast_by_default: the mixed precision that the trainer chose; None: it chose none.
        rollouts: generates responses, and keeps their log-probs.
        reference: the reference policy; ``ref_model`` is its model.
        scorer: runs policy and reference over a batch.
        update: minimises the clipped loss over a batch's experience.
        critic: learns the values where the policy's value head does not; else None.
        teaching: gives a step what its teachers have to say; None without teachers.
        experience: what the last step learned from; None before the first.
        kl_ctl: the controller of the KL coefficient.
        running: the moments of all scores so far; of none without ``use_score_scaling``.

    Raises:
        TypeError: config, model, ref_model, tokenizer or lr_scheduler of a wrong type.
        ValueError: a reference or a teacher that the model cannot have; a policy whose language
            model has no weight to train.
    """

    rehearsed_as = rehearse.PPO

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: PreTrainedModelWrapper | PreTrainedModel | None = None,
        ref_model: PreTrainedModelWrapper | PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        training_data_collator: Callable | None = None,
        critic: Critic | PreTrainedModel | str | Path | None = None,
        teacher_model: Any = None,
    ):
        check_overrides(type(self))
        self._estimates = "compute_advantages" in overridden(type(self))  # by a subclass's method
        config = config or PPOConfig()
        has_critic = critic is not None
        if isinstance(config, PPOConfig):
            check_optimizer(config.optim, optimizer, config.optim_args)
            has_critic = has_critic or config.critic is not None
        model, ref_model = checked_policies(
            config, model, ref_model, tokenizer, lr_scheduler, has_critic
        )
        warn_of_a_single_response(config)
        set_seed(config.seed)
        critic_model = checked_critic(config, critic, model, tokenizer)
        self.config = config
        tokenizer = as_fast(tokenizer)
        self.tokenizer: Any = tokenizer
        self.is_encoder_decoder = model.is_encoder_decoder
        self.is_peft_model = model.is_peft_model
        self.autocast_by_default = choose_precision(config, model)
        self.accelerator = make_accelerator(config)
        refuse_fp16_twice(model, self.accelerator.mixed_precision)
        self.processes = processes_of(self.accelerator)
        self.processes.check_same("PPOConfig", deciding(config.to_dict()))
        self.dataset = dataset
        self.dataloader: Any = None
        self._unwrapped = model
        if dataset is not None:
            self.dataloader = self.prepare_dataloader(dataset, data_collator)
        self.training_data_collator = training_data_collator

        if not loads_once(self.accelerator):  # else the main process alone has weights
            share_new_weights(self.processes, model, ref_model)
        # Before the optimizer is made: layers that are shared with the reference are not trained.
        self.reference = choose_ref_model(config, model, ref_model, num_shared_layers)
        self._teacher_models = checked_teachers(
            config, teacher_model, model, tokenizer, self.accelerator.mixed_precision
        )
        optimizer, lr_scheduler = optimizer_of(
            config, model, optimizer, lr_scheduler, self.accelerator
        )
        self.model, self.optimizer, self.dataloader, self.lr_scheduler = prepared(
            self.accelerator, model, optimizer, self.dataloader, lr_scheduler
        )
        self.reference.place(self.model, self.accelerator)
        self.ref_model = self.reference.model
        self.current_device = self.accelerator.device
        fill_in_config(config, self.accelerator, model)
        PPODecorators.optimize_device_cache = config.optimize_device_cache

        self._make_parts(model, critic_model, optimizer)
        if self.processes.count > 1:
            self.processes.check_same("PPOTrainer", self._state.identity)

    def _make_parts(
        self,
        model: PreTrainedModelWrapper,
        critic_model: Critic | None,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Makes the parts of a step, once models and optimizer are on their devices.

        Args:
            model, critic_model, optimizer: without the wrappers of several processes.
        """
        config, tokenizer = self.config, self.tokenizer
        self.kl_ctl = method.kl_controller_of(config)
        self.running = RunningMoments()
        self.transform_scores = ScoreTransform(
            config.use_score_scaling, config.use_score_norm, config.score_clip, self.running
        )
        self.products = Products(self.processes)
        # TRL has a method of this name; programs call it with log-probs.
        self._kl_penalty = make_kl_penalty(config.kl_penalty, self.reference)
        self.kl_in_loss = method.has_kl_in_loss(config)
        self.advantages = method.advantages_of(config)
        self._routes = follow_routers(model, config.router_aux_loss_coef) > 0
        precision = precision_of(model, self.accelerator)
        check_policy_support(config, teacher_model=self._teacher_models)
        self.teaching = self._make_teaching(precision)
        loss = method.loss_of(
            config,
            values=config.needs_values and critic_model is None,
            routes=self._routes,
            teachers=None if self.teaching is None else self.teaching.in_loss,
        )
        self.aggregate = loss.aggregate
        self.nonfinite = NonFiniteNumbers(
            config.on_nonfinite, lambda ids: self.tokenizer.decode(ids)
        )
        self.critic: CriticLearner | None = None
        if critic_model is not None:
            self.critic = CriticLearner(
                config, critic_model, self.accelerator, loss, self.nonfinite, self.processes
            )
        values_model = None if self.critic is None else self.critic.model
        choose_heads(self.current_device, self.model, self.ref_model)
        self.padding = choose_padding(
            config.padding_free,
            self.current_device,
            precision,
            self.model,
            self.ref_model,
            values_model,
            anywhere=self.processes.any,
        )
        self.batches = make_batches(model, tokenizer, self.training_data_collator, self.padding)
        self.scorer = Scorer(
            self.model,
            self.reference,
            self._kl_penalty,
            PassLimit(config.mini_batch_size, config.micro_batch_tokens),
            precision,
            config.temperature,
            self.processes,
            values_model,
            config.reference_support,
        )
        self.sampler_correction = method.correction_of(config)
        kind = method.old_logprobs_of(
            config,
            needs_logits=self._kl_penalty.needs_logits,
            recomputes=self.sampler_correction is not None,
        )
        self.score_or_reuse = OldLogprobs(kind, self.scorer)
        self.rollouts = Rollouts(
            config,
            model,
            self.model,
            tokenizer,
            self.reference,
            optimizer,
            self.accelerator,
            self.processes,
        )
        engine = Engine(
            self.accelerator, self.model, self.optimizer, config.max_grad_norm, self.processes
        )
        gradient = method.gradient_of(config, engine, loss, self.nonfinite)
        self._positions = self.scorer.positions, gradient.positions
        activations = Activations(
            config.gradient_checkpointing,
            config.activation_offloading,
            self.accelerator.device,
            self.accelerator.is_fsdp2,
        )
        epochs = method.epochs_of(config, self.processes.count)
        self.update = Update(gradient, epochs, activations, self.critic)
        self.warmup = CriticWarmup(config.critic_warmup_steps)
        self.experience: Experience | None = None
        self._state = TrainerState(
            config,
            tokenizer,
            self.processes,
            policy=model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            reference=self.reference,
            teachers=self._teacher_models,
            critic=self.critic,
            kl_ctl=self.kl_ctl,
            running=self.running,
            scorer=self.scorer,
            rollouts=self.rollouts,
            update=self.update,
        )
        self._files = ModelFiles(self._state, self.model, self.accelerator)
        self._inputs = StepInputs(
            config.batch_size,
            masks_truncated=config.mask_truncated_completions,
            per_token=self.advantages.per_token,
            rollouts=self.rollouts,
            batches=self.batches,
            scores=self.transform_scores,
            temperature=config.temperature,
            reads_sampler=self.sampler_correction is not None
            or config.off_policy_mask_threshold is not None,
            nonfinite=self.nonfinite,
            name_in=self._name_in,
            device=self.current_device,
            processes=self.processes,
            teachers=self._teacher_models,
        )

    def _make_teaching(self, precision: torch.dtype) -> StepTeaching | None:
        """Moves the teachers to their devices, and makes what runs them; None without teachers.

        Args:
            precision: the lowest in which forward passes compute.
        """
        models, config, tokenizer = self._teacher_models, self.config, self.tokenizer
        if models is None:
            return None
        policy = self.accelerator.unwrap_model(self.model)
        teachers = models.placed(
            policy,
            self.accelerator,
            teacher_settings(config),
            precision,
            lambda: self.padding,
            self.processes,
        )
        pad_token = data.padding_token((), tokenizer, policy.config.get_text_config().vocab_size)
        teaching = StepTeaching(models, teachers, pad_token or 0, self.current_device)
        wrappers = [reference.model for reference in models.references.values()]
        of_loss = not teaching.in_reward
        choose_heads(self.current_device, policy, *wrappers, as_teacher=of_loss)
        return teaching

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        response_masks: list[Tensor] | None = None,
        rollout: Samples | None = None,
        weights: Tensor | Sequence[float] | None = None,
        teacher_queries: list[Tensor] | None = None,
        teachers: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """One PPO iteration on a batch of scored responses.

        Args:
            queries, responses: ``batch_size`` 1-D tensors of token ids; with a ``group_size`` the
                responses to a query lie one after the other, each with that query.
            scores: ``batch_size`` tensors of one number each, which is added to the reward of the
                last token that counts; or 1-D tensors with a number for each token of a response,
                added to that token's reward. A sample's score, below and for a group's baseline, is
                then their sum.
            response_masks: for each response a 1-D tensor, which of its tokens count; others get no
                reward, no loss, and are skipped by the advantages.
            rollout: the samples that the responses come from; their log-probs and values may serve
                as the old ones (``PPOConfig.old_logprobs``). Responses that this trainer's
                generate() returned with the current weights are recognised without it. For another
                engine, pass a :class:`Samples` with that engine's log-probs at the policy's
                temperature, by which ``PPOConfig.sampler_correction`` weights the loss.
            weights: ``batch_size`` numbers of 0 or more that multiply each sample's part of the
                loss: 2 counts like the sample twice, 0 like none. None: 1.
            teacher_queries: with a teacher the token ids that it reads in place of each query, such
                as the query with a hint. None: it reads the queries.
            teachers: where ``teacher_model`` is a dict: the name of each sample's teacher.

        A sample that ``rollout`` says ended in NaN logits (finish reason "nan"; its response may be
        empty), or whose score, log-probs, values or rewards are not finite, stays in the batch with
        weight 0: it is in no baseline, whitening, mean or running moment.
        ``PPOConfig.on_nonfinite`` says whether it is an error instead.

        Returns:
            the statistics of ``docs/statistics.md``: numbers, and arrays of distributions.

        Raises:
            ValueError: names the argument and the element; nothing has changed then. That includes
                scores none of which is finite; with ``on_nonfinite="raise"`` any that is not.
            TypeError: ``rollout`` is no :class:`Samples`, or its numbers are no tensors.
            FloatingPointError: other numbers of all samples are not finite; with
                ``on_nonfinite="raise"`` those of a sample, a loss or a gradient are not.
            torch.OutOfMemoryError: a single sample, or with several processes a pass, does not fit.

        The trainer can be used after any exception: no gradient is left, and the running
        moments of scores, the KL coefficient, the learning rate's schedule, ``current_step`` and
        the order of the samples are as before the call. Optimizer steps that were taken until then
        stay.
        """
        samples = self._inputs(
            queries, responses, scores, response_masks, rollout, weights, teacher_queries, teachers
        )
        nan = [i for i, out in enumerate(samples.left_out) if out]
        nonfinite = self.nonfinite.scores(samples.scores, nan, self._name_in(samples.prompt_ids))
        while True:
            left_out = sorted({*nan, *nonfinite})
            try:
                with self.computing():
                    result = self._step(without(samples, left_out))
                break
            except NonFiniteExperience as error:  # nothing has changed yet
                nonfinite = [*nonfinite, *error.samples]
        result["ppo/nan_samples"] = float(len(nan))
        result["ppo/nonfinite_samples"] += float(len(nonfinite))
        return result

    def _step(self, samples: Samples) -> dict[str, Any]:
        """The algorithm of :meth:`step`, on the samples of all processes. Each process computes the
        same from them, but runs policy and reference on its share alone.

        Raises:
            NonFiniteExperience: numbers of some samples, which the exception names, are not finite;
                nothing has changed.
        """
        for count in self._positions:
            count.taken()  # forgets what a failed step has counted
        batch = self.make_batch(samples.prompt_ids, samples.sequences, samples.masks)
        if self._routes:
            batch = batch.with_experts(samples.experts)
        batch = replace(batch, supports=learned_supports(samples.supports, samples.written))
        self._check(batch, samples)
        learning = self.warmup.learning(self.current_step)
        final_scores, moments = self.transform_scores(samples.scores)
        final_scores = to_device(final_scores, self.current_device)
        self.rollouts.before_update()
        clock = start_clock(self.current_device)
        with self._evaluating(), PPODecorators.empty_device_cache():
            with clock("forward_pass"):
                scored, reuse_stats = self.score_or_reuse(batch, samples)
                if self.teaching is not None:
                    scored = self.teaching(scored, samples, self.scorer)
                sampler_weights: Tensor | None = None
                sampler_stats: dict[str, Tensor] = {}
                if self.sampler_correction is not None:
                    sampler_weights, sampler_stats = self.sampler_correction(
                        batch, scored.logprobs, samples.sampler_logprobs
                    )
            with clock("compute_rewards"):
                rewards, non_score_rewards, kls = self.compute_rewards(
                    placed_scores(samples, final_scores, moments, self.transform_scores, batch),
                    *scored.kl_operands,
                    batch.mask,
                )
                if self.teaching is not None and self.teaching.in_reward:
                    of_teachers, teacher_stats = self.teaching.rewards(scored)
                    rewards = rewards + of_teachers
                    non_score_rewards = non_score_rewards + of_teachers
                    sampler_stats |= teacher_stats
            with clock("compute_advantages"):
                estimates = self.compute_advantages(scored.values, rewards, batch.mask)
                values, advantages, returns = check_estimates(
                    estimates, rewards, batch.mask, finite=self._estimates
                )
            self._files.push_if_best(final_scores, self.push_to_hub)  # before the weights change
            with clock("optimize_step"):
                experience = replace(
                    scored,
                    ref_logprobs=scored.ref_logprobs if self.kl_in_loss else None,
                    kls=None,
                    values=values,
                    advantages=advantages,
                    returns=returns,
                    sampler_weights=sampler_weights,
                    sampled=sampled_tokens(samples, batch),
                    weights=self.aggregate.weights(batch.mask.sum(-1), samples.weights),
                    of_samples=samples.weights,
                    kl_coef=self.kl_ctl.value if self.kl_in_loss else None,
                )
                try:
                    record = self.update(experience, learning)
                except NonFiniteExperience as error:
                    error.samples = self.nonfinite.experience(batch, scored, rewards)
                    raise
        if self.teaching is not None:
            self.teaching.teachers.tell()
        with clock("calc_stats"):
            result = self.record_step_stats(
                kl_coef=self.kl_ctl.value,
                sampler=sampler_stats,
                batch=batch,
                scored=scored,
                scores=final_scores,
                non_score_reward=non_score_rewards,
                kls=kls,
                experience=experience,
                record=record,
            )
        result.update(stats.finish_stats(batch, samples.finish_reasons))
        result.update(stats.timing_stats(clock.seconds(), batch))
        result.update(stats.position_stats(self._positions, self.processes))
        result.update(reuse_stats)
        result.update(self.warmup.statistics(learning))
        warn_of_negative_kl(result["objective/kl"])

        # This state changes last, so that an exception leaves all of it unchanged.
        tokens = replace(batch, boundaries=None, experts=None, supports=None)
        self.experience = replace(experience, tokens=tokens)
        self.running.become(moments)
        if learning.policy_learns:
            size = self.config.batch_size * self.processes.count
            self.kl_ctl.update(result["objective/kl"], size)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._state.step += 1
        self._move_reference()
        return result

    def _check(self, batch: TokenBatch, samples: Samples) -> None:
        """Raises ValueError for samples that are too long, in a wrong order, or lack what the step
        needs."""
        most = self.config.micro_batch_tokens
        check_tokens(most, batch.prompt_lengths, batch.response_lengths)
        if self.critic is not None:
            self.critic.unwrapped.check_lengths(batch.lengths)
        self.advantages.check(samples.prompt_ids)
        self.score_or_reuse.check(samples)
        if self.sampler_correction is not None:
            self.sampler_correction.check(samples.sampler_logprobs)

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rewards of tokens: -β·KL, plus the score at each row's last counted token, or plus
        each token's score.

        With ``kl_in="loss"`` β is 0 here.

        Args:
            scores: of samples [B], or of tokens [B, T-1], on any device.
            logprobs, ref_logprobs: [B, T-1]; with ``kl_penalty="full"`` log-probs of the whole
                vocabulary [B, T-1, V], or the KL itself and zeros.
            masks: [B, T-1].

        Returns:
            rewards, their part without the score, and tokens' KL (not times β), each [B, T-1].
        """
        coef = 0.0 if self.kl_in_loss else self.kl_ctl.value
        scores, masks = scores.to(logprobs.device), masks.bool()
        if scores.dim() == 1:
            return self._kl_penalty.rewards(scores, logprobs, ref_logprobs, masks, coef)
        none = scores.new_zeros(len(scores))
        with_kl = self._kl_penalty.rewards(none, logprobs, ref_logprobs, masks, coef)
        rewards, non_score_rewards, kls = with_kl
        return rewards + torch.where(masks, scores, 0.0), non_score_rewards, kls

    def compute_advantages(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes ``PPOConfig.advantage``: generalised advantage estimates or returns, whitened
        over the batch, or differences from a group's baseline. A subclass may override it.

        Tensors are [B, T-1] fp32: column t is of token t + 1 of a row, and rows are the samples of
        all processes in order, with a ``group_size`` the samples of a prompt one after the other.

        Args:
            values: V before the update; zeros where no value function is learned.
            rewards: -β·KL of each token, plus scores, as :meth:`compute_rewards` returns them.
            mask: bool, the tokens of responses that count. Others are not read.

        Returns:
            values, advantages, returns, without gradients.
        """
        return self.advantages(values, rewards, mask.bool())

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Responses to one query or several; keyword arguments as in ``model.generate``.

        As there, arguments that are left out come from the model's generation_config, except for a
        ``PPOConfig.temperature`` T other than 1, which is then the default. A warning names each
        argument because of which responses are not drawn from softmax(logits / T), the policy that
        ``step()`` scores. ``stop``, which is ours, ends responses at token sequences.

        Args:
            query_tensor: 1-D token ids, or a list of such.
            length_sampler: draws max_new_tokens, once for every ``batch_size`` queries.
            batch_size: queries per call of ``model.generate``, where that runs and not the engine.
            return_prompt: whether the responses begin with their query; those of an
                encoder–decoder never do, nor with its start token.
            generate_ref_response: return the reference's responses as well, as a second result.

        Returns:
            for a list, a list of 1-D tensors, each cut after the first EOS of its response; for one
            query a tensor [1, L].
        """
        with self.computing():
            return self.rollouts.generate(
                query_tensor,
                length_sampler,
                batch_size,
                return_prompt,
                generate_ref_response,
                **generation_kwargs,
            )

    def train(
        self,
        reward_fn: RewardFunctions | None = None,
        *,
        reward_weights: Sequence[float] | None = None,
        reward_timeout: float | None = None,
        reward_retries: int = 0,
        reward_batch_size: int | None = None,
        steps: int,
        prompts: Sequence[str | Tensor | list[dict[str, str]]] | None = None,
        dataset: Any = None,
        prompt_column: str | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        environment_factory: Any = None,
        max_tool_calling_iterations: int | None = None,
        rollout_func: Callable[..., dict[str, Any]] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        eval_prompts: Any = None,
        eval_every: int = 0,
        missing_eos_penalty: float | None = None,
        long_prompts: str = "refuse",
        callbacks: Iterable[TrainCallback] = (),
        progress: bool = True,
        output: str | Path | RunFolder | None = None,
        save_every: int = SAVE_EVERY,
        keep_last: int = KEEP_LAST,
        resume: bool | str | Path = False,
        overwrite: bool = False,
        ledger: bool | str | Path | Ledger = True,
    ) -> TrainResult:
        """Trains: samples prompts, generates, scores, steps, evaluates.

        A further call continues: steps are counted over all calls (``current_step``, the number
        that callbacks and ``eval_every`` get), and with the same prompts (the same token ids in the
        same order) it goes on in their order: two runs of 10 steps see what one of 20 sees. Prompts
        of a step that failed come again. Other prompts begin an order of their own.

        Args:
            reward_fn: ``reward_fn(prompts, completions, completion_ids, **columns)`` returns one
                number per completion, or for each a list of one number for each of its
                ``completion_ids``; ``columns`` are the other columns of ``dataset``. For a prompt
                of chat messages it gets these as they are, and the completion as
                ``[{"role": "assistant", "content": text}]``, as in TRL 1.x. It may be an
                ``async def``, and return None for a completion that it does not judge. Or the name
                of a ready reward, see docs/ready_rewards.md. Or a list or a dict (by name) of such:
                the reward is their weighted sum.
            reward_weights: a number for each of several functions, in their order; default 1.
            reward_timeout: seconds that a call of a function may take; None: no limit. With a limit
                functions that are not async run in a thread, which is left behind where they hang.
            reward_retries: how often a call is repeated that raised an exception or took too long.
            reward_batch_size: completions per call of a function; None: all of a step in one. A
                :class:`ClassifierReward` has a batch size of its own.
            steps: number of step() calls, each on ``batch_size / group_size`` prompts; a resumed
                run counts those before the checkpoint, too.
            prompts: texts, chats (lists of messages with a role and a content, put through the
                tokenizer's chat template) or 1-D token ids.
            dataset: in place of ``prompts``: a data set whose ``prompt_column`` has them (default:
                prompt, query or input_ids). Without either, the trainer's own dataset.
            tools: functions that the policy may call, with type hints and docstrings in Google's
                format; ``async def`` too. Prompts are chats then, and the policy reads what tools
                return, but does not learn it. See :class:`fastrl.collect.tools.ToolLoop`.
            environment_factory: makes objects whose methods are tools, and whose ``get_reward``, if
                they have one, is a reward of weight 1, so that ``reward_fn`` may be None. See
                :class:`fastrl.collect.environments.Environments`.
            max_tool_calling_iterations: most turns of tools in a response; None: any number.
            rollout_func: maps the prompts (each as often as it has responses) and this trainer
                to ``prompt_ids``, ``completion_ids`` and ``logprobs`` (None: not known), and
                further columns for reward functions; in place of sampling. An ``env_mask`` says
                which tokens the policy wrote. ``PPOConfig.sampler_correction`` weights the loss by
                the ``logprobs`` that it returns.
            generation_kwargs: as in ``model.generate``. The defaults are not those of the model's
                generation_config, but 32 new tokens, sampled from softmax(logits / T) with T
                ``PPOConfig.temperature``; only the tokens that end a response are the model's.
            eval_prompts: held-out prompts, a list or a data set, evaluated before, after, and every
                ``eval_every`` steps (0: only before and after), always with the same random
                numbers.
            missing_eos_penalty: taken off the score of a response that ends neither in EOS nor at a
                stop.
            long_prompts: how to handle prompts that with their new tokens exceed the model's
                context: "refuse" raises before anything is generated, "drop" leaves them out, with
                a warning, and counts them in the result.
            callbacks: see :class:`fastrl.TrainCallback`.
            progress: show a progress bar.
            output: folder for metrics, ledger and checkpoints; None writes nothing.
            save_every: steps between two checkpoints; the last step is saved, too. 0: only where
                the run fails or is stopped.
            keep_last: number of checkpoints to keep; 0 keeps all.
            resume: go on from the newest good checkpoint in ``output``, or begin where there is
                none; or from a checkpoint's folder. Make trainer, prompts and reward as for the
                run before: what follows is bit for bit what an uninterrupted run would have done,
                on one machine. The result has all evaluations, its history the new steps.
            overwrite: remove an earlier run in ``output``; its saved model stays.
            ledger: keep a row for each sample, with prompt, tokens, log-probs, rewards, advantages
                and what its draws depend on. True: in ``output``, if there is one; a path: in that
                folder; or a :class:`fastrl.run.ledger.Ledger`; False: keep none.

        With ``PPOConfig.log_with`` every step's numbers and samples also go to the trackers, which
        stay open: ``accelerator.end_training()`` closes them.

        Raises:
            ValueError: fewer prompts than a step takes, an empty or over-long prompt, one that with
                 its new tokens exceeds ``PPOConfig.micro_batch_tokens``, chats without a chat
                 template, a missing column, steps < 1, another temperature than the configuration's
                 in ``generation_kwargs``, a setting of the rewards that is out of range, rewards
                 that are not one number per completion; a reward that is not finite, with
                 ``on_nonfinite="raise"`` or where no sample has a finite one; an ``output`` that
                 holds a run, without ``resume`` or ``overwrite``.
            BadCheckpoint: a ValueError: a checkpoint that is damaged, or of another run.
            FolderInUse: an OSError: another process writes to ``output``.
            TimeoutError: a reward function took longer than ``reward_timeout``.
            Exception: what a reward function raised.
            KeyboardInterrupt: Ctrl-C or SIGTERM, at the end of a step and with its state saved in
                ``output``, if there is one; SIGTERM's is also a SystemExit, with status 143.

        An exception in a step that has not changed weights yet leaves a checkpoint in ``output``:
        the state before that step.
        """
        numbers = Numbers(
            steps,
            eval_every,
            missing_eos_penalty,
            save_every,
            keep_last,
            overwrite,
            max_tool_calling_iterations,
        )
        if self.rollouts.replays:
            refuse_beside(tools=tools, environment=environment_factory, rollout_func=rollout_func)
        saves = numbers.save_every, numbers.keep_last
        saving = make_saving(self, output, *saves, resume, overwrite)
        loop = Loop(
            self,
            reward_fn,
            numbers,
            reward_weights=reward_weights,
            reward_timeout=reward_timeout,
            reward_retries=reward_retries,
            reward_batch_size=reward_batch_size,
            prompts=prompts,
            dataset=dataset,
            prompt_column=prompt_column,
            tools=tools,
            environment_factory=environment_factory,
            rollout_func=rollout_func,
            generation_kwargs=generation_kwargs or {},
            eval_prompts=eval_prompts,
            long_prompts=long_prompts,
            callbacks=callbacks,
            progress=progress,
            saving=saving,
            ledger=ledger,
        )
        with self.computing():
            return loop.run()

    def prepare_dataloader(self, dataset: Any, data_collator: Any = None) -> Any:
        """Makes a shuffled loader of whole batches of ``batch_size / group_size`` prompts.

        Of a ``datasets.Dataset``, columns that neither the model's forward nor the classic loop
        reads are dropped, unless ``remove_unused_columns`` is off. By default dicts become a dict
        of lists, and tuples and tensors are collated by torch's ``default_collate`` (a list of
        tensors where their shapes differ). Fewer prompts than a batch give an empty loader, and a
        warning.
        """
        arguments = inspect.signature(self._unwrapped.forward).parameters
        keep = (*arguments, *_LOOP_COLUMNS) if self.config.remove_unused_columns else None
        return data.make_dataloader(dataset, self.config.prompts_per_step, data_collator, keep)

    def record_step_stats(
        self, kl_coef: float, sampler: Mapping[str, Tensor] | None = None, **step: Any
    ) -> dict[str, Any]:
        """Statistics of a step by name, fetched from the device in one transfer. ``step`` holds the
        arguments of :func:`fastrl.trainers.ppo.stats.device_stats`; ``sampler`` more scalars."""
        batch, record = step["batch"], step["record"]
        of_groups = self.advantages.statistics(step["scores"])
        of_update = stats.device_stats(**step, vf_coef=self.config.vf_coef)
        on_device = {**of_update, **of_groups, **(sampler or {})}
        result: dict[str, Any] = {
            name: value.item() if value.ndim == 0 else value
            for name, value in stats.fetch(on_device).items()
        }
        result.update(stats.host_stats(batch, record))
        result["objective/kl_coef"] = kl_coef
        result["ppo/learning_rate"] = learning_rate_of(self.optimizer)
        if self.critic is not None:
            result.update(self.critic.statistics())
        return result

    def sequence_kl(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        masks: Sequence[Tensor] | None = None,
    ) -> float:
        """Mean over samples of Σ_t KL(policy || reference), by the configured penalty; NaN without
        samples or a reference.

        Args:
            queries, responses: the same in every process.
            masks: which tokens of the responses count; None: all.
        """
        if not queries:
            return math.nan
        batch = self.make_batch(list(queries), list(responses), masks)
        with self._evaluating(), self.computing():
            operands = self.scorer(batch, values=False).kl_operands
        no_scores = torch.zeros(len(batch), device=self.current_device)
        _, _, kls = self.compute_rewards(no_scores, *operands, batch.mask)
        return float(kls.sum(-1).mean())

    # What programs for TRL call, and step() does without; then names for messages, and plans.

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
        same numbers. Neither has the KL term of ``kl_in="loss"``, or a term of entropies or
        of teachers.

        Raises:
            ValueError: a separate critic learns the values.
        """
        if self.update.critic is not None:
            raise ValueError(
                "the policy's and the critic's losses are minimised apart, and loss() is for a "
                "policy with a value head: call step()"
            )
        loss = self.update.gradient.loss
        assert isinstance(loss, UpdateLoss)
        old = Experience(
            logprobs=old_logprobs, values=values, advantages=advantages, returns=returns
        )
        policy_loss, value_loss, named = loss.of_scored(old, mask, logprobs, vpreds, logits)
        statistics = {name.removeprefix("ppo/"): value for name, value in named.items()}
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
        """Takes an optimizer step on :meth:`loss`; returns the statistics of that loss.

        The step is left out, with a warning, where the loss or its gradient is not finite; with
        ``on_nonfinite="raise"`` it raises FloatingPointError instead.
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
        """Returns a function that names the sample at an index by the text of its query."""
        return lambda i: repr(self.tokenizer.decode(queries[i]))

    def plan(
        self,
        prompt_tokens: int,
        response_tokens: int,
        passes: PassSize | None = None,
        device: str | None = None,
    ) -> Plan:
        """What a step on prompts and responses of these lengths needs of memory, by phase, rollouts
        included: see :meth:`fastrl.trainers.base.BaseTrainer.plan`."""
        return rehearse.plan_of(self, (prompt_tokens, response_tokens), passes, device)

    def tokens_of(self, *lengths: int) -> tuple[int, int]:
        """Tokens of a mini-batch of samples of ``sum(lengths)`` tokens, and of one sample."""
        return rehearse.tokens_of(self, lengths)

    def limit_passes(self, passes: PassSize) -> None:
        """Limits how much is computed at a time, as ``micro_batch_tokens`` and
        ``gradient_checkpointing`` do; but a sample that has more tokens gets a pass of its own."""
        self.scorer.limit = self.scorer.limit._replace(tokens=passes.tokens)
        for learner in self.update.learners:
            gradient = learner.gradient
            gradient.rules = gradient.rules._replace(micro_batch_tokens=passes.tokens)
        if self.teaching is not None:
            self.teaching.limit_passes(passes.tokens)
        self.update.activations.recomputed |= passes.recomputed

    # State and files; then what several methods share.

    @property
    def current_step(self) -> int:
        """The number of complete steps."""
        return self._state.step

    @property
    def streams(self) -> dict[str, PromptStream]:
        """The orders of prompts, by the prompts' fingerprint."""
        return self._state.streams

    @property
    def own_code(self) -> dict[str, str]:
        """Hashes of users' losses and advantages, as they were when this was first read."""
        return self._state.own_code

    def state_dict(self, random: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """All that later steps depend on, after the last complete one: trained weights, optimizer,
        schedule, KL coefficient, moments of scores, orders of prompts and samples, random states.
        Tensors are the trainer's, not copies, and spread over processes where the trainer's are.

        Args:
            random: random states, of the first processes; None: gathers those of all processes.
        """
        return self._state.tree(random)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where another trainer was, which must have been made from the same model: frozen
        weights and a fixed reference are not in its state. Warns of settings that differ.

        Raises:
            BadCheckpoint: a ValueError: the state of another model, tokenizer, method, reference,
                critic or optimizer, or of another number of processes that together had another
                batch size; nothing has changed then.
        """
        self._state.load(state)

    def save_checkpoint(self, folder: str | Path) -> Path:
        """Writes the state to ``folder/checkpoint-N``, N the number of steps; for a loop of your
        own, whose position in its data the state lacks. :meth:`train` saves by itself.

        Returns:
            the checkpoint's path; it is there as a whole, or not at all.
        """
        return save_checkpoint(self.state_dict(), folder, self.processes, self.products)

    def load_checkpoint(self, path: str | Path) -> None:
        """Goes on from a checkpoint, or from the newest good one in a folder of them.

        Raises:
            BadCheckpoint: a ValueError: a damaged checkpoint, whose file is named; or as
                :meth:`load_state_dict`. Nothing has changed then.
            FileNotFoundError: there is none.
        """
        load_checkpoint(self.load_state_dict, path, self.processes, self.products)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Saves model with value head, tokenizer, and a model card where there is none; a separate
        critic in ``critic/``.

        Raises:
            ValueError: layers that are shared with the reference have changed.
        """
        self._files.save(save_directory, self.create_model_card)

    def create_model_card(self, path: str | Path, model_name: str | None = None) -> None:
        """Writes ``README.md``: the model's kind, how it was trained, and how to load it.

        The base model is the one that the model itself names, else ``PPOConfig.model_name`` where
        that was set.
        """
        self._files.write_card(path, model_name)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Uploads model, tokenizer and model card, in one commit, which the main process returns.

        Args:
            kwargs: see :func:`fastrl.run.hub.upload`, such as ``private``, ``token`` and
                ``commit_message``.
        """
        hub.check_options(kwargs)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            if self.accelerator.is_main_process:
                self.create_model_card(folder, repo_id)
                return hub.upload(folder, repo_id, **kwargs)
        return None

    @property
    def teacher_models(self) -> list[Any]:
        """The teachers that are models of their own."""
        models = self._teacher_models
        return [] if models is None else models.separate(self.accelerator)

    @property
    def steps_begun(self) -> int:
        """How many optimizer steps of policy and critic have begun, added up."""
        return self.update.steps_begun

    @property
    def weights_version(self) -> int:
        """The number of the policy's optimizer steps so far."""
        return self.update.gradient.engine.steps

    def computing(self) -> AbstractContextManager[None]:
        """Context in which CPUs compute matrix products by the run's libraries, see Products."""
        critic = None if self.critic is None else self.critic.model
        return self.products.on(self.model, self.ref_model, critic, *self.teacher_models)

    def _evaluating(self) -> AbstractContextManager[None]:
        """Context in which policy and critic are in evaluation mode."""
        return evaluating(self.model, None if self.critic is None else self.critic.model)

    def make_batch(self, queries: Any, responses: Any, response_masks: Any) -> TokenBatch:
        """Makes a checked, padded batch on the device."""
        batch = self.batches(queries, responses, response_masks).to(self.current_device)
        return batch.on(self.reference.trunk_cache(batch))

    def _move_reference(self) -> None:
        interval = self.config.sync_ref_every
        if interval and self.current_step % interval == 0:
            self.reference.follow(self.config.ref_ema)
        if self._teacher_models is not None:
            self._teacher_models.follow.after(self.current_step)
