"""The models and the tokenizer behind the golden cases, built by rule: no weights are shipped.

Imported by `generate.py` (TRL 0.11.4, transformers 4) and by the tests (transformers 5): what is
here must mean the same under both.
"""

import zlib

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

BOS, EOS, PAD = 0, 1, 2
FIRST_WORD = 3
VOCABULARY = 97

_SPECIAL = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
_ROTARY = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 48, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
_CONFIGS = {
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_positions=48, n_embd=16, n_layer=2,
     n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **_SPECIAL),
    "llama": lambda: LlamaConfig(vocab_size=VOCABULARY, **_ROTARY, **_SPECIAL),
    "qwen2": lambda: Qwen2Config(vocab_size=VOCABULARY, **_ROTARY, **_SPECIAL),
}  # fmt: skip


def language_model(architecture: str) -> PreTrainedModel:
    """A language model of the named architecture with 2 layers of width 16; its weights are not
    meaningful until `fill_by_rule`."""
    return AutoModelForCausalLM.from_config(_CONFIGS[architecture]())


def tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    """A word-level tokenizer whose word `w17` is token 17."""
    words = ["<bos>", "<eos>", "<pad>"] + [f"w{i}" for i in range(FIRST_WORD, VOCABULARY)]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side=padding_side,
    )


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a policy under the names that both libraries share.

    Tied parameters appear once, without the wrapper's `pretrained_model.` prefix.
    """
    named = dict(model.pretrained_model.named_parameters())
    if model.v_head is not None:
        named |= {f"v_head.{name}": p for name, p in model.v_head.named_parameters()}
    return named


def rule(name: str, shape: tuple[int, ...], perturbation: float = 0.0) -> torch.Tensor:
    """The initial weights of the parameter `name`, drawn from a generator seeded by that name.

    Drawing by name, not in sequence, makes the figures independent of what other parameters a
    library's version registers. `perturbation` moves the weights: the reference's differ by it.
    """
    seed = zlib.crc32(name.encode())
    weights = np.random.RandomState(seed).standard_normal(shape)
    if name.endswith("bias"):
        weights *= 0.1
    elif len(shape) == 1:  # the gain of a norm
        weights = 1.0 + 0.1 * weights
    else:
        weights *= 0.2
    if perturbation:
        weights += perturbation * np.random.RandomState(seed ^ 1).standard_normal(shape)
    return torch.from_numpy(weights.astype(np.float32))


@torch.no_grad()
def fill_by_rule(model: nn.Module, perturbation: float = 0.0) -> None:
    """Writes `rule` into every parameter of a model with a value head."""
    for name, parameter in named_parameters(model).items():
        parameter.copy_(rule(name, tuple(parameter.shape), perturbation))
