"""What GRPOTrainer and RLOOTrainer share: prompts, responses, rewards, log-probs, logs."""

from __future__ import annotations

import importlib.util
import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastrl.collect.collector import Collector
from fastrl.collect.interaction import Interaction
from fastrl.collect.respond import Asked, Respond, RolloutFunction, Sampled
from fastrl.collect.responses import Collected, Responses
from fastrl.collect.tools import check_chats
from fastrl.core import set_seed
from fastrl.data.chat_prompts import encode_prompts
from fastrl.data.columns import check_reserved
from fastrl.data.prompts import Prompts, PromptStream
from fastrl.data.token_batch import Padded
from fastrl.learn.correction import on_policy
from fastrl.learn.dynamic_sampling import DynamicSampling
from fastrl.learn.experience import Minibatch
from fastrl.learn.nonfinite import NonFiniteNumbers
from fastrl.learn.penalties import Penalties
from fastrl.learn.samples import SampledResponses
from fastrl.learn.scorer import check_tokens, scoring_request
from fastrl.models import CausalLMPolicy
from fastrl.models.products import Products
from fastrl.models.scorer import ScoredPass
from fastrl.models.scoring import PassLimit, PolicyObjective
from fastrl.models.sharding import whole_weights
from fastrl.models.utils import check_trainable, context_length, modes_kept, without_dropout
from fastrl.plan.report import Plan
from fastrl.plan.skeleton import Skeleton
from fastrl.ref_model import RefModel
from fastrl.rewards.identity import identities_of
from fastrl.rollout import RolloutOutput
from fastrl.rollout.backends import Request, make_backend
from fastrl.rollout.sampling_params import end_tokens
from fastrl.run.checkpoints import BadCheckpoint
from fastrl.run.model_card import OwnModelCard
from fastrl.run.random_state import seed_at
from fastrl.run.transformers_nonfinite import FiniteStepsTrainer
from fastrl.settings import warn_of_idle
from fastrl.trainers.low_memory import LowMemoryTrainer
from fastrl.trainers.passes import on_all_processes, with_synchronised_last
from fastrl.trainers.router_loss import router_loss
from fastrl.trainers.sharded import ShardedTrainer
from fastrl.trainers.supervised import check_one_gpu, is_path, settings_of, trained_identity
from fastrl.trl.completions_table import CompletionsTable
from fastrl.trl.group_sampler import GroupSampler, in_groups
from fastrl.trl.log_probs import ResponseScorer
from fastrl.trl.metric_means import MetricMeans, Parts, mean_of
from fastrl.trl.passes import BatchScores, Pass
from fastrl.trl.planning import plan_online
from fastrl.trl.policy import adapted, loaded, padding_tokenizer, settle_tokens
from fastrl.trl.policy_loss import GroupLoss
from fastrl.trl.prompt_data import PromptRoom, check_data, refuse_dispatch, reserved_of
from fastrl.trl.reference import (
    Follow,
    following_weights,
    load_following_weights,
    model_of,
    reference_of,
)
from fastrl.trl.responses import Judged, note_lengths, note_rewards
from fastrl.trl.reward_functions import RewardFunctions
from fastrl.trl.rollout_correction import RolloutCorrection
from fastrl.trl.sample_ledger import GenerationLedger

_LOGGER = logging.getLogger(__name__)
_ON_HEAD = "an adapter on lm_head is not supported: leave 'lm_head' out of target_modules"


