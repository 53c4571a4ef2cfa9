"""Optimizers by transformers' names, their packages, and where they keep their state."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastrl.models.host_memory import is_host
from fastrl.models.master_weights import MasterWeights, with_master_weights

# transformers' names or their beginnings, with packages as they are imported and installed.
_OF_TORCHAO = ("adamw_torch_8bit", "adamw_torch_4bit")
_OF_BITSANDBYTES = ("paged_", "lion_", "ademamix", "rmsprop_bnb", "adamw_bnb", "adamw_8bit")
_OF_OTHERS = {
    "galore_": ("galore_torch", "galore-torch"),
    "apollo_": ("apollo_torch", "apollo-torch"),
    "schedule_free_": ("schedulefree", "schedulefree"),
    "grokadamw": ("grokadamw", "grokadamw"),
    "stable_adamw": ("optimi", "torch-optimi"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "adalomo": ("lomo_optim", "lomo-optim"),
}
# Optimizers that need the groups of weights that transformers' Trainer makes: the names of their
# arguments, each with a value of the right type.
_LOW_RANK = {"rank": 128, "update_proj_gap": 200, "scale": 1.0, "proj_type": "std"}
_OF_GROUPS: dict[str, dict[str, Any]] = {
    "galore_": _LOW_RANK,
    "apollo_": {**_LOW_RANK, "proj": "random", "scale_type": "channel"},
    "lomo": {},
    "adalomo": {},
}
_BETAS = ("beta1", "beta2", "beta3")  # names in optim_args of the parts of betas
# Arguments of optimizers that optim_args may not set, and what to do instead.
_SAID_BY = {
    "weight_decay": "set weight_decay",  # where that is a setting
    "lr": "set learning_rate",
    "betas": "name beta1 and beta2",
    "optim_bits": "optim's name says that",
    "is_paged": "optim's name says that",
}
# Types of optimizers' arguments whose default is None.
_OF_NONE = {
    "fused": bool,
    "foreach": bool,
    "kahan_sum": bool,
    "t_alpha": int,
    "t_beta3": int,
    "max_lr": float,
    "beta1": float,  # adafactor's
}
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_BY_BLOCKS = ("bitsandbytes", "torchao")
# Optimizers that step weights within the backward pass.
_IN_BACKWARD = ("lomo", "adalomo", "layerwise")


def check_optimizer(
    name: str,
    optimizer: Any = None,
    arguments: str | None = None,
    *,
    decay_is_a_setting: bool = False,
) -> None:
    """Checks that an optimizer's name and arguments can be used.

    Args:
        name: one of transformers' ``OptimizerNames``, or "adam".
        optimizer: a user's optimizer, which excludes arguments and another name than "adam".
        arguments: the setting ``optim_args``.
        decay_is_a_setting: whether ``weight_decay`` is a setting, as in transformers'
            TrainingArguments, and no part of ``arguments``.

    Raises:
        ValueError: what ``optimizer`` excludes; wrong ``arguments`` for the optimizer.
        ImportError: the optimizer's package is not installed; says how to install it.
    """
    if optimizer is not None and name != "adam":
        raise ValueError(
            f"optim={name!r}, but optimizer was given ({type(optimizer).__name__}): leave one out"
        )
    if optimizer is not None and arguments:
        raise ValueError(
            f"optim_args={arguments!r}, but optimizer was given ({type(optimizer).__name__}), "
            "which has its own: leave optim_args out"
        )
    module, package = _package(name)
    if module is not None and importlib.util.find_spec(module) is None:
        raise ImportError(
            f"optim={name!r} needs the package {package}, which is not installed: pip install "
            f"{package}, or choose another optim, such as adamw_torch"
        )
    if module == "torchao":
        # Its import lets torch.load read its tensors; checkpoints are read before it is used.
        importlib.import_module("torchao.optim")
    if arguments:
        parsed = _parsed(arguments)
        if not decay_is_a_setting:
            _decay(name, parsed)
        defaults = _of_groups(name)
        _arguments(name, _defaults(*_class_of(name, 0.0)) if defaults is None else defaults, parsed)


def optimizer_name(settings: Any) -> str:
    """The name of the optimizer in ``settings.optim``, which may be a member of an enum."""
    return str(getattr(settings.optim, "value", settings.optim))


def class_and_keywords(settings: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
    """The class of an optimizer and its keyword arguments, as transformers' Trainer makes them of
    its arguments; it alone reads ``optim_args`` of GaLore, APOLLO and LOMO. Others' are read as
    by :func:`make_optimizer`: transformers ignores some, and passes some on as texts.

    Args:
        settings: ``transformers.TrainingArguments``.
        model: the model, whose layers some optimizers need.

    Raises:
        ValueError: see :func:`make_optimizer`.
    """
    from transformers import Trainer

    name = optimizer_name(settings)
    if _of_groups(name) is not None:
        return Trainer.get_optimizer_cls_and_kwargs(settings, model)
    plain = copy.copy(settings)
    plain.optim_args = None
    kind, keywords = Trainer.get_optimizer_cls_and_kwargs(plain, model)
    return kind, keywords | _arguments(
        name, _defaults(kind, keywords), _parsed(settings.optim_args)
    )


def steps_in_backward(name: str) -> bool:
    """Whether an optimizer of this name steps weights as soon as they have a gradient."""
    return name in _IN_BACKWARD or name.endswith(_IN_BACKWARD[-1])


def make_optimizer(
    model: nn.Module,
    name: str,
    learning_rate: float,
    arguments: str | None = None,
    fused: bool = True,
) -> torch.optim.Optimizer:
    """Makes an optimizer of a model's trainable weights, by default without weight decay.

    Args:
        name: "adam", torch's Adam; or one of transformers' ``OptimizerNames``.
        arguments: written as transformers' ``optim_args``: "name=value,…". All optimizers have
            weight_decay, Adam and its kin beta1 and beta2.
        fused: whether "adam" runs torch's fused kernel where there is one. Pass False where one
            process has the weights and others have them on the meta device: all must choose alike.

    Raises:
        ValueError: an unknown name; an argument that the optimizer lacks, or a wrong value of one.
    """
    values = _parsed(arguments)
    weights = [p for p in model.parameters() if p.requires_grad]
    kind, keywords = _class_of(name, learning_rate)
    if name == "adam":
        fused = fused and {p.device.type for p in weights} <= {"cpu", "cuda", "xpu", "mps"}
        keywords["fused"] = fused
    decay = _decay(name, values)
    keywords |= _arguments(name, _defaults(kind, keywords), values)
    optimizer = kind([{"params": weights, "weight_decay": decay}], **keywords)
    if keywords.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(model)
    return optimizer


def keep_state(
    optimizer: Any,
    *,
    master_weights: bool,
    on_host: bool,
    device: torch.device,
    spread: bool = False,
) -> Any:
    """The optimizer, over float32 masters of low-precision weights with ``master_weights``, and
    with all masters and its state in host memory with ``on_host``.

    Args:
        on_host: the setting ``offload_optimizer``. Warns where ``device``, on which the model is
            trained, is a CPU.
        spread: whether FSDP2 spreads the weights over processes.

    Raises:
        ValueError: ``spread`` with ``on_host``; an optimizer that cannot step with one of them.
    """
    if isinstance(optimizer, MasterWeights):
        return optimizer
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
    packages = [kind.__module__.partition(".")[0] for kind in kinds]
    package = packages[0]
    by_blocks = any(each in _BY_BLOCKS for each in packages)
    if spread and by_blocks:
        raise ValueError(
            f"{type(optimizer).__name__} of {package} keeps moments in blocks of a whole weight, "
            "and FSDP2 spreads weights over processes: choose another optim, such as adamw_torch"
        )
    if spread and on_host:
        raise ValueError(
            "offload_optimizer is not for weights that FSDP2 spreads: set fsdp_offload_params: "
            "true in accelerate's file (accelerate launch --fsdp_offload_params true) instead"
        )
    if on_host and (by_blocks or not {"torch", "transformers"} & {*packages}):
        raise ValueError(
            f"offload_optimizer: {type(optimizer).__name__} of {package} has no steps in host "
            "memory: choose one of torch's, such as optim='adamw_torch', or one of bitsandbytes' "
            "paged ones without offload_optimizer"
        )
    if on_host and is_host(device):
        warnings.warn(
            "offload_optimizer has no effect on a CPU, whose memory is the host's: leave it out",
            stacklevel=3,
        )
        on_host = False
    if on_host or master_weights:
        return with_master_weights(optimizer, on_host)
    return optimizer


def learning_rate_of(optimizer: Any) -> float:
    """The learning rate of the first group; some optimizers keep it in a tensor."""
    return float(optimizer.param_groups[0]["lr"])


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Sets the learning rate of all groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _class_of(name: str, learning_rate: float) -> tuple[Any, dict[str, Any]]:
    if name == "adam":
        return torch.optim.Adam, {"betas": (0.9, 0.999), "lr": learning_rate, "fused": None}
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    # The fields that transformers reads: its TrainingArguments would set up device and processes.
    settings: Any = SimpleNamespace(
        optim=OptimizerNames(name),
        optim_args="",
        learning_rate=learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        warmup_steps=0,
    )
    return Trainer.get_optimizer_cls_and_kwargs(settings)


def _defaults(kind: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer class's arguments without ``optim_args``: ``keywords`` over its defaults."""
    return {k: p.default for k, p in inspect.signature(kind).parameters.items()} | dict(keywords)


