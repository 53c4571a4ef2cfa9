"""Other libraries that compute an op, called on the same inputs in the same process.

A library that cannot take part is listed with the reason. One that computes less than the op says
so in its note, and is judged by what it does compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import eager
from benchmarks.gate import Implementation, Results
from benchmarks.shapes import Shape

PACKAGES = ("torch", "triton", "trl", "liger-kernel", "cut-cross-entropy", "flash-attn", "torchrl")
# A peer's largest relative error: enough to know that it computes the same thing.
TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}
LinearLogprobs = Callable[..., tuple[Tensor, Tensor | None]]


class Unsuitable(Exception):
    """The peer is installed, but cannot take this case; the message says why."""


class Peer(NamedTuple):
    """An implementation, and what distinguishes it from the op."""

    call: Implementation
    note: str = ""


MakePeer = Callable[[Shape, torch.device], Peer]


def peers_of(
    makers: Mapping[str, MakePeer], shape: Shape, device: torch.device
) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can take a case, by name, and the reasons why the others cannot."""
    found, absent = {}, {}
    for name, make in makers.items():
        try:
            found[name] = make(shape, device)
        except Exception as error:  # imports of other libraries break in any way
            absent[name] = why_absent(error)
    return found, absent


def why_absent(error: Exception) -> str:
    """Why a peer that raised this is absent, in a line."""
    if isinstance(error, Unsuitable):
        return str(error)
    if isinstance(error, ImportError):
        return f"not installed ({error})"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def torch_compile(formula: Implementation) -> MakePeer:
    """torch.compile of an eager formula; it compiles at the first, uncounted call."""

    def make(shape: Shape, device: torch.device) -> Peer:
        torch.compiler.reset()  # one case's shapes must not make the next one's dynamic
        return Peer(torch.compile(formula, dynamic=False))

    return make


def _kernels_need(device: torch.device, dtype: str = "") -> None:
    if device.type != "cuda":
        raise Unsuitable("its kernels need a GPU")
    if dtype == "fp32":
        raise Unsuitable("its kernels take half precision only")


def _from_losses(losses: Callable[..., Tensor], shape: Shape, *notes: str) -> Peer:
    """A peer that computes cross-entropies, in which labels of -100 are ignored."""

    def call(labels: Tensor, mask: Tensor | None = None, **inputs: Tensor) -> Results:
        labels = labels if mask is None else torch.where(mask, labels, -100)
        return {"logprobs": -losses(**inputs, labels=labels).float()}

    return Peer(call, "; ".join([*notes, *_no_entropy(shape)]))


def _no_entropy(shape: Shape) -> list[str]:
    return [] if shape.entropy == "off" else ["no entropy"]


