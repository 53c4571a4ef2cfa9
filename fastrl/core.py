"""The helpers of TRL's ``trl.core``, some of them on fastrl's kernels."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastrl_kernels

PADDING_VALUE = -1  # pads stacked statistics of different lengths


def set_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators, on all devices."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def logprobs_from_logits(logits: Tensor, labels: Tensor | None, gather: bool = True) -> Tensor:
    """log softmax(logits)[labels], fp32 and differentiable.

    Args:
        logits: [..., V], fp32, bf16 or fp16.
        labels: [...], int64; may be None when ``gather`` is False, else None raises ValueError.
        gather: False returns the whole log_softmax [..., V] instead, in the logits' dtype.
    """
    if not gather:
        return F.log_softmax(logits, dim=-1)
    if labels is None:
        raise ValueError("labels are needed to gather log-probs: pass them, or gather=False")
    return fastrl_kernels.token_logprobs(logits, labels)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of softmax(logits / temperature) in nats: [..., V] -> [...]."""
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    scored = fastrl_kernels.token_logprobs(logits, labels, temperature=temperature, entropy=True)
    return scored[1]


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean of the elements under the mask, of all or along ``axis``; 0 if there are none."""
    counted = mask.bool()
    if axis is None:
        return fastrl_kernels.masked_mean(values, counted)
    total = torch.where(counted, values, 0).sum(axis)
    return total / counted.sum(axis).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the elements under the mask, ``unbiased`` or not; 0 for fewer than two."""
    return fastrl_kernels.masked_var(values, mask.bool(), unbiased=unbiased)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean)/std under the mask, plus the mean unless ``shift_mean``; 0 elsewhere."""
    return fastrl_kernels.masked_whiten(values, mask.bool(), shift_mean=shift_mean)


def whiten(values: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean)/std over all elements, see :func:`masked_whiten`."""
    return masked_whiten(values, torch.ones_like(values, dtype=torch.bool), shift_mean)


def clip_by_value(x: Tensor, tensor_min: Tensor | float, tensor_max: Tensor | float) -> Tensor:
    """max(min(x, tensor_max), tensor_min), element by element."""
    low, high = (
        torch.as_tensor(b, dtype=x.dtype, device=x.device) for b in (tensor_min, tensor_max)
    )
    return torch.maximum(torch.minimum(x, high), low)


def top_k_top_p_filtering(
    logits: Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
    filter_value: float = -float("inf"),
    min_tokens_to_keep: int = 1,
) -> Tensor:
    """Logits [N, V], with tokens outside top-k, then top-p, set to ``filter_value``."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    settings: dict[str, Any] = {
        "filter_value": filter_value,
        "min_tokens_to_keep": min_tokens_to_keep,
    }
    ids = torch.empty(0, dtype=torch.long, device=logits.device)
    if top_k > 0:
        logits = TopKLogitsWarper(top_k=top_k, **settings)(ids, logits)
    if 0 <= top_p < 1.0:
        logits = TopPLogitsWarper(top_p=top_p, **settings)(ids, logits)
    return logits


@torch.no_grad()
def respond_to_batch(
    model: nn.Module, queries: Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Samples ``txt_len`` tokens for each query, with a whole forward pass per token.

    Args:
        model: returns logits [B, T, V] as the first element of its output.
        queries: [B, T] int64, all of one length.

    Returns:
        [B, txt_len] int64, the responses without the queries.
    """
    input_ids = queries
    was_training = model.training
    model.eval()
    try:
        for _ in range(txt_len):
            logits = model(input_ids)[0][:, -1, :].float()
            logits = top_k_top_p_filtering(logits, top_k=top_k, top_p=top_p)
            next_token = torch.multinomial(logits.softmax(-1), num_samples=1)
            input_ids = torch.cat([input_ids, next_token], dim=-1)
    finally:
        model.train(was_training)
    return input_ids[:, queries.shape[1] :]


def flatten_dict(nested: Mapping[str, Any], sep: str = "/") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a/b": 1}.

    Raises:
        ValueError: a key that contains ``sep``.
    """

    def items(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            if sep in key:
                raise ValueError(f"separator {sep!r} not allowed to be in key {key!r}")
            if isinstance(value, Mapping):
                yield from items(value, prefix + key + sep)
            else:
                yield prefix + key, value

    return dict(items(nested, ""))


def stack_dicts(stats_dicts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Flattened tensors of several dicts, stacked by key and padded with -1 to one length."""
    return {
        key: nn.utils.rnn.pad_sequence(
            [d[key].flatten() for d in stats_dicts], batch_first=True, padding_value=PADDING_VALUE
        )
        for key in stats_dicts[0]
    }


def stats_to_np(stats_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as NumPy arrays (bf16 as fp32), numbers as floats; the rest as it is."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        return float(value) if isinstance(value, (int, float, np.number)) else value

    return {key: convert(value) for key, value in stats_dict.items()}


def convert_to_scalar(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors and arrays of shape [] or [1] as Python numbers; the rest as it is."""
    return {
        key: value.item()
        if isinstance(value, (Tensor, np.ndarray)) and value.shape in ((), (1,))
        else value
        for key, value in stats.items()
    }


class LengthSampler:
    """Samples lengths uniformly from [min_value, max_value), with NumPy's global generator.

    Raises:
        ValueError: an empty range.
    """

    def __init__(self, min_value: int, max_value: int):
        if max_value <= min_value:
            raise ValueError(
                f"max_value ({max_value}) is exclusive and must exceed min_value ({min_value})"
            )
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        return int(np.random.choice(self.values))


class PPODecorators:
    """``empty_device_cache`` frees cached memory after a block, if ``optimize_device_cache``."""

    optimize_device_cache = False

    @classmethod
    @contextmanager
    def empty_device_cache(cls) -> Iterator[None]:
        yield
        if cls.optimize_device_cache and torch.accelerator.is_available():
            gc.collect()
            torch.accelerator.empty_cache()


def randn_tensor(
    shape: Sequence[int],
    generator: torch.Generator | list[torch.Generator] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
) -> Tensor:
    """Normal random numbers; each generator of a list draws a batch element, a single one all.

    A CPU generator samples on the CPU and the result is moved to ``device``, so that a seed gives
    the same numbers on every device.

    Raises:
        ValueError: a generator neither on the CPU nor on ``device``, or too few or many of them.
    """
    target = torch.device(device or "cpu")
    generators = generator if isinstance(generator, list) else [generator]
    if len(generators) not in (1, shape[0]):
        raise ValueError(
            f"got {len(generators)} generators for a batch of {shape[0]}: pass one each"
        )
    if any(g is not None and g.device.type not in ("cpu", target.type) for g in generators):
        raise ValueError(f"cannot fill a {target} tensor from a generator of another device")

    def draw(size: Sequence[int], g: torch.Generator | None) -> Tensor:
        where = target if g is None else g.device
        return torch.randn(tuple(size), generator=g, device=where, dtype=dtype, layout=layout)

    if len(generators) == 1:
        return draw(shape, generators[0]).to(target)
    return torch.cat([draw((1, *shape[1:]), g) for g in generators]).to(target)
