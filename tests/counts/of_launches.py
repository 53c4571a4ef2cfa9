"""Launches: of ops, and of a decoder layer in a decode step."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy
import torch

import fastrl_kernels as kernels
from fastrl.models.products import PackedProducts
from fastrl.rollout import model_runner
from fastrl.rollout.attention import DecodeAttention, choose_decode_kernel
from fastrl.rollout.kv_cache import KVCache
from tests import tiny_models
from tests.counts.record import Count
from tests.kernels.launches import watched

BF16, FP32 = torch.bfloat16, torch.float32


def launches(call: Callable[[], Any]) -> float:
    # inf - inf and what overflows are silent on a GPU.
    with watched() as calls, numpy.errstate(all="ignore"):
        call()
    return len(calls)


def _draw(dtype: torch.dtype, **options: Any) -> float:
    logits = torch.randn(2, 600, dtype=dtype)
    keys = torch.arange(2)
    return launches(partial(kernels.sample_tokens, logits, keys, backend="triton", **options))


def _draw_from_hidden() -> float:
    hidden, weight = torch.randn(2, 16, dtype=BF16), torch.randn(200, 16, dtype=BF16)
    op = partial(kernels.linear_sample, hidden, weight, torch.arange(2), backend="triton")
    return launches(op)


def _both_ways(forward: Callable[[], torch.Tensor]) -> float:
    """Of an op's forward and backward."""
    with numpy.errstate(all="ignore"):
        gradient = torch.ones_like(forward())
    found: list[torch.Tensor] = []
    count = launches(lambda: found.append(forward()))
    return count + launches(lambda: found[0].backward(gradient))


def _token_logprobs() -> float:
    logits = torch.randn(3, 600, dtype=BF16, requires_grad=True)
    op = partial(kernels.token_logprobs, logits, torch.tensor([1, 2, 3]), entropy=True)
    return _both_ways(lambda: op(backend="triton")[0])


def _ppo_loss(**options: Any) -> float:
    logprobs, advantages = torch.zeros(2, 8, requires_grad=True), torch.ones(2, 8)
    old, mask = logprobs.detach().clone(), torch.ones(2, 8, dtype=torch.bool)
    op = partial(kernels.ppo_loss, logprobs, old, advantages, mask, **options)
    return _both_ways(lambda: op(backend="triton")[0])


def _gae() -> float:
    rewards, mask = torch.zeros(2, 16), torch.ones(2, 16, dtype=torch.bool)
    op = partial(kernels.gae, rewards, rewards, mask, gamma=1.0, lam=0.95, whiten=True)
    return launches(partial(op, backend="triton"))


@contextlib.contextmanager
def like_a_gpu() -> Iterator[None]:
    """Context in which rollouts on a CPU do what they do on a GPU: CPUs pack weights, and keep keys
    in fp32."""
    with (
        mock.patch.object(model_runner, "kind_of_device", return_value="cuda"),
        mock.patch.object(PackedProducts, "in_place", contextlib.nullcontext),
    ):
        yield


def decode_step_launches(model: Any, *, autocast: bool, fused: bool) -> float:
    """Of a decode step of two rows, up to the logits."""
    context = partial(torch.autocast, "cpu", BF16, enabled=autocast)
    with like_a_gpu():
        runner = model_runner.ModelRunner(model, context)
        layers = runner.layer_shapes()
        if fused:
            runner.fuse_layers(layers)
            assert runner.fused_layers.active
        kv_cache = KVCache(layers, 2, 300, runner.dtype, runner.device)
        positions = torch.tensor([5, 7])
        with runner.opened():
            attention = DecodeAttention(choose_decode_kernel(kv_cache), kv_cache, positions, 300)
            return launches(lambda: runner.decode(positions, positions, attention))


def _layer(autocast: bool, fused: bool = True) -> float:
    """Of one more layer."""
    three, two = (
        decode_step_launches(
            tiny_models.language_model("llama", num_hidden_layers=n), autocast=autocast, fused=fused
        )
        for n in (3, 2)
    )
    return three - two


COUNTS = (
    Count("plain draw, bf16", "launches", 2, partial(_draw, BF16)),
    Count("head and plain draw in one, bf16", "launches", 2, _draw_from_hidden),
    Count("top-k draw, bf16", "launches", 4, partial(_draw, BF16, top_k=50)),
    Count("top-p draw, bf16", "launches", 4, partial(_draw, BF16, top_p=0.9)),
    Count("top-k and top-p draw, bf16", "launches", 4, partial(_draw, BF16, top_k=50, top_p=0.9)),
    Count("top-k and top-p draw, fp32", "launches", 4, partial(_draw, FP32, top_k=50, top_p=0.9)),
    Count("token_logprobs with entropy, both ways", "launches", 2, _token_logprobs),
    Count("ppo_loss, both ways", "launches", 2, _ppo_loss),
    Count("ppo_loss of row means, both ways", "launches", 2,
     partial(_ppo_loss, aggregate="seq-mean-token-mean")),
    Count("gae with whitening", "launches", 2, _gae),
    Count("decoder layer, fp32 weights under bf16 autocast", "launches", 9, partial(_layer, True)),
    Count("decoder layer, other weights", "launches", 9, partial(_layer, False)),
)  # fmt: skip
