"""Facts about a model, and its training and evaluation modes."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import inspect
import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from fastrl.models.master_weights import LOW_PRECISION
from fastrl.models.quantised import (
    NEEDS_AN_ADAPTER,
    is_quantised,
    refuse_compressed,
    scales,
    settle,
)
from fastrl.models.sharding import whole

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd factor of 64 bits, as int64
_CHUNK = 1 << 20  # weights that a checksum takes at a time
NO_LIMIT = 10**9  # tokens; a larger limit is none: tokenizers without one say 10^30


def base_of(model: Any) -> Any:
    """The model of transformers within wrappers of fastrl and PEFT, or the model itself."""
    model = getattr(model, "pretrained_model", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _SavedAsItIs(GenerationConfig):
    """A generation config that is saved whatever it holds."""

    def validate(self, **options: Any) -> None:  # type: ignore[override]
        super().validate(**{**options, "strict": False})


def keep_savable(model: Any) -> None:
    """Lets a model be saved with a generation config that transformers finds fault with, such as a
    temperature without ``do_sample``, which files of Llama 2's time have. transformers refuses one
    that has changed since it was loaded, as by the tokenizer's ids; it warns of others."""
    config = getattr(base_of(model), "generation_config", None)
    if type(config) is GenerationConfig:
        config.__class__ = _SavedAsItIs


def cache_argument(model: Any) -> str:
    """The name by which a model's forward takes its cache: from transformers 5.24 on ``cache``."""
    taken = inspect.signature(type(base_of(model)).forward).parameters
    return "cache" if "cache" in taken else "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache in a model's output, under the name of :func:`cache_argument`."""
    return output.cache if hasattr(output, "cache") else output.past_key_values


def need_peft(what: str) -> None:
    """Raises ImportError where PEFT is not installed; ``what`` says in words what needs it."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError(f"{what} needs peft: pip install 'peft>=0.21.2'")


def text_config(model: Any) -> Any:
    """The part of a model's configuration that is about its text; None where it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def context_length(model: Any) -> int | None:
    """Number of positions of the model; None where its configuration names none, or says by -1
    (XLNet), or by a number larger than any text's, that the model has no limit."""
    stated = getattr(text_config(model), "max_position_embeddings", None)
    return stated if stated is not None and 0 < stated < NO_LIMIT else None


def is_empty(model: nn.Module) -> bool:
    """Whether another process has loaded the model's weights, and this one none."""
    return any(p.is_meta for p in model.parameters())


def hidden_width(config: Any) -> int:
    """Width of the last hidden state.

    Raises:
        ValueError: the configuration does not name it.
    """
    # OPT projects its last hidden state down to the width of its word embeddings.
    for name in ("word_embed_proj_dim", "hidden_size"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    text = config.get_text_config()
    if text is not config:
        return hidden_width(text)
    raise ValueError(f"{type(config).__name__} states no hidden_size: the value head needs one")


def computes_in_tf32(device: torch.device) -> bool:
    """Whether a device computes matrix products of fp32 in TF32, with ten bits of the mantissa.

    ``torch.get_float32_matmul_precision()`` is not used: it fails where TF32 was chosen by
    ``torch.backends.fp32_precision``, as transformers' ``tf32=True`` does.
    """
    return device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextlib.contextmanager
def evaluating(*models: nn.Module | None) -> Iterator[None]:
    """Context of evaluation mode (dropout off); at its end each module gets its mode back."""
    with modes_kept(*models):
        for model in models:
            if model is not None:
                model.eval()
        yield


@contextlib.contextmanager
def modes_kept(*models: nn.Module | None) -> Iterator[None]:
    """Restores each module's mode at the end of a block, as code in it may change it."""
    present = [model for model in models if model is not None]
    # A new adapter is in training mode on a base that is not: the model has no single mode.
    modes = [(module, module.training) for model in present for module in model.modules()]
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def without_dropout(model: nn.Module | None) -> None:
    """Sets all dropout of a model to 0, an adapter's too: that of modules, the probabilities that
    layers hold themselves, and those that they read in their configuration. They then read a copy
    of the configuration: the model's own, which is saved with it, stays as it is."""
    quiet: dict[int, Any] = {}
    whole = None
    for module in () if model is None else model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _drop_nothing(module)
        if whole is None:  # the whole model comes first, perhaps in wrappers
            whole = module if isinstance(module, PreTrainedModel) else None
        elif isinstance(module.__dict__.get("config"), PreTrainedConfig):
            config: Any = module.config
            if id(config) not in quiet:
                quiet[id(config)] = config, copy.copy(config)  # the original, so that its id stays
                _drop_nothing(quiet[id(config)][1])
            module.config = quiet[id(config)][1]


def _drop_nothing(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if "drop" not in name:
            continue
        if isinstance(value, float):
            setattr(owner, name, 0.0)
        elif isinstance(value, dict):  # by an adapter's name
            setattr(owner, name, {k: 0.0 if isinstance(x, float) else x for k, x in value.items()})


def check_trainable(model: nn.Module, but: str = "") -> None:
    """Refuses a model without a trainable weight, and one in four bits without an adapter; settles
    four-bit layers, see :func:`fastrl.models.quantised.settle`.

    Args:
        but: what else there is to train, for the message.

    Raises:
        ValueError: no weight of the model can be trained, or it has four-bit weights and no
            adapter; four-bit weights in a layout without a gradient, packed weights of
            compressed-tensors.
    """
    refuse_compressed(model)
    if is_quantised(model) and not hasattr(model, "peft_config"):
        raise ValueError(NEEDS_AN_ADAPTER)
    settle(model)
    if any(p.requires_grad for p in model.parameters()):
        return
    remedy = (
        "load its adapter with is_trainable=True (peft.PeftModel.from_pretrained has the same "
        "argument), or put a new one on the base model with peft_config"
        if hasattr(model, "peft_config")
        else "set requires_grad of what is to be trained, or pass peft_config for an adapter"
    )
    raise ValueError(
        f"nothing of the model can be trained{but}: all its weights are frozen; {remedy}"
    )


def warn_of_lost_updates(model: nn.Module, remedy: str, stacklevel: int = 2) -> None:
    """Warns where trainable weights are bf16 or fp16: changes of a weight below half the dtype's
    spacing (2^-9 to 2^-8 of a weight in bf16, 2^-12 to 2^-11 in fp16) are rounded away.

    Args:
        remedy: how the trainer computes in low precision over float32 weights.
    """
    low = {p.dtype for p in model.parameters() if p.requires_grad and p.dtype in LOW_PRECISION}
    if not low:
        return
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in low))
    warnings.warn(
        f"trainable weights are {names}: updates below half their spacing are lost (in bfloat16 at "
        "a learning rate of 1e-6 most weights never change). Set master_weights=True; or load the "
        f"model in float32 and {remedy}; or train a LoRA adapter, whose weights are float32",
        stacklevel=stacklevel + 1,
    )


