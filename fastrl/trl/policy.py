"""The policy of a trainer by TRL's arguments: its model, tokenizer and adapter."""

from __future__ import annotations

from typing import Any

from fastrl.models.load import load_language_model, with_adapter
from fastrl.trainers.special_tokens import settle_model
from fastrl.trainers.supervised import is_path, load_if_path, tokenizer_of


def loaded(model: Any, args: Any, quantization_config: Any = None) -> Any:
    """A model; of a path the one that is saved there.

    Raises:
        ValueError: a ``quantization_config`` for a model that is loaded already, or two of them.
    """
    if not is_path(model):
        if quantization_config is not None:
            raise ValueError(
                "quantization_config is for a model that the trainer loads: pass the model's "
                "path, or load the model with it"
            )
        return model
    options: dict[str, Any] = {"trainable": True}
    if quantization_config is not None:
        if "quantization_config" in (args.model_init_kwargs or {}):
            raise ValueError(
                "quantization_config is also in model_init_kwargs: give it in one place"
            )
        options["quantization_config"] = quantization_config
    return load_if_path(model, load_language_model, args, **options)


def padding_tokenizer(processing_class: Any, model: Any, args: Any) -> Any:
    """The tokenizer, by default the one saved with the model; it pads with EOS unless it has a pad
    token.

    Raises:
        TypeError: a processor of more than texts.
    """
    if getattr(processing_class, "tokenizer", None) is not None:
        raise TypeError(
            f"processing_class is a {type(processing_class).__name__}, and only texts are learned "
            "from: pass its tokenizer"
        )
    if processing_class is not None and processing_class.pad_token is None:
        processing_class.pad_token = processing_class.eos_token
    return tokenizer_of(None, processing_class, model, args)


def settle_tokens(model: Any, tokenizer: Any, args: Any, adapts: bool) -> None:
    """Tells a model of the tokenizer's tokens.

    Args:
        adapts: only an adapter is trained.
    """
    settle_model(model, tokenizer, args, adapts)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def adapted(model: Any, peft_config: Any, args: Any) -> Any:
    """The model, with an adapter if there is a ``peft_config``."""
    model = with_adapter(model, peft_config, args)
    if hasattr(model, "peft_config") and args.gradient_checkpointing:
        model.enable_input_require_grads()
    return model
