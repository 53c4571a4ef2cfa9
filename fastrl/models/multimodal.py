"""Checkpoints of multimodal models: they are loaded whole, so that they are saved in their format,
and only the parts that read texts are trained."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

CLASSIFIER_HEADS = ("score", "classifier")  # modules that PEFT saves with a SEQ_CLS adapter


def is_multimodal(config: Any) -> bool:
    """Whether a checkpoint's configuration names a class that reads images and texts, such as
    Qwen3_5ForConditionalGeneration; AutoModelForCausalLM would load the text model alone."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return False
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return model_class.__name__ in (getattr(config, "architectures", None) or ())


def loader_for(config: Any, loader: Any) -> Any:
    """The auto class that loads a multimodal checkpoint whole if ``loader`` would load its text
    model alone; else ``loader``."""
    whole = loader is AutoModelForCausalLM and is_multimodal(config)
    return AutoModelForImageTextToText if whole else loader


def unread_modules(model: Any) -> list[str]:
    """The parts of a multimodal model that texts do not reach, such as ``model.visual``; none for
    any other model."""
    config: Any = getattr(model, "config", None)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or model.get_decoder() is model:
        return []
    heads = [getattr(model, name, None) for name in CLASSIFIER_HEADS]
    reading = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    read = {id(p) for part in (*reading, *heads) if part is not None for p in part.parameters()}
    unread: list[str] = []
    for name, module in model.named_modules():
        weights = [id(p) for p in module.parameters()]
        inside = name.startswith(tuple(f"{each}." for each in unread))
        if weights and not inside and read.isdisjoint(weights):
            unread.append(name)
    return unread


def freeze_unread(model: Any) -> None:
    """Freezes parts that texts do not reach, with a warning; they are saved as they were loaded."""
    unread = unread_modules(model)
    for name in unread:
        model.get_submodule(name).requires_grad_(False)
    if unread:
        warnings.warn(
            f"{type(model).__name__} reads texts alone here: {', '.join(unread)} is frozen, and "
            "saved as it is",
            stacklevel=5,
        )
