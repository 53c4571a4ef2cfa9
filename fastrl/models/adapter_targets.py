"""Chooses the layers that a new adapter is put on, where its configuration does not name them."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn

from fastrl.models.multimodal import CLASSIFIER_HEADS, unread_modules
from fastrl.models.routing import routers
from fastrl.nearest import did_you_mean

# Layers that PEFT refuses in Mamba's models, whose kernels read these weights by themselves.
_OF_MAMBA = ("out_proj", "conv1d")
_MAMBA = ("falcon_h1", "nemotron_h", "mamba", "mamba2", "falcon_mamba")


def with_targets(model: nn.Module, peft_config: Any) -> Any:
    """An adapter's configuration with target layers: its own, else PEFT's for the model's type
    (left to PEFT to fill in) or its text model's, else all linear layers but heads, routers,
    gates with one output and Mamba's that PEFT refuses. A multimodal model's layers that texts do
    not reach are excluded where ``exclude_modules`` is not set. Warns of unknown names."""
    if not hasattr(peft_config, "target_modules") or not hasattr(peft_config, "exclude_modules"):
        return peft_config
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    _warn_of_unknown(model, peft_config)
    adapted, config = copy.copy(peft_config), cast("Any", model.config)
    unread = unread_modules(model)
    named = adapted.target_modules or getattr(adapted, "target_parameters", None)
    if not named and config.model_type not in KNOWN:
        of_text = config.get_text_config().model_type
        adapted.target_modules = KNOWN.get(of_text) or _linear_layers(model, unread)
    within = tuple(f"{name}." for name in unread)
    inside = [name for name, _ in model.named_modules() if name.startswith(within)]
    targets = adapted.target_modules or KNOWN.get(config.model_type, ())
    hits = isinstance(targets, str) or any(name.endswith(tuple(targets)) for name in inside)
    # PEFT warns of an exclude_modules that excludes nothing.
    if unread and adapted.exclude_modules is None and hits:
        adapted.exclude_modules = rf"({'|'.join(map(re.escape, unread))})\..*"
    return adapted


def _warn_of_unknown(model: nn.Module, peft_config: Any) -> None:
    """Warns of names in a configuration's lists that no name in the model ends with, and of layers
    that the model lacks: PEFT ignores them where it finds others in the list."""
    modules, parameters = ([*dict(x)] for x in (model.named_modules(), model.named_parameters()))
    depth = getattr(cast("Any", model.config).get_text_config(), "num_hidden_layers", None)
    layers = None if depth is None else [*map(str, range(depth))]
    suggestions: dict[str, tuple[str, Sequence[str] | None]] = {
        "target_modules": (".", modules),
        "target_parameters": (".", parameters),
        "modules_to_save": ("", modules),
        "layers_to_transform": (".", layers),
    }
    for setting, (before, names) in suggestions.items():
        listed = getattr(peft_config, setting, None)
        if names is None or listed is None or isinstance(listed, str):
            continue
        entries = [*map(str, listed if isinstance(listed, Iterable) else [listed])]
        unknown = [
            x
            for x in entries
            if x not in CLASSIFIER_HEADS  # PEFT lists both heads, whichever the model has
            and not any(name == x or name.endswith(before + x) for name in names)
        ]
        # PEFT itself raises an error where it finds none of the targets.
        if unknown and not (setting.startswith("target_") and len(unknown) == len(entries)):
            parts = {part for name in names for part in name.split(".")}
            warnings.warn(
                f"peft_config.{setting} has {', '.join(sorted(unknown))}, which "
                f"{type(model).__name__} does not have: the adapter is made without"
                f"{did_you_mean(unknown[0], parts)}",
                stacklevel=5,
            )


def _linear_layers(model: nn.Module, unread: Sequence[str]) -> list[str]:
    """The last parts of the names of a model's linear layers that an adapter may be put on."""
    heads = {id(getattr(model, name, None)) for name in CLASSIFIER_HEADS}
    heads |= {id(cast("Any", model).get_output_embeddings())} | {id(x) for x in routers(model)}
    within = tuple(f"{name}." for name in unread)
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in heads and module.out_features > 1
        if not (within and name.startswith(within))
    }
    if cast("Any", model.config).model_type in _MAMBA:
        names.difference_update(_OF_MAMBA)
    return sorted(names)
