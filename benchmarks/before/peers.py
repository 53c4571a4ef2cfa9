"""Other libraries' implementations of the same ops, called on the same inputs in the same process.

A peer that cannot take part is listed with the reason, never left out in silence. One that computes
less than the op says so, and is judged by what it does compute.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.before import build, eager
from benchmarks.before.cases import Case
from benchmarks.before.problem import Implementation

# What a peer's largest relative error may be: enough to know that it computes the same thing.
TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}


class Unsuitable(Exception):
    """The peer is there, but cannot take this case; the message says why."""


class Peer(NamedTuple):
    """An implementation, and what sets it apart from the op that it stands beside."""

    call: Implementation
    note: str = ""


def peers_of(case: Case, device: torch.device) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can take a case, by name; and for the others why they cannot."""
    found, absent = {}, {}
    for name, make in _PEERS[case.op].items():
        try:
            found[name] = make(case, device)
        except Unsuitable as reason:
            absent[name] = str(reason)
        except ImportError as error:
            absent[name] = f"not installed ({error})"
        except Exception as error:  # an import that breaks half-way is the peer's affair
            absent[name] = described(error)
    return found, absent


def versions() -> dict[str, str]:
    """Of every package that a peer comes from; those that are missing are left out."""
    found = {}
    for package in ("torch", "triton", "trl", "liger-kernel", "cut-cross-entropy", "flash-attn",
                    "torchrl"):  # fmt: skip
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def described(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _needs_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unsuitable("its kernels need a GPU")


def _compiled(formula: Callable[[Case], Implementation]) -> Callable[..., Peer]:
    """torch.compile of the eager formula; it is compiled at the first, untimed call."""

    def make(case: Case, device: torch.device) -> Peer:
        torch.compiler.reset()  # one case's shapes must not turn the next one's dynamic
        return Peer(torch.compile(formula(case), dynamic=False))

    return make


def _with_entropy(formula: Callable[..., dict[str, Tensor]]) -> Callable[[Case], Implementation]:
    return lambda case: functools.partial(formula, entropy=case.entropy != "off")


def _compiled_linear_loss(case: Case) -> Implementation:
    return functools.partial(eager.linear_ppo_loss, entropy=case.entropy != "off")


def _compiled_attention(case: Case) -> Implementation:
    assert case.attention is not None
    return functools.partial(eager.decode_attention, **case.attention.options)


def _trl_selective(case: Case, device: torch.device) -> Peer:
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    def call(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        if case.entropy == "off":
            return {"logprobs": selective_log_softmax(logits, labels, row_mask=mask)}
        wanted = case.entropy == "gradient"
        logprobs, entropies = selective_log_softmax_and_entropy(
            logits, labels, entropy_requires_grad=wanted, row_mask=mask
        )
        return {"logprobs": logprobs, "entropies": entropies}

    return Peer(call, "selective_log_softmax")


def _flash_attn(case: Case, device: torch.device) -> Peer:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    _needs_gpu(device)

    def call(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        labels = labels if mask is None else torch.where(mask, labels, -100)
        losses, _ = cross_entropy_loss(logits, labels, ignore_index=-100)
        return {"logprobs": -losses}

    return Peer(call, "" if case.entropy == "off" else "no entropy")


def _trl_chunked_logprobs(case: Case) -> Callable[..., tuple[Tensor, Tensor | None]]:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    columns = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    outputs = ("entropy",) if case.entropy != "off" else ()

    def logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        return ChunkedLogProbFunction.apply(
            hidden, weight, None, labels, 1.0, columns, None, 1.0, outputs
        )[:2]

    return logprobs


def _trl_chunked(case: Case, device: torch.device) -> Peer:
    logprobs = _trl_chunked_logprobs(case)

    def call(
        hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        if mask is not None:  # as TRL picks the tokens that count
            hidden, labels = hidden[mask], labels[mask]
        found = dict(zip(("logprobs", "entropies"), logprobs(hidden, weight, labels), strict=True))
        found = {name: x for name, x in found.items() if x is not None}
        if mask is not None:
            found = {k: x.new_zeros(case.rows).masked_scatter(mask, x) for k, x in found.items()}
        return found

    return Peer(call, "ChunkedLogProbFunction")


def _trl_chunked_loss(case: Case, device: torch.device) -> Peer:
    logprobs = _trl_chunked_logprobs(case)

    def call(
        hidden: Tensor, weight: Tensor, labels: Tensor, old_logprobs: Tensor, advantages: Tensor,
        mask: Tensor, denominator: float,
    ) -> dict[str, Tensor]:  # fmt: skip
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


def _liger_linear(case: Case, device: torch.device) -> Peer:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    _needs_gpu(device)

    def call(
        hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        labels = labels if mask is None else torch.where(mask, labels, -100)
        losses = LigerFusedLinearCrossEntropyFunction.apply(
            hidden, weight, labels, None, None, -100, 0.0, 0.0, "none"
        )
        losses = losses[0] if isinstance(losses, tuple) else losses
        return {"logprobs": -losses}

    return Peer(call, "" if case.entropy == "off" else "no entropy")


def _liger_loss(case: Case, device: torch.device) -> Peer:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    # A sequence of one token each: its advantages are one per sequence.
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
    ) -> dict[str, Tensor]:  # fmt: skip
        found, _ = loss(
            hidden.unsqueeze(1), weight, labels.unsqueeze(1), mask.unsqueeze(1), advantages,
            old_per_token_logps=old_logprobs.unsqueeze(1),
        )  # fmt: skip
        return {"loss": found}

    note = "LigerFusedLinearGRPOLoss, chunks of 1024 tokens"
    return Peer(call, note + ("" if case.entropy == "off" else "; no entropy"))


def _cut_cross_entropy(case: Case, device: torch.device) -> Peer:
    from cut_cross_entropy import linear_cross_entropy

    _needs_gpu(device)
    if case.dtype == "fp32":
        raise Unsuitable("its kernels take half precision only")

    def call(
        hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        labels = labels if mask is None else torch.where(mask, labels, -100)
        losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
        return {"logprobs": -losses.float()}

    note = "leaves out small gradients (its default)"
    return Peer(call, note + ("" if case.entropy == "off" else "; no entropy"))


def _torchrl(case: Case, device: torch.device) -> Peer:
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    def call(rewards: Tensor, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
        rewards, values = rewards * mask, values * mask
        following = torch.nn.functional.pad(values[:, 1:], (0, 1))
        done = torch.zeros_like(mask)
        done[:, -1] = True
        advantages, returns = vec_generalized_advantage_estimate(
            build.GAMMA, build.LAM, *(x.unsqueeze(-1) for x in (values, following, rewards, done))
        )
        advantages, returns = advantages.squeeze(-1), returns.squeeze(-1)
        if case.whiten:
            advantages = eager.masked_whiten(advantages, mask)["whitened"]
        return {"advantages": advantages, "returns": returns}

    note = "vec_generalized_advantage_estimate, zeros after a row's end"
    return Peer(call, note + ("; whitened by eager PyTorch" if case.whiten else ""))


def _sdpa(case: Case, device: torch.device) -> Peer:
    layer = case.attention
    assert layer is not None
    if layer.softcap is not None:
        raise Unsuitable("it has no softcap")

    def call(
        query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        grouped = query.view(len(query), layer.kv_heads, -1, layer.width)
        out = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), mask[:, None, None]
        )
        return {"out": out.reshape(query.shape)}

    return Peer(call, "masked, over the whole slots; heads that share keys in place of tokens")


def _flash_attn_cache(case: Case, device: torch.device) -> Peer:
    from flash_attn import flash_attn_with_kvcache

    layer = case.attention
    assert layer is not None
    _needs_gpu(device)
    if case.dtype == "fp32":
        raise Unsuitable("its kernels take half precision only")
    # Keys that a query sees to its left and its right, -1 for all.
    window = (-1, -1) if layer.window is None else (layer.window - 1, 0)

    def call(
        query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        out = flash_attn_with_kvcache(
            query.unsqueeze(1), keys, values, cache_seqlens=lengths, window_size=window,
            softcap=layer.softcap or 0.0,
        )  # fmt: skip
        return {"out": out.squeeze(1)}

    return Peer(call, "flash_attn_with_kvcache")


_Make = Callable[[Case, torch.device], Peer]
_PEERS: dict[str, dict[str, _Make]] = {
    "token_logprobs": {
        "torch.compile": _compiled(_with_entropy(eager.token_logprobs)),
        "trl": _trl_selective,
        "flash-attn": _flash_attn,
    },
    "linear_logprobs": {
        "torch.compile": _compiled(_with_entropy(eager.linear_logprobs)),
        "liger-kernel": _liger_linear,
        "cut-cross-entropy": _cut_cross_entropy,
        "trl": _trl_chunked,
    },
    "linear_ppo_loss": {
        "torch.compile": _compiled(_compiled_linear_loss),
        "liger-kernel": _liger_loss,
        "trl": _trl_chunked_loss,
    },
    "full_kl": {"torch.compile": _compiled(lambda case: eager.full_kl)},
    "kl_rewards": {},
    "gae": {"torchrl": _torchrl},
    "ppo_loss": {"torch.compile": _compiled(lambda case: eager.ppo_loss)},
    "whiten": {"torch.compile": _compiled(lambda case: eager.masked_whiten)},
    "sample_tokens": {"torch.compile": _compiled(lambda case: eager.sample_tokens)},
    "decode_attention": {
        "torch.compile": _compiled(_compiled_attention),
        "sdpa": _sdpa,
        "flash-attn": _flash_attn_cache,
    },
}
