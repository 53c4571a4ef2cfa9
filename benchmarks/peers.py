"""Whom fastrl is measured against: the formulas as trainers write them, in eager PyTorch, which are
the yardstick of error too; other libraries, called on the same inputs in the same process; and
environments for libraries that need packages of their own.

As in the classic trainers, logits in half precision are widened to fp32 before the softmax. A
formula's named outputs are those of the op; what it computes beside them is left out. A library
that cannot take part is listed with the reason, never left out in silence. One that computes less
than the op says so, and is judged by what it does compute.
"""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import ROOT, Implementation, Results, described
from fastrl_kernels import reference

if TYPE_CHECKING:
    from benchmarks.ops import Shape

GAMMA, LAM = 1.0, 0.95


# --- formulas in eager PyTorch -------------------------------------------------------------------


def token_logprobs(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, entropy: bool = False
) -> Results:
    """log_softmax and gather; the entropy is logsumexp(z) - Σ softmax(z)·z."""
    logits = logits.float()
    logprobs = F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    outputs = {"logprobs": logprobs}
    if entropy:
        expected = (F.softmax(logits, dim=-1) * logits).sum(-1)
        outputs["entropies"] = torch.logsumexp(logits, dim=-1) - expected
    if mask is not None:
        outputs = {name: torch.where(mask, x, 0.0) for name, x in outputs.items()}
    return outputs


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    entropy: bool = False,
) -> Results:
    """All logits at once, then as above."""
    return token_logprobs(F.linear(hidden, weight), labels, mask, entropy)


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: float,
    entropy: bool = False,
) -> Results:
    """All logits at once, the clipped objective, and the entropy as a statistic.

    As in the classic trainer, autograd follows the entropy although nobody asks for its gradient.
    """
    found = token_logprobs(F.linear(hidden, weight), labels, None, entropy)
    logprobs = found["logprobs"]
    outputs = {"loss": clipped_loss(logprobs, old_logprobs, advantages, mask, denominator)}
    if entropy:
        outputs["entropy"] = (found["entropies"].detach() * mask).sum() / denominator
    return outputs


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, denominator: float
) -> Tensor:
    """Σ mask·max(-A·ρ, -A·clip(ρ, 0.8, 1.2)) / denominator."""
    ratio = (logprobs - old_logprobs).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return (losses * mask).sum() / denominator


def ppo_loss(
    logprobs: Tensor,
    values: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_values: Tensor,
    returns: Tensor,
    denominator: float,
) -> Results:
    """The clipped objective and a tenth of the clipped value loss."""
    policy = clipped_loss(logprobs, old_logprobs, advantages, mask, denominator)
    near = torch.clamp(values, old_values - 0.2, old_values + 0.2)
    error = torch.maximum((values - returns).square(), (near - returns).square())
    return {"loss": policy + 0.1 * 0.5 * (error * mask).sum() / denominator}


def full_kl(logits: Tensor, ref_logits: Tensor) -> Results:
    """Two log-softmaxes and F.kl_div, as the classic trainer's kl_penalty="full"."""
    logp = F.log_softmax(logits.float(), dim=-1)
    logq = F.log_softmax(ref_logits.float(), dim=-1)
    return {"kl": F.kl_div(logq, logp, log_target=True, reduction="none").sum(-1)}


def kl_rewards(
    logprobs: Tensor, ref_logprobs: Tensor, scores: Tensor, mask: Tensor, coef: float
) -> Results:
    """A sequence at a time, as the classic trainer."""
    rewards, kls = [], []
    for row in range(len(scores)):
        kl = (logprobs[row] - ref_logprobs[row]) * mask[row]
        reward = -coef * kl
        reward[mask[row].nonzero()[-1]] += scores[row]
        rewards.append(reward)
        kls.append(kl)
    stacked = torch.stack(kls)
    return {"rewards": torch.stack(rewards), "kls": stacked, "sequence_kl": stacked.sum(-1)}


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = False,
) -> Results:
    """The classic per-step loop, from the last step to the first, over whole columns.

    Masks here end rows: there it gives what `fastrl_kernels.gae` gives. Holes it does not bridge.
    """
    if mask is not None:
        rewards, values = rewards * mask, values * mask
    steps = rewards.shape[-1]
    carry, columns = torch.zeros_like(rewards[:, 0]), []
    for t in reversed(range(steps)):
        following = values[:, t + 1] if t < steps - 1 else 0.0
        delta = rewards[:, t] + gamma * following - values[:, t]
        carry = delta + gamma * lam * carry
        columns.append(carry)
    advantages = torch.stack(columns[::-1], dim=1)
    returns = advantages + values
    if whiten:
        counted = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
        advantages = masked_whiten(advantages, counted)["whitened"]
    return {"advantages": advantages, "returns": returns}


