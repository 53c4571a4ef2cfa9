"""Construction of a PPOTrainer: argument checks, accelerate, the default optimizer."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    extract_model_from_parallel,
)
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastrl.config import PPOConfig, json_object
from fastrl.learn.ref_model.trunk import WEIGHTS_ARE_COMPARED
from fastrl.models import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    CausalLMPolicy,
    PreTrainedModelWrapper,
)
from fastrl.models.adapters import adapter_dropout
from fastrl.models.layout import layout_of
from fastrl.models.master_weights import handles_rounding
from fastrl.models.optimizer_state import optimizer_groups, set_weights
from fastrl.models.optimizers import keep_state, make_optimizer
from fastrl.models.quantised import WITHOUT_FSDP, compute_dtypes, refuse_quantised
from fastrl.models.routing import refuse_dense
from fastrl.models.scoring import ScoringRequest
from fastrl.models.sharding import name_by_path
from fastrl.models.utils import (
    check_trainable,
    evaluating,
    warn_of_fp16,
    warn_of_lost_updates,
)
from fastrl.run.gradient_buckets import settle_buckets
from fastrl.run.launcher import launched_accelerator
from fastrl.run.metrics import check_trackers, open_trackers
from fastrl.run.precision import kind_of_device, precision_for
from fastrl.run.processes import Processes
from fastrl.run.value_head_file import HEAD_PREFIX

_MIXED_PRECISION = (
    'set accelerator_kwargs={"mixed_precision": "bf16"} (commands: --dtype float32 '
    """--accelerator-kwargs '{"mixed_precision": "bf16"}')"""
)
# Kinds of runs in which accelerate wraps models in DDP, even in a single process.
_DDP = tuple(t for t in DistributedType if t.name.startswith("MULTI_"))


def checked_policies(
    config: Any,
    model: Any,
    ref_model: Any,
    tokenizer: Any,
    scheduler: Any,
    has_critic: bool = False,
) -> tuple[PreTrainedModelWrapper, PreTrainedModelWrapper | None]:
    """Checks policy and reference, and prepares them for the configured advantage.

    Where the policy learns no values, plain causal language models become policies without values,
    and a value head is frozen.

    Args:
        has_critic: whether a critic beside the policy learns the values.

    Raises:
        TypeError: names the argument of PPOTrainer that has a wrong type.
        ValueError: a policy whose language model has no weight to train, or no routers for
            ``router_aux_loss_coef``.
    """
    if not isinstance(config, PPOConfig):
        raise TypeError(f"config must be a PPOConfig, got {type(config).__name__}")
    learns_values = config.needs_values and not has_critic
    if not learns_values:
        model, ref_model = _without_values(model), _without_values(ref_model)
    _check_types(learns_values, model, ref_model, tokenizer, scheduler)
    if not learns_values and model.v_head is not None:
        model.v_head.requires_grad_(False)
    refuse_dense(model.pretrained_model, config.router_aux_loss_coef)
    check_trainable(model.pretrained_model, " but the value head" if learns_values else "")
    dropout = adapter_dropout(model.pretrained_model)
    if dropout:
        warnings.warn(
            f"the adapter's lora_dropout={dropout:g} has no effect: PPO trains the policy in "
            "evaluation mode, because dropout would make the probability ratio differ from 1 where "
            "nothing was learned",
            stacklevel=3,
        )
    return model, ref_model


def warn_of_a_single_response(config: PPOConfig) -> None:
    """Warns of a batch of one response, whose whitened advantages are useless."""
    if config.needs_values and config.batch_size == 1:
        warnings.warn(
            "batch_size=1: advantages are whitened over the batch, so that those of a single "
            "response add up to 0 whatever its score; set PPOConfig.batch_size to the number of "
            "responses that each step() gets, 2 or more",
            stacklevel=3,
        )


def _without_values(model: Any) -> Any:
    """A plain causal language model as a policy without values; any other model unchanged."""
    plain = isinstance(model, PreTrainedModel) or hasattr(model, "peft_config")
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return CausalLMPolicy(model) if plain and not two else model


def _check_types(
    learns_values: bool, model: Any, ref_model: Any, tokenizer: Any, scheduler: Any
) -> None:
    if not isinstance(model, PreTrainedModelWrapper):
        two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        wanted = AutoModelForSeq2SeqLMWithValueHead if two else AutoModelForCausalLMWithValueHead
        raise TypeError(
            f"model must be an {wanted.__name__}, got {type(model).__name__}: wrap it with "
            f"{wanted.__name__}.from_pretrained(model)"
        )
    if learns_values and not model.has_values:
        raise TypeError(
            f"model is a {type(model).__name__}, which has no values, and advantage='gae' needs "
            "them: pass an AutoModelForCausalLMWithValueHead, or choose another advantage (grpo, "
            "dr_grpo, rloo)"
        )
    kind = getattr(ref_model, "is_encoder_decoder", None)
    if ref_model is not None and kind is not model.is_encoder_decoder:
        raise TypeError(
            f"ref_model must be an {type(model).__name__} or None, got {type(ref_model).__name__}"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer must be a Hugging Face tokenizer, got {type(tokenizer).__name__}"
        )
    if scheduler is not None and not (isinstance(scheduler, LRScheduler) or callable(scheduler)):
        raise TypeError(
            "lr_scheduler must be a torch LRScheduler, a function that makes one of the optimizer, "
            f"or None, got {type(scheduler).__name__}"
        )


def schedule_of(schedule: Any, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The learning rate's schedule: ``schedule``, or what it makes of the optimizer, if callable.
    Raises TypeError for a schedule whose step needs a metric, or that is no ``LRScheduler``."""
    is_made = schedule is None or isinstance(schedule, LRScheduler)
    made = schedule if is_made else schedule(optimizer)
    if isinstance(made, ReduceLROnPlateau) or not isinstance(made, LRScheduler | None):
        raise TypeError(
            f"lr_scheduler is a {type(made).__name__}, which steps by a metric or otherwise than "
            "torch's LRScheduler: choose another one (lr_scheduler_type)"
        )
    return made


