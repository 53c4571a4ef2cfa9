"""Models and tokenizers of whole workloads, which depend on nothing but sizes: the same under every
version of a library. Needs torch and, where it builds something, transformers."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import DTYPES

PRECISION = {"fp32": "fp32", "bf16": "bf16 by autocast over fp32 weights"}
PAD, EOS = 0, 1  # the only special tokens
HYBRID = "qwen3_5"  # three layers with states before one that attends
_FAMILIES = {"gpt2": "GPT-2", "llama": "Llama", "qwen2": "Qwen2", HYBRID: "Qwen3.5"}
# Allowed |Δ log-prob| beside a plain forward: the largest in fp32, the mean in less, where a single
# logit may be off by more.
EXACT, ROUNDED = 1e-5, 5e-3


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's sizes; the weights are random."""

    name: str
    family: str  # gpt2, llama, qwen2 or qwen3_5
    layers: int
    width: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int
    dtype: str = "bf16"
    tied: bool = True  # the head is the embeddings' table

    def __str__(self) -> str:
        """`GPT-2 of 4 layers, width 256, 4 heads, vocabulary 50257`."""
        grouped = self.kv_heads != self.heads
        keys = f" ({self.kv_heads} of keys and values)" if grouped else ""
        family = _FAMILIES[self.family]
        return (
            f"{family} of {self.layers} layers, width {self.width}, {self.heads} heads{keys}, "
            f"vocabulary {self.vocabulary}"
        )

    @property
    def head(self) -> int:
        """The width of a head of attention; that of Qwen3.5's states is half of it, and they have
        two such heads for each."""
        return self.width // self.heads * (2 if self.family == HYBRID else 1)

    @property
    def attending(self) -> int:
        """Layers that keep keys and values; the others keep states."""
        return self.layers // 4 if self.family == HYBRID else self.layers


SMALL = Model("GPT-2 4×256", "gpt2", 4, 256, 4, 4, 1024, 50257, 256, "fp32")
LLAMA = Model("Llama 8×512", "llama", 8, 512, 8, 4, 1408, 32000, 1024, "fp32", tied=False)
GPT2 = Model("GPT-2 124M", "gpt2", 12, 768, 12, 12, 3072, 50257, 1024)
QWEN = Model("Qwen2.5 0.5B", "qwen2", 24, 896, 14, 2, 4864, 151936, 1024)
QWEN35 = Model("Qwen3.5 0.8B", HYBRID, 24, 1024, 8, 2, 3584, 248320, 1024)
SMALL_QWEN35 = Model("Qwen3.5 8×768", HYBRID, 8, 768, 12, 4, 2048, 32000, 1024, "fp32")
TOY = Model("toy GPT-2", "gpt2", 2, 32, 4, 4, 128, 503, 128, "fp32")
TOY_QWEN = Model("toy Qwen2", "qwen2", 2, 32, 4, 2, 96, 503, 128, "bf16")
TOY_QWEN35 = Model("toy Qwen3.5", HYBRID, 4, 32, 4, 2, 96, 503, 128, "fp32")


def config_of(model: dict[str, Any], positions: int = 0, end: int | None = EOS) -> Any:
    """transformers' configuration, without dropout, which sides would draw differently.

    Args:
        model: a `Model`'s fields.
        positions: at least; the model's own context where that is more.
        end: the end-of-sequence token; None for generation that makes a given number of tokens.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    positions = max(model["context"], positions)
    common = {
        "vocab_size": model["vocabulary"],
        "tie_word_embeddings": model["tied"],
        "bos_token_id": end,
        "eos_token_id": end,
    }
    if end is None:
        common["pad_token_id"] = None
    if model["family"] == "gpt2":
        return CONFIG_MAPPING["gpt2"](
            n_layer=model["layers"],
            n_embd=model["width"],
            n_head=model["heads"],
            n_inner=model["intermediate"],
            n_positions=positions,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    kind = model["family"]
    if kind == HYBRID:
        kind, half = f"{HYBRID}_text", model["width"] // model["heads"]
        common |= {
            "head_dim": 2 * half,
            "linear_num_key_heads": 2 * model["heads"],
            "linear_num_value_heads": 2 * model["heads"],
            "linear_key_head_dim": half,
            "linear_value_head_dim": half,
        }
    return CONFIG_MAPPING[kind](
        num_hidden_layers=model["layers"],
        hidden_size=model["width"],
        num_attention_heads=model["heads"],
        num_key_value_heads=model["kv_heads"],
        intermediate_size=model["intermediate"],
        max_position_embeddings=positions,
        **common,
    )


def model_of(shape: dict[str, Any], positions: int = 0) -> Any:
    """The model in fp32, its weights drawn by parameter name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(shape, positions)).float()
    fill_by_name(model)
    return model