def masked_whiten(values: Tensor, mask: Tensor) -> Results:
    """Mean, variance with Bessel's correction, and (x - μ)·rsqrt(var + 1e-8)."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1)
    return {"whitened": (values - mean) * torch.rsqrt(variance + reference.WHITEN_EPS) * mask}


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    mask: Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> Results:
    """All scores, the dead ones too, softmax in fp32, and its weights back in the values' dtype, as
    transformers has it; only that heads which share keys do so without copies of them.

    The mask [B, M] holds lengths and window: a model makes it once for all of its layers.
    """
    rows, heads, width = query.shape
    query = query.reshape(rows, keys.shape[2], -1, width)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    scores = query @ keys.mT * width**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~mask[:, None, None], -torch.inf)
    weights = scores.softmax(-1).to(values.dtype)
    return {"out": (weights @ values).reshape(rows, heads, values.shape[-1])}


def sample_tokens(logits: Tensor, keys: Tensor) -> Results:
    """Softmax and torch.multinomial, then the log-probability and the entropy.

    The keys play no part: the random numbers come from torch's one generator.
    """
    logits = logits.float()
    logp = F.log_softmax(logits, dim=-1)
    p = logp.exp()
    tokens = torch.multinomial(p, 1)
    return {
        "tokens": tokens.squeeze(-1),
        "logprobs": logp.gather(-1, tokens).squeeze(-1),
        "entropies": -(p * logp).sum(-1),
    }


# --- other libraries ----------------------------------------------------------------------------

# What a peer's largest relative error may be: enough to know that it computes the same thing.
TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}


class Unsuitable(Exception):
    """The peer is there, but cannot take this case; the message says why."""


class Peer(NamedTuple):
    """An implementation, and what sets it apart from the op that it stands beside."""

    call: Implementation
    note: str = ""


def peers_of(shape: Shape, device: torch.device) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can take a case, by name; and for the others why they cannot."""
    found, absent = {}, {}
    for name, make in _PEERS[shape.op].items():
        try:
            found[name] = make(shape, device)
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


def _needs_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unsuitable("its kernels need a GPU")


def _compiled(formula: Callable[[Shape], Implementation]) -> Callable[..., Peer]:
    """torch.compile of the eager formula; it is compiled at the first, untimed call."""

    def make(shape: Shape, device: torch.device) -> Peer:
        torch.compiler.reset()  # one case's shapes must not turn the next one's dynamic
        return Peer(torch.compile(formula(shape), dynamic=False))

    return make


def _with_entropy(formula: Callable[..., Results]) -> Callable[[Shape], Implementation]:
    return lambda shape: functools.partial(formula, entropy=shape.entropy != "off")


def _compiled_linear_loss(shape: Shape) -> Implementation:
    return functools.partial(linear_ppo_loss, entropy=shape.entropy != "off")


def _compiled_attention(shape: Shape) -> Implementation:
    assert shape.attention is not None
    return functools.partial(decode_attention, **shape.attention.options)


def _trl_selective(shape: Shape, device: torch.device) -> Peer:
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