def trl_selective(shape: Shape, device: torch.device) -> Peer:
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    def call(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Results:
        if shape.entropy == "off":
            return {"logprobs": selective_log_softmax(logits, labels, row_mask=mask)}
        wanted = shape.entropy == "gradient"
        logprobs, entropies = selective_log_softmax_and_entropy(
            logits, labels, entropy_requires_grad=wanted, row_mask=mask
        )
        return {"logprobs": logprobs, "entropies": entropies}

    return Peer(call, "selective_log_softmax")


def flash_attn(shape: Shape, device: torch.device) -> Peer:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    _kernels_need(device)
    return _from_losses(
        lambda logits, labels: cross_entropy_loss(logits, labels, ignore_index=-100)[0], shape
    )


def _trl_logprobs(shape: Shape) -> LinearLogprobs:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    columns = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    outputs = ("entropy",) if shape.entropy != "off" else ()

    def logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        return ChunkedLogProbFunction.apply(
            hidden, weight, None, labels, 1.0, columns, None, 1.0, outputs
        )[:2]

    return logprobs


def trl_chunked(shape: Shape, device: torch.device) -> Peer:
    logprobs = _trl_logprobs(shape)

    def call(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None) -> Results:
        if mask is not None:  # as TRL picks the tokens that count
            hidden, labels = hidden[mask], labels[mask]
        found = dict(zip(("logprobs", "entropies"), logprobs(hidden, weight, labels), strict=True))
        found = {name: x for name, x in found.items() if x is not None}
        if mask is not None:
            found = {k: x.new_zeros(shape.rows).masked_scatter(mask, x) for k, x in found.items()}
        return found

    return Peer(call, "ChunkedLogProbFunction")


def trl_chunked_loss(shape: Shape, device: torch.device) -> Peer:
    logprobs = _trl_logprobs(shape)

    def call(
        hidden: Tensor, weight: Tensor, labels: Tensor, old_logprobs: Tensor, advantages: Tensor,
        mask: Tensor, denominator: float,
    ) -> Results:  # fmt: skip
        hidden, labels, old_logprobs, advantages = (
            x[mask] for x in (hidden, labels, old_logprobs, advantages)
        )
        found, entropies = logprobs(hidden, weight, labels)
        counted = torch.ones_like(labels, dtype=torch.bool)
        loss = eager.clipped_loss(found, old_logprobs, advantages, counted, denominator)
        if entropies is None:
            return {"loss": loss}
        return {"loss": loss, "entropy": entropies.detach().sum() / denominator}

    return Peer(call, "ChunkedLogProbFunction, then the loss")


def trl_divergence(shape: Shape, device: torch.device) -> Peer:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def call(
        hidden: Tensor, weight: Tensor, labels: Tensor, teacher_hidden: Tensor,
        teacher_weight: Tensor, denominator: float, mask: Tensor | None = None,
    ) -> Results:  # fmt: skip
        if mask is not None:  # as TRL picks the tokens that count
            hidden, teacher_hidden = hidden[mask], teacher_hidden[mask]
        heads = hidden, weight, None, teacher_hidden, teacher_weight, None
        values, _ = ChunkedDivergenceFunction.apply(*heads, shape.beta)
        return {"loss": values.sum() / denominator}

    return Peer(call, "ChunkedDivergenceFunction")


def liger_linear(shape: Shape, device: torch.device) -> Peer:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    _kernels_need(device)

    def losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        found = LigerFusedLinearCrossEntropyFunction.apply(
            hidden, weight, labels, None, None, -100, 0.0, 0.0, "none"
        )
        return found[0] if isinstance(found, tuple) else found

    return _from_losses(losses, shape)


def liger_loss(shape: Shape, device: torch.device) -> Peer:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    # Sequences of one token: it takes one advantage per sequence.
    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=device.type == "cuda",
        use_ref_model=False,
        chunk_size=1024,
        loss_type="bnpo",
    )

    def call(
        hidden: Tensor, weight: Tensor, labels: Tensor, old_logprobs: Tensor, advantages: Tensor,
        mask: Tensor, denominator: float,
    ) -> Results:  # fmt: skip
        found, _ = loss(
            hidden.unsqueeze(1), weight, labels.unsqueeze(1), mask.unsqueeze(1), advantages,
            old_per_token_logps=old_logprobs.unsqueeze(1),
        )  # fmt: skip
        return {"loss": found}

    note = "LigerFusedLinearGRPOLoss, chunks of 1024 tokens"
    return Peer(call, "; ".join([note, *_no_entropy(shape)]))


def cut_cross_entropy(shape: Shape, device: torch.device) -> Peer:
    from cut_cross_entropy import linear_cross_entropy

    _kernels_need(device, shape.dtype)
    return _from_losses(
        lambda hidden, weight, labels: linear_cross_entropy(
            hidden, weight, labels, reduction="none"
        ),
        shape,
        "leaves out small gradients (its default)",
    )


def torchrl(shape: Shape, device: torch.device) -> Peer:
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    def call(rewards: Tensor, values: Tensor, mask: Tensor) -> Results:
        rewards, values = rewards * mask, values * mask
        following = F.pad(values[:, 1:], (0, 1))
        done = torch.zeros_like(mask)
        done[:, -1] = True
        advantages, returns = vec_generalized_advantage_estimate(
            eager.GAMMA, eager.LAM, *(x.unsqueeze(-1) for x in (values, following, rewards, done))
        )
        advantages, returns = advantages.squeeze(-1), returns.squeeze(-1)
        if shape.whiten:
            advantages = eager.masked_whiten(advantages, mask)["whitened"]
        return {"advantages": advantages, "returns": returns}

    note = "vec_generalized_advantage_estimate, zeros after a row's end"
    return Peer(call, note + ("; whitened by eager PyTorch" if shape.whiten else ""))


def sdpa(shape: Shape, device: torch.device) -> Peer:
    layer = shape.attention
    assert layer is not None
    if layer.softcap is not None:
        raise Unsuitable("it has no softcap")

    def call(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, mask: Tensor) -> Results:
        grouped = query.view(len(query), layer.kv_heads, -1, layer.width)
        out = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), mask[:, None, None]
        )
        return {"out": out.reshape(query.shape)}

    return Peer(call, "masked, over the whole slots; heads that share keys in place of tokens")


def flash_attn_cache(shape: Shape, device: torch.device) -> Peer:
    from flash_attn import flash_attn_with_kvcache

    layer = shape.attention
    assert layer is not None
    _kernels_need(device, shape.dtype)
    # Keys that a query sees to its left and its right, -1 for all.
    window = (-1, -1) if layer.window is None else (layer.window - 1, 0)

    def call(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, mask: Tensor) -> Results:
        out = flash_attn_with_kvcache(
            query.unsqueeze(1), keys, values, cache_seqlens=lengths, window_size=window,
            softcap=layer.softcap or 0.0,
        )  # fmt: skip
        return {"out": out.squeeze(1)}

    return Peer(call, "flash_attn_with_kvcache")
