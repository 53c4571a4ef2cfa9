"""Chooses a trainer's reference model, and copies models for it."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from fastrl.config import PPOConfig
from fastrl.learn.ref_model.adapter import AdapterOffRefModel, StartAdapterRefModel, trained_before
from fastrl.learn.ref_model.base import RefModel, cannot_follow
from fastrl.learn.ref_model.copy import CopyRefModel, frozen_copy, in_dtype
from fastrl.learn.ref_model.none import NoRefModel
from fastrl.learn.ref_model.offload import OffloadRefModel
from fastrl.learn.ref_model.trunk import TrunkRefModel, Unshareable, shared_copy, split_off
from fastrl.learn.ref_model.trunk_cache import Budget
from fastrl.models.adapter_base import moves_base
from fastrl.models.master_weights import LOW_PRECISION
from fastrl.models.quantised import refuse_quantised
from fastrl.models.value_head import PreTrainedModelWrapper

_IN_PARTS = "the scales of such weights stay behind where they are shared or moved"
# PPOConfig's settings, and the names that trainers under TRL's names have for them.
_TRLS = {"sync_ref_every": "sync_ref_model", "ref_ema": "ref_model_mixup_alpha"}
_RUN_WHOLE = "an encoder–decoder shares no layers, and is not run layer by layer"


class ReferenceSettings(NamedTuple):
    """What decides which reference a policy has: settings of ``PPOConfig``, with its defaults but
    for ``init_kl_coef``."""

    reference: str = "auto"
    num_shared_layers: int | None = None
    reference_adapter: str = "off"
    reference_dtype: str = "auto"
    init_kl_coef: float = 1.0  # 0: no reference is needed
    sync_ref_every: int = 0
    ref_ema: float = 1.0
    trunk_cache_gib: float = 2.0
    trunk_cache_host_gib: float = 8.0
    micro_batch_tokens: int | None = None


Model = TypeVar("Model", PreTrainedModelWrapper, PreTrainedModel)


def create_reference_model(
    model: Model, num_shared_layers: int | None = None, pattern: str | None = None
) -> Model:
    """A frozen copy of ``model``, in evaluation mode. The copy of a model with an adapter shares
    all weights that are not trained: the KL is measured against the adapter as it is now. A trainer
    with ``ref_model=None`` takes the base instead, or copies the adapter (``reference_adapter``).

    Args:
        model: a policy, or a plain transformers model.
        num_shared_layers: so many bottom layers, and the embeddings, are shared, not copied, and
            frozen in ``model`` too. A model that cannot be run in two parts is copied whole, with a
            warning. Of a model with an adapter the base is shared in any case.
        pattern: TRL's name of the layers; ignored, they are found without it.

    Raises:
        TypeError: another model.
        ValueError: num_shared_layers out of range, or for a quantised or encoder–decoder model.
    """
    language_model: Any = model
    if isinstance(model, PreTrainedModelWrapper):
        language_model = model.pretrained_model
    if hasattr(language_model, "peft_config"):
        return frozen_copy(model, {id(p): p for p in model.parameters() if not p.requires_grad})
    if not isinstance(language_model, PreTrainedModel):
        raise TypeError(
            "model must be a policy or a transformers model, got "
            f"{type(language_model).__name__}: copy another module with copy.deepcopy"
        )
    if num_shared_layers is None:
        return frozen_copy(model)
    refuse_quantised(
        model, f"num_shared_layers={num_shared_layers}: layers", f"{_IN_PARTS}; leave it None"
    )
    if getattr(language_model.config, "is_encoder_decoder", False):
        raise ValueError(f"num_shared_layers={num_shared_layers}: {_RUN_WHOLE}; leave it None")
    try:
        trunk = split_off(language_model, num_shared_layers)
    except Unshareable as cause:
        warnings.warn(
            f"{type(language_model).__name__} is copied whole, and none of its layers is frozen, "
            f"because {cause}",
            stacklevel=2,
        )
        return frozen_copy(model)
    if isinstance(model, PreTrainedModelWrapper):
        model.trunk = trunk
    return shared_copy(model, trunk)


def choose_ref_model(
    settings: ReferenceSettings | PPOConfig,
    policy: PreTrainedModelWrapper,
    ref_model: PreTrainedModelWrapper | None = None,
    num_shared_layers: int | None = None,
) -> RefModel:
    """Chooses the reference by ``PPOConfig.reference``, before anything is prepared or an optimizer
    made. Beside a ``ref_model`` that shares no layers with the policy ``num_shared_layers`` is
    ignored, with a warning.

    Raises:
        ValueError: a mode that the model cannot serve, arguments that contradict it, a reference
            with another vocabulary, a ``reference_dtype`` that the mode cannot have.
    """
    layers = settings.num_shared_layers if num_shared_layers is None else num_shared_layers
    if layers is not None and ref_model is not None and not _shared(policy, ref_model):
        warnings.warn(
            f"num_shared_layers={layers} is ignored: ref_model is a model of its own, which shares "
            "no layers with model; leave out ref_model, or make it with "
            "create_reference_model(model, num_shared_layers=…)",
            stacklevel=3,
        )
        layers = None
    mode, why = _mode(settings, policy, ref_model, layers)
    _check(mode, settings, policy, ref_model, layers)
    reference: RefModel
    if mode == "none":
        reference = NoRefModel()
    elif mode == "adapter":
        trained = trained_before(policy.pretrained_model)
        kind = settings.reference_adapter
        if kind == "auto":  # a reference that follows the policy needs its own weights
            kind = "start" if trained or settings.sync_ref_every else "off"
        if kind == "start":
            reference = StartAdapterRefModel(policy)
            why += ": a copy of it as training begins"
        else:
            _check_base_kept(policy.pretrained_model)
            reference = AdapterOffRefModel(policy)
            why += ": the base model with it off"
            why += ", from which the policy differs already" if trained else ""
    elif mode == "offload":
        copied = _copied(ref_model, policy, settings.reference_dtype)
        reference = OffloadRefModel(copied, policy)
    elif mode == "trunk":
        ref_model = ref_model or create_reference_model(policy, layers)
        gib = (settings.trunk_cache_gib, settings.trunk_cache_host_gib)
        budget = Budget(*(int(each * 2**30) for each in gib))
        if ref_model.trunk is not None:
            reference = TrunkRefModel(ref_model, policy, budget, settings.micro_batch_tokens)
        else:
            reference, why = CopyRefModel(ref_model, policy), "its layers cannot be shared"
    else:
        copied = _copied(ref_model, policy, settings.reference_dtype)
        reference = CopyRefModel(copied, policy)
    reference.why = why
    return reference


def _check_base_kept(peft_model: Any) -> None:
    for name in peft_model.active_adapters:
        config = peft_model.peft_config[name]
        if moves_base(config):
            raise ValueError(
                "reference_adapter='off': an adapter that begins with init_lora_weights="
                f"{config.init_lora_weights!r} changes the base's weights, and the model without "
                "it is not the one that it was put on: set reference_adapter='start'"
            )


def _copied(
    ref_model: PreTrainedModelWrapper | None, policy: PreTrainedModelWrapper, dtype: str
) -> PreTrainedModelWrapper:
    """The user's reference, itself if it has the dtype, else a copy in it; without one, a copy of
    the policy in it."""
    model = in_dtype(ref_model or policy, dtype)
    return frozen_copy(policy) if model is policy else model


def _mode(
    settings: ReferenceSettings | PPOConfig,
    policy: PreTrainedModelWrapper,
    ref_model: PreTrainedModelWrapper | None,
    layers: int | None,
) -> tuple[str, str]:
    """The reference's mode, and the reason for it in words."""
    if settings.reference != "auto":
        return settings.reference, "as configured"
    if ref_model is not None:
        if _shared(policy, ref_model):
            return "trunk", "ref_model shares layers with the policy"
        return "copy", "ref_model was given"
    if policy.is_peft_model:
        return "adapter", "the policy has an adapter"
    if layers is not None:
        return "trunk", f"num_shared_layers is {layers}"
    if settings.init_kl_coef == 0:
        return "none", "the KL coefficient is 0"
    return "copy", "a frozen copy of the policy"