def _flash_attn(shape: Shape, device: torch.device) -> Peer:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    _needs_gpu(device)

    def call(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Results:
        labels = labels if mask is None else torch.where(mask, labels, -100)
        losses, _ = cross_entropy_loss(logits, labels, ignore_index=-100)
        return {"logprobs": -losses}

    return Peer(call, "" if shape.entropy == "off" else "no entropy")


def _trl_chunked_logprobs(shape: Shape) -> Callable[..., tuple[Tensor, Tensor | None]]:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    columns = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    outputs = ("entropy",) if shape.entropy != "off" else ()

    def logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        return ChunkedLogProbFunction.apply(
            hidden, weight, None, labels, 1.0, columns, None, 1.0, outputs
        )[:2]

    return logprobs


def _trl_chunked(shape: Shape, device: torch.device) -> Peer:
    logprobs = _trl_chunked_logprobs(shape)

    def call(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None) -> Results:
        if mask is not None:  # as TRL picks the tokens that count
            hidden, labels = hidden[mask], labels[mask]
        found = dict(zip(("logprobs", "entropies"), logprobs(hidden, weight, labels), strict=True))
        found = {name: x for name, x in found.items() if x is not None}
        if mask is not None:
            found = {k: x.new_zeros(shape.rows).masked_scatter(mask, x) for k, x in found.items()}
        return found

    return Peer(call, "ChunkedLogProbFunction")


def _trl_chunked_loss(shape: Shape, device: torch.device) -> Peer:
    logprobs = _trl_chunked_logprobs(shape)

    def call(
        hidden: Tensor, weight: Tensor, labels: Tensor, old_logprobs: Tensor, advantages: Tensor,
        mask: Tensor, denominator: float,
    ) -> Results:  # fmt: skip
        hidden, labels, old_logprobs, advantages = (
            x[mask] for x in (hidden, labels, old_logprobs, advantages)
        )
        found, entropies = logprobs(hidden, weight, labels)
        counted = torch.ones_like(labels, dtype=torch.bool)
        loss = clipped_loss(found, old_logprobs, advantages, counted, denominator)
        if entropies is None:
            return {"loss": loss}
        return {"loss": loss, "entropy": entropies.detach().sum() / denominator}

    return Peer(call, "ChunkedLogProbFunction, then the loss")


def _liger_linear(shape: Shape, device: torch.device) -> Peer:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    _needs_gpu(device)

    def call(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None) -> Results:
        labels = labels if mask is None else torch.where(mask, labels, -100)
        losses = LigerFusedLinearCrossEntropyFunction.apply(
            hidden, weight, labels, None, None, -100, 0.0, 0.0, "none"
        )
        losses = losses[0] if isinstance(losses, tuple) else losses
        return {"logprobs": -losses}

    return Peer(call, "" if shape.entropy == "off" else "no entropy")


def _liger_loss(shape: Shape, device: torch.device) -> Peer:
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
    ) -> Results:  # fmt: skip
        found, _ = loss(
            hidden.unsqueeze(1), weight, labels.unsqueeze(1), mask.unsqueeze(1), advantages,
            old_per_token_logps=old_logprobs.unsqueeze(1),
        )  # fmt: skip
        return {"loss": found}

    note = "LigerFusedLinearGRPOLoss, chunks of 1024 tokens"
    return Peer(call, note + ("" if shape.entropy == "off" else "; no entropy"))


def _cut_cross_entropy(shape: Shape, device: torch.device) -> Peer:
    from cut_cross_entropy import linear_cross_entropy

    _needs_gpu(device)
    if shape.dtype == "fp32":
        raise Unsuitable("its kernels take half precision only")

    def call(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None) -> Results:
        labels = labels if mask is None else torch.where(mask, labels, -100)
        losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
        return {"logprobs": -losses.float()}

    note = "leaves out small gradients (its default)"
    return Peer(call, note + ("" if shape.entropy == "off" else "; no entropy"))


def _torchrl(shape: Shape, device: torch.device) -> Peer:
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    def call(rewards: Tensor, values: Tensor, mask: Tensor) -> Results:
        rewards, values = rewards * mask, values * mask
        following = torch.nn.functional.pad(values[:, 1:], (0, 1))
        done = torch.zeros_like(mask)
        done[:, -1] = True
        advantages, returns = vec_generalized_advantage_estimate(
            GAMMA, LAM, *(x.unsqueeze(-1) for x in (values, following, rewards, done))
        )
        advantages, returns = advantages.squeeze(-1), returns.squeeze(-1)
        if shape.whiten:
            advantages = masked_whiten(advantages, mask)["whitened"]
        return {"advantages": advantages, "returns": returns}

    note = "vec_generalized_advantage_estimate, zeros after a row's end"
    return Peer(call, note + ("; whitened by eager PyTorch" if shape.whiten else ""))


