"""Launches of a whole decode step on a GPU, part by part: of a model like Llama with 24 layers."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy
import torch
from torch import nn

import fastrl_kernels
from fastrl import RolloutEngine, SamplingParams
from fastrl.rollout import decode_step
from tests import tiny_models
from tests.counts.of_launches import like_a_gpu
from tests.counts.record import Count
from tests.golden import tiny
from tests.kernels.launches import watched

LAYERS = 24
# What is in no other part: live lengths, and what becomes of the slots after the draw.
REST = "bookkeeping"
_PARTS = {"layers": 216, "embedding": 1, "rotary": 1, "norm": 1, "head": 1, "keys": 1, "draw": 2}
_PARTS[REST] = 2
BF16, AUTOCAST = "bf16 weights", "fp32 weights under bf16 autocast"


@contextlib.contextmanager
def _attributed(model: Any, calls: list[str], found: Counter[str]) -> Iterator[None]:
    """Context that counts what is launched within parts of a step, which contain no other."""
    body = model.model
    parts: dict[Any, str] = dict.fromkeys(body.layers, "layers")
    parts |= {body.embed_tokens: "embedding", body.norm: "norm", model.lm_head: "head"}
    parts[body.rotary_emb] = "rotary"
    own_call = nn.Module.__call__

    def counted(part: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = len(calls)
        result = call(*args, **kwargs)
        found[part] += len(calls) - before
        return result

    def of_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in parts:
            return own_call(module, *args, **kwargs)
        return counted(parts[module], own_call, module, *args, **kwargs)

    keys = partial(counted, "keys", decode_step.token_keys)
    draw = partial(counted, "draw", fastrl_kernels.sample_tokens)
    with (
        mock.patch.object(nn.Module, "__call__", of_module),
        mock.patch.object(decode_step, "token_keys", keys),
        mock.patch.object(fastrl_kernels, "sample_tokens", draw),
    ):
        yield


def _step(weights: str, layers: int) -> Counter[str]:
    """Launches of a call's last step, of two rows."""
    dtype = torch.bfloat16 if weights == BF16 else torch.float32
    model = tiny_models.language_model("llama", num_hidden_layers=layers).to(dtype)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=weights == AUTOCAST)
    found: Counter[str] = Counter()
    run = decode_step.DecodeStep.__call__

    def step(self: Any, *args: Any) -> None:
        found.clear()
        with watched() as calls, numpy.errstate(all="ignore"), _attributed(model, calls, found):
            run(self, *args)
        found[REST] = len(calls) - found.total()

    with like_a_gpu(), mock.patch.object(decode_step.DecodeStep, "__call__", step):
        engine = RolloutEngine(model, tiny.tokenizer(), 2, 300, autocast=autocast)
        engine.generate([[3, 4], [5]], SamplingParams(max_new_tokens=3, seed=1))
    return found


@cache
def launches_of_a_step(weights: str) -> Counter[str]:
    """By part; all layers are alike."""
    two, three = (_step(weights, layers) for layers in (2, 3))
    assert two - Counter(layers=two["layers"]) == three - Counter(layers=three["layers"])
    each = three["layers"] - two["layers"]
    return two + Counter(layers=each * (LAYERS - 2))


def _whole(weights: str) -> float:
    return launches_of_a_step(weights).total()


def _part(part: str) -> float:
    return launches_of_a_step(BF16)[part]


_WHAT = f"decode step of {LAYERS} layers"
COUNTS = (
    *(Count(f"{_WHAT}, {w}", "launches", 230, partial(_whole, w)) for w in (BF16, AUTOCAST)),
    *(Count(f"{_WHAT}: {part}", "launches", n, partial(_part, part)) for part, n in _PARTS.items()),
)