def choose_precision(config: PPOConfig, model: nn.Module) -> str | None:
    """Sets the configuration's mixed precision, and returns it; None where it is set already, or
    accelerate's default is right."""
    settings = json_object(config.accelerator_kwargs)
    chosen = precision_for(model, kind_of_device(settings), settings.get("mixed_precision"))
    if chosen is not None:
        settings["mixed_precision"] = chosen
    return chosen


def make_accelerator(config: PPOConfig) -> Accelerator:
    """Makes an Accelerator with the configured devices, precision and trackers.

    Raises:
        ValueError, ImportError: ``project_kwargs`` or ``accelerator_kwargs`` with a key that
            accelerate does not take; FSDP1; see :func:`launched_accelerator`, ``check_trackers``.
    """
    for name, kind in (
        ("project_kwargs", ProjectConfiguration),
        ("accelerator_kwargs", Accelerator),
    ):
        unknown = json_object(getattr(config, name)).keys() - inspect.signature(kind).parameters
        if unknown:
            raise ValueError(f"{name}: accelerate's {kind.__name__} takes no {min(unknown)!r}")
    trackers = config.log_with if isinstance(config.log_with, list | tuple) else [config.log_with]
    check_trackers("log_with", [x for x in trackers if isinstance(x, str)])
    settings = {
        # A learning rate schedule counts calls of PPOTrainer.step(), not the optimizer's steps.
        "step_scheduler_with_optimizer": False,
        # By default accelerate also syncs at the end of a dataloader, in mid-batch.
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            num_steps=config.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        "project_config": ProjectConfiguration(**json_object(config.project_kwargs)),
        **json_object(config.accelerator_kwargs),
    }
    accelerator = launched_accelerator(timeout=config.ddp_timeout, **settings)
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "PPOTrainer needs FSDP2, and FSDP1 was asked for: set fsdp_version: 2 (accelerate "
            "launch --fsdp_version 2)"
        )
    if config.log_with is not None:
        open_trackers(
            accelerator,
            config.log_with,
            project=config.tracker_project_name,
            settings=config.to_dict(),
            options=json_object(config.tracker_kwargs),
        )
    return accelerator


def prepared(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, *others: Any
) -> tuple[Any, ...]:
    """Model, optimizer, and others (a dataloader and a scheduler, or None) wrapped by accelerate,
    but without DDP in a single process (``torchrun --nproc-per-node 1``). With FSDP2 it raises
    ValueError for four-bit weights, or, where only the main process loads weights, for layers that
    are shared with the reference."""
    if accelerator.is_fsdp2:
        refuse_quantised(model, "a model that FSDP spreads", WITHOUT_FSDP)
        if getattr(model, "trunk", None) is not None and loads_once(accelerator):
            raise ValueError(WEIGHTS_ARE_COMPARED)
        name_by_path(model)
        groups = optimizer_groups(optimizer, model)
        prepared = accelerator.prepare(model, optimizer, *others)
        # accelerate finds the optimizer's weights by address; those without memory have none.
        set_weights(optimizer, model, groups)
        return prepared
    others = (optimizer, *others)
    if accelerator.distributed_type not in _DDP or accelerator.num_processes > 1:
        prepared = accelerator.prepare(model, *others)
        settle_buckets(prepared[0])
        return prepared
    model = accelerator.prepare_model(model, evaluation_mode=True)  # all but the wrapping
    return (model, *accelerator.prepare(*others))