def _sdpa(shape: Shape, device: torch.device) -> Peer:
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


def _flash_attn_cache(shape: Shape, device: torch.device) -> Peer:
    from flash_attn import flash_attn_with_kvcache

    layer = shape.attention
    assert layer is not None
    _needs_gpu(device)
    if shape.dtype == "fp32":
        raise Unsuitable("its kernels take half precision only")
    # Keys that a query sees to its left and its right, -1 for all.
    window = (-1, -1) if layer.window is None else (layer.window - 1, 0)

    def call(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, mask: Tensor) -> Results:
        out = flash_attn_with_kvcache(
            query.unsqueeze(1), keys, values, cache_seqlens=lengths, window_size=window,
            softcap=layer.softcap or 0.0,
        )  # fmt: skip
        return {"out": out.squeeze(1)}

    return Peer(call, "flash_attn_with_kvcache")


_Make = Callable[..., Peer]
_PEERS: dict[str, dict[str, _Make]] = {
    "token_logprobs": {
        "torch.compile": _compiled(_with_entropy(token_logprobs)),
        "trl": _trl_selective,
        "flash-attn": _flash_attn,
    },
    "linear_logprobs": {
        "torch.compile": _compiled(_with_entropy(linear_logprobs)),
        "liger-kernel": _liger_linear,
        "cut-cross-entropy": _cut_cross_entropy,
        "trl": _trl_chunked,
    },
    "linear_ppo_loss": {
        "torch.compile": _compiled(_compiled_linear_loss),
        "liger-kernel": _liger_loss,
        "trl": _trl_chunked_loss,
    },
    "full_kl": {"torch.compile": _compiled(lambda shape: full_kl)},
    "kl_rewards": {},
    "gae": {"torchrl": _torchrl},
    "ppo_loss": {"torch.compile": _compiled(lambda shape: ppo_loss)},
    "whiten": {"torch.compile": _compiled(lambda shape: masked_whiten)},
    "sample_tokens": {"torch.compile": _compiled(lambda shape: sample_tokens)},
    "decode_attention": {
        "torch.compile": _compiled(_compiled_attention),
        "sdpa": _sdpa,
        "flash-attn": _flash_attn_cache,
    },
}

# --- environments of their own --------------------------------------------------------------------

VENVS = ROOT / ".benchmarks" / "venvs"

# What each library is installed with: the newest versions that it works with.
TRL_CLASSIC, TRL = "trl==0.11.4", "trl==1.16.0"
WITH = {
    TRL_CLASSIC: ("transformers==4.45.2", "peft==0.13.2", "numpy<2.3", "rich"),
    TRL: (),
}


class Uninstallable(RuntimeError):
    """There is no environment for a peer, and none can be made."""


def peer_python(peer: str) -> Path:
    """The interpreter of the peer's environment, which is made at the first call; this one's where
    the peer is installed beside us.

    Raises:
        Uninstallable: it cannot be made here.
    """
    name, version = peer.split("==")
    try:
        if importlib.metadata.version(name) == version:
            return Path(sys.executable)
    except importlib.metadata.PackageNotFoundError:
        pass
    folder = VENVS / peer.replace("==", "-")
    python = folder / "bin" / "python"
    # Both sides run the same torch: what is measured is the library, not its torch.
    torch_version = torch.__version__.split("+")[0]
    wanted = [f"torch=={torch_version}", peer, *WITH[peer]]
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text().split("\n") != wanted:
        print(f"installing {peer} into {folder.relative_to(ROOT)}")
        try:
            venv.create(folder, with_pip=True, clear=True)
            for packages in (wanted[:1], wanted[1:]):
                command = [python, "-m", "pip", "install", "--quiet", *packages]
                subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Uninstallable(
                f"{peer} cannot be installed here ({_last_line(error)}): give an interpreter that "
                "has it by --peer-python PATH"
            ) from error
        stamp.write_text("\n".join(wanted))
    return python


def _last_line(error: OSError | subprocess.CalledProcessError) -> str:
    """What a command said last, or how it ended."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    said = said.decode() if isinstance(said, bytes) else said
    return (said or str(error)).strip().splitlines()[-1][:200]
