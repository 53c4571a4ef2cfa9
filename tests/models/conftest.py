"""Models of several layers whose trunks are looked at."""

from dataclasses import replace

from fastrl.data.batch import pad
from fastrl.data.padding_free import PaddingFree
from fastrl.data.token_batch import TokenBatch
from fastrl.models.trunk import layer_stack
from tests import tiny_models
from tests.golden import tiny

LENGTHS = (3, 40, 7, 12, 2, 33)
DEPTH = {"gpt2": "n_layer"}  # elsewhere num_hidden_layers
FAMILIES = (
    "gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3",
)  # fmt: skip


def deep(family, layers=4, **changes):
    """A policy of more layers."""
    return tiny_models.policy(family, **{DEPTH.get(family, "num_hidden_layers"): layers, **changes})


def counted(model, inside=None):
    """How many tokens each layer, or a module inside of it, has run on."""
    counts = {}
    for i, layer in enumerate(layer_stack(model.pretrained_model)):
        module = layer if inside is None else getattr(layer, inside)
        module.register_forward_pre_hook(
            lambda _m, args, i=i: counts.__setitem__(
                i, counts.get(i, 0) + args[0].shape[:2].numel()
            )
        )
    return counts


def batch_of(sequences, prompts=None, padding=None, side="right"):
    """Sequences of a token more than a prompt, or with prompts of given lengths."""
    padded = pad(sequences, tiny.PAD, side)
    prompts = prompts or [len(x) - 1 for x in sequences]
    responses = [len(x) - n for x, n in zip(sequences, prompts, strict=True)]
    batch = TokenBatch.from_padded(
        padded["input_ids"], padded["attention_mask"], prompts, responses
    )
    return replace(batch, padding=padding or PaddingFree())