def _check(
    mode: str,
    settings: ReferenceSettings | PPOConfig,
    policy: PreTrainedModelWrapper,
    ref_model: PreTrainedModelWrapper | None,
    layers: int | None,
) -> None:
    asked = f"reference={mode!r}"
    if policy.is_encoder_decoder and (layers is not None or mode in ("trunk", "offload")):
        asked += "" if layers is None else f", num_shared_layers={layers}"
        raise ValueError(
            f"{asked}: {_RUN_WHOLE}; leave num_shared_layers None and choose reference='copy', "
            "'adapter' or 'none'"
        )
    if layers is not None and mode != "trunk":
        if policy.is_peft_model:
            raise ValueError(
                f"num_shared_layers={layers} is for models without an adapter: an adapter's "
                "reference is its base, which is shared whole; leave num_shared_layers out"
            )
        raise ValueError(
            f"num_shared_layers={layers}: {asked} shares no layers; leave num_shared_layers out, "
            "or choose reference='trunk'"
        )
    if mode == "trunk" or (ref_model is None and mode == "offload"):
        instead = "'adapter'" if ref_model is None else "'copy'"
        refuse_quantised(
            policy, f"{asked}: policy and reference", f"{_IN_PARTS}; choose reference={instead}"
        )
    if mode in ("trunk", "offload"):
        refuse_quantised(
            ref_model,
            f"{asked}: the reference",
            f"{_IN_PARTS}; choose reference='copy', or load ref_model without load_in_4bit",
        )
    if settings.sync_ref_every and ref_model is not None:
        refuse_quantised(
            ref_model,
            f"{_name(settings, 'sync_ref_every')}: a reference that follows the policy",
            "load it whole",
        )
    if mode == "adapter" and not policy.is_peft_model:
        raise ValueError(f"{asked} needs a PEFT model: choose 'copy', or pass peft_config")
    if mode in ("copy", "trunk", "offload") and policy.is_peft_model and ref_model is None:
        raise ValueError(
            f"{asked} is not for a PEFT model: choose 'adapter', which costs no memory"
        )
    if mode == "none" and settings.init_kl_coef != 0:
        raise ValueError(
            f"{asked}, but init_kl_coef is {settings.init_kl_coef}: set it to 0, or choose another "
            "reference"
        )
    if mode in ("adapter", "none") and ref_model is not None:
        raise ValueError(f"{asked}, but ref_model was given: leave one of them out")
    if mode == "trunk" and ref_model is None and layers is None:
        raise ValueError(f"{asked} needs num_shared_layers: how many of the bottom layers to share")
    if mode == "trunk" and ref_model is not None and not _shared(policy, ref_model):
        raise ValueError(
            f"{asked}, but ref_model shares no layers with model: make it with "
            "create_reference_model(model, num_shared_layers=…), or leave it out"
        )
    follows = mode not in ("adapter", "none") or settings.reference_adapter != "off"
    if settings.sync_ref_every and (mode == "none" or not follows):
        raise ValueError(cannot_follow(mode, _name(settings, "sync_ref_every")))
    _check_dtype(mode, settings, policy, ref_model)
    if ref_model is not None:
        _check_vocabulary(policy, ref_model)