@torch.no_grad()
def fill_by_name(*modules: torch.nn.Module) -> None:
    """Draws weights by parameter name as GPT-2 does: the same under every version of a library.
    Adapters' weights too, so that their model differs from its base at once."""
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        rng = np.random.RandomState(zlib.crc32(name.encode()))
        noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
        is_gain = parameter.dim() == 1 and name.endswith("weight")
        parameter.copy_(0.02 * noise + (1.0 if is_gain else 0.0))


def build(model: Model, device: torch.device) -> Any:
    """The model in its dtype, with random weights and without an end-of-sequence token."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config_of(vars(model), end=None))
    return made.to(DTYPES[model.dtype]).eval()


def lora(family: str, gpt2: Sequence[str], qwen2: Sequence[str]) -> Any:
    """A LoRA of rank 8 on these modules of the attention."""
    from peft import LoraConfig

    is_gpt2 = family == "gpt2"
    return LoraConfig(
        r=8,
        target_modules=list(gpt2 if is_gpt2 else qwen2),
        fan_in_fan_out=is_gpt2,  # its weights lie transposed
        task_type="CAUSAL_LM",
    )


def word_tokenizer(vocabulary: int = EOS + 1) -> Any:
    """Every number is a word, and its own id; the default vocabulary can only pad and end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": PAD, "<eos>": EOS} | {str(i): i for i in range(EOS + 1, vocabulary)}
    core = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def text_tokenizer(vocabulary: int) -> Any:
    """Pieces of made-up words and bytes, as GPT-2's tokenizer has; the first two can only pad and
    end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = np.random.RandomState(0)
    syllables = [a + b for a in "bcdfghjklmnpqrstvwxz" for b in "aeiou"]
    drawn = ["".join(rng.choice(syllables, rng.randint(1, 5))) for _ in range(vocabulary)]
    texts = (" ".join(rng.choice(drawn, 20)) for _ in range(vocabulary // 2))
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def words(ids: Sequence[int]) -> str:
    """The text that `word_tokenizer` turns into these ids."""
    return " ".join(map(str, ids))


@torch.no_grad()
def plain_logprobs(model: Any, prompt: Tensor, response: Tensor) -> Tensor:
    """Log-probs of a response's tokens, by a forward of this sample alone; on the host."""
    tokens = torch.cat([prompt, response]).to(model.device)
    logits = model(tokens.unsqueeze(0), use_cache=False).logits[0, len(prompt) - 1 : -1]
    found = logits.float().log_softmax(-1).gather(1, tokens[len(prompt) :, None])
    return found.squeeze(1).cpu()


def less_exact_than_plain(found: Tensor, plain: Tensor, truth: Tensor) -> str | None:
    """Why log-probs in low precision fail the gate: their mean |Δ| to those of fp32 may be half as
    large again as that of the plain forward, which rounds as often in another order."""
    error, own = (float((x - truth).abs().mean()) for x in (found, plain))
    if error <= 1.5 * own:  # NaN is not
        return None
    return f"log-probs are off by {error:.1e} (mean |Δ| to fp32), a plain forward's by {own:.1e}"


def wrong_logprobs(found: Tensor, expected: Tensor, dtype: str, exact: float = EXACT) -> str | None:
    """Why log-probs fail the gate, None where they pass."""
    delta = (found - expected).abs()
    kind, error, allowed = "largest", float(delta.max()), exact
    if dtype != "fp32":
        kind, error, allowed = "mean", float(delta.mean()), ROUNDED
    if error <= allowed:  # NaN is not
        return None
    return f"log-probs are off by {error:.1e} in {dtype} ({kind} |Δ|; {allowed:.0e} is allowed)"
