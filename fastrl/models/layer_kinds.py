"""The kinds of layers that can run on packed rows and in slots of rollouts: one table.

A model runs packed, and in the rollout engine, if each of its layers is of a kind in this table and
its results are those of plain forwards. The results are compared by running it, see
:mod:`fastrl.rollout.self_check` and :mod:`fastrl.data.choose_padding`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from fastrl.models.layer_functions import CONVOLUTION


class LayerKind(NamedTuple):
    """A kind of layers.

    Attributes:
        called: a function that the forwards of this kind's modules call; of a module that calls
            several kinds' functions the first kind counts.
        keeps: what a slot of a rollout keeps of such a layer.
        packed: how texts are kept apart in a row, and how responses continue from their prompt.
        models: families that have it.
    """

    name: str
    called: str
    keeps: str
    packed: str
    models: str


_ATTENDED = "tokens attend to those of their own text, responses also to their prompt's"
_CONTINUED = "texts begin with a state of zeros, responses with the one at their prompt's end"
_STATE = "a state, and the last inputs of a convolution"
KINDS = (
    LayerKind(
        "multi-head latent attention",
        "expand_kv",
        "a latent of each token",
        _ATTENDED,
        "deepseek_v3, glm4_moe_lite, longcat_flash, kimi_linear",
    ),
    LayerKind(
        "attention: full, sliding windows, chunks, sinks",
        "ALL_ATTENTION_FUNCTIONS",
        "keys and values of each token",
        _ATTENDED,
        "llama, qwen3, gemma3, gpt_oss, llama4",
    ),
    LayerKind(
        "gated delta rule",
        "torch_chunk_gated_delta_rule",
        _STATE,
        _CONTINUED,
        "qwen3_5, qwen3_5_moe, qwen3_next, olmo_hybrid",
    ),
    LayerKind(
        "Kimi delta attention", "chunk_kimi_delta_attention", _STATE, _CONTINUED, "kimi_linear"
    ),
    LayerKind(
        "Mamba-2",
        "mamba2_chunk_scan",
        _STATE,
        _CONTINUED,
        "nemotron_h, granitemoehybrid, falcon_h1, bamba",
    ),
    LayerKind(
        "short convolution",
        CONVOLUTION,
        "the last inputs",
        "zeros stand before a text, the last inputs of a prompt before its responses",
        "lfm2, lfm2_moe, lfm3",
    ),
)
ATTENTION = KINDS[:2]
_CONVOLUTION = KINDS[-1]
# Members of a cache: a layer that uses one of them keeps more than the inputs of a convolution.
_KEEPS_A_STATE = {"get_recurrent_state", "update_recurrent_state", "recurrent_states"}
# Values of config.layer_types for layers with attention.
_ATTENDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_MIXES_NO_TOKENS = {"mlp", "moe"}
_RECURRENT = {"linear_attention", "conv", "mamba"}
_BOTH = {"hybrid"}


def layers(model: nn.Module) -> Iterator[tuple[nn.Module, LayerKind]]:
    """Yields each module of a model that is of a kind in :data:`KINDS`, with its kind."""
    for module in model.modules():
        called = _called_by(type(module))
        for kind in KINDS:
            # Convolutions are part of other kinds, known and unknown.
            other = kind is _CONVOLUTION and not _KEEPS_A_STATE.isdisjoint(called)
            if kind.called in called and not other:
                yield module, kind
                break


def unknown_layer(model: Any) -> str | None:
    """What is unknown of a model's layers, in words; None where each is of a known kind."""
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    kinds_by_layer: dict[int | None, set[bool]] = {}
    for module, kind in layers(model):
        kinds_by_layer.setdefault(getattr(module, "layer_idx", None), set()).add(kind in ATTENTION)
    interface = getattr(model, "_supports_attention_backend", False)
    if types is None:
        supported = interface or kinds_by_layer
        return None if supported else "it does not support transformers' attention interface"
    unknown = set()
    for i, kind in enumerate(types):
        of_layer = kinds_by_layer.get(i, set())
        attends = True in of_layer or interface
        supported = (
            (kind in _ATTENDS and attends)
            or kind in _MIXES_NO_TOKENS
            or (kind in _RECURRENT and False in of_layer)
            or (kind in _BOTH and of_layer == {False, True})
        )
        if not supported:
            unknown.add(f"{kind}{_class_of(model, i)}")
    if not unknown:
        return None
    return f"some of its layers are of another kind ({', '.join(sorted(unknown))})"


def _called_by(kind: type[nn.Module]) -> frozenset[str]:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset(code.co_names if code is not None else ())


def _class_of(model: nn.Module, index: int) -> str:
    """The name of the class that mixes tokens in a layer, for messages."""
    named = (type(x).__name__ for x in model.modules() if getattr(x, "layer_idx", None) == index)
    name = next((x for x in named if not x.endswith("DecoderLayer")), None)
    return "" if name is None else f": {name}"
