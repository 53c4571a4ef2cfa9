"""What GRPOTrainer and RLOOTrainer share: prompts, responses, rewards, log-probs, logs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastrl.collect.collector import Collector
from fastrl.collect.interaction import Interaction
from fastrl.collect.ledger import GenerationLedger
from fastrl.collect.respond import Asked, Respond, RolloutFunction
from fastrl.collect.tools import check_chats
from fastrl.config import SAMPLED
from fastrl.core import set_seed
from fastrl.data.columns import check_reserved
from fastrl.data.prompts import PromptStream
from fastrl.data.tables import list_as_dataset
from fastrl.data.token_batch import Padded
from fastrl.learn.dynamic_sampling import DynamicSampling
from fastrl.learn.nonfinite import NonFiniteNumbers
from fastrl.learn.objective import Pass, TokenLoss
from fastrl.learn.ref_model import Follow, RefModel
from fastrl.learn.samples import minibatch_of, token_batch
from fastrl.learn.scorer import check_tokens
from fastrl.models import CausalLMPolicy
from fastrl.models.routing import follow_routers, refuse_beside, replays
from fastrl.models.scorer import ScoredPass
from fastrl.models.scoring import PassLimit, PolicyObjective
from fastrl.models.sharding import whole_weights
from fastrl.models.utils import modes_kept
from fastrl.overrides import check_overrides
from fastrl.registry import own_functions
from fastrl.rewards.identity import identities_of
from fastrl.rewards.weighted import RewardBatch
from fastrl.rollout.backends import make_backend
from fastrl.run.callbacks import ShownSamples
from fastrl.run.metric_means import Parts, mean_of
from fastrl.samples import Samples
from fastrl.settings import warn_of_idle
from fastrl.trainers import rehearse
from fastrl.trainers.base import BaseTrainer
from fastrl.trainers.groups.generations import Generations, between_generations
from fastrl.trainers.groups.group_loaders import eval_loader, train_loader, train_sampler
from fastrl.trainers.groups.judged import judged_by_all
from fastrl.trainers.groups.log_probs import ResponseScorer
from fastrl.trainers.groups.prompt_data import (
    as_it_is,
    asked_of,
    check_data,
    check_resampling,
    further_prompts,
    reserved_of,
)
from fastrl.trainers.groups.response_log import ResponseLog
from fastrl.trainers.groups.reward_functions import RewardFunctions
from fastrl.trainers.groups.rollout_correction import RolloutCorrection, of_all_or_none
from fastrl.trainers.groups.rollouts import GroupRollouts
from fastrl.trainers.groups.teaching import GroupTeaching, taught_by
from fastrl.trainers.low_memory import warn_of_lost_steps
from fastrl.trainers.passes import on_all_processes, with_synchronised_last
from fastrl.trainers.policy import (
    adapted_policy,
    check_adapter,
    loaded_causal,
    padding_tokenizer,
)
from fastrl.trainers.policy_support import check_draws, check_form, check_policy_support
from fastrl.trainers.prompt_room import PromptRoom, data_by_name
from fastrl.trainers.reference import model_of, reference_of
from fastrl.trainers.router_loss import router_loss
from fastrl.trainers.supervised import check_one_gpu, prefix_of, settings_of, trained_identity
from fastrl.trainers.teachers import TeacherPrompts

LOGPROBS = "_get_per_token_logps_and_entropies"
_LOSSES = {"_compute_loss", "compute_loss", LOGPROBS}  # by TRL's names


class OnlineTrainer(BaseTrainer, ABC):
    """transformers' Trainer that samples responses to prompts, has them judged, and learns from
    them.

    A batch of the loader has all prompts of a generation, and the loader repeats it for each
    mini-batch of its responses, as in TRL. Runs are resumed bit for bit.

    Attributes:
        shown: the prompts, responses and rewards of the first evaluation and of the latest; None,
            unless a list is set before these: they are not kept.

    Subclasses turn rewards into advantages, and log-probs into a loss. A subclass that replaces
    sampling, or adds to it, sets its own attributes before ``super().__init__``.
    """

    args: Any
    model: Any
    processing_class: Any
    config: ClassVar[type]
    _tag_names: ClassVar[list[str]]
    rehearsed_as = rehearse.ONLINE
    needs_old: ClassVar[bool]  # whether old log-probs are read even where all ratios are 1
    needs_rewards: ClassVar[bool] = True
    order: ClassVar[str] = "shuffled"  # by which responses get into batches, one of ORDERS
    learns_kl: ClassVar[bool] = False  # whether rewards hold the KL of the old log-probs
    # Whether TRL's _compute_loss itself divides by the number of batches of an optimizer step.
    divides_loss: ClassVar[bool]
    _loss: TokenLoss
    _scorer: ResponseScorer
    _rollouts: GroupRollouts
    _taught: TeacherPrompts | None
    rewards: RewardFunctions
    reward_weights: Tensor
    beta: float
    kl_coef: float  # of the KL to the reference, whatever ``beta`` is
    aux_loss_enabled: bool

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        teacher_model: Any = None,
    ):
        check_overrides(type(self))
        train_dataset, eval_dataset = map(list_as_dataset, (train_dataset, eval_dataset))
        interaction = Interaction(tools, environment_factory)
        interaction.refuse_beside(rollout_func)
        self._rollout_func = rollout_func
        self.tools, self._interaction = interaction.tools, interaction
        environments = interaction.environments
        if environments is not None:
            self._env_tools = {
                name: list(box.functions.values()) for name, box in environments.boxes.items()
            }
            self._environment_pool = environments.pool
            if train_dataset is None:
                train_dataset = environments.placeholder(args)
        if interaction:
            check_chats(train_dataset)
        args = self._settled(args, model, adapts=peft_config is not None)
        if train_dataset is None:
            raise ValueError("`train_dataset` is required: a data set with a column prompt")
        check_adapter(peft_config)
        check_data(train_dataset, eval_dataset, args, asked=environments is None)
        set_seed(args.seed)
        load = dict(args.model_init_kwargs or {})
        load.setdefault("trust_remote_code", args.trust_remote_code)
        added = interaction.rewards
        rewards = RewardFunctions(
            reward_funcs, reward_processing_classes, dict(load), added, args, self.needs_rewards
        )
        self._tokenizer = padding_tokenizer(processing_class, model, args)
        check_resampling(args, train_dataset, rollout_func)
        interaction.read_by(self._tokenizer, args.chat_template_kwargs or {})
        corrects = args.vllm_importance_sampling_correction
        self._correction = RolloutCorrection(args) if corrects else None
        model = loaded_causal(model, args, quantization_config)
        most = args.generation_arguments.get("max_new_tokens")
        self._room = PromptRoom(
            model,
            most,
            self._tokenizer,
            args.chat_template_kwargs or {},
            args.micro_batch_tokens,
            args.max_prompt_length,
        )
        if rollout_func is None and environments is None:
            self._room.check_data(train_dataset, eval_dataset)
        model = adapted_policy(model, self._tokenizer, peft_config, args)
        self._policy = CausalLMPolicy(model)
        self._reference: RefModel | None = None
        fresh = peft_config is not None
        if args.kl_coef:
            self._reference = reference_of(args, self._policy, fresh=fresh)
        own = f"{type(self).__name__} computes a loss of its own, which has no term of a teacher"
        self._taught = taught_by(
            teacher_model,
            args,
            self._policy,
            self._tokenizer,
            data_by_name(train_dataset, eval_dataset),
            fresh=fresh,
            rewarded=self.needs_rewards,
            as_given=rollout_func is None and environments is None,
            refused={f"{own}: leave teacher_kl_coef at 0": self.has_own_loss},
        )
        check_policy_support(args, teachers=self._taught, own_loss=self.has_own_loss)
        if rollout_func is None:
            check_form(args.generation_arguments, model, self._tokenizer)
        if rollout_func is None and self.needs_rewards:
            check_draws(args, model, stacklevel=3)
        self.rewards = rewards
        self._further = further_prompts(args, train_dataset)
        self._take_settings(args, rewards)
        router = router_loss(model, args.router_aux_loss_coef)
        self.aux_loss_enabled, self.router_aux_loss_coef = router
        self._replays = replays(model, args.replay_routing)
        if self._replays:
            refuse_beside(
                tools_or_environment=interaction,
                rollout_func=rollout_func,
                own_loss=self.has_own_loss,
            )
        # A subclass that computes log-probs runs forward passes whose routing nobody reads.
        self._routes = LOGPROBS not in self.overrides and follow_routers(model) > 0
        batches = args.steps_per_generation, args.num_iterations
        self._generations = Generations(args.seed, *batches, self.order)
        self.shown: list[ShownSamples] | None = None
        self._seconds = 0.0  # that this optimizer step has taken so far
        args.remove_unused_columns = False
        args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"
        super().__init__(
            model=model,
            args=args,
            data_collator=as_it_is,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self._tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        check_one_gpu(self.args)
        self._make_parts()
        self.model.add_model_tags([*self._tag_names, "fastrl"])
        warn_of_lost_steps(self.args, self.model, stacklevel=3)

    def _settled(self, args: Any, model: Any, *, adapts: bool) -> Any:
        """Returns a checked copy of ``args``, by default of the class's settings.

        Raises:
            TypeError, ValueError: settings that the trainer cannot have.
        """
        name = type(self).__name__
        if args is None:
            path = model if isinstance(model, str) else model.config.name_or_path
            args = self.config(output_dir=f"{Path(path).name}-{name.removesuffix('Trainer')}")
        if not isinstance(args, self.config):
            raise TypeError(f"args must be a {self.config.__name__}, got {type(args).__name__}")
        args = settings_of(args, self.config)
        if args.label_smoothing_factor:
            raise ValueError(f"{name} does not smooth labels: leave label_smoothing_factor at 0")
        warn_of_idle(args, stacklevel=4)
        if self.has_own_loss and args.micro_batch_tokens is not None:
            raise ValueError(
                f"micro_batch_tokens splits batches, and {name} computes a loss of whole ones: "
                "leave it out, and lower per_device_train_batch_size"
            )
        if LOGPROBS in self.overrides and args.kl_coef and adapts:
            raise ValueError(
                f"{name} overrides {LOGPROBS}, and the reference of an adapter is the model "
                "without it, which is no model of its own: set beta=0"
            )
        return args

    def _take_settings(self, args: Any, rewards: RewardFunctions) -> None:
        """Sets attributes of TRL's that are settings, or of the reward functions."""
        self.reward_funcs, self.reward_func_names = rewards.functions, rewards.names
        self.reward_processing_classes = rewards.processing_classes
        self.reward_weights = rewards.weights
        self.num_generations = args.num_generations
        self.num_generations_eval = args.num_generations_eval or args.num_generations
        self.num_iterations, self.temperature = args.num_iterations, args.temperature
        self.beta, self.max_completion_length = args.beta, args.max_completion_length
        self.kl_coef = args.kl_coef
        self.chat_template_kwargs = dict(args.chat_template_kwargs or {})
        self.log_completions = args.log_completions

    def _make_parts(self) -> None:
        """Makes what needs the Accelerator, or the model on its device."""
        args, rewards = self.args, self.rewards
        self._noted = ResponseLog(args, rewards.names, self._metrics, self.processes)
        self._logs = self._noted.table  # TRL's name
        # Losses are means over a batch: transformers divides them by the number of batches of an
        # optimizer step.
        self.model_accepts_loss_kwargs = False
        self.loss_is_scaled_for_ga = None
        if self.has_own_loss and self.divides_loss:
            self.loss_is_scaled_for_ga = True
            self.compute_loss_func = self._compute_loss  # older transformers look at this instead
        if self._reference is not None:
            self._reference.place(self._policy, self.accelerator)
        self._follow = Follow.of(self._reference, args)
        self.add_first(self._follow)
        self._scorer = self._make_scorer(
            args, self.pad_token_id, self.accelerator, self.accelerator.autocast, self.processes
        )
        rewards.to(args.device)
        self._resampling = DynamicSampling(
            self.num_generations, args.dynamic_sampling_rounds, self.processes
        )
        backend = make_backend(
            args,
            self._tokenizer,
            self.accelerator.autocast,
            self.processes.index,
            self._replays,
            args.policy_support,
        )
        self._rollouts = GroupRollouts(
            args,
            self._tokenizer,
            backend,
            self._interaction,
            self._room,
            rewards.event_loop,
            lambda: self.accelerator.unwrap_model(self.model),
            self.chat_template_kwargs,
        )
        self._collect = Collector(
            self._respond_by(),
            self.judge,
            args.penalties,
            self.processes,
            self._ready,
            NonFiniteNumbers(args.on_nonfinite, counts=False),
            lambda: {
                "trainer_state": self.state,
                "log_extra": self._noted.note_column,
                "log_metric": self._noted.note_number,
            },
            self._noted.take_columns,
        )
        self._ledger: GenerationLedger | None = None
        self._loss = self._make_loss()
        self.teaching: GroupTeaching | None = None
        if self._taught is not None:
            self.teaching = GroupTeaching(
                self._taught,
                self._policy,
                self._scorer,
                lambda: self.model_wrapped,
                self.needs_rewards,
            )
            self.add_first(self.teaching.models.follow)
            self._loss.teachers = self.teaching.in_loss

    @property
    def ref_model(self) -> Any:
        """The reference as a separate model; None where there is no KL, or where the reference is
        the policy with its adapter off, or with another one."""
        return model_of(self._reference, self.accelerator)

    @property
    def teacher_models(self) -> list[Any]:
        """The teachers that are models of their own."""
        taught = self._taught
        return [] if taught is None else taught.models.separate(self.accelerator)

    @property
    def pad_token_id(self) -> int:
        return self._tokenizer.pad_token_id

    @property
    def has_own_loss(self) -> bool:
        """Whether a program's subclass computes the loss, or the log-probs that the loss reads."""
        return bool(self.overrides & _LOSSES)

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of the training data, at least 2, for a plan."""
        return max(2, self._room.longest_of(self.train_dataset))

    def responding_by(self, function: Any) -> RolloutFunction:
        """Returns what answers prompts by calling the ``rollout_func`` ``function``."""
        return self._rollouts.by_function(function, self)

    def card_settings(self) -> dict[str, Any]:
        teachers = () if self.teaching is None else self.teaching.models.references
        named = {"reward_funcs": self.reward_func_names, "teachers": teachers}
        told = {name: ", ".join(x) for name, x in named.items() if x}
        return {**told, **super().card_settings()}

    @property
    def rollout_func(self) -> Any:
        """The user's function that answers prompts; None: the policy does. It may be set."""
        return self._rollout_func

    @rollout_func.setter
    def rollout_func(self, function: Any) -> None:
        self._interaction.refuse_beside(function)
        check_resampling(self.args, self.train_dataset, function)
        self._rollout_func = function
        self._collect.respond = self._respond_by()

    def _respond_by(self) -> Respond:
        if self.rollout_func is not None:
            return self.responding_by(self.rollout_func)
        return self._rollouts.by_policy()

    def _ready(self) -> AbstractContextManager[None]:
        """Context in which sampling does not wait for other processes."""
        if self.rollout_func is not None:
            return nullcontext()
        return whole_weights(self.model_wrapped)

    @property
    def environments(self) -> list[Any] | None:
        """The environments of the latest responses; None before any, or without a factory."""
        environments = self._interaction.environments
        return None if environments is None else environments.current

    # What subclasses do, or may do otherwise.

    @abstractmethod
    def _make_loss(self) -> TokenLoss:
        """Makes the loss that the settings name, at the end of the construction."""

    @abstractmethod
    def advantages_of(
        self, judged: Samples, kl: Tensor | None, group: int, mode: str
    ) -> tuple[Tensor, Tensor]:
        """Advantages [B] of the responses of all processes, and which groups have no spread of
        rewards, [B] or [B / group] bool.

        Args:
            kl: what is taken off each response's reward, where rewards hold a KL, [B]:
                beta·Σ_t (log π_old - log π_ref), and the same for a teacher; None: nothing.
        """

    @abstractmethod
    def _compute_loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The loss of a batch as TRL lays it out, where a program's subclass computes it."""

    def _coefficient(self) -> float:
        """The coefficient of the mean entropy, which is subtracted from the loss."""
        return 0.0

    def note_batch(self, batch: Pass, loss: TokenLoss, mode: str) -> None:
        """Logs the metrics of a batch that are computed from its log-probs."""

    def _chosen(self, entropies: Tensor) -> Tensor:
        """Which tokens of a batch are learned, [N]: 1 or 0, by default all 1. A subclass chooses
        those whose entropy is among the highest in all processes."""
        return torch.ones_like(entropies)

    def _objective(self, given: Pass) -> PolicyObjective | None:
        """What the LM head computes a pass's loss by; None where the loss needs its scores."""
        return self._loss.in_one_pass(given, self._coefficient(), self.processes.count)

    def _make_scorer(self, *arguments: Any) -> ResponseScorer:
        return ResponseScorer(*arguments)

    def responses_to(self, rows: list[dict[str, Any]], mode: str) -> Samples:
        """Responses to the prompts of some rows, judged."""
        return self._learnable(rows, mode)

    def judge(self, *responses: Any, **options: Any) -> RewardBatch:
        """The rewards of this process's responses."""
        return self.rewards(*responses, **options)

    # Data.

    def get_train_dataloader(self) -> Any:
        uses = self._generations.uses
        settings = self.args, self.train_dataset, self.num_generations, uses
        return train_loader(*settings, self.loader, self.asked_sampler)

    def train_sampler(self, dataset: Any = None) -> Any:
        data = self.train_dataset if dataset is None else dataset
        return train_sampler(self.args, data, self.num_generations, self._generations.uses)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        data: Any = self.eval_dataset
        if eval_dataset is not None:
            data = data[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        if data is None:
            raise ValueError("evaluation needs an eval_dataset")
        settings = self.args, data, self.num_generations_eval
        return eval_loader(*settings, self.accelerator, self.loader)

    # Steps.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._ledger is not None:
                self._ledger.flush()

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        begin = time.perf_counter()
        with self.products.on(model, self.ref_model, *self.teacher_models):
            model.train()
            # Rewards may draw random numbers, so they are computed before the passes draw.
            samples = self.ready_batch(inputs)
            passes, losses = self._units(model, samples, "train"), []
            contexts = with_synchronised_last(len(passes), model, self.accelerator)
            for each, context in zip(passes, contexts, strict=True):
                with context:
                    losses.append(super().training_step(model, each, *args, **kwargs))
            loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
            self._note(passes, "train")
        self._generations.step += 1
        self._seconds += time.perf_counter() - begin
        if self.accelerator.sync_gradients:
            self._metrics["train"].add_number("step_time", self._seconds)
            self._seconds = 0.0
        return loss

    def count_input_tokens(self, minibatch: Any) -> None:
        """Does nothing: tokens of prompts and responses are counted as a generation is sampled."""

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._generations.made["eval"] = 0  # all evaluations draw the same random numbers
        with self.products.on(self.model, self.ref_model, *self.teacher_models):
            output = super().evaluation_loop(*args, **kwargs)
        if self.shown is not None:
            self.shown[1:] = [self._noted.take_shown()]
        taken = self._noted.take("eval", self.state.num_input_tokens_seen)
        prefix = prefix_of(args, kwargs)
        output.metrics.update({f"{prefix}_{name}": value for name, value in taken.items()})
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        samples = self.ready_batch(inputs)
        with torch.no_grad():
            passes = self._units(model, samples, "eval")
            loss = torch.stack([self.compute_loss(model, each).detach() for each in passes]).sum()
            self._note(passes, "eval")
        if self.accelerator.num_processes > 1:
            # All processes' mean: of a last batch, transformers keeps only some processes' losses.
            loss = self.accelerator.reduce(loss, reduction="mean")
        return loss, None, None

    def ready_batch(self, batch: Any) -> Any:
        """The responses to a batch of rows; in training, those of the latest generation's
        mini-batch whose turn it is."""
        if not isinstance(batch, list):
            return super().ready_batch(batch)
        if not self.model.training:
            return self.responses_to(batch, "eval")
        if self._generations.is_due():
            self._generations.take(self.responses_to(batch, "train"))
            self._rollouts.backend.before_update()
        return self._generations.batch()

    def _units(self, model: nn.Module, samples: Samples, mode: str) -> list[Any]:
        """The inputs of :meth:`compute_loss` for a batch: its passes, or all of it as in TRL."""
        return self._passes(model, samples, mode)

    def _passes(self, model: nn.Module, samples: Samples, mode: str) -> list[Pass]:
        """A batch, in passes of at most ``micro_batch_tokens``."""
        most = self.args.micro_batch_tokens
        parts = self.args.steps_per_generation if mode == "train" else 1
        generated = max(samples.generated, 1.0) / self.processes.count / parts
        padded = self.aux_loss_enabled and not self._routes
        padding = Padded() if padded else self._scorer.padding(model)
        if self.args.policy_support == SAMPLED and samples.supports is None:
            raise ValueError(
                "policy_support='sampled': it is not known what responses were drawn from, as an "
                "overridden method has lost it: keep the column supports of what is sampled"
            )
        if self._replays and samples.experts is None:
            raise ValueError(
                "replay_routing: an overridden method has lost the experts' choices of the "
                "responses: leave replay_routing out"
            )
        if self._routes and samples.experts is None:
            samples = replace(samples, experts=[None] * len(samples))
        device, pad_token = self.args.device, self.pad_token_id
        kl_coef = 0.0 if self.learns_kl else self.kl_coef
        whole = minibatch_of(samples, pad_token, padding, device, kl_coef, self._loss.aggregate)
        denominator = self._loss.denominator(whole, generated)
        if most is None:
            return [Pass(whole, whole, denominator)]
        prompts, responses = (
            list(map(len, ids)) for ids in (samples.prompt_ids, samples.sequences)
        )
        check_tokens(most, prompts, responses, "response {0} and its prompt".format)
        limit = PassLimit(whole.size, most)

        def passes() -> list[Pass]:
            parts = on_all_processes(whole.split(limit), self.processes)
            return [Pass(part, whole, denominator, counts) for part, counts in parts]

        made = passes()
        if len(made) > 1 and self._loss.top_entropy < 1:
            with torch.no_grad():
                for each in made:
                    each.scores = self._scorer.policy(model, each.part.tokens, entropy=True).scores
            entropies = Pass.joined([each for each in made if each.counts]).entropies
            whole = replace(whole, chosen=self._chosen(entropies))
            made = passes()
        return made

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """A pass's part of its batch's loss; the whole loss of a batch laid out as in TRL."""
        if return_outputs:
            raise ValueError(f"{type(self).__name__} returns no outputs beside the loss")
        if self.has_own_loss:
            return self._compute_loss(model, inputs)
        return self._pass_loss(model, inputs)

    def _pass_loss(self, model: nn.Module, inputs: Pass) -> Tensor:
        scored = self._scorer.policy(
            model,
            inputs.part.tokens,
            aux=self.aux_loss_enabled and not self._routes,
            entropy=True,
            objective=self._objective(inputs),
            teachers=self._loss.terms(inputs),
            only_teachers=self._loss.only_teachers,
        )
        inputs.scores, inputs.routing = scored.scores, scored.routing
        loss = self._loss_of_scored(inputs, scored.aux_loss if self.aux_loss_enabled else None)
        return loss if inputs.counts else loss * 0

    def _loss_of_scored(self, scored: Pass, aux_loss: Tensor | None) -> Tensor:
        """The loss of a pass that has its scores, with the experts' loss where one is given."""
        loss = self._loss.of_pass(scored, self._coefficient(), self._chosen)
        if aux_loss is not None:
            aux_loss = aux_loss * (scored.part.size / scored.whole.size)
            scored.aux_loss = aux_loss.detach()
            loss = loss + self.router_aux_loss_coef * aux_loss
        return loss

    def _scored(self, model: nn.Module, samples: Samples, aux: bool, entropy: bool) -> ScoredPass:
        """The policy's forward pass over responses, see :meth:`ResponseScorer.policy`."""
        tokens = token_batch(samples, self.pad_token_id, self._scorer.padding(model))
        return self._scorer.policy(model, tokens.to(self.args.device), aux, entropy=entropy)

    def _note(self, passes: list[Pass], mode: str) -> None:
        """Logs the metrics of a batch from its passes."""
        counted = [each for each in passes if isinstance(each, Pass) and each.counts]
        if not counted:  # a subclass has computed the loss, and logs
            return
        batch = Pass.joined(counted)
        noted = {"entropy": mean_of(batch.entropies)}
        if batch.divergences is not None:
            noted["divergence"] = mean_of(batch.divergences)
            assert self.teaching is not None
            self.teaching.note_left_out(batch.whole.size, self._metrics[mode])
        if self.aux_loss_enabled:
            losses = [x.aux_loss for x in counted if x.aux_loss is not None]
            noted["aux_loss"] = mean_of(torch.stack(losses).sum()[None])
        routings = [x.routing.statistics() for x in counted if x.routing is not None]
        for name in ("load", "changed_choices") if routings else ():
            if name in routings[0]:
                noted[f"router/{name}"] = mean_of(torch.stack([x[name] for x in routings]))
        self.note_batch(batch, self._loss, mode)
        self._metrics[mode].add(noted)

    # Responses and rewards.

    def _learnable(self, rows: list[dict[str, Any]], mode: str) -> Samples:
        """Responses to the prompts of rows, with their rewards, masks, log-probs and advantages."""
        data = "train_dataset" if mode == "train" else "eval_dataset"
        # Again, by a row's columns: a stream may not have named them at the construction.
        check_reserved(rows[0], data, reserved_of(self._interaction.environments is not None))
        group = self.num_generations if mode == "train" else self.num_generations_eval
        with modes_kept(self.model):  # users' functions may change them
            collected = self._collected(rows, group)
            if mode == "train" and self._further is not None:
                collected = self._resampled(collected, self._further)
        names, weights = self.reward_func_names, self.reward_weights
        judged = judged_by_all(collected, names, weights, self.processes)
        masks = list(collected.written)
        if self.args.mask_truncated_completions:
            masks = [mask & ended for mask, ended in zip(masks, collected.ended, strict=True)]
        masks = [x & (not out) for x, out in zip(masks, collected.left_out, strict=True)]
        tokens, learned = self._noted.lengths(collected, masks, mode)
        learnable = replace(collected.to_learn(), learned=masks, generated=learned)
        learnable.advantages = torch.zeros(len(rows))
        if self.teaching is not None:
            learnable = self.teaching.asked(learnable, collected, mode)
        rewarding = self.teaching if self.teaching and self.teaching.in_reward else None
        args = self.args
        several_steps = args.gradient_accumulation_steps % self._generations.uses
        model, size = self.model, args.eval_batch_size
        if mode == "train":
            model, size = self.model_wrapped, args.per_device_train_batch_size
            self.state.num_input_tokens_seen += tokens
        # The log-probs of a rollout_func may be another policy's.
        sampled, users = collected.logprobs_at(self.temperature), None
        if self.rollout_func is not None:
            sampled, users = None, of_all_or_none(sampled, self.processes)
        if (self.learns_kl and self._reference is not None) or rewarding is not None:
            sampled = None  # scored as the reference is: else rounding would be learned as a KL
        correction = None if users is None else self._correction
        limit = PassLimit(size, args.micro_batch_tokens)
        reads_old = (self.needs_old or several_steps) and not self._loss.only_teachers
        if reads_old or correction is not None or rewarding is not None:
            learnable.old_logprobs = self._scorer.old(model, learnable, sampled, limit)
        if users is not None:
            if correction is not None:
                correction(learnable, users, self._metrics[mode], self._loss.objective.loss.kind)
            if args.off_policy_mask_threshold is not None:
                learnable.sampler_logprobs = users
        kl = None
        if self._reference is not None:
            ref = self._scorer.reference(model, self._reference, learnable, limit)
            learnable.ref_logprobs = ref
            if learnable.old_logprobs is not None:
                triples = zip(learnable.old_logprobs, ref, masks, strict=True)
                kl = torch.stack([(old - ref)[mask].sum() for old, ref, mask in triples])
                kl = self.kl_coef * kl
                self._metrics[mode].add(self._kl_metric(learnable))
        if rewarding is not None:
            kl = rewarding.priced(learnable, limit, self._metrics[mode], self.learns_kl, kl)
        if kl is not None:
            kl = self.processes.joined(kl, [len(kl)] * self.processes.count).cpu()
        advantages, spreadless = self.advantages_of(judged, kl, group, mode)
        self._noted.rewards(judged, spreadless, mode)
        self._noted.responses(collected, judged, advantages)
        if mode == "eval" and self.shown is not None:
            self._noted.show_later(collected, judged)
        if mode == "train" and self.args.ledger:
            self._enter(collected, learnable, advantages)
        first = self.processes.index * len(rows)
        learnable.advantages = advantages[first : first + len(rows)].clone()
        self._generations.made[mode] += 1
        return learnable

    def _enter(self, collected: Samples, learnable: Samples, advantages: Tensor) -> None:
        """Enters the responses of all processes into the ledger."""
        if self.teaching is not None:
            learnable = self.teaching.noted(learnable)
        recorded = collected.recorded().without("columns", "completions", "noted")
        further = ["learned", "token_advantages"]
        further += ["teachers", "teacher_prompt_ids", "teacher_logprobs"]
        recorded = replace(recorded, **{name: getattr(learnable, name) for name in further})
        of_all = recorded.gathered(self.processes)
        if self._ledger is None:
            return
        of_teachers = {} if self.teaching is None else self.teaching.columns(of_all)
        generation = self._generations.made["train"] + 1
        self._ledger.add(generation, of_all, self.state.global_step, advantages, of_teachers)

    def _seed_of_responses(self) -> int:
        return self._generations.seed_of("responses", "train" if self.model.training else "eval")

    def _kl_metric(self, learnable: Samples) -> Parts:
        """The metric "kl" of a generation's responses; by default there is none."""
        return {}

    def _collected(self, rows: list[dict[str, Any]], group: int) -> Samples:
        """Responses to the prompts of this process's rows, with their rewards."""
        first = self.processes.index * len(rows)
        size = 1 if len(rows) % group else group  # several processes may share a group
        keys = range(first // size, (first + len(rows)) // size)
        samples = self._collect(Asked(asked_of(rows), size, keys, self._seed_of_responses()))
        assert samples is not None
        return samples

    def _resampled(self, collected: Samples, further: PromptStream) -> Samples:
        """Replaces groups without a spread of rewards by the groups of further prompts."""
        group = self.num_generations

        def prompts_of(numbers: list[int]) -> Samples:
            data: Any = self.train_dataset
            return asked_of([data[i] for i in numbers for _ in range(group)])

        groups = len(collected) // group * self.processes.count
        seed = self._seed_of_responses()
        collected, _, noted = self._collect.resampled(
            collected, self._resampling, groups, further.take, prompts_of, seed
        )
        for name, value in noted.items():
            self._metrics["train"].add_number(name, value)
        return collected

    # Checkpoints.

    def identity(self) -> dict[str, Any]:
        teaching = self.teaching
        teachers = {} if teaching is None else {"teachers": teaching.models.identity()}
        return {**super().identity(), **trained_identity(self), **teachers}

    def own_settings(self) -> dict[str, Any]:
        code = identities_of(zip(self.reward_func_names, self.reward_funcs, strict=True))
        code |= {} if self.teaching is None else self.teaching.code()
        return {**super().own_settings(), "reward_funcs": self.reward_func_names, **code}

    def own_code(self) -> dict[str, Any]:
        advantage = getattr(self.args, "advantage", None)
        loss = getattr(self.args, "loss_type", None)
        return {**super().own_code(), **identities_of(own_functions(loss, advantage))}

    def own_state(self) -> dict[str, Any]:
        if self._ledger is not None:  # a resumed run does not sample the ledger's rows again
            self._ledger.flush()
        online = {
            **self._generations.state(),
            "table": self._logs.state() if self.log_completions else None,
            "further": None if self._further is None else self._further.state_dict(),
            "responder": {"rooms": self._rollouts.backend.rooms()},
            "reuses": self._scorer.reuses,
            "reference": self._follow.state(),
            "teacher": {} if self.teaching is None else self.teaching.models.follow.state(),
            "first_shown": asdict(self.shown[0]) if self.shown else None,
        }
        return {**super().own_state(), "online": online}

    def begin_training(self, resumed: Mapping[str, Any] | None) -> None:
        super().begin_training(resumed)
        state = None if resumed is None else resumed["own"]["online"]
        self._generations.load(state)
        if self.args.ledger and self.processes.is_main:
            settings = self.args.to_dict(), self.args.generation_arguments, self.own_code()
            self._ledger = GenerationLedger(self.own_folder, self.temperature, *settings)
            self._ledger.begin(self._generations.made["train"])
        if state is None:
            return
        if self.shown is not None:
            first = state.get("first_shown")
            self.shown[:] = [] if first is None else [ShownSamples(**first)]
        self._scorer.reuses = state["reuses"]
        if state.get("table"):
            self._logs.load(state["table"])
        self._rollouts.backend.reserve(state["responder"]["rooms"])
        if self._further is not None and state.get("further"):
            self._further.load_state_dict(state["further"])
        self._follow.load(state["reference"])
        if self.teaching is not None:
            self.teaching.models.follow.load(state["teacher"])

    def joined_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        accumulated = self.args.gradient_accumulation_steps
        online = between_generations(states[0]["online"], accumulated)
        return {**super().joined_state(states), "online": online}

    def own_mark(self) -> dict[str, Any]:
        further = None if self._further is None else self._further.state_dict()
        kept = self._generations.mark(), self._rollouts.backend.rooms(), further
        return {**super().own_mark(), "online": kept}

    def own_rewind(self, mark: Mapping[str, Any]) -> None:
        super().own_rewind(mark)
        generations, rooms, further = mark["online"]
        self._generations.rewind(generations)
        if self._further is not None:
            self._further.load_state_dict(further)
        self._rollouts.backend.reserve(rooms)

    # Logs.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs ``logs`` and, by TRL's names, the means of the metrics since the last log."""
        if self.model.training:
            logs.update(self._noted.take("train", self.state.num_input_tokens_seen))
        super().log(logs, start_time)
        if self.processes.is_main:
            self._noted.show(self.state.global_step, self.own_folder.path)
