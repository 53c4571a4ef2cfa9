"""Models of several layers whose trunks are looked at."""

from fastrl.models.trunk import Trunk, TrunkCache, layer_stack
from tests import tiny_models

LENGTHS = (3, 40, 7, 12, 1, 33)
DEPTH = {"gpt2": "n_layer"}  # elsewhere num_hidden_layers
FAMILIES = (
    "gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3",
)  # fmt: skip


def deep(family, layers=4, **changes):
    """A policy of more layers."""
    return tiny_models.policy(family, **{DEPTH.get(family, "num_hidden_layers"): layers, **changes})


def counted(model, inside=None):
    """How many samples each layer, or a module inside of it, has run on."""
    counts = {}
    for i, layer in enumerate(layer_stack(model.pretrained_model)):
        module = layer if inside is None else getattr(layer, inside)
        module.register_forward_pre_hook(
            lambda _m, args, i=i: counts.__setitem__(i, counts.get(i, 0) + len(args[0]))
        )
    return counts


def trunk_cache(model, lengths, budget):
    trunk = Trunk(model.pretrained_model, 2)
    return TrunkCache(trunk, tiny_models.prompts(*lengths), budget)
