"""What GRPOTrainer and RLOOTrainer share: prompts, responses, rewards, log-probs, logs."""

from __future__ import annotations

import copy
import logging
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback

from fastrl.core import set_seed
from fastrl.data.chat import as_answer
from fastrl.data.chat_prompts import encode_prompts
from fastrl.data.choose_padding import logprobs_of_labels, runs_packed
from fastrl.data.padding_free import PaddingFree
from fastrl.data.token_batch import Padded, Padding
from fastrl.models.adapters import REFERENCE_ADAPTER, acting, add_adapter, trainability_kept
from fastrl.models.attention import replaced
from fastrl.models.lm_head import Head, choose_head, corner_of
from fastrl.models.load import load_language_model, with_adapter
from fastrl.models.products import Products
from fastrl.models.quantised import save_beside_adapter
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.utils import check_trainable, evaluating
from fastrl.ppo.old_logprobs import AUDITED, LOW_PRECISION, TOLERANCES
from fastrl.ref_model.adapter import trained_before
from fastrl.ref_model.copy import frozen_copy, mix
from fastrl.rollout.sampling_params import end_tokens
from fastrl.run.model_card import OwnModelCard
from fastrl.run.transformers_nonfinite import FiniteStepsTrainer
from fastrl.trainers.low_memory import LowMemoryTrainer
from fastrl.trainers.sharded import ShardedTrainer
from fastrl.trainers.supervised import load_if_path, settings_of, tokenizer_of, trained_identity
from fastrl.trl.environments import Environments
from fastrl.trl.generation import PolicySampler
from fastrl.trl.group_sampler import GroupSampler, in_groups
from fastrl.trl.metrics import CompletionsTable, MetricLists
from fastrl.trl.policy_loss import PolicyTokens
from fastrl.trl.reward_functions import RewardFunctions
from fastrl.trl.sampled import SampledResponses

_LOGGER = logging.getLogger(__name__)
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
_OF_ROLLOUTS = ("prompt_ids", "completion_ids", "logprobs")


class Responses(NamedTuple):
    """Responses to a batch of prompts."""

    prompt_ids: list[Tensor]
    completion_ids: list[Tensor]
    completions: list[Any]  # texts, or lists of one message
    masks: list[Tensor]  # bool: the tokens that the policy wrote
    logprobs: list[Tensor] | None  # at the sampling temperature
    columns: dict[str, Any]  # further ones, for reward functions


class Judged(NamedTuple):
    """The rewards of the responses of all processes."""

    by_function: Tensor  # [B, K]; NaN where a function does not apply
    rewards: Tensor  # [B], weighted sums; NaN where none applies


