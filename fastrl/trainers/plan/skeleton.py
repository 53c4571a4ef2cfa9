"""Makes a model from its configuration alone, for a rehearsal: no weights are read."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
)

from fastrl.models import quantised
from fastrl.models.load import base_folder, with_adapter
from fastrl.models.model_files import CONFIG_NAME, find_file, is_adapter, model_folder
from fastrl.models.multimodal import CLASSIFIER_HEADS, freeze_unread, loader_for
from fastrl.models.utils import context_length, need_peft

# Sizes that an unknown architecture must state, to be counted as a Llama, and sizes that it may.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_FURTHER = ("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings")


@dataclass
class Skeleton:
    """A model's configuration, dtype and adapter, without its weights.

    Attributes:
        config: transformers' configuration.
        dtype: the dtype of the weights.
        adapter: PEFT's configuration of a new or a saved adapter; None: all weights are trained.
        guesses: assumptions about the configuration, in words.
        four_bits: transformers' BitsAndBytesConfig of a base in four bits; None: whole weights.
    """

    config: Any
    dtype: torch.dtype = torch.float32
    adapter: Any = None
    guesses: list[str] = field(default_factory=list)
    four_bits: Any = None

    @classmethod
    def read(cls, path: str | os.PathLike, dtype: str = "float32", adapter: Any = None) -> Skeleton:
        """The skeleton of a model in a folder, a run's folder or an adapter's, or of a Hub id; only
        the configuration is read.

        Args:
            dtype: the weights' dtype by its name in torch; "auto": the configuration's.
            adapter: PEFT's configuration; None: that of an adapter in the folder, if there is one.

        Raises:
            FileNotFoundError: a folder without a configuration.
            ImportError: an adapter or weights in four bits, and peft or bitsandbytes is missing.
            ValueError: a configuration that cannot be read, or an unknown architecture without
                sizes.
        """
        beside: dict[str, Any] = {}
        if adapter is None and is_adapter(path):
            need_peft(f"the adapter in {path}")
            from peft import PeftConfig

            folder = model_folder(path)
            adapter = PeftConfig.from_pretrained(folder)
            adapter.inference_mode = False
            if os.path.isfile(file := os.path.join(folder, quantised.BASE_FILE)):
                beside = quantised.read_beside_adapter(file)
        config, guesses = _config_of(base_folder(path))
        named = dtype if dtype != "auto" else str(getattr(config, "dtype", None) or "float32")
        skeleton = cls(config, getattr(torch, named.removeprefix("torch.")), adapter, guesses)
        skeleton.four_bits = beside.get("quantization_config") or _four_bits_of(config)
        return skeleton

    @classmethod
    def of(cls, model: Any) -> Skeleton:
        """The skeleton of a model of transformers or PEFT, or of fastrl's wrapper around one."""
        model = getattr(model, "pretrained_model", model)
        peft = getattr(model, "peft_config", None)
        weights = [p for p in model.parameters() if p.is_floating_point()]
        base = next((p for p in weights if not p.requires_grad), weights[0])
        skeleton = cls(
            model.config, base.dtype, None if peft is None else peft[model.active_adapter]
        )
        skeleton.four_bits = _four_bits_of(model.config)
        if skeleton.four_bits is not None:
            skeleton.dtype = getattr(torch, quantised.dtype_before(model))
        return skeleton

    def build(self, kind: Any = AutoModelForCausalLM) -> Any:
        """Makes the model, with its adapter; call it within a rehearsal.

        Args:
            kind: transformers' class for the model's kind, which has ``from_config``.

        Raises:
            ImportError: weights in four bits or an adapter, without bitsandbytes or peft.
            ValueError: a configuration from which transformers makes no model of this kind.
        """
        config = copy.deepcopy(self.config)
        if self.four_bits is not None:  # from_config is for whole weights
            config.__dict__.pop("quantization_config", None)
        model = loader_for(config, kind).from_config(config, dtype=self.dtype)
        freeze_unread(model)
        if self.four_bits is not None:
            skipped = CLASSIFIER_HEADS if kind is AutoModelForSequenceClassification else ()
            model = _in_four_bits(model, self.four_bits, skipped)
        return with_adapter(model, self.adapter)

    def check_tokens(self, **tokens: int) -> None:
        """Checks numbers of tokens for which memory is to be planned.

        Args:
            tokens: the tokens of each part of a sample, by the name of its argument.

        Raises:
            ValueError: fewer than 2 tokens, or together more than the model's context.
        """
        for name, number in tokens.items():
            if not isinstance(number, int) or number < 2:
                raise ValueError(f"{name} must be a number of 2 or more, got {number!r}")
        most, whole = context_length(self), sum(tokens.values())
        if most is not None and whole > most:
            terms = " + ".join(f"{name}={number}" for name, number in tokens.items())
            raise ValueError(f"{terms} are more than the model's context of {most}: lower them")

    @property
    def name(self) -> str:
        """The model's type and size, such as "llama 32×4096" (layers × width)."""
        kind = getattr(self.config, "model_type", "model")
        text = self.config.get_text_config()
        return f"{kind} {text.num_hidden_layers}×{text.hidden_size}"