@torch.no_grad()
def share_new_weights(processes: Processes, *models: nn.Module | None) -> None:
    """Gives each process the main process's value heads and trained adapters, so that scripts need
    no seed where these are new. A reference that is copied from the policy is then the same
    everywhere; DDP does this later, and for the policy alone. Other weights are loaded from files;
    where they differ an error follows.
    """
    for model in models:
        if model is None or processes.count == 1:
            continue
        adapts = bool(getattr(model, "is_peft_model", False))
        new_weights = {
            name: p
            for name, p in model.named_parameters()
            if name.startswith(HEAD_PREFIX) or (adapts and p.requires_grad)
        }
        shapes = {name: p.shape for name, p in new_weights.items()}
        if any(other != shapes for other in processes.objects(shapes)):
            continue  # models of different kinds, which a later check refuses
        main = processes.from_main({name: p.detach().cpu() for name, p in new_weights.items()})
        for name, p in new_weights.items():
            p.copy_(main[name])


def fill_in_config(
    config: PPOConfig, accelerator: Accelerator, model: PreTrainedModelWrapper
) -> None:
    """Sets the configuration's facts about the run: the processes, and the kind of its model."""
    processes = accelerator.num_processes
    config.world_size = processes
    config.is_encoder_decoder = model.is_encoder_decoder
    config.is_peft_model = model.is_peft_model
    config.global_backward_batch_size = config.backward_batch_size * processes
    config.global_batch_size = config.batch_size * processes


def loads_once(accelerator: Accelerator) -> bool:
    """Whether only the main process loads weights, from which FSDP2 spreads them."""
    return accelerator.is_fsdp2 and bool(accelerator.state.fsdp_plugin.cpu_ram_efficient_loading)


def precision_of(model: nn.Module, accelerator: Accelerator) -> torch.dtype:
    """The dtype of the lowest precision in which forward passes compute."""
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} | compute_dtypes(model)
    dtypes |= {autocast[x] for x in [accelerator.mixed_precision] if x in autocast}
    return min(dtypes, key=lambda dtype: torch.finfo(dtype).bits)


@torch.no_grad()
def choose_heads(device: torch.device, *models: nn.Module | None, as_teacher: bool = False) -> None:
    """Scores a few tokens with each model, so that before training it chooses how to run its LM
    head, and warns if need be.

    Args:
        device: the inputs' device; an offloaded model's weights come there when it runs.
        as_teacher: whether divergences are computed from the models' hidden states; raises
            ValueError for a model whose head does not allow it.
    """
    for model in models:
        if model is None:
            continue
        plain = extract_model_from_parallel(model)
        tokens = torch.arange(8) % plain.config.get_text_config().vocab_size
        inputs, rows = layout_of(plain).inputs([(tokens[:4], tokens[4:])])
        request = ScoringRequest(rows.to(device), tokens[4:].to(device), as_teacher=as_teacher)
        with evaluating(model):
            model(**{name: x.to(device) for name, x in inputs.items()}, scoring=request)


def optimizer_of(
    config: PPOConfig, model: Any, optimizer: Any, lr_scheduler: Any, accelerator: Accelerator
) -> tuple[Any, Any]:
    """The optimizer, by default the configuration's, with float32 masters and an offloaded state if
    the settings say so; and the learning rate's schedule. Warns of steps that are rounded away."""
    if optimizer is None:
        fused = not loads_once(accelerator)
        optimizer = make_optimizer(
            model, config.optim, config.learning_rate, config.optim_args, fused
        )
    lr_scheduler = schedule_of(lr_scheduler, optimizer)
    warn_of_fp16(model, stacklevel=3)
    if not config.master_weights and not handles_rounding(optimizer):
        warn_of_lost_updates(model, _MIXED_PRECISION, stacklevel=3)
    optimizer = keep_state(
        optimizer,
        master_weights=config.master_weights,
        on_host=config.offload_optimizer,
        device=accelerator.device,
        spread=accelerator.is_fsdp2,
    )
    return optimizer, lr_scheduler