def _arguments(name: str, defaults: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """The keyword arguments that ``optim_args`` sets; raises ValueError for one that the class does
    not have, that another setting decides, or with a wrong value."""
    betas = list(defaults.get("betas") or ())
    arguments: dict[str, Any] = {}
    for argument, value in texts.items():
        if argument in _BETAS[: len(betas)]:
            number = _BETAS.index(argument)
            betas[number] = _read(name, argument, value, betas[number])
            arguments["betas"] = tuple(betas)
        elif argument in defaults and argument not in _SAID_BY:
            arguments[argument] = _read(name, argument, value, defaults[argument])
        else:
            remedy = _SAID_BY.get(argument, "leave it out")
            raise ValueError(f"optim_args: optim={name!r} has no argument {argument!r}: {remedy}")
    return arguments


def _read(name: str, argument: str, value: str, default: Any) -> Any:
    """A text of ``optim_args`` in the default's type; raises ValueError where it is of another."""
    kind = _OF_NONE.get(argument) if default is None else type(default)
    try:
        if kind is bool:
            return _WORDS[value.lower()]
        if kind in (int, float, str):
            # A default that is an integer, such as momentum's 0, may be replaced by any number.
            return kind(value) if kind is not int or value.isdecimal() else float(value)
        if kind is torch.dtype:
            return getattr(torch, value)
    except (ValueError, KeyError, AttributeError):
        wanted = "true or false" if kind is bool else f"of type {getattr(kind, '__name__', kind)}"
        raise ValueError(
            f"optim_args: {argument}={value} of optim={name!r} is not {wanted}"
        ) from None
    raise ValueError(
        f"optim_args: {argument} of optim={name!r} cannot be given here: leave it out, or pass an "
        "optimizer"
    )


def _decay(name: str, texts: dict[str, str]) -> float:
    """Takes weight_decay, which groups of weights have, out of ``optim_args``; 0 without it."""
    return float(_read(name, "weight_decay", texts.pop("weight_decay", "0"), 0.0))


def _of_groups(name: str) -> dict[str, Any] | None:
    """The arguments of an optimizer of :data:`_OF_GROUPS`; None for any other."""
    return next((x for beginning, x in _OF_GROUPS.items() if name.startswith(beginning)), None)


def _package(name: str) -> tuple[str | None, str | None]:
    """An optimizer's package by its names in an import and for pip; (None, None) without one."""
    if name in _OF_TORCHAO:
        return "torchao", "torchao"
    if name.startswith(_OF_BITSANDBYTES):
        return "bitsandbytes", "bitsandbytes"
    for beginning, package in _OF_OTHERS.items():
        if name.startswith(beginning):
            return package
    return None, None


def _parsed(arguments: str | None) -> dict[str, str]:
    """The values of ``optim_args`` by name; raises ValueError for other than "name=value,…"."""
    values: dict[str, str] = {}
    for part in (arguments or "").replace(" ", "").split(","):
        name, equals, value = part.partition("=")
        if part and not (name and equals and value):
            raise ValueError(f'optim_args must be "name=value,…", got {arguments!r}')
        if name in values:
            raise ValueError(f"optim_args has {name} twice: {arguments!r}")
        if part:
            values[name] = value
    return values


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """Makes bitsandbytes keep the moments of embeddings in float32, as transformers does."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
