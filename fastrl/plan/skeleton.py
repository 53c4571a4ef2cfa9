"""A model from its configuration alone, for a rehearsal: no weights are read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from fastrl.models.load import CONFIG_NAME, base_folder, find_file, is_adapter, model_folder

# What an unknown architecture must state, for a Llama of its sizes.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_FURTHER = ("intermediate_size", "num_key_value_heads", "head_dim", "max_position_embeddings")


@dataclass
class Skeleton:
    """What a model is, without its weights.

    Attributes:
        config: transformers' configuration.
        dtype: of the weights.
        adapter: PEFT's configuration of a new or a saved adapter; None: all weights are trained.
        guesses: what of it is assumed.
    """

    config: Any
    dtype: torch.dtype = torch.float32
    adapter: Any = None
    guesses: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | os.PathLike, dtype: str = "float32", adapter: Any = None) -> Skeleton:
        """From a folder, a run's folder, an adapter's or a Hub id, of which the configuration alone
        is read.

        Raises:
            FileNotFoundError: a folder without a configuration.
            ValueError: one that cannot be read, or an unknown architecture without sizes.
        """
        if adapter is None and is_adapter(path):
            from peft import PeftConfig

            adapter = PeftConfig.from_pretrained(model_folder(path))
            adapter.inference_mode = False
        config, guesses = _config_of(base_folder(path))
        named = dtype if dtype != "auto" else str(getattr(config, "dtype", None) or "float32")
        return cls(config, getattr(torch, named.removeprefix("torch.")), adapter, guesses)

    @classmethod
    def of(cls, model: Any) -> Skeleton:
        """Of a model of transformers, of PEFT, or of fastrl around one."""
        model = getattr(model, "pretrained_model", model)
        peft = getattr(model, "peft_config", None)
        weights = [p for p in model.parameters() if p.is_floating_point()]
        base = next((p for p in weights if not p.requires_grad), weights[0])
        return cls(model.config, base.dtype, None if peft is None else peft[model.active_adapter])

    def build(self, kind: Any = AutoModelForCausalLM) -> Any:
        """The model; to be called within a rehearsal.

        Args:
            kind: transformers' class for the model's kind, which has ``from_config``.

        Raises:
            ValueError: a configuration of which transformers makes no such model.
        """
        model = kind.from_config(self.config, dtype=self.dtype)
        if self.adapter is None:
            return model
        from peft import get_peft_model

        return get_peft_model(model, self.adapter)

    @property
    def name(self) -> str:
        """The kind of the model and its size."""
        kind = getattr(self.config, "model_type", "model")
        text = self.config.get_text_config()
        return f"{kind} {text.num_hidden_layers}×{text.hidden_size}"


def _config_of(folder: str) -> tuple[Any, list[str]]:
    """The configuration, and what of it is guessed."""
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
    given = {name: fields[name] for name in (*_SIZES, *_FURTHER) if fields.get(name) is not None}
    given.setdefault("intermediate_size", 4 * given["hidden_size"])
    guess = (
        f"parameters and activations: the architecture {kind!r} is unknown to transformers, and "
        "counted as a Llama of its sizes"
    )
    tied = bool(fields.get("tie_word_embeddings", False))
    return LlamaConfig(**given, tie_word_embeddings=tied), [guess]


WORDS = ("a", "b")  # a text of so many words has as many tokens


def blank_tokenizer() -> Any:
    """A tokenizer that can pad and end, and knows two words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": 0, "<eos>": 1, **{word: 2 + i for i, word in enumerate(WORDS)}}
    core = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def words(count: int, which: int = 0, others: int = 0) -> str:
    """A text of so many tokens, all of them one word, but for the last ``others``."""
    others = min(others, count)
    return " ".join([WORDS[which]] * (count - others) + [WORDS[1 - which]] * others)


def tokens(count: int, vocabulary: int, start: int = 2) -> torch.Tensor:
    """So many token ids, none of which is special."""
    most = max(vocabulary - 2, 1)
    return (torch.arange(start, start + count) % most + 2).clamp(max=vocabulary - 1)