def _four_bits_of(config: Any) -> Any:
    """The BitsAndBytesConfig of a checkpoint's weights; None where they are not in four bits."""
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None or not quantised.quantises({"quantization_config": quantisation}):
        return None
    if not isinstance(quantisation, dict):
        return quantisation
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig.from_dict(quantisation)


def _in_four_bits(model: Any, config: Any, heads: tuple[str, ...]) -> Any:
    """The model as from_pretrained quantises it, but for the modules named by ``heads``; raises
    ImportError without bitsandbytes."""
    from transformers.quantizers import AutoHfQuantizer

    options = {"quantization_config": config}
    quantised.quantises(options)
    if heads:
        config = quantised.with_whole_heads(options, heads)["quantization_config"]
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    whole = dict(model.named_parameters())
    quantizer.preprocess_model(model, device_map={"": "cpu"})
    convert = quantizer.get_quantize_ops().convert
    for name, shell in list(model.named_parameters()):
        if not shell.is_meta:
            continue
        weight = whole.pop(name).data
        if quantizer.param_needs_quantization(model, name):
            value = convert({name: weight}, full_layer_name=name, model=model)[name]
        else:  # a bias
            value = nn.Parameter(weight, requires_grad=False)
        layer, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(layer), attribute, value)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    return model


def _config_of(folder: str) -> tuple[Any, list[str]]:
    """A model's configuration, and what of it is guessed, in words."""
    try:
        return AutoConfig.from_pretrained(folder), []
    except (OSError, ValueError, KeyError) as error:
        file = find_file(folder, CONFIG_NAME, {})
        if file is None:
            raise FileNotFoundError(
                f"{folder} has no {CONFIG_NAME}, from which a plan is made: {error}"
            ) from error
        try:
            fields = json.loads(Path(file).read_text(encoding="utf-8"))
        except ValueError as bad:
            raise ValueError(f"{file} is not JSON ({bad}): a plan is made from it") from bad
    missing = [name for name in _SIZES if not isinstance(fields.get(name), int)]
    kind = fields.get("model_type", "without a name")
    if missing:
        raise ValueError(
            f"{file}: the architecture {kind!r} is unknown to transformers, and without "
            f"{', '.join(missing)} its size is too: a plan needs these fields"
        )
    sizes = {name: fields[name] for name in (*_SIZES, *_FURTHER) if fields.get(name) is not None}
    sizes.setdefault("intermediate_size", 4 * sizes["hidden_size"])
    guess = (
        f"parameters and activations: the architecture {kind!r} is unknown to transformers, and "
        "counted as a Llama of its sizes"
    )
    tied = bool(fields.get("tie_word_embeddings", False))
    return LlamaConfig(**sizes, tie_word_embeddings=tied), [guess]


WORDS = ("a", "b")  # each is one token


def blank_tokenizer(size: int = 0) -> Any:
    """A tokenizer that can pad and end, and knows two words, and others up to ``size`` tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, **{word: 2 + i for i, word in enumerate(WORDS)}}
    vocabulary |= {f"another{i}": i for i in range(len(vocabulary), size)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def words(count: int, which: int = 0, others: int = 0) -> str:
    """``count`` times the word ``WORDS[which]``, but for the last ``others``: the other word."""
    others = min(others, count)
    return " ".join([WORDS[which]] * (count - others) + [WORDS[1 - which]] * others)


def tokens(count: int, vocabulary: int, start: int = 2) -> torch.Tensor:
    """Token ids [count] from ``start`` + 2 on, wrapping round; none special in blank_tokenizer."""
    most = max(vocabulary - 2, 1)
    return (torch.arange(start, start + count) % most + 2).clamp(max=vocabulary - 1)