def _check_dtype(
    mode: str,
    settings: ReferenceSettings | PPOConfig,
    policy: PreTrainedModelWrapper,
    ref_model: PreTrainedModelWrapper | None,
) -> None:
    asked = f"reference_dtype={settings.reference_dtype!r}"
    if settings.sync_ref_every and settings.ref_ema < 1:
        _check_small_steps(mode, settings, ref_model or policy)
    if settings.reference_dtype == "auto":
        return
    if mode == "trunk":
        raise ValueError(
            f"{asked}: with reference='trunk' the bottom layers are the policy's own, and the "
            "layers above them take their outputs: leave it at 'auto', or choose reference='copy'"
        )
    if mode not in ("copy", "offload"):
        raise ValueError(
            f"{asked}, but reference={mode!r} has no weights of its own: leave it at 'auto', or "
            "choose reference='copy' or 'offload'"
        )
    theirs = () if ref_model is None else ref_model.parameters()
    if {id(weight) for weight in policy.parameters()} & {id(weight) for weight in theirs}:
        raise ValueError(
            f"{asked}, but ref_model has weights that are the policy's own: leave it at 'auto', or "
            "pass a model of its own"
        )


def _check_small_steps(
    mode: str, settings: ReferenceSettings | PPOConfig, source: PreTrainedModelWrapper
) -> None:
    """Refuses a reference that is to move by a part of the way to the policy, and has weights that
    lose such steps.

    Args:
        source: what the reference is a copy of; an adapter's copy is float32.
    """
    if mode not in ("copy", "offload", "trunk"):
        return
    dtypes = {p.dtype for p in source.parameters() if p.is_floating_point()}
    if settings.reference_dtype != "auto":
        dtypes = {getattr(torch, settings.reference_dtype)}
    low = [str(d).removeprefix("torch.") for d in LOW_PRECISION if d in dtypes]
    if low:
        remedy = "reference_dtype='float32'"
        if mode == "trunk":
            remedy = f"reference='copy' with {remedy}"
        ema = _name(settings, "ref_ema")
        raise ValueError(
            f"{ema}={settings.ref_ema:g} with a reference in {low[0]}: changes below half the "
            f"spacing of {low[0]} would be lost, and the reference hardly move: set {ema}=1, or "
            f"choose {remedy}"
        )


def _name(settings: ReferenceSettings | PPOConfig, name: str) -> str:
    """A setting's name for messages: ours or TRL's."""
    return name if isinstance(settings, PPOConfig) else _TRLS[name]


def _check_vocabulary(policy: PreTrainedModelWrapper, ref_model: PreTrainedModelWrapper) -> None:
    ours, theirs = (m.config.get_text_config() for m in (policy, ref_model))
    for name in ("vocab_size", "bos_token_id", "eos_token_id"):
        mine, other = (getattr(config, name, None) for config in (ours, theirs))
        if mine != other and None not in (mine, other):
            raise ValueError(
                f"ref_model has {name}={other}, model {mine}: the reference must be a model with "
                "the same tokenizer"
            )


def _shared(policy: PreTrainedModelWrapper, ref_model: PreTrainedModelWrapper) -> bool:
    """Whether the reference shares the policy's trunk."""
    if policy.trunk is None or ref_model.trunk is None:
        return False
    theirs = ref_model.trunk.parameters
    return all(theirs.get(name) is p for name, p in policy.trunk.parameters.items())
