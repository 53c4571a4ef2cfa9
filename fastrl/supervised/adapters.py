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
        raise ValueError(
            "the model has an adapter already: leave out peft_config to train that one"
        )
    if any(getattr(model, f"is_{kind}", False) for kind in _QUANTISED):
        options: dict[str, Any] = {"use_gradient_checkpointing": bool(args.gradient_checkpointing)}
        if args.gradient_checkpointing_kwargs is not None:
            options["gradient_checkpointing_kwargs"] = args.gradient_checkpointing_kwargs
        model = prepare_model_for_kbit_training(model, **options)
    return get_peft_model(model, peft_config)


_QUANTISED = ("quantized", "loaded_in_8bit", "loaded_in_4bit")
