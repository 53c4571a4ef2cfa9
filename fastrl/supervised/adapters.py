"""PEFT adapters on a model that is about to be trained."""

from __future__ import annotations

from typing import Any


def with_adapter(model: Any, peft_config: Any, args: Any) -> Any:
    """The model with a new adapter where a configuration is given; quantised weights are made ready
    for training first.

    Raises:
        ImportError: peft is not installed.
        ValueError: the model has an adapter already.
    """
    if peft_config is None:
        return model
    try:
        from peft import get_peft_model, prepare_model_for_kbit_training
    except ImportError as error:
        raise ImportError("peft_config needs peft: pip install 'fastrl-lm[peft]'") from error
    if hasattr(model, "peft_config"):
        raise ValueError("peft_config is given, but the model already has an adapter")
    if any(getattr(model, flag, False) for flag in ("is_loaded_in_8bit", "is_quantized")):
        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=args.gradient_checkpointing
        )
    return get_peft_model(model, peft_config)
