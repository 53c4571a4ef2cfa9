"""A stand-in for TRL: modules with its names, and functions with its signatures that do the same,
the plain way. `install` puts one in sys.modules in place of whatever TRL there is."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


def _plain_softmax(logits, index, row_mask):
    logprobs = logits.log_softmax(-1)
    logprobs = logprobs.gather(-1, index if index.dim() == logits.dim() else index.unsqueeze(-1))
    logprobs = logprobs.squeeze(-1) if index.dim() < logits.dim() else logprobs
    return logprobs if row_mask is None else logprobs.masked_fill(row_mask == 0, 0.0)


def selective_log_softmax(logits, index, temperature=1.0, row_mask=None):
    return _plain_softmax(logits / temperature, index, row_mask)


def modern_entropy(logits, chunk_size=128):
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def selective_log_softmax_and_entropy(
    logits, index, entropy_requires_grad=True, temperature=1.0, row_mask=None
):
    entropy = modern_entropy(logits / temperature)
    entropy = entropy if row_mask is None else entropy.masked_fill(row_mask == 0, 0.0)
    entropy = entropy if entropy_requires_grad else entropy.detach()
    return _plain_softmax(logits / temperature, index, row_mask), entropy


class ChunkedLogProbFunction(torch.autograd.Function):
    """The gradient is autograd's own, of the plain formula."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        final_logit_softcapping=None,
        logit_scale=1.0,
        outputs=("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ):
        ctx.set_materialize_grads(False)
        leaves = [
            None if x is None else x.detach().requires_grad_() for x in (hidden, weight, bias)
        ]
        with torch.enable_grad():
            z = leaves[0] @ leaves[1].t() + (0 if bias is None else leaves[2])
            z = z * logit_scale
            if final_logit_softcapping is not None:
                z = final_logit_softcapping * torch.tanh(z / final_logit_softcapping)
            z = z / temperature
            logprobs, entropy = selective_log_softmax_and_entropy(z, targets)
        ctx.leaves, ctx.roots = leaves, (logprobs, entropy)
        p = z.detach().softmax(-1)
        extras = {
            "log_sum_sq_probs": p.square().sum(-1).log(),
            "mean_logits": z.detach().mean(-1),
            "is_top1": z.detach().argmax(-1) == targets,
        }
        found = [extras[name] if name in outputs else None for name in extras]
        ctx.mark_non_differentiable(*(x for x in found if x is not None))
        return logprobs.detach(), entropy.detach() if "entropy" in outputs else None, *found

    @staticmethod
    def backward(ctx, *grads):
        pairs = [(root, g) for root, g in zip(ctx.roots, grads, strict=False) if g is not None]
        leaves = [x for x in ctx.leaves if x is not None]
        gradients = iter(torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs]))
        return *(None if x is None else next(gradients) for x in ctx.leaves), *(None,) * 6


def logprobs_from_logits(logits, labels, gather=True):
    logprobs = logits.log_softmax(2)
    return logprobs.gather(2, labels.unsqueeze(2)).squeeze(-1) if gather else logprobs


def classic_entropy(logits):
    return modern_entropy(logits)


def masked_mean(values, mask, axis=None):
    if axis is not None:
        return (values * mask).sum(axis) / mask.sum(axis)
    return (values * mask).sum() / mask.sum()


def masked_var(values, mask, unbiased=True):
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * mask.sum() / (mask.sum() - 1) if unbiased else variance


def masked_whiten(values, mask, shift_mean=True):
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def compute_advantages(self, values, rewards, mask):
    values, rewards = values * mask, rewards * mask
    if self.config.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False)
    last: Any = 0
    advantages: list[Tensor] = []
    for t in reversed(range(rewards.shape[-1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[-1] else 0.0
        delta = rewards[:, t] + self.config.gamma * following - values[:, t]
        last = delta + self.config.gamma * self.config.lam * last
        advantages.insert(0, last)
    result = torch.stack(advantages, 1)
    return values, masked_whiten(result, mask).detach(), result + values


def _modern() -> dict[str, dict[str, Any]]:
    names = {
        "selective_log_softmax": selective_log_softmax,
        "entropy_from_logits": modern_entropy,
        "selective_log_softmax_and_entropy": selective_log_softmax_and_entropy,
    }
    chunked = {"ChunkedLogProbFunction": ChunkedLogProbFunction}
    return {
        "trl": {"__version__": "1.16.3"},
        "trl.kernels": dict(chunked),
        "trl.trainer": {},
        "trl.trainer.utils": {"_ChunkedLogProbFunction": ChunkedLogProbFunction, **names},
        "trl.trainer.other": {"renamed": selective_log_softmax, "its_own": 3},
    }


def _classic() -> dict[str, dict[str, Any]]:
    names = {
        "logprobs_from_logits": logprobs_from_logits, "entropy_from_logits": classic_entropy,
        "masked_mean": masked_mean, "masked_var": masked_var, "masked_whiten": masked_whiten,
    }  # fmt: skip
    trainer = type("PPOTrainer", (), {"compute_advantages": compute_advantages})
    trainer.__module__ = "trl.trainer.ppo_trainer"
    return {
        "trl": {"__version__": "0.11.4"},
        "trl.core": dict(names),
        "trl.trainer": {},
        "trl.trainer.ppo_trainer": {"PPOTrainer": trainer, **names},
    }


def install(
    monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, dict[str, Any]] | None = None
) -> dict[str, ModuleType]:
    """Modules of a TRL of one kind, "modern" (1.16) or "classic" (0.11.4), with some names changed;
    None as a change takes a name away."""
    for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    modules = {}
    for name, contents in {"modern": _modern, "classic": _classic}[kind]().items():
        contents |= (changes or {}).get(name, {})
        module = ModuleType(name)
        vars(module).update({k: v for k, v in contents.items() if v is not None})
        monkeypatch.setitem(sys.modules, name, module)
        modules[name] = module
    return modules
