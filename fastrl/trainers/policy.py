"""The policy of a trainer with TRL's arguments: its model, tokenizer and adapter."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from fastrl.models.fast_tokenizer import as_fast
from fastrl.models.load import load_language_model, with_adapter
from fastrl.models.model_files import is_path
from fastrl.models.utils import check_trainable, without_dropout
from fastrl.trainers.special_tokens import settle_model
from fastrl.trainers.supervised import load_if_path, refuse_processor, tokenizer_of

_ON_HEAD = "an adapter on lm_head is not supported: leave 'lm_head' out of target_modules"


def loaded(model: Any, args: Any, quantization_config: Any = None) -> Any:
    """The model, or the one that is saved at a path.

    Raises:
        ValueError: ``quantization_config`` with a loaded model, or also in model_init_kwargs.
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
    token; with the chat template and tokens that ``args`` name.

    Raises:
        TypeError, ValueError: see :func:`fastrl.trainers.supervised.tokenizer_of`.
    """
    refuse_processor(processing_class)
    processing_class = as_fast(processing_class)
    if processing_class is not None and processing_class.pad_token is None:
        processing_class.pad_token = processing_class.eos_token
    return tokenizer_of(None, processing_class, model, args)


def settle_tokens(model: Any, tokenizer: Any, args: Any, adapts: bool) -> None:
    """Gives a model's configurations the tokenizer's pad token, and the tokens that ``args`` name;
    raises ValueError as :func:`settle_model` does. ``adapts``: whether only an adapter is trained.
    """
    settle_model(model, tokenizer, args, adapts)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def adapted(model: Any, peft_config: Any, args: Any) -> Any:
    """The model, with an adapter if there is a ``peft_config``; raises as ``with_adapter`` does."""
    model = with_adapter(model, peft_config, args)
    if hasattr(model, "peft_config") and args.gradient_checkpointing:
        model.enable_input_require_grads()
    return model


def loaded_causal(model: Any, args: Any, quantization_config: Any) -> Any:
    """Loads a causal language model, as :func:`loaded` does.

    Raises:
        ValueError: a model that is no causal language model; what :func:`loaded` refuses.
    """
    if args.model_init_kwargs and not is_path(model):
        warnings.warn("the model is loaded already: model_init_kwargs change nothing", stacklevel=4)
    model = loaded(model, args, quantization_config)
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or not model.get_output_embeddings():
        raise ValueError(
            f"{type(model).__name__} is no causal language model: load it with AutoModelForCausalLM"
        )
    return model


def adapted_policy(model: Any, tokenizer: Any, peft_config: Any, args: Any) -> Any:
    """A model as it is trained on its own responses: with the tokenizer's tokens, an adapter if
    there is a ``peft_config``, and no dropout if ``args.disable_dropout``.

    Raises:
        ValueError: an adapter on the head; no trainable weight; see ``settle_tokens``, ``adapted``.
    """
    adapts = peft_config is not None or hasattr(model, "peft_config")
    settle_tokens(model, tokenizer, args, adapts)
    model = adapted(model, peft_config, args)
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear and any("lora_" in x for x, _ in head.named_parameters()):
        raise ValueError(_ON_HEAD)
    if args.disable_dropout:
        without_dropout(model)
    check_trainable(model)
    return model


def check_adapter(peft_config: Any) -> None:
    """Raises ValueError for a kind of adapter that cannot be trained on responses."""
    if getattr(peft_config, "is_prompt_learning", False):
        raise ValueError(
            "Prompt-learning adapters shift the positions of tokens and are not supported: use LoRA"
        )
    if "lm_head" in (getattr(peft_config, "target_modules", None) or ()):
        raise ValueError(_ON_HEAD)