def warn_of_fp16(model: nn.Module, stacklevel: int = 2) -> None:
    """Warns where trainable weights are float16: their gradients are, too, and nothing scales the
    loss, as fp16 mixed precision of float32 weights does."""
    if any(p.requires_grad and p.dtype == torch.float16 for p in model.parameters()):
        warnings.warn(
            "weights in float16 are trained without loss scaling: gradients below 3e-8 become 0. "
            "Load the model in bfloat16 or float32 (commands: --dtype bfloat16); "
            "with fp16 mixed precision, which scales the loss, weights are float32",
            stacklevel=stacklevel + 1,
        )


@torch.no_grad()
def checksum(weights: Mapping[str, Tensor]) -> str:
    """A checksum of the names, shapes and bits of weights, the same on every device. Where weights
    are spread over processes, every process must call this function."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {tuple(weight.shape)} {_bits(whole(weight))}".encode())
    return digest.hexdigest()


def _bits(x: Tensor) -> int:
    """A sum over the elements' bits, weighted by their places; exact on every device."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    start = 0
    for part in x.detach().contiguous().view(kind).flatten().split(_CHUNK):
        places = torch.arange(start, start + len(part), device=x.device)
        # In place: a trainer's construction should need less memory than its steps.
        total += places.mul_(2).add_(1).mul_(_ODD).mul_(part).sum()
        start += len(part)
    return int(total)


def model_identity(
    model: nn.Module, tokenizer: Any, moving: Collection[str] = ()
) -> dict[str, Any]:
    """What must be the same where a run resumes: the kind of model, its vocabulary and tokenizer,
    and the weights that are not trained, which checkpoints of adapters do not have.

    Args:
        model: a model of transformers or PEFT, or a wrapper of fastrl around one.
        tokenizer: None where there is none.
        moving: names, in the model without wrappers, of weights that follow the trained ones, and
            are in checkpoints.
    """
    plain = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    follow = tuple(f".{name}" for name in moving)
    plain = {name: p for name, p in plain.items() if not f".{name}".endswith(follow)}
    adapters = getattr(model, "peft_config", {}).values()
    if any(getattr(x, "task_type", None) == "SEQ_CLS" for x in adapters):
        # The head that PEFT has put a trained copy in front of: drawn anew each time, never run.
        plain = {name: p for name, p in plain.items() if ".original_module." not in name}
    frozen = {**plain, **scales(model)}
    return {
        "model": type(getattr(model, "pretrained_model", model)).__name__,
        "vocabulary": getattr(text_config(model), "vocab_size", None),
        "tokenizer": "none" if tokenizer is None else _tokens(tokenizer),
        "frozen weights": checksum(frozen),
    }


def _tokens(tokenizer: Any) -> str:
    """A checksum of all tokens and of the roles of the special ones."""
    tokens = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(tokens, default=str).encode()).hexdigest()
