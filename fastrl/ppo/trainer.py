"""PPOTrainer: TRL's classic surface; ``step()`` reads as the algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrl.config import PPOConfig, json_object
from fastrl.core import PPODecorators, set_seed
from fastrl.data import batch as data
from fastrl.data.batch import TokenBatch
from fastrl.data.prompts import Prompts, PromptStream, read_eval_prompts
from fastrl.data.tables import LONG_PROMPTS
from fastrl.models import PreTrainedModelWrapper
from fastrl.models.layout import EncoderDecoder
from fastrl.models.modes import evaluating
from fastrl.models.precision import warn_of_lost_updates
from fastrl.ppo import stats
from fastrl.ppo.advantages import make_advantages
from fastrl.ppo.batches import make_batches
from fastrl.ppo.classic import ClassicSurface
from fastrl.ppo.control import RunningMoments, ScoreTransform, make_kl_controller
from fastrl.ppo.experience import Experience, Scorer, make_kl_penalty
from fastrl.ppo.generation import Generation
from fastrl.ppo.loop import Loop
from fastrl.ppo.losses import UpdateLoss, make_aggregate, make_kl_place
from fastrl.ppo.nonfinite import samples_left_out
from fastrl.ppo.reuse import RolloutMemory, make_reuse, without_figures
from fastrl.ppo.rollouts import make_rollouts
from fastrl.ppo.sampling import SamplingArguments
from fastrl.ppo.setup import (
    checked_policies,
    choose_heads,
    make_accelerator,
    make_optimizer,
    precision_of,
    prepared,
    warn_of_a_single_response,
)
from fastrl.ppo.tracking import TrackerCallback
from fastrl.ppo.update import PPOUpdate
from fastrl.processes import check_one_process
from fastrl.ref_model import choose_reference
from fastrl.rewards.functions import RewardFunction
from fastrl.rollout import RolloutOutput
from fastrl.run.callbacks import ProgressCallback, TrainCallback, TrainResult
from fastrl.timing import start_clock

_MIXED_PRECISION = (
    'set accelerator_kwargs={"mixed_precision": "bf16"} (commands: --dtype float32 '
    """--accelerator-kwargs '{"mixed_precision": "bf16"}')"""
)


class PPOTrainer(Generation, ClassicSurface):
    """Proximal policy optimisation of a language model from scored responses.

    The classic loop: ``generate`` responses to queries, score them, ``step``; or :meth:`train` for
    all of it. Surface and semantics are those of TRL 0.11's PPOTrainer, mended where that was wrong
    (the README lists where).

    Args:
        config: see :class:`fastrl.PPOConfig`.
        model: the policy with its value head: a causal language model, or an encoder–decoder,
            whose encoder reads the queries and whose decoder writes the responses. Where
            ``PPOConfig.advantage`` is a group baseline no values are learnt: pass a
            :class:`fastrl.models.CausalLMPolicy`, or a plain causal language model, which is
            wrapped in one; a value head is frozen then.
        ref_model: the reference policy; None makes the one that ``PPOConfig.reference`` says.
        tokenizer: gives pad and EOS tokens, the padding side, and text.
        dataset: samples for ``dataloader``, shuffled, in whole batches.
        optimizer: default Adam without weight decay, fused where torch can.
        data_collator: makes the dataloader's batches; by default dicts of lists, or of tuples and
            tensors what torch's ``default_collate`` makes.
        num_shared_layers: bottom layers that policy and reference share, frozen; in place of the
            configuration's. Ignored, with a warning, where a ``ref_model`` is given.
        lr_scheduler: stepped once per step(); wrapped by accelerate afterwards.
        training_data_collator: pads model inputs in place of the trainer; gets dicts of
            ``input_ids`` and ``attention_mask``.

    Raises:
        TypeError: config, model, ref_model, tokenizer or lr_scheduler of another type.
        ValueError: a reference that the model cannot have; a policy whose language model has no
            weight to train.
    """

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
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        training_data_collator: Callable | None = None,
    ):
        config = config or PPOConfig()
        model, ref_model = checked_policies(config, model, ref_model, tokenizer, lr_scheduler)
        warn_of_a_single_response(config)
        set_seed(config.seed)
        self.config = config
        self.tokenizer: Any = tokenizer
        self.is_encoder_decoder = model.is_encoder_decoder
        self.is_peft_model = model.is_peft_model
        self.accelerator = make_accelerator(config)
        self.dataset = dataset
        self.dataloader: Any = None
        self._unwrapped = model
        if dataset is not None:
            self.dataloader = self.prepare_dataloader(dataset, data_collator)
        self.training_data_collator = training_data_collator
        self._batches = make_batches(model, tokenizer, training_data_collator)

        # Before there is an optimizer: what is shared with the reference is not trained.
        self.reference = choose_reference(config, model, ref_model, num_shared_layers)
        warn_of_lost_updates(model, _MIXED_PRECISION)
        if optimizer is None:
            optimizer = make_optimizer(model, config.learning_rate)
        self.model, self.optimizer, self.dataloader, self.lr_scheduler = prepared(
            self.accelerator, model, optimizer, self.dataloader, lr_scheduler
        )
        self.reference.place(self.model, self.accelerator)
        self.ref_model = self.reference.model
        self.current_device = self.accelerator.device
        self._fill_in_config()
        PPODecorators.optimize_device_cache = config.optimize_device_cache

        self.kl_ctl = make_kl_controller(config)
        self.running = RunningMoments()
        self._transform_scores = ScoreTransform(config, self.running, self.accelerator)
        self._kl_penalty = make_kl_penalty(config.kl_penalty, self.reference, config.temperature)
        self._kl_place = make_kl_place(config)
        self._advantages = make_advantages(config)
        self._aggregate = make_aggregate(config)
        choose_heads(self.current_device, self.model, self.ref_model)
        self._score = Scorer(
            self.model,
            self.reference,
            self._kl_penalty,
            config.mini_batch_size,
            precision_of(model, self.accelerator),
            config.temperature,
        )
        self._rollouts = make_rollouts(config, tokenizer, self.accelerator.autocast)
        self._sampling = SamplingArguments(model, config.temperature)
        self._memory = RolloutMemory(model, optimizer, config.temperature)
        # The KL over the vocabulary needs the policy's logits, and hence its forward.
        kind = "recompute" if self._kl_penalty.needs_logits else config.old_logprobs
        self._score_or_reuse = make_reuse(kind, self._score)
        loss = UpdateLoss(config, self._aggregate, self._kl_place)
        self._update = PPOUpdate(config, self.accelerator, self.model, self.optimizer, loss)
        self.current_step = 0
        self._streams: dict[str, PromptStream] = {}  # by what they are of
        self._best_mean_score = -float("inf")

    # ------------------------------------------------------------------ the algorithm

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        response_masks: list[Tensor] | None = None,
        rollout: RolloutOutput | None = None,
        weights: Tensor | Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """One PPO iteration on a batch of scored responses.

        Args:
            queries, responses: ``batch_size`` 1-D tensors of token ids; with a ``group_size`` the
                responses to a query lie one after the other, each with that query.
            scores: ``batch_size`` tensors of one number each.
            response_masks: for each response, which of its tokens count; others get no reward, no
                loss, and are skipped by the advantages.
            rollout: what generated the responses: its log-probs and values may be taken for those
                before the update (``PPOConfig.old_logprobs``). Responses that this trainer's own
                generate() returned under the current weights are recognised without it.
            weights: ``batch_size`` numbers of 0 or more that multiply each sample's part of the
                loss: 2 counts like the sample twice, 0 like none. None: 1.

        A sample that ``rollout`` says ended in NaN logits (finish reason "nan"; its response may be
        empty) stays in the batch with weight 0: it is in no baseline, whitening, mean or running
        moment, whatever its score. ``PPOConfig.on_nonfinite`` says whether it is an error instead.

        Returns:
            the statistics of the README's table: numbers, and arrays of distributions.

        Raises:
            ValueError: names the argument and the element; nothing has changed then.
            FloatingPointError: all samples ended in NaN logits; with ``on_nonfinite="raise"`` one
                did, or a loss or a gradient is not finite.

        Any exception leaves a trainer that can go on: no gradient is left over, and the running
        moments of scores, the KL coefficient, the learning rate's schedule, ``current_step`` and
        the order of the samples are as before the call. Optimizer steps that were taken until then
        stay.
        """
        data.check_batch_size(queries, responses, self.config.batch_size)
        left_out = self._left_out(queries, rollout)
        checked_scores = data.check_scores(scores, self.config.batch_size, left_out)
        checked_weights = data.check_weights(weights, self.config.batch_size, self.current_device)
        generated = responses
        if left_out:
            responses, response_masks = data.without_tokens(
                queries, responses, response_masks, left_out
            )
        batch = self._make_batch(queries, responses, response_masks)
        self._advantages.check(queries)
        known = self._known(queries, generated, rollout)
        if left_out:
            known = without_figures(known, responses, left_out)
        self._score_or_reuse.check(known)

        final_scores, moments = self._transform_scores(checked_scores)
        final_scores = final_scores.to(self.current_device)
        self._push_if_best(final_scores)
        self._rollouts.before_update()
        clock = start_clock(self.current_device)
        with evaluating(self.model), PPODecorators.empty_device_cache():
            with clock("forward_pass"):
                scored, reuse_stats = self._score_or_reuse(batch, known)
            with clock("compute_rewards"):
                rewards, non_score_rewards, kls = self.compute_rewards(
                    final_scores.nan_to_num(), *self._kl_penalty.operands(scored), batch.mask
                )
            with clock("compute_advantages"):
                values, advantages, returns = self.compute_advantages(
                    scored.values, rewards, batch.mask
                )
            with clock("optimize_step"):
                experience = Experience(
                    scored.logprobs,
                    values,
                    advantages,
                    returns,
                    self._kl_place.term(scored.ref_logprobs, self.kl_ctl.value),
                    self._aggregate.sample_weights(batch.mask, checked_weights),
                )
                record = self._update(batch, experience)
        with clock("calc_stats"):
            result = self.record_step_stats(
                kl_coef=self.kl_ctl.value,
                batch=batch,
                scored=scored,
                scores=final_scores,
                non_score_reward=non_score_rewards,
                kls=kls,
                record=record,
            )
        result.update(stats.timing_stats(clock.seconds(), batch))
        result.update(reuse_stats)
        result["ppo/nan_samples"] = float(len(left_out))
        self._warn_of_negative_kl(result["objective/kl"])

        # Last, so that no exception finds it changed.
        self.running.become(moments)
        self.kl_ctl.update(
            result["objective/kl"], self.config.batch_size * self.accelerator.num_processes
        )
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.current_step += 1
        self._move_reference()
        return result

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-β·KL per token, the score added at each row's last counted token.

        With ``kl_in="loss"`` β is 0 here.

        Args:
            scores: [B], on any device.
            logprobs, ref_logprobs: [B, T-1]; with ``kl_penalty="full"`` log-probs of the whole
                vocabulary [B, T-1, V], or the KL itself and zeros.
            masks: [B, T-1].

        Returns:
            rewards, their part without the score, and the KL penalties, each [B, T-1].
        """
        coef = self._kl_place.reward_coef(self.kl_ctl.value)
        scores = scores.to(logprobs.device)
        return self._kl_penalty.rewards(scores, logprobs, ref_logprobs, masks.bool(), coef)

    def compute_advantages(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By ``PPOConfig.advantage``: generalised advantage estimates, whitened over the batch, or
        those against a group's baseline; all [B, T-1].

        Returns:
            values (zero where masked), advantages, returns.
        """
        return self._advantages(values, rewards, mask.bool())

    # ------------------------------------------------------------------ the whole loop

    def train(
        self,
        reward_fn: RewardFunction,
        *,
        steps: int,
        prompts: Sequence[str | Tensor | list[dict[str, str]]] | None = None,
        dataset: Any = None,
        prompt_column: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        eval_prompts: Any = None,
        eval_every: int = 0,
        missing_eos_penalty: float | None = None,
        long_prompts: str = "refuse",
        callbacks: Iterable[TrainCallback] = (),
        progress: bool = True,
    ) -> TrainResult:
        """The whole loop: sample prompts, generate, score, step, evaluate.

        A further call goes on: steps are counted over all calls (``current_step``; callbacks and
        ``eval_every`` see that number), and of the same prompts (the same token ids in the same
        order) it takes those that come next: two runs of 10 steps see what one of 20 does. Prompts
        of a step that failed come again. Other prompts begin an order of their own.

        Args:
            reward_fn: ``reward_fn(prompts, completions, completion_ids, **columns)`` returns one
                number per completion; ``columns`` are the other columns of ``dataset``. For a
                prompt of chat messages it gets these as they are, and the completion as
                ``[{"role": "assistant", "content": text}]``, as in TRL 1.x.
            steps: number of step() calls, each on ``batch_size / group_size`` prompts.
            prompts: texts, chats (lists of messages with a role and a content, put through the
                tokenizer's chat template) or 1-D token ids; or
            dataset: a data set with a column of them, ``prompt_column`` (default: prompt, query or
                input_ids). Without either, the trainer's own dataset.
            generation_kwargs: as in ``model.generate``. What is left out is not taken from the
                model's generation_config: 32 new tokens, sampled from softmax(logits / T) with T
                ``PPOConfig.temperature``; only the tokens that end a response are the model's.
            eval_prompts: held-out prompts, a list or a data set, evaluated before, after, and every
                ``eval_every`` steps (0: only before and after), always with the same random
                numbers.
            missing_eos_penalty: taken off the score of a response that ends neither in EOS nor at a
                stop.
            long_prompts: what becomes of prompts that with their new tokens exceed the model's
                context: "refuse" raises before anything is generated, "drop" leaves them out, with
                a warning, and counts them in the result.
            callbacks: see :class:`fastrl.TrainCallback`.
            progress: show a progress bar.

        With ``PPOConfig.log_with`` every step's numbers and samples also go to the trackers, which
        stay open: ``accelerator.end_training()`` closes them.

        Raises:
            ValueError: fewer prompts than a step takes, an empty or over-long prompt, chats without
                 a chat template, a missing column, steps < 1, more than one process, another
                 temperature than the configuration's in ``generation_kwargs``, rewards that are not
                 one finite number per completion.
        """
        check_one_process("PPOTrainer.train()", self.accelerator.num_processes)
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if prompts is not None and dataset is not None:
            raise ValueError("pass prompts or dataset, not both")
        if long_prompts not in LONG_PROMPTS:
            raise ValueError(
                f"unknown long_prompts {long_prompts!r}: choose one of {', '.join(LONG_PROMPTS)}"
            )
        source = self.dataset if dataset is None else dataset
        if prompts is None and source is None:
            raise ValueError("nothing to train on: pass prompts or dataset")
        kwargs = self._sampling.of_training(generation_kwargs or {})
        # max_length in its place counts the prompt.
        room = (self._batches.layout, kwargs.get("max_new_tokens") or 1, long_prompts)
        closed = isinstance(self._batches.layout, EncoderDecoder)
        given = (
            Prompts.from_dataset(source, prompt_column, self.tokenizer, closed=closed)
            if prompts is None
            else Prompts.from_list(prompts, self.tokenizer, closed=closed)
        )
        found = given.fitting(*room)
        if len(found) < self.config.prompts_per_step:
            wanted, size = f"batch_size={self.config.batch_size}", self.config.group_size
            wanted += "" if size == 1 else f" / group_size={size}"
            raise ValueError(
                f"{len(found)} prompts are fewer than {wanted}: lower batch_size or bring more "
                "prompts"
            )
        result, held_out = TrainResult(dropped_prompts=len(given) - len(found)), None
        if eval_prompts is not None:
            given = read_eval_prompts(eval_prompts, prompt_column, self.tokenizer, closed=closed)
            held_out = given.fitting(*room)
            result.dropped_eval_prompts = len(given) - len(held_out)
        new = PromptStream(len(found), self.config.seed)
        loop = Loop(
            self,
            reward_fn,
            prompts=found,
            stream=self._streams.setdefault(found.fingerprint(), new),
            eval_prompts=held_out,
            generation_kwargs=kwargs,
            missing_eos_penalty=missing_eos_penalty,
            callbacks=[
                *([ProgressCallback(self.config.method)] if progress else []),
                *([] if self.config.log_with is None else [TrackerCallback()]),
                *callbacks,
            ],
            result=result,
        )
        return loop.run(steps, eval_every)

    # ------------------------------------------------------------------ internals

    def sequence_kl(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> float:
        """Mean over samples of Σ_t KL(policy || reference), by the configured penalty."""
        batch = self._make_batch(list(queries), list(responses), None)
        with evaluating(self.model):
            scored = self._score(batch)
        no_scores = torch.zeros(len(batch), device=self.current_device)
        operands = self._kl_penalty.operands(scored)
        return float(self.compute_rewards(no_scores, *operands, batch.mask)[2].sum(-1).mean())

    def _left_out(self, queries: list[Tensor], rollout: RolloutOutput | None) -> list[int]:
        """Samples that ended in NaN logits."""
        if rollout is None or len(rollout.finish_reasons) != len(queries):
            return []

        def name(i: int) -> str:
            return repr(self.tokenizer.decode(queries[i]))

        return samples_left_out(rollout, self._update.nonfinite, name)

    def _make_batch(self, queries: Any, responses: Any, response_masks: Any) -> TokenBatch:
        """One checked, padded batch on the device."""
        batch = self._batches(queries, responses, response_masks).to(self.current_device)
        return batch.on(self.reference.boundaries(batch.sequences()))

    def _move_reference(self) -> None:
        every = self.config.sync_ref_every
        if every and self.current_step % every == 0:
            self.reference.follow(self.config.ref_ema)

    def _fill_in_config(self) -> None:
        processes = self.accelerator.num_processes
        self.config.world_size = processes
        self.config.is_encoder_decoder = self.is_encoder_decoder
        self.config.is_peft_model = self.is_peft_model
        self.config.global_backward_batch_size = self.config.backward_batch_size * processes
        self.config.global_batch_size = self.config.batch_size * processes

    def _push_if_best(self, scores: Tensor) -> None:
        where = json_object(self.config.push_to_hub_if_best_kwargs)
        if not where or self.current_step % self.config.compare_steps:
            return
        mean = float(scores.nanmean())
        if mean > self._best_mean_score:
            self.push_to_hub(**where)
            self._best_mean_score = mean

    def _warn_of_negative_kl(self, kl: float) -> None:
        if kl < -1.0:
            warnings.warn(
                f"the KL estimate is negative ({kl:.2f}): the responses are unlikely under the "
                "policy. Were they generated by it, with top_k=0, top_p=1 and no other change to "
                "its distribution?",
                stacklevel=3,
            )