class OnlineTrainer(OwnModelCard, LowMemoryTrainer, ShardedTrainer, FiniteStepsTrainer, ABC):
    """transformers' Trainer that samples responses to prompts, has them judged, and learns from
    them.

    A batch of the loader has the prompts that are generated for at a time, and is there again in
    each of the steps that its responses serve, as in TRL. Runs are resumed bit for bit.

    Subclasses turn rewards into advantages, and log-probs into a loss.
    """

    args: Any
    model: Any
    processing_class: Any
    config: ClassVar[type]
    _tag_names: ClassVar[list[str]]
    needs_old: ClassVar[bool]  # whether the loss needs old log-probs where no step was taken since

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
        rollout_func: Callable[..., dict[str, Any]] | None = None,
        environments: Environments | None = None,
    ):
        name = type(self).__name__
        if args is None:
            path = model if isinstance(model, str) else model.config._name_or_path
            args = self.config(output_dir=f"{Path(path).name}-{name.removesuffix('Trainer')}")
        if not isinstance(args, self.config):
            raise TypeError(f"args must be a {self.config.__name__}, got {type(args).__name__}")
        args = settings_of(args, self.config)
        if train_dataset is None:
            raise ValueError("`train_dataset` is required: a data set with a column prompt")
        if peft_config is not None and getattr(peft_config, "is_prompt_learning", False):
            raise ValueError(
                "prompt-learning adapters shift the positions of tokens and are not supported: use "
                "LoRA"
            )
        _check_data(train_dataset, eval_dataset, args, asked=environments is None)
        set_seed(args.seed)
        load = dict(args.model_init_kwargs or {})
        load.setdefault("trust_remote_code", args.trust_remote_code)
        rewards = RewardFunctions(
            reward_funcs,
            args.reward_weights,
            reward_processing_classes,
            dict(load),
            dict(args.chat_template_kwargs or {}),
            () if environments is None else environments.rewards,
        )
        self._environments = environments
        self._tokenizer = _padding_tokenizer(processing_class, model)
        self._read_tools(args)
        model = self._prepared(model, args, load, quantization_config, peft_config)
        if args.sync_ref_model and (args.beta == 0 or _is_peft(model)):
            raise (ValueError if args.beta == 0 else NotImplementedError)(
                "sync_ref_model moves a reference model, and there is none "
                + ("with beta=0.0" if args.beta == 0 else "beside an adapter: its base is shared")
                + ": leave sync_ref_model out"
            )
        self.rewards = rewards
        self.reward_funcs, self.reward_func_names = rewards.functions, rewards.names
        self.reward_processing_classes = rewards.processing_classes
        self.reward_weights = rewards.weights
        self.rollout_func = rollout_func
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
        self.aux_loss_enabled, self.router_aux_loss_coef = _router_loss(model, args)
        self._metrics = MetricLists()
        self._logs = CompletionsTable(args.generation_batch_size)
        self._extra_columns: defaultdict[str, list] = defaultdict(list)
        self._extra_metrics: defaultdict[str, list[float]] = defaultdict(list)
        self._step = 0  # forward and backward passes
        self._seconds = 0.0  # of this optimizer step's
        self._buffer: list[SampledResponses] | None = None
        self._sampler: GroupSampler | None = None
        self._padding: Padding | None = None
        self._head: Head | None = None
        self._ref_head: Head | None = None
        self._reuses: bool | None = None  # rollouts' log-probs, once compared
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
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process with {self.args.n_gpu} GPUs would split batches without the loss's "
                "knowledge: start one process per GPU (accelerate launch, torchrun)"
            )
        # Losses are means over a batch: transformers divides them by the batches of a step.
        self.model_accepts_loss_kwargs = False
        self.loss_is_scaled_for_ga = None
        self.ref_model = self._make_reference()
        if args.sync_ref_model:
            self.add_callback(_SyncReference(self))
        rewards.to(self.args.device)
        self.products = Products(self.processes)
        ends = end_tokens(self.accelerator.unwrap_model(self.model), self._tokenizer).tolist()
        self._ends = {*ends, self._tokenizer.pad_token_id}
        self._responder = PolicySampler(
            self.args, self._tokenizer, ends, self._autocast, self.processes_index
        )
        self.model.add_model_tags([*self._tag_names, "fastrl"])
        self.warn_of_lost_updates(self.model, stacklevel=3)

    @property
    def processes_index(self) -> int:
        return self.accelerator.process_index

    def _autocast(self) -> Any:
        return self.compute_loss_context_manager()

    def _prepared(
        self, model: Any, args: Any, load: dict[str, Any], quantization: Any, peft_config: Any
    ) -> Any:
        """The model, checked, with an adapter if there is a ``peft_config``."""
        if isinstance(model, str | os.PathLike):
            if quantization is not None:
                if "quantization_config" in load:
                    raise ValueError(
                        "quantization_config is set as an argument and in model_init_kwargs: set "
                        "it in one place"
                    )
                load["quantization_config"] = quantization
            options = copy.copy(args)
            options.model_init_kwargs = load
            model = load_if_path(model, load_language_model, options, trainable=True)
        elif args.model_init_kwargs or quantization is not None:
            warnings.warn(
                "the model is loaded already: model_init_kwargs and quantization_config change "
                "nothing",
                stacklevel=4,
            )
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False) or not model.get_output_embeddings():
            raise ValueError(
                f"{type(model).__name__} is no causal language model: load it with "
                "AutoModelForCausalLM"
            )
        fresh = peft_config is not None
        model = with_adapter(model, peft_config, args)
        if _is_peft(model):
            if any(c.is_prompt_learning for c in model.peft_config.values()):
                raise ValueError("prompt-learning adapters are not supported: use LoRA")
            if type(model.get_output_embeddings()) is not nn.Linear and any(
                "lora_" in name for name, _ in model.get_output_embeddings().named_parameters()
            ):
                raise ValueError(
                    "an adapter on lm_head is not supported: leave 'lm_head' out of target_modules"
                )
            # An adapter that is new changes nothing: its reference is the model without it.
            if not fresh and args.beta != 0 and trained_before(model):
                _copy_adapter(model)
            if args.gradient_checkpointing:
                model.enable_input_require_grads()
        model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        model.generation_config.pad_token_id = self._tokenizer.pad_token_id
        if args.disable_dropout:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        check_trainable(model)
        return model

    def _make_reference(self) -> Any:
        """A frozen copy of the model; None where there is no KL, or an adapter can be switched."""
        if self.beta == 0 or _is_peft(self.accelerator.unwrap_model(self.model)):
            return None
        reference = frozen_copy(self.accelerator.unwrap_model(self.model))
        return self.accelerator.prepare_model(reference, evaluation_mode=True)

    # What subclasses do.

    def _read_tools(self, args: Any) -> None:
        """Looks whether the tokenizer is one for tools, before anything changes."""

    @abstractmethod
    def advantages_of(
        self, judged: Judged, kl: Tensor | None, group: int, mode: str
    ) -> tuple[Tensor, Tensor]:
        """Advantages [B] of the responses of all processes, and which groups have no spread of
        rewards, [B] or [B / group] bool.

        Args:
            kl: Σ_t (log π_old - log π_ref) of each response, [B], where there is a reference.
        """

    @abstractmethod
    def policy_loss(self, tokens: PolicyTokens, part: SampledResponses, mode: str) -> Tensor:
        """The loss of a batch; logs what is known of it."""

    # Data.

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = ["prompt"]

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
            self._sampler = GroupSampler(
                rows, self.num_generations, prompts, uses, bool(args.shuffle_dataset), args.seed
            )
            return self._sampler

        size = self._train_batch_size * args.steps_per_generation
        return self._get_dataloader(data, "Training", size, sampler_fn=sampler, is_training=True)

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
                _refuse_dispatch(args)
                self.accelerator.dataloader_config.dispatch_batches = False
                data = in_groups(data.shuffle(seed=args.seed), group)
                args.dataloader_num_workers = 0
            return self._get_dataloader(
                data,
                "Evaluation",
                args.eval_batch_size,
                sampler_fn=in_order,
            )
        finally:
            args.dataloader_num_workers = workers

    def _run_epoch(self, *, epoch: int, **rest: Any) -> None:  # type: ignore[override]
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)
        super()._run_epoch(epoch=epoch, **rest)

    # Steps.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self.products.on():
            return super().train(*args, **kwargs)

    def adopt(self, machine: Mapping[str, Any]) -> None:
        self.products.adopt(machine)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        begin = time.perf_counter()
        with self.products.on(model):
            loss = super().training_step(model, inputs, *args, **kwargs)
        self._step += 1
        self._seconds += time.perf_counter() - begin
        if self.accelerator.sync_gradients:
            self._metrics["train"]["step_time"].append(self._seconds)
            self._seconds = 0.0
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        part = self._prepare_inputs(inputs)
        with torch.no_grad(), self._autocast():
            loss = self.compute_loss(model, part)
        return loss.detach(), None, None

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Responses to a batch of rows, in training those of this step's turn."""
        if not isinstance(inputs, list):
            return super()._prepare_inputs(inputs)
        if not self.model.training:
            return self._learnable(inputs, "eval")
        steps = self.args.steps_per_generation
        if self._buffer is None or self._step % (steps * self.num_iterations) == 0:
            whole = self._learnable(inputs, "train")
            order = torch.randperm(len(whole)).tolist()
            size = len(whole) // steps
            self._buffer = [whole.select(order[i * size : (i + 1) * size]) for i in range(steps)]
            self._responder.before_update()
        return self._buffer[self._step % steps]

    def compute_loss(  # type: ignore[override]
        self,
        model: nn.Module,
        inputs: SampledResponses,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if return_outputs:
            raise ValueError(f"{type(self).__name__} returns no outputs beside the loss")
        mode = "train" if self.model.training else "eval"
        scores, aux = self._scores(model, inputs, aux=self.aux_loss_enabled)
        device = self.args.device
        counts = torch.tensor(inputs.counts)
        of = torch.arange(len(inputs)).repeat_interleave(counts).to(device)
        old = scores.logprobs.detach()
        if inputs.old is not None:
            old = inputs.learned(inputs.old).to(device)
        entropies = scores.entropies
        assert entropies is not None
        tokens = PolicyTokens(
            scores.logprobs,
            entropies,
            old,
            inputs.advantages.to(device),
            of,
            counts.to(device),
            None if inputs.ref is None else inputs.learned(inputs.ref).to(device),
        )
        loss = self.policy_loss(tokens, inputs, mode)
        if aux is not None:
            loss = loss + self.router_aux_loss_coef * aux
            self._metrics[mode]["aux_loss"].append(self._mean_of_all(aux))
        self._metrics[mode]["entropy"].append(self._mean_of_tokens(entropies))
        return loss

    # Responses and rewards.

    def _learnable(self, rows: list[dict[str, Any]], mode: str) -> SampledResponses:
        """Responses to the prompts of some rows, judged."""
        prompts = self._prompts_of(rows)
        group = self.num_generations if mode == "train" else self.num_generations_eval
        found = self._respond(prompts, group)
        self._note_lengths(found, mode)
        masks = found.masks
        if self.args.mask_truncated_completions:
            masks = [
                mask & self._is_whole(ids)
                for mask, ids in zip(masks, found.completion_ids, strict=True)
            ]
        total = self._sum_of_all(torch.tensor(float(sum(int(m.sum()) for m in masks))))
        learnable = SampledResponses(
            found.prompt_ids,
            found.completion_ids,
            masks,
            torch.zeros(len(rows)),
            float(total),
        )
        args = self.args
        behind = args.gradient_accumulation_steps % (
            args.steps_per_generation * self.num_iterations
        )
        if self.needs_old or behind:
            learnable.old = self._old(learnable, found.logprobs, mode)
        kl = None
        if self.beta:
            with self._as_reference() as model:
                learnable.ref = self._scored(model, learnable, mode)
            if learnable.old is not None:
                triples = zip(learnable.old, learnable.ref, masks, strict=True)
                kl = torch.stack([(old - ref)[mask].sum() for old, ref, mask in triples])
        judged = self._judge(rows, prompts, found)
        if kl is not None:
            self._metrics[mode]["kl"] += self._kl_metric(learnable)
            kl = self._gathered(kl)
        advantages, spreadless = self.advantages_of(judged, kl, group, mode)
        self._note_rewards(judged, spreadless, mode)
        self._note_responses(prompts, found, judged, advantages, mode)
        first = self.processes_index * len(rows)
        learnable.advantages = advantages[first : first + len(rows)].clone()
        return learnable

    def _kl_metric(self, learnable: SampledResponses) -> list[float]:
        """What is logged as "kl" once for all responses of a generation."""
        return []

    def _prompts_of(self, rows: list[dict[str, Any]]) -> list[Any]:
        if self._environments is None:
            return [row["prompt"] for row in rows]
        return self._environments.begin(rows, self.rewards.event_loop)

    def _respond(self, prompts: list[Any], group: int) -> Responses:
        if self.rollout_func is not None:
            return self._rolled_out(prompts)
        ids = encode_prompts(prompts, self._tokenizer, self.chat_template_kwargs)
        model = self.accelerator.unwrap_model(self.model)
        first = self.processes_index * len(prompts)
        with torch.no_grad():
            output = self._responder(self.model_wrapped, model, ids, group, first)
        responses = [x.cpu() for x in output.sequences]
        return Responses(
            ids,
            responses,
            self._as_said(prompts, responses),
            [torch.ones(len(x), dtype=torch.bool) for x in responses],
            output.logprobs_at(self.temperature),
            {},
        )

    def _rolled_out(self, prompts: list[Any]) -> Responses:
        """What ``rollout_func`` returns for copies of the prompts."""
        assert self.rollout_func is not None
        output = dict(self.rollout_func(copy.deepcopy(prompts), self))
        missing = sorted({*_OF_ROLLOUTS} - output.keys())
        if missing:
            raise ValueError(f"rollout_func must return keys {missing} in its output dict")
        lists = {name: output.pop(name) for name in _OF_ROLLOUTS}
        for name in ("prompt_ids", "completion_ids"):
            if len(lists[name]) != len(prompts):
                raise ValueError(
                    f"rollout_func returned {len(lists[name])} {name} for {len(prompts)} prompts: "
                    "return one for each; every prompt is there as often as it has responses"
                )
        responses = [torch.as_tensor(x, dtype=torch.long).cpu() for x in lists["completion_ids"]]
        masks = output.pop("env_mask", None)
        own = [torch.ones(len(x), dtype=torch.bool) for x in responses]
        if masks is not None:
            own = [torch.as_tensor(x).bool().cpu() for x in masks]
        logprobs = lists["logprobs"]
        if logprobs is not None:
            logprobs = [torch.as_tensor(x, dtype=torch.float32).cpu() for x in logprobs]
        return Responses(
            [torch.as_tensor(x, dtype=torch.long).cpu() for x in lists["prompt_ids"]],
            responses,
            self._as_said(prompts, responses),
            own,
            logprobs,
            output,
        )

    def _as_said(self, prompts: list[Any], responses: list[Tensor]) -> list[Any]:
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        return [as_answer(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    def _judge(self, rows: list[dict[str, Any]], prompts: list[Any], found: Responses) -> Judged:
        columns: dict[str, Any] = {
            name: [row.get(name) for row in rows] for name in rows[0] if name not in _NOT_COLUMNS
        }
        for name, values in found.columns.items():
            columns[name] = values if isinstance(values, list) else [values] * len(rows)
        options = {
            "trainer_state": self.state,
            "log_extra": self._log_completion_extra,
            "log_metric": self._log_metric,
        }
        ids = [x.tolist() for x in found.completion_ids]
        own = self.rewards(prompts, found.completions, ids, columns | options)
        unjudged = own.isnan().all(1)
        if unjudged.any():
            i = int(unjudged.nonzero()[0, 0])
            row = {name: values[i] for name, values in columns.items()}
            row |= {"prompt": prompts[i], "completion": found.completions[i]}
            _LOGGER.warning(
                "All reward functions returned None for the following kwargs:\n%s\nNothing is "
                "learned from such responses: let one function return a number",
                row,
            )
        by_function = self._gathered(own)
        rewards = (by_function * self.reward_weights).nansum(1)
        rewards[by_function.isnan().all(1)] = torch.nan
        return Judged(by_function, rewards)

    def _log_completion_extra(self, column: str, values: list) -> None:
        self._extra_columns[column].extend(values)

    def _log_metric(self, name: str, value: float) -> None:
        self._extra_metrics[name].append(value)

    # Log-probs.

    def _old(
        self, learnable: SampledResponses, sampled: list[Tensor] | None, mode: str
    ) -> list[Tensor]:
        """Log-probs of the policy as it is: the rollout's, where a few that are computed again
        agree with them."""
        model = self.model_wrapped if mode == "train" else self.model
        if sampled is None or self.rollout_func is not None or self._reuses is False:
            return self._scored(model, learnable, mode)
        if self._reuses is None:
            step = max(1, len(learnable) // AUDITED)
            chosen = list(range(0, len(learnable), step))[:AUDITED]
            part = learnable.select(chosen)
            found = torch.cat(self._scored(model, part, mode))
            off = (torch.cat([sampled[i].float().cpu() for i in chosen]) - found).abs()
            low = self.args.bf16 or self.args.fp16
            dtype = torch.bfloat16 if low else next(self.model.parameters()).dtype
            kind, tolerance = TOLERANCES.get(dtype, LOW_PRECISION)
            worst = float(off.max() if kind == "max" else off.mean()) if len(off) else 0.0
            self._reuses = not self.processes.any(not worst <= tolerance)
            if not self._reuses:
                return self._scored(model, learnable, mode)
        return [x.float().cpu() for x in sampled]

    @torch.no_grad()
    def _scored(self, model: nn.Module, learnable: SampledResponses, mode: str) -> list[Tensor]:
        """Log-probs of all tokens of the responses, on the host; 0 where they are not learned."""
        args = self.args
        size = args.per_device_train_batch_size if mode == "train" else args.eval_batch_size
        found: list[Tensor] = []
        with evaluating(model), self._autocast():
            for start in range(0, len(learnable), size):
                part = learnable.select(range(start, min(start + size, len(learnable))))
                flat = self._scores(model, part)[0].logprobs.float().cpu()
                for mask, values in zip(part.masks, flat.split(part.counts), strict=True):
                    found.append(torch.zeros(len(mask)).masked_scatter(mask, values))
        return found

    def _scores(
        self, model: nn.Module, part: SampledResponses, aux: bool = False
    ) -> tuple[TokenScores, Tensor | None]:
        """Scores of the learned tokens, in the order of the responses; and the load-balancing loss
        of a mixture of experts, where it is asked for."""
        counting = [i for i, count in enumerate(part.counts) if count]
        if not counting:  # no token to learn: a gradient of 0 for each weight
            zero = torch.zeros(0, device=self.args.device)
            for weight in model.parameters():
                if weight.requires_grad:
                    zero = zero + weight.flatten()[:0].sum()
            return TokenScores(zero, zero.detach(), None, None), None
        padding = self._chosen_padding() if not aux else Padded()
        batch = part.select(counting).batch(self._tokenizer.pad_token_id, padding)
        batch = batch.to(self.args.device)
        model_pass = batch.model_pass
        labels = batch.input_ids.flatten()[batch.rows() + 1]
        given = {**model_pass.inputs, "use_cache": False}
        attention = given.pop("attention", None)
        if aux:
            given["output_router_logits"] = True
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        head = self._scoring_head(plain, given)
        request = ScoringRequest(
            model_pass.rows, labels, self.temperature, entropy=True, values=False
        )
        with replaced(plain, attention), head.scoring(plain, request) as results:
            out = model(**given, **head.options)
            return results(out)[0], out.aux_loss if aux else None

    def _chosen_padding(self) -> Padding:
        if self._padding is None:
            self._padding = Padded()
            if self.args.padding_free:
                lowest = torch.bfloat16 if self.args.bf16 or self.args.fp16 else torch.float32
                with self._autocast():
                    packs = runs_packed(
                        [self.model_wrapped],
                        self.args.device,
                        lowest,
                        logprobs_of_labels,
                        anywhere=self.processes.any,
                    )
                if packs:
                    self._padding = PaddingFree()
        return self._padding

    def _scoring_head(self, plain: Any, given: Mapping[str, Any]) -> Head:
        if self._head is None:
            corner = {**corner_of({"input_ids": given["input_ids"]}), "use_cache": False}
            with evaluating(plain):
                self._head = choose_head(plain, corner)
        return self._head

    def _as_reference(self) -> Any:
        """Context of the reference model: the copy, or the policy with its adapter switched."""
        if self.ref_model is not None:
            return _Given(self.ref_model)
        return _Switched(self.accelerator.unwrap_model(self.model), self.model_wrapped)

    # Logs.

    def _is_whole(self, ids: Tensor) -> bool:
        return bool(len(ids)) and int(ids[-1]) in self._ends

    def _note_lengths(self, found: Responses, mode: str) -> None:
        prompts = self._gathered(torch.tensor([len(x) for x in found.prompt_ids]))
        lengths = self._gathered(torch.tensor([int(mask.sum()) for mask in found.masks])).float()
        cut = self._gathered(torch.tensor([not self._is_whole(x) for x in found.completion_ids]))
        if mode == "train":
            self.state.num_input_tokens_seen += int(prompts.sum() + lengths.sum())
        metrics = self._metrics[mode]
        metrics["num_tokens"] = [float(self.state.num_input_tokens_seen)]
        whole = lengths[~cut] if bool((~cut).any()) else torch.zeros(1)
        for name, of in (("", lengths), ("terminated_", whole)):
            metrics[f"completions/mean_{name}length"].append(float(of.mean()))
            metrics[f"completions/min_{name}length"].append(float(of.min()))
            metrics[f"completions/max_{name}length"].append(float(of.max()))
        metrics["completions/clipped_ratio"].append(float(cut.float().mean()))

    def _note_rewards(self, judged: Judged, spreadless: Tensor, mode: str) -> None:
        metrics = self._metrics[mode]
        for name, column in zip(self.reward_func_names, judged.by_function.t(), strict=True):
            metrics[f"rewards/{name}/mean"].append(float(column.nanmean()))
            metrics[f"rewards/{name}/std"].append(nanstd(column))
        metrics["reward"].append(float(judged.rewards.nanmean()))
        metrics["reward_std"].append(nanstd(judged.rewards))
        metrics["frac_reward_zero_std"].append(float(spreadless.float().mean()))
        values = self._extra_metrics
        for name in sorted(set(gather_object(list(values)))):
            own = values.get(name, [])
            total = self._sum_of_all(torch.tensor([float(sum(own)), float(len(own))]))
            metrics[name].append(float(total[0] / total[1]))
        values.clear()

    def _note_responses(
        self, prompts: list[Any], found: Responses, judged: Judged, advantages: Tensor, mode: str
    ) -> None:
        logs = self._logs
        logs["prompt"].extend(gather_object(prompts))
        logs["completion"].extend(gather_object(found.completions))
        for name, column in zip(self.reward_func_names, judged.by_function.t(), strict=True):
            logs["rewards"][name].extend(column.tolist())
        logs["advantages"].extend(advantages.tolist())
        columns = self._extra_columns
        for name in sorted(set(gather_object(list(columns)))):
            logs["extra"][name].extend(gather_object(columns.get(name, [None] * len(prompts))))
        columns.clear()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """With the means of what was noted since the last log, by TRL's names."""
        mode = "train" if self.model.training else "eval"
        prefix = "eval_" if mode == "eval" else ""
        noted: Any = self._metrics.taken(mode)
        logs.update({f"{prefix}{name}": value for name, value in noted.items()})
        super().log(logs, start_time)
        if self.log_completions and self.accelerator.is_main_process and self._logs["prompt"]:
            step = self.state.global_step
            self._logs.show(step, self.args.num_completions_to_print)
            self._logs.save(Path(str(self.args.output_dir)), step)

    def _gathered(self, own: Tensor) -> Tensor:
        """Of all processes, one after the other, on the host."""
        if self.accelerator.num_processes == 1:
            return own.cpu()
        return self.accelerator.gather(own.to(self.args.device)).cpu()

    def _sum_of_all(self, own: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return own.detach().cpu()
        return self.accelerator.reduce(own.detach().to(self.args.device), reduction="sum").cpu()

    def _mean_of_all(self, own: Tensor) -> float:
        return float(self._gathered(own.detach().float().reshape(1)).nanmean())

    def _mean_of_tokens(self, own: Tensor) -> float:
        """The mean of what is there per token or response, over all processes."""
        own = own.detach().float()
        total = self._sum_of_all(torch.stack([own.sum(), own.new_tensor(float(len(own)))]))
        return float(total[0] / total[1].clamp(min=1))

    # Checkpoints.

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), **trained_identity(self)}

    def own_state(self) -> dict[str, Any]:
        reference = {}
        if self.args.sync_ref_model:
            model = self.accelerator.unwrap_model(self.ref_model)
            reference = {name: p.detach().cpu() for name, p in model.named_parameters()}
        return {
            **super().own_state(),
            "online": {
                "step": self._step,
                "buffer": None if self._buffer is None else [x.state() for x in self._buffer],
                "metrics": self._metrics.state(),
                "responder": self._responder.state(),
                "reuses": self._reuses,
                "reference": reference,
            },
        }

    def begin_training(self, resumed: Mapping[str, Any] | None) -> None:
        super().begin_training(resumed)
        self._step, self._buffer = 0, None
        if resumed is None:
            return
        own = resumed["own"]["online"]
        self._step, self._reuses = own["step"], own["reuses"]
        if own["buffer"] is not None:
            self._buffer = [SampledResponses.of_state(x) for x in own["buffer"]]
        self._metrics.resume(own["metrics"])
        self._responder.resume(own["responder"])
        if own["reference"]:
            model = self.accelerator.unwrap_model(self.ref_model)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.copy_(own["reference"][name])

    def own_mark(self) -> dict[str, Any]:
        kept = self._step, self._buffer, self._metrics.state(), self._responder.state()
        return {**super().own_mark(), "online": kept}

    def own_rewind(self, mark: Mapping[str, Any]) -> None:
        super().own_rewind(mark)
        self._step, self._buffer, metrics, responder = mark["online"]
        self._metrics.resume(metrics)
        self._responder.resume(responder)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder = output_dir or str(self.args.output_dir)
        save_beside_adapter(self.accelerator.unwrap_model(self.model), folder)


class _Given:
    """Context of a model that is there."""

    def __init__(self, model: Any):
        self.model = model

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *_: Any) -> None:
        pass


class _Switched:
    """Context of a PEFT model as its own reference: with the copy of its first adapter, or none."""

    def __init__(self, plain: Any, wrapped: Any):
        self.wrapped = wrapped
        if REFERENCE_ADAPTER in plain.peft_config:
            self._contexts = [acting(plain, REFERENCE_ADAPTER)]
        else:
            self._contexts = [trainability_kept(plain), plain.disable_adapter()]

    def __enter__(self) -> Any:
        for context in self._contexts:
            context.__enter__()
        return self.wrapped

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


class _SyncReference(TrainerCallback):
    """ref ← α·policy + (1 - α)·ref each ``ref_model_sync_steps``."""

    def __init__(self, trainer: OnlineTrainer):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            unwrap = self.trainer.accelerator.unwrap_model
            own = dict(unwrap(self.trainer.model).named_parameters())
            targets = dict(unwrap(self.trainer.ref_model).named_parameters())
            mix(
                [p.data for p in targets.values()],
                [own[name].data for name in targets],
                args.ref_model_mixup_alpha,
            )


def nanstd(values: Tensor) -> float:
    """The unbiased deviation of the numbers that are not NaN; NaN of fewer than two."""
    known = values[~values.isnan()]
    return float(known.std()) if len(known) > 1 else float("nan")


def _as_it_is(rows: list[Any]) -> list[Any]:
    return rows


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _copy_adapter(model: Any) -> None:
    """A frozen copy of a trained adapter, as the reference."""
    trained = model.active_adapter
    add_adapter(model, REFERENCE_ADAPTER, model.peft_config[trained])
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if f".{REFERENCE_ADAPTER}." in name:
                weight.copy_(weights[name.replace(f".{REFERENCE_ADAPTER}.", f".{trained}.")])


def _padding_tokenizer(given: Any, model: Any) -> Any:
    """The tokenizer, whose EOS pads where it has no pad token."""
    if given is not None and given.pad_token is None:
        given.pad_token = given.eos_token
    return tokenizer_of(None, given, model)


def _router_loss(model: Any, args: Any) -> tuple[bool, float]:
    """Whether there is a load-balancing loss, and its coefficient."""
    config, asked = model.config.get_text_config(), args.router_aux_loss_coef
    there = hasattr(config, "output_router_logits")
    if asked and not there:
        raise ValueError(
            f"router_aux_loss_coef={asked}: {type(model).__name__} is no mixture of experts that "
            "returns its router's logits; leave it out"
        )
    coef = getattr(config, "router_aux_loss_coef", 0.0) if asked is None else asked
    return there and coef != 0, float(coef or 0.0)


def _refuse_dispatch(args: Any) -> None:
    if args.accelerator_config.dispatch_batches:
        raise ValueError(
            "Iterable datasets require `dispatch_batches=False`, as rows hold texts: leave it out "
            "of accelerator_config"
        )


def _check_data(train: Any, evaluation: Any, args: Any, asked: bool = True) -> None:
    """Settles the loader's settings for streams.

    Args:
        asked: whether each row needs a prompt.

    Raises:
        TypeError: training data of another kind.
        ValueError: a stream whose batches one process is to send to the others, or without
            ``max_steps``.
    """
    from datasets import Dataset, IterableDataset

    if not isinstance(train, Dataset | IterableDataset):
        raise TypeError(
            f"`train_dataset` must be a `Dataset` or `IterableDataset`, got "
            f"{type(train).__name__}: Dataset.from_list makes one of rows"
        )
    held_out = evaluation.values() if isinstance(evaluation, dict) else [evaluation]
    if any(isinstance(data, IterableDataset) for data in (train, *held_out)):
        _refuse_dispatch(args)
        args.accelerator_config.dispatch_batches = False
    if isinstance(train, IterableDataset) and args.dataloader_num_workers:
        warnings.warn(
            "dataloader_num_workers is set to 0, as several workers would break the groups of "
            "a stream",
            stacklevel=4,
        )
        args.dataloader_num_workers = 0
    columns = train.column_names
    if asked and columns is not None and "prompt" not in columns:
        raise ValueError(f"train_dataset needs a column prompt, it has {', '.join(columns)}")
