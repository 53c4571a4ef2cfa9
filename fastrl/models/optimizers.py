"""Optimizers by transformers' names, their packages, and where they keep their state."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastrl.models.master_weights import MasterWeights, with_master_weights

# Beginnings and ends of transformers' names, with packages as they are imported and installed.
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
_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_NOT_ARGUMENTS = {"beta3"}  # which transformers reads, and passes under another name
_BY_BLOCKS = ("bitsandbytes", "torchao")
# Optimizers that step weights within the backward pass, and so by their own rules.
_IN_BACKWARD = ("lomo", "adalomo", "layerwise")


def check_optimizer(name: str, given: Any = None, arguments: str | None = None) -> None:
    """
    Args:
        name: of transformers' ``OptimizerNames``, or "adam".
        given: an optimizer that is there already.
        arguments: the setting ``optim_args``.

    Raises:
        ValueError: a name or arguments beside an optimizer.
        ImportError: its package is not installed; says how to install it.
    """
    if given is not None and name != "adam":
        raise ValueError(
            f"optim={name!r}, but optimizer was given ({type(given).__name__}): leave one out"
        )
    if given is not None and arguments:
        raise ValueError(
            f"optim_args={arguments!r}, but optimizer was given ({type(given).__name__}), which "
            "has its own: leave optim_args out"
        )
    module, package = _package(name)
    if module is not None and importlib.util.find_spec(module) is None:
        raise ImportError(
            f"optim={name!r} needs the package {package}, which is not installed: pip install "
            f"{package}, or choose another optim, such as adamw_torch"
        )
    if module == "torchao":
        # Lets torch.load take its tensors; a checkpoint is read before there is an optimizer.
        importlib.import_module("torchao.optim")


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
    """Makes an optimizer of a model's trainable weights, without weight decay unless ``arguments``
    has it.

    Args:
        name: "adam", torch's Adam; or one of transformers' ``OptimizerNames``.
        arguments: as transformers' ``optim_args``: "name=number,…"; of Adam and its kin beta1,
            beta2, eps, of all weight_decay, and others that the optimizer has.
        fused: False where one process has weights, and others have them without memory: all are to
            compute alike. Adam's else where torch can.

    Raises:
        ValueError: an argument that the optimizer does not have.
    """
    given = _parsed(arguments)
    weights = [p for p in model.parameters() if p.requires_grad]
    if name == "adam":
        _check_known(name, given, {*_ADAM, "weight_decay"})
        beta1, beta2, eps = (float(given.get(k, default)) for k, default in _ADAM.items())
        fused = fused and {p.device.type for p in weights} <= {"cpu", "cuda", "xpu", "mps"}
        decay = float(given.get("weight_decay", 0))
        return torch.optim.Adam(
            weights, learning_rate, (beta1, beta2), eps, weight_decay=decay, fused=fused
        )
    kind, keywords = _of_transformers(name, learning_rate, given)
    known = {*keywords, *_NOT_ARGUMENTS, "weight_decay", *(_ADAM if "betas" in keywords else ())}
    _check_known(name, given, known)
    decay = float(given.get("weight_decay", 0))
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
    """The optimizer with float32 masters of low-precision weights, and with its state on the device
    or in host memory.

    Args:
        on_host: the setting ``offload_optimizer``. Warns where ``device``, on which the model is
            trained, is a CPU.
        spread: whether FSDP2 spreads the weights over processes.

    Raises:
        ValueError: an optimizer that does not step spread weights, or not in host memory.
    """
    if isinstance(optimizer, MasterWeights):
        return optimizer
    packages = _packages_of(optimizer)
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
    if on_host and device.type == "cpu":
        warnings.warn(
            "offload_optimizer has no effect on a CPU, whose memory is the host's: leave it out",
            stacklevel=3,
        )
        on_host = False
    if on_host or master_weights:
        return with_master_weights(optimizer, on_host)
    return optimizer


def learning_rate_of(optimizer: Any) -> float:
    """That of the first group; some optimizers keep it in a tensor."""
    return float(optimizer.param_groups[0]["lr"])


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Sets that of all groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _of_transformers(
    name: str, learning_rate: float, given: Mapping[str, str]
) -> tuple[Any, dict[str, Any]]:
    """The class of an optimizer, and its keyword arguments."""
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    others = [f"{k}={v}" for k, v in given.items() if k not in (*_ADAM, "weight_decay")]
    adam = {k: float(given.get(k, default)) for k, default in _ADAM.items()}
    # What transformers reads of its TrainingArguments, which would begin a run of its own.
    settings: Any = SimpleNamespace(
        optim=OptimizerNames(name),
        optim_args=",".join(others),
        learning_rate=learning_rate,
        adam_beta1=adam["beta1"],
        adam_beta2=adam["beta2"],
        adam_epsilon=adam["eps"],
        weight_decay=float(given.get("weight_decay", 0)),
    )
    return Trainer.get_optimizer_cls_and_kwargs(settings)


def _packages_of(optimizer: Any) -> list[str]:
    """The packages of an optimizer's class and of those that it is derived from, but for the base
    class of all."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
    return [kind.__module__.partition(".")[0] for kind in kinds]


def _package(name: str) -> tuple[str | None, str | None]:
    """The package that an optimizer needs, as it is imported and as it is installed."""
    if name in _OF_TORCHAO:
        return "torchao", "torchao"
    if name.startswith(_OF_BITSANDBYTES):
        return "bitsandbytes", "bitsandbytes"
    for beginning, package in _OF_OTHERS.items():
        if name.startswith(beginning):
            return package
    return None, None


def _parsed(arguments: str | None) -> dict[str, str]:
    """
    Raises:
        ValueError: not "name=value,…".
    """
    found: dict[str, str] = {}
    for part in (arguments or "").replace(" ", "").split(","):
        name, equals, value = part.partition("=")
        if part and not (name and equals and value):
            raise ValueError(f'optim_args must be "name=value,…", got {arguments!r}')
        if part:
            found[name] = value
    return found


def _check_known(name: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    for argument in given:
        if argument not in set(known):
            raise ValueError(
                f"optim_args: optim={name!r} has no argument {argument!r}: leave it out"
            )


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """Has bitsandbytes keep the moments of embeddings in float32, as transformers does."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