class OnlineTrainer(OwnModelCard, LowMemoryTrainer, ShardedTrainer, FiniteStepsTrainer, ABC):
    """transformers' Trainer that samples responses to prompts, has them judged, and learns from
    them.

    A batch of the loader has the prompts that are generated for at a time, and is there again in
    each of the steps that its responses serve, as in TRL. Runs are resumed bit for bit.

    Subclasses turn rewards into advantages, and log-probs into a loss. What some have in the place
    of sampling, or beside it, they set before ``super().__init__``.
    """

    args: Any
    model: Any
    processing_class: Any
    config: ClassVar[type]
    _tag_names: ClassVar[list[str]]
    needs_old: ClassVar[bool]  # whether the loss needs old log-probs where no step was taken since
    learns_kl: ClassVar[bool] = False  # whether rewards have the KL of old log-probs

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
    ):
        name = type(self).__name__
        self._rollout_func = rollout_func
        if rollout_func is not None and (tools or environment_factory):
            raise ValueError(
                "rollout_func takes the place of sampling, and tools and environment_factory are "
                "part of it: leave them out, and mark the policy's tokens by an env_mask"
            )
        interaction = Interaction(tools, environment_factory)
        self.tools, self._interaction = interaction.tools, interaction
        environments = interaction.environments
        if environments is not None:
            self._env_tools = {
                name: list(found.functions.values()) for name, found in environments.boxes.items()
            }
            self._environment_pool = environments.pool
            if train_dataset is None:
                train_dataset = environments.placeholder(args)
        if interaction:
            check_chats(train_dataset)
        if args is None:
            path = model if isinstance(model, str) else model.config.name_or_path
            args = self.config(output_dir=f"{Path(path).name}-{name.removesuffix('Trainer')}")
        if not isinstance(args, self.config):
            raise TypeError(f"args must be a {self.config.__name__}, got {type(args).__name__}")
        args = settings_of(args, self.config)
        if args.label_smoothing_factor:
            raise ValueError(f"{name} does not smooth labels: leave label_smoothing_factor at 0")
        warn_of_idle(args, stacklevel=3)
        if train_dataset is None:
            raise ValueError("`train_dataset` is required: a data set with a column prompt")
        if peft_config is not None and getattr(peft_config, "is_prompt_learning", False):
            raise ValueError(
                "prompt-learning adapters shift the positions of tokens and are not supported: use "
                "LoRA"
            )
        check_data(train_dataset, eval_dataset, args, asked=environments is None)
        set_seed(args.seed)
        load = dict(args.model_init_kwargs or {})
        load.setdefault("trust_remote_code", args.trust_remote_code)
        own = interaction.rewards
        rewards = RewardFunctions(reward_funcs, reward_processing_classes, dict(load), own, args)
        self._tokenizer = padding_tokenizer(processing_class, model, args)
        self._check_resampling(args, train_dataset)
        interaction.read_by(self._tokenizer, args.chat_template_kwargs or {})
        self._correction: RolloutCorrection | None = None
        if self.rollout_func is not None and args.vllm_importance_sampling_correction:
            self._correction = RolloutCorrection(args)
        if "lm_head" in (getattr(peft_config, "target_modules", None) or ()):
            raise ValueError(_ON_HEAD)
        if args.use_liger_kernel:
            _refuse_liger(name)
        model = self._loaded(model, args, quantization_config)
        most = args.generation_arguments.get("max_new_tokens")
        self._room = PromptRoom(
            model, most, self._tokenizer, args.chat_template_kwargs or {}, args.micro_batch_tokens
        )
        if self.rollout_func is None and environments is None:
            self._room.check_data(train_dataset, eval_dataset)
        model = self._adapted(model, args, peft_config)
        self._policy = CausalLMPolicy(model)
        self._reference: RefModel | None = None
        if args.beta:
            self._reference = reference_of(args, self._policy, fresh=peft_config is not None)
        self.rewards = rewards
        penalties = Penalties.of(
            args.missing_eos_penalty,
            args.overlong_buffer,
            args.overlong_penalty,
            args.max_completion_length,
            "max_completion_length",
        )
        self._further: PromptStream | None = None  # prompts of dynamic sampling
        if args.dynamic_sampling_rounds:
            seed = seed_at(args.seed, "further prompts") % 2**32
            self._further = PromptStream(len(train_dataset), seed)
        self.reward_funcs, self.reward_func_names = rewards.functions, rewards.names
        self.reward_processing_classes = rewards.processing_classes
        self.reward_weights = rewards.weights
        self.num_generations = args.num_generations
        self.num_generations_eval = args.num_generations_eval or args.num_generations
        self.num_iterations, self.temperature, self.beta = (
            args.num_iterations,
            args.temperature,
            args.beta,
        )
        self.max_completion_length = args.max_completion_length
        self.chat_template_kwargs = dict(args.chat_template_kwargs or {})
        self.log_completions = args.log_completions
        router = router_loss(model, args.router_aux_loss_coef)
        self.aux_loss_enabled, self.router_aux_loss_coef = router
        self._metrics = {name: MetricMeans() for name in ("train", "eval")}
        self._logs = CompletionsTable(args.generation_batch_size)
        self._extra_columns: defaultdict[str, list] = defaultdict(list)
        self._extra_metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._step = 0  # forward and backward passes
        self._generations = {"train": 0, "eval": 0}  # batches of responses so far
        self._seconds = 0.0  # of this optimizer step's
        self._buffer: list[SampledResponses] | None = None
        args.remove_unused_columns = False
        args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"
        super().__init__(
            model=model,
            args=args,
            data_collator=_as_it_is,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=self._tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        check_one_gpu(self.args)
        # Losses are means over a batch: transformers divides them by the batches of a step.
        self.model_accepts_loss_kwargs = False
        self.loss_is_scaled_for_ga = None
        if self._reference is not None:
            self._reference.place(self._policy, self.accelerator)
        if args.sync_ref_model:
            self.add_callback(Follow(self._reference, args))
        self._scorer = ResponseScorer(
            self.args,
            self._tokenizer.pad_token_id,
            self.accelerator,
            self._autocast,
            self.processes,
        )
        rewards.to(self.args.device)
        self.products = Products(self.processes)
        self._resampling = DynamicSampling(
            self.num_generations, args.dynamic_sampling_rounds, self.processes
        )
        ends = end_tokens(self.accelerator.unwrap_model(self.model), self._tokenizer).tolist()
        self._end_ids, self._ends = ends, {*ends, self._tokenizer.pad_token_id}
        self._sampler = make_backend(
            self.args, self._tokenizer, self._autocast, self.processes_index
        )
        self._collect = Collector(
            self._respond_by(),
            rewards,
            penalties,
            self.processes,
            self._ready,
            NonFiniteNumbers(self.args.on_nonfinite, counts=False),
            lambda: {
                "trainer_state": self.state,
                "log_extra": self._log_completion_extra,
                "log_metric": self._log_metric,
            },
            self._noted_columns,
        )
        self._ledger: GenerationLedger | None = None
        if self.args.ledger and self.processes.is_main:
            self._ledger = GenerationLedger(Path(str(self.args.output_dir)), self.args)
        self._loss = self._make_loss()
        self.model.add_model_tags([*self._tag_names, "fastrl"])
        self.warn_of_lost_updates(self.model, stacklevel=3)

    @property
    def processes_index(self) -> int:
        return self.accelerator.process_index

    def _autocast(self) -> Any:
        return self.compute_loss_context_manager()

    @property
    def ref_model(self) -> Any:
        """The reference as a model of its own; None where there is no KL, or the policy's base is
        it."""
        return model_of(self._reference, self.accelerator)

    def _loaded(self, model: Any, args: Any, quantization: Any) -> Any:
        """The model, checked."""
        if args.model_init_kwargs and not is_path(model):
            warnings.warn(
                "the model is loaded already: model_init_kwargs change nothing", stacklevel=4
            )
        model = loaded(model, args, quantization)
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False) or not model.get_output_embeddings():
            raise ValueError(
                f"{type(model).__name__} is no causal language model: load it with "
                "AutoModelForCausalLM"
            )
        return model

    def _adapted(self, model: Any, args: Any, peft_config: Any) -> Any:
        """The model as it is trained, with an adapter if there is a ``peft_config``."""
        adapts = peft_config is not None or hasattr(model, "peft_config")
        settle_tokens(model, self._tokenizer, args, adapts)
        model = adapted(model, peft_config, args)
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear and any("lora_" in x for x, _ in head.named_parameters()):
            raise ValueError(_ON_HEAD)
        if args.disable_dropout:
            without_dropout(model)
        check_trainable(model)
        return model

    def plan(self, prompt_tokens: int, response_tokens: int) -> Plan:
        """What training on such prompts and responses needs of memory, phase by phase: from a
        rehearsal without memory, in which nothing of this trainer is run or changed.

        Args:
            prompt_tokens, response_tokens: of the longest, at least 2.

        Returns:
            a :class:`fastrl.plan.report.Plan`, whose ``peak`` is in bytes.
        """
        skeleton, lengths = Skeleton.of(self.model), (prompt_tokens, response_tokens)
        return plan_online(type(self), skeleton, self.args, *lengths, self.args.device.type)

    def _check_resampling(self, args: Any, data: Any) -> None:
        """
        Raises:
            ValueError: dynamic sampling of prompts that cannot be drawn one by one.
        """
        if not args.dynamic_sampling_rounds:
            return
        where = {
            "a stream of prompts": not hasattr(data, "__len__"),
            "a rollout_func in several processes": self.rollout_func is not None
            and args.world_size > 1,
        }
        for what in (what for what, there in where.items() if there):
            raise ValueError(
                f"dynamic_sampling_rounds draws single prompts anew, which goes not with {what}: "
                "leave dynamic_sampling_rounds at 0"
            )

    def _decode(self, prompt: Tensor, response: Tensor) -> str:
        return self._tokenizer.decode(response, skip_special_tokens=True)

    def _ended(self, response: Tensor, reason: str = "") -> bool:
        return bool(len(response)) and int(response[-1]) in self._ends

    def responding_by(self, function: Any) -> RolloutFunction:
        """What answers prompts by a ``rollout_func``."""
        return RolloutFunction(
            function,
            self,
            self.accelerator.unwrap_model(self.model),
            self._tokenizer,
            self._decode,
            self._ended,
            reserved_of(environments=False),
            self.temperature,
        )

    @property
    def rollout_func(self) -> Any:
        """What answers prompts in the place of sampling; None: nothing does. It may be set."""
        return self._rollout_func

    @rollout_func.setter
    def rollout_func(self, function: Any) -> None:
        self._rollout_func = function
        self._collect.respond = self._respond_by()

    def _respond_by(self) -> Respond:
        """What answers prompts."""
        if self.rollout_func is not None:
            return self.responding_by(self.rollout_func)
        args, tokenizer, ends = self.args, self._tokenizer, self._end_ids
        arguments = {**args.generation_arguments, "pad_token_id": tokenizer.pad_token_id}
        arguments.setdefault("eos_token_id", ends)
        policy = self.accelerator.unwrap_model(self.model)

        def run(request: Request) -> RolloutOutput:
            return self._sampler(self.accelerator.unwrap_model(self.model), request)

        return self._interaction.respond(
            Sampled(run, arguments, self._decode, self._ended, self._encoded),
            tokenizer,
            self.chat_template_kwargs,
            ends,
            self.rewards.event_loop,
            args.max_tool_calling_iterations,
            args.max_completion_length,
            context_length(policy),
            args.temperature,
        )

    def _encoded(self, prompts: Prompts) -> Prompts:
        ids = encode_prompts(prompts.said, self._tokenizer, self.chat_template_kwargs)
        for i, prompt in enumerate(ids):
            self._room.check(prompt, f"prompt {i}, {prompts.said[i]!r:.80},")
        return prompts.with_ids(ids, self._tokenizer)

    def _ready(self) -> AbstractContextManager[None]:
        """Context in which sampling does not wait for other processes."""
        if self.rollout_func is not None:
            return nullcontext()
        return whole_weights(self.model_wrapped)

    @property
    def environments(self) -> list[Any] | None:
        """Those of the latest responses; None before the first, or without a factory."""
        made = self._interaction.environments
        return None if made is None else made.current

    # What subclasses do.

    @abstractmethod
    def _make_loss(self) -> GroupLoss:
        """By the settings, at the end of the construction."""

    @abstractmethod
    def advantages_of(
        self, judged: Judged, kl: Tensor | None, group: int, mode: str
    ) -> tuple[Tensor, Tensor]:
        """Advantages [B] of the responses of all processes, and which groups have no spread of
        rewards, [B] or [B / group] bool.

        Args:
            kl: Σ_t (log π_old - log π_ref) of each response, [B], where there is a reference.
        """

    def policy_loss(self, given: Pass) -> Tensor:
        """The loss of a pass that has its scores, see
        :class:`fastrl.trl.policy_loss.GroupLoss`."""
        part, scores = given.part, given.scores
        assert scores is not None
        given.loss = scores.loss
        if given.loss is None:
            kept = part.old.chosen
            if self.args.off_policy_mask_threshold is not None:
                near = on_policy(part, scores.logprobs, self.args.off_policy_mask_threshold)
                kept = near if kept is None else kept * near
            given.loss = self._loss(part, scores, kept, given.denominator)
        return given.loss

    def _coefficient(self) -> float:
        """Of the mean entropy, which the loss is less."""
        return 0.0

    def note_batch(self, batch: BatchScores, mode: str) -> None:
        """Logs what is known of a batch by its log-probs."""

    def _with_chosen(self, model: nn.Module, whole: Minibatch, parts: list[Pass]) -> Minibatch:
        """A batch that knows which of its tokens are learned, where that hangs on all of them."""
        return whole

    # Data.

    def get_train_dataloader(self) -> Any:
        args = self.args
        data: Any = self.train_dataset
        prompts = args.generation_batch_size // self.num_generations
        uses = args.steps_per_generation * self.num_iterations
        if not hasattr(data, "__len__"):
            if args.shuffle_dataset:
                data = data.shuffle(seed=args.seed)
            data = in_groups(data, self.num_generations, prompts, uses)

        def sampler(rows: Any = None) -> GroupSampler:
            rows = data if rows is None else rows
            shuffles = bool(args.shuffle_dataset)
            return GroupSampler(rows, self.num_generations, prompts, uses, shuffles, args.seed)

        size = args.train_batch_size * args.steps_per_generation
        return self.loader(data, size, sampler, training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        held_out: Any = self.eval_dataset
        data: Any = held_out if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = held_out[data]
        if data is None:
            raise ValueError("evaluation needs an eval_dataset")
        args, group = self.args, self.num_generations_eval
        workers = args.dataloader_num_workers

        def in_order(rows: Any) -> GroupSampler:
            return GroupSampler(rows, group, seed=args.seed)

        try:
            if not hasattr(data, "__len__"):
                refuse_dispatch(args)
                self.accelerator.dataloader_config.dispatch_batches = False
                data = in_groups(data.shuffle(seed=args.seed), group)
                args.dataloader_num_workers = 0
            return self.loader(data, args.eval_batch_size, in_order)
        finally:
            args.dataloader_num_workers = workers

    # Steps.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.products.on():
                return super().train(*args, **kwargs)
        finally:
            if self._ledger is not None:
                self._ledger.flush()

    def adopt(self, machine: Mapping[str, Any]) -> None:
        self.products.adopt(machine)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        begin = time.perf_counter()
        with self.products.on(model, self.ref_model):
            model.train()
            # By rewards that may draw: before the passes do.
            samples = self.ready_batch(inputs)
            passes, losses = self._passes(model, samples, "train"), []
            contexts = with_synchronised_last(len(passes), model, self.accelerator)
            for each, context in zip(passes, contexts, strict=True):
                with context:
                    losses.append(super().training_step(model, each, *args, **kwargs))
            loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
            self._note(passes, "train")
        self._step += 1
        self._seconds += time.perf_counter() - begin
        if self.accelerator.sync_gradients:
            self._metrics["train"].add_number("step_time", self._seconds)
            self._seconds = 0.0
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._generations["eval"] = 0  # all evaluations draw the same random numbers
        with self.products.on(self.model, self.ref_model):
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        samples = self.ready_batch(inputs)
        with torch.no_grad(), self._autocast():
            passes = self._passes(model, samples, "eval")
            loss = torch.stack([self.compute_loss(model, each).detach() for each in passes]).sum()
            self._note(passes, "eval")
        if self.accelerator.num_processes > 1:
            # Of all, as transformers takes a last batch for longer than the data set, and cuts it.
            loss = self.accelerator.reduce(loss, reduction="mean")
        return loss, None, None

    def ready_batch(self, batch: Any) -> Any:
        """Responses to a batch of rows, in training those of this step's turn."""
        if not isinstance(batch, list):
            return super().ready_batch(batch)
        if not self.model.training:
            return self._learnable(batch, "eval")
        steps = self.args.steps_per_generation
        if self._buffer is None or self._step % (steps * self.num_iterations) == 0:
            whole = self._learnable(batch, "train")
            generator = torch.Generator().manual_seed(self._seed_of("order"))
            order = torch.randperm(len(whole), generator=generator).tolist()
            size = len(whole) // steps
            self._buffer = [whole.select(order[i * size : (i + 1) * size]) for i in range(steps)]
            self._sampler.before_update()
        return self._buffer[self._step % steps]

    def _passes(self, model: nn.Module, samples: SampledResponses, mode: str) -> list[Pass]:
        """A batch, in passes of at most ``micro_batch_tokens``."""
        most = self.args.micro_batch_tokens
        uses = self.args.steps_per_generation if mode == "train" else 1
        generated = max(samples.generated, 1.0) / self.accelerator.num_processes / uses
        padding = Padded() if self.aux_loss_enabled else self._scorer.padding(model)
        device, pad_token = self.args.device, self._tokenizer.pad_token_id
        kl_coef = 0.0 if self.learns_kl else self.beta
        whole = samples.minibatch(pad_token, padding, device, kl_coef)
        denominator = self._loss.denominator(whole, generated)
        if most is None:
            return [Pass(whole, whole, denominator)]
        prompts, responses = (
            list(map(len, ids)) for ids in (samples.prompt_ids, samples.completion_ids)
        )
        check_tokens(most, prompts, responses, "response {0} and its prompt".format)
        limit = PassLimit(whole.size, most)

        def passes() -> list[Pass]:
            parts = on_all_processes(whole.split(limit), self.processes)
            return [Pass(part, whole, denominator, counts) for part, counts in parts]

        found = passes()
        if len(found) > 1:
            whole = self._with_chosen(model, whole, found)
            found = passes()
        return found

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: Pass,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The part of a batch's loss that a pass has."""
        if return_outputs:
            raise ValueError(f"{type(self).__name__} returns no outputs beside the loss")
        part, aux = inputs.part, self.aux_loss_enabled
        processes = self.accelerator.num_processes
        objective = self._loss.in_one_pass(inputs, self._coefficient(), processes)
        scored = self._scored(model, part, objective, aux)
        inputs.scores = scored.scores
        loss = self.policy_loss(inputs)
        if aux:
            aux_loss = scored.output.aux_loss * (part.size / inputs.whole.size)
            inputs.aux_loss = aux_loss.detach()
            loss = loss + self.router_aux_loss_coef * aux_loss
        return loss if inputs.counts else loss * 0

    def _scored(
        self,
        model: nn.Module,
        part: Minibatch,
        objective: PolicyObjective | None = None,
        aux: bool = False,
    ) -> ScoredPass:
        """Log-probs and entropies of the tokens that are learned, and the loss of an objective."""
        model_pass = self._scorer.model_pass(part)
        request = scoring_request(
            part.tokens,
            model_pass,
            temperature=self.temperature,
            entropy=True,
            values=False,
            objective=objective,
        )
        return self._scorer.policy(model, dict(model_pass.inputs), request, aux)

    def _note(self, passes: list[Pass], mode: str) -> None:
        """Logs what is known of a batch that was learned from."""
        own = [each for each in passes if each.counts]
        batch = Pass.joined(own)
        noted = {"entropy": mean_of(batch.entropies)}
        if self.aux_loss_enabled:
            losses = [x.aux_loss for x in own if x.aux_loss is not None]
            noted["aux_loss"] = mean_of(torch.stack(losses).sum()[None])
        self.note_batch(batch, mode)
        self._metrics[mode].add(noted, of_none=0.0)

    # Responses and rewards.

    def _learnable(self, rows: list[dict[str, Any]], mode: str) -> SampledResponses:
        """Responses to the prompts of some rows, judged."""
        of = "train_dataset" if mode == "train" else "eval_dataset"  # streams name columns in rows
        check_reserved(rows[0], of, reserved_of(self._interaction.environments is not None))
        group = self.num_generations if mode == "train" else self.num_generations_eval
        with modes_kept(self.model):  # which users' functions may change
            collected = self._collected(rows, group)
            if mode == "train" and self._further is not None:
                collected = self._resampled(collected, self._further)
        self._warn_of_unjudged(collected)
        found = collected.responses
        masks = list(found.written)
        if self.args.mask_truncated_completions:
            masks = [mask & ended for mask, ended in zip(masks, found.ended, strict=True)]
        for i in collected.left_out:
            masks[i] = torch.zeros_like(masks[i])
        learnable = SampledResponses(
            list(found.prompts.ids),
            found.rollout.sequences,
            masks,
            torch.zeros(len(rows)),
            self._note_lengths(found, masks, mode),
        )
        args = self.args
        behind = args.gradient_accumulation_steps % (
            args.steps_per_generation * self.num_iterations
        )
        model, size = self.model, args.eval_batch_size
        if mode == "train":
            model, size = self.model_wrapped, args.per_device_train_batch_size
        # Those of a rollout_func may be another policy's.
        own, others = found.rollout.logprobs_at(self.temperature), None
        if self.rollout_func is not None:
            own, others = None, self._of_all_or_none(own)
        if self.learns_kl and self._reference is not None:
            own = None  # scored as the reference is: else rounding would be a KL, and learned
        correction = None if others is None else self._correction
        limit = PassLimit(size, args.micro_batch_tokens)
        if self.needs_old or behind or correction is not None:
            learnable.old = self._scorer.old(model, learnable, own, limit)
        if others is not None:
            if correction is not None:
                correction(learnable, others, self._metrics[mode])
            if args.off_policy_mask_threshold is not None:
                learnable.sampled = others
        kl = None
        if self._reference is not None:
            learnable.ref = self._scorer.reference(model, self._reference, learnable, limit)
            if learnable.old is not None:
                triples = zip(learnable.old, learnable.ref, masks, strict=True)
                kl = torch.stack([(old - ref)[mask].sum() for old, ref, mask in triples])
        judged = self._judged(collected)
        if kl is not None:
            self._metrics[mode].add(self._kl_metric(learnable))
            kl = self._gathered(kl)
        advantages, spreadless = self.advantages_of(judged, kl, group, mode)
        self._note_rewards(judged, spreadless, mode)
        self._note_responses(collected, judged, advantages)
        if mode == "train" and self.args.ledger:
            self._enter(collected, masks, advantages)
        first = self.processes_index * len(rows)
        learnable.advantages = advantages[first : first + len(rows)].clone()
        self._generations[mode] += 1
        return learnable

    def _enter(self, collected: Collected, masks: list[Tensor], advantages: Tensor) -> None:
        """Enters the responses of all processes into the ledger."""
        every, masks_of_all = (
            collected.of_all(self.processes),
            self.processes.objects_at_main(masks),
        )
        if self._ledger is not None:
            generation = self._generations["train"] + 1
            joined = [mask for part in masks_of_all for mask in part]
            self._ledger.add(generation, every, self.state.global_step, joined, advantages)

    def _seed_of(self, what: str) -> int:
        """Of the next batch of responses, the same in all processes, however many there are."""
        mode = "train" if self.model.training else "eval"
        return seed_at(self.args.seed, what, mode, self._generations[mode])

    def _of_all_or_none(self, logprobs: list[Tensor] | None) -> list[Tensor] | None:
        """
        Raises:
            ValueError: a ``rollout_func`` gave log-probs in one process and none in another.
        """
        given = logprobs is not None
        if self.processes.any(given) and self.processes.any(not given):
            raise ValueError(
                "rollout_func returned logprobs in one process and None in another: return them in "
                "all, or in none"
            )
        return logprobs

    def _kl_metric(self, learnable: SampledResponses) -> Parts:
        """What is logged as "kl" once for all responses of a generation."""
        return {}

    def _collected(self, rows: list[dict[str, Any]], group: int) -> Collected:
        """Responses to the prompts of this process's rows, with their rewards."""
        first = self.processes_index * len(rows)
        size = 1 if len(rows) % group else group  # a group may be of several processes
        keys = range(first // size, (first + len(rows)) // size)
        found = self._collect(Asked(asked_of(rows), size, keys, self._seed_of("responses")))
        assert found is not None
        return found

    def _resampled(self, collected: Collected, further: PromptStream) -> Collected:
        """With groups of further prompts in the place of those without a spread of rewards, see
        ``dynamic_sampling_rounds``."""
        group = self.num_generations

        def prompts_of(numbers: list[int]) -> Prompts:
            data: Any = self.train_dataset
            return asked_of([data[i] for i in numbers for _ in range(group)])

        groups = len(collected) // group * self.processes.count
        seed = self._seed_of("responses")
        collected, _, noted = self._collect.resampled(
            collected, self._resampling, groups, further.take, prompts_of, seed
        )
        for name, value in noted.items():
            self._metrics["train"].add_number(name, value)
        return collected

    def _warn_of_unjudged(self, collected: Collected) -> None:
        for i in collected.rewards.unjudged[:1]:
            prompts = collected.responses.prompts
            row = {name: values[i] for name, values in prompts.columns.items()}
            row |= {"prompt": prompts.said[i], "completion": collected.responses.completions[i]}
            _LOGGER.warning(
                "All reward functions returned None for the following kwargs:\n%s\nNothing is "
                "learned from such responses: let one function return a number",
                row,
            )

    def _noted_columns(self) -> dict[str, list[Any]]:
        """What reward functions noted by ``log_extra`` since the last call."""
        noted = dict(self._extra_columns)
        self._extra_columns.clear()
        return noted

    def _judged(self, collected: Collected) -> Judged:
        own = collected.rewards
        table = torch.stack([*own.by_function.values(), own.total, collected.penalties], 1).float()
        *columns_of_all, total, off = self._gathered(table).unbind(1)
        by_function = torch.stack(columns_of_all, 1)
        if by_function.isnan().all():
            _LOGGER.warning(
                "Nothing is learned from this generation: no reward function returned a number for "
                "any of its %d responses (%s)",
                len(by_function),
                ", ".join(self.reward_func_names),
            )
        rewards = (by_function * self.reward_weights).nansum(1) - off
        rewards[total.isnan()] = torch.nan
        return Judged(by_function, rewards)

    def _log_completion_extra(self, column: str, values: list) -> None:
        self._extra_columns[column].extend(values)

    def _log_metric(self, name: str, value: float) -> None:
        self._extra_metrics[name].append(value)

    # Logs.

    def _note_lengths(self, found: Responses, masks: list[Tensor], mode: str) -> float:
        """Logs the lengths; returns the learned tokens of all processes' responses."""
        own = [
            [len(prompt), int(written.sum()), not ended, int(mask.sum())]
            for prompt, written, ended, mask in zip(
                found.prompts.ids, found.written, found.ended, masks, strict=True
            )
        ]
        prompts, lengths, cut, learned = self._gathered(torch.tensor(own)).t()
        if mode == "train":
            self.state.num_input_tokens_seen += int(prompts.sum() + lengths.sum())
        note_lengths(self._metrics[mode], lengths, cut.bool())
        if found.tool_calls is not None:
            calls, failures = map(torch.tensor, map(float, found.tool_calls))
            count = torch.tensor(float(len(found)))
            self._metrics[mode].add({"tools/call_frequency": (calls, count)})
            self._metrics[mode].add({"tools/failure_frequency": (failures, calls)}, of_none=0.0)
        return float(learned.sum())

    def _note_rewards(self, judged: Judged, spreadless: Tensor, mode: str) -> None:
        metrics = self._metrics[mode]
        note_rewards(metrics, self.reward_func_names, judged, spreadless)
        values = self._extra_metrics
        for name in sorted({name for names in self.processes.objects([*values]) for name in names}):
            metrics.add({name: mean_of(torch.tensor(values.get(name, [])))})
        values.clear()

    def _note_responses(self, collected: Collected, judged: Judged, advantages: Tensor) -> None:
        """Keeps them for the table of the latest responses, which the main process has."""
        logs, found = self._logs, collected.responses
        own = found.prompts.said, found.completions, collected.extra
        parts = self.processes.objects_at_main(own)
        names = sorted({name for _, _, extra in parts for name in extra})
        for asked, said, extra in parts:
            logs["prompt"].extend(asked)
            logs["completion"].extend(said)
            for name in names:
                logs["extra"][name].extend(extra.get(name, [None] * len(asked)))
        for name, column in zip(self.reward_func_names, judged.by_function.t(), strict=True):
            logs["rewards"][name].extend(column.tolist())
        logs["advantages"].extend(advantages.tolist())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With the means of what was noted since the last log, by TRL's names."""
        mode = "train" if self.model.training else "eval"
        prefix = "eval_" if mode == "eval" else ""
        noted: Any = self._metrics[mode].take(self.processes)
        if noted:
            noted = {"num_tokens": float(self.state.num_input_tokens_seen), **noted}
        logs.update({f"{prefix}{name}": value for name, value in noted.items()})
        super().log(logs, start_time)
        if self.log_completions and self.accelerator.is_main_process and self._logs["prompt"]:
            step = self.state.global_step
            self._logs.show(step, self.args.num_completions_to_print)
            self._logs.save(Path(str(self.args.output_dir)), step)
            self._logs.report(self.args.report_to, step, self.args.log_unique_prompts)

    def _gathered(self, own: Tensor) -> Tensor:
        """Of all processes, one after the other, on the host."""
        if self.accelerator.num_processes == 1:
            return own.cpu()
        return self.accelerator.gather(own.to(self.args.device)).cpu()

    def _sum_of_all(self, own: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return own.detach().cpu()
        return self.accelerator.reduce(own.detach().to(self.args.device), reduction="sum").cpu()

    # Checkpoints.

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), **trained_identity(self)}

    def own_settings(self) -> dict[str, Any]:
        code = identities_of(zip(self.reward_func_names, self.reward_funcs, strict=True))
        return {**super().own_settings(), "reward_funcs": self.reward_func_names, **code}

    def own_state(self) -> dict[str, Any]:
        if self._ledger is not None:  # what it holds is not drawn again
            self._ledger.flush()
        return {
            **super().own_state(),
            "online": {
                "step": self._step,
                "generations": self._generations["train"],
                "uses": self.args.steps_per_generation * self.num_iterations,
                "buffer": None if self._buffer is None else [x.state() for x in self._buffer],
                "metrics": self._metrics["train"].state(),
                "table": self._logs.state() if self.log_completions else None,
                "further": None if self._further is None else self._further.state_dict(),
                "responder": {"rooms": self._sampler.rooms()},
                "reuses": self._scorer.reuses,
                "reference": following_weights(self._reference, self.args),
            },
        }

    def begin_training(self, resumed: Mapping[str, Any] | None) -> None:
        super().begin_training(resumed)
        self._step, self._buffer, self._generations["train"] = 0, None, 0
        own = None if resumed is None else resumed["own"]["online"]
        if self._ledger is not None:
            self._ledger.begin(0 if own is None else own["generations"])
        if own is None:
            return
        self._step, self._scorer.reuses = own["step"], own["reuses"]
        self._generations["train"] = own["generations"]
        if own["buffer"] is not None:
            self._buffer = [SampledResponses.of_state(x) for x in own["buffer"]]
        self._metrics["train"].load(own["metrics"], self.args.device)
        if own.get("table"):
            self._logs.load(own["table"])
        self._sampler.reserve(own["responder"]["rooms"])
        if self._further is not None and own.get("further"):
            self._further.load_state_dict(own["further"])
        load_following_weights(self._reference, own["reference"])

    def joined_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Where responses are sampled next, without the metrics since the last log.

        Raises:
            BadCheckpoint: in the midst of responses that the processes have sampled.
        """
        own, args = states[0]["online"], self.args
        uses = own["uses"]
        if own["step"] % uses:
            raise BadCheckpoint(
                f"the checkpoint is {own['step'] % uses} of {uses} batches into what each process "
                "has sampled: resume it with as many processes, or from a checkpoint between two "
                f"generations (save_steps × {args.gradient_accumulation_steps} a multiple of "
                f"{uses})"
            )
        online = {**own, "step": 0, "buffer": None, "metrics": MetricMeans().state()}
        return {**super().joined_state(states), "online": online}

    def drop_metrics(self) -> None:
        self._metrics["train"].shorten(0)

    def own_mark(self) -> dict[str, Any]:
        made, metrics = self._generations["train"], len(self._metrics["train"])
        further = None if self._further is None else self._further.state_dict()
        kept = self._step, made, self._buffer, metrics, self._sampler.rooms(), further
        return {**super().own_mark(), "online": kept}

    def own_rewind(self, mark: Mapping[str, Any]) -> None:
        super().own_rewind(mark)
        self._step, made, self._buffer, metrics, rooms, further = mark["online"]
        if self._further is not None:
            self._further.load_state_dict(further)
        self._generations["train"] = made
        self._metrics["train"].shorten(metrics)
        self._sampler.reserve(rooms)


def asked_of(rows: Sequence[Mapping[str, Any]]) -> Prompts:
    """The prompts of rows, whose other columns go to environments and reward functions."""
    return Prompts.of_rows(rows, [row.get("prompt") for row in rows])


def _as_it_is(rows: list[Any]) -> list[Any]:
    return rows


def _refuse_liger(name: str) -> None:
    """
    Raises:
        ImportError, ValueError: always; Liger's kernels are not there, or not for this trainer.
    """
    remedy = f"leave use_liger_kernel out, as {name} computes losses by kernels of its own"
    if importlib.util.find_spec("liger_kernel") is None:
        raise ImportError(f"use_liger_kernel=True needs the package liger-kernel: {remedy}")
    raise ValueError(f"use_liger_kernel=True replaces the model's layers: {remedy}")
