"""Replacements in TRL 0.11.4: log-probs, entropies, masked statistics, classic PPO's advantages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.compat.patch.coverage import entropies, has_one_index, has_rows, is_plain, softmax_dtype
from fastrl.compat.patch.replacement import Replacement, delegating, small


def _covers(values: Tensor, mask: Any) -> bool:
    """Whether a mask has the values' shape, and booleans or integers: floats might be weights."""
    return (
        is_plain(values)
        and isinstance(mask, Tensor)
        and not mask.is_floating_point()
        and mask.shape == values.shape
    )


@delegating(
    lambda logits, labels, gather=True: (
        gather and logits.dim() == 3 and has_one_index(logits, labels)
    )
)
def _logprobs_from_logits(logits: Tensor, labels: Tensor, gather: bool = True) -> Tensor:
    return fastrl_kernels.token_logprobs(logits, labels).to(softmax_dtype(logits))


@delegating(has_rows)
def _entropy_from_logits(logits: Tensor) -> Tensor:
    return entropies(logits).to(softmax_dtype(logits))


@delegating(lambda values, mask, axis=None: axis is None and _covers(values, mask))
def _masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    return fastrl_kernels.masked_mean(values, mask.bool()).to(values.dtype)


@delegating(lambda values, mask, unbiased=True: _covers(values, mask))
def _masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    return fastrl_kernels.masked_var(values, mask.bool(), unbiased=unbiased).to(values.dtype)


def _covers_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> bool:
    # Where a gradient is needed, TRL's own runs: it differentiates the moments, _whiten does not.
    return _covers(values, mask) and not (values.requires_grad and torch.is_grad_enabled())


@delegating(_covers_whiten)
def _masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    return _whiten(values, mask, shift_mean)


def _whiten(values: Tensor, mask: Tensor, shift_mean: bool) -> Tensor:
    """Whitens all elements by the moments of those that count, as TRL does."""
    moments = fastrl_kernels.masked_moments(values, mask.bool())
    everywhere = torch.ones_like(values, dtype=torch.bool)
    whitened = fastrl_kernels.masked_whiten(values, everywhere, shift_mean, moments=moments)
    return whitened.to(values.dtype)


def _covers_advantages(trainer: Any, values: Tensor, rewards: Tensor, mask: Tensor) -> bool:
    return (
        _covers(values, mask)
        and _covers(rewards, mask)
        and values.dim() == 2
        and not torch.is_grad_enabled()
        and 0 <= trainer.config.gamma <= 1
        and 0 <= trainer.config.lam <= 1
    )


@delegating(_covers_advantages)
def _compute_advantages(
    self: Any, values: Tensor, rewards: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    config = self.config
    values, rewards = values * mask, rewards * mask
    if config.whiten_rewards:
        rewards = _whiten(rewards, mask, shift_mean=False)
    # Without the mask: TRL's recurrence runs over masked tokens, as values of 0.
    advantages, returns = fastrl_kernels.gae(rewards, values, gamma=config.gamma, lam=config.lam)
    dtype = torch.result_type(values, rewards)
    return values, _whiten(advantages, mask, shift_mean=True).to(dtype), returns.to(dtype)


def _logits_and_labels(device: torch.device) -> list[tuple[Any, ...]]:
    labels = torch.arange(6, device=device).reshape(2, 3)
    return [(small(2, 3, 7, device=device, requires_grad=True), labels)]


def _logits(device: torch.device) -> list[tuple[Any, ...]]:
    return [(small(2, 3, 7, device=device, requires_grad=True),)]


def _mask(device: torch.device) -> Tensor:
    """A mask [2, 5] with a hole and a tail that do not count."""
    return torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 0, 0]], device=device)


def _values_and_mask(device: torch.device) -> list[tuple[Any, ...]]:
    return [(small(2, 5, device=device, requires_grad=True), _mask(device))]


def _whiten_cases(device: torch.device) -> list[tuple[Any, ...]]:
    values, mask = small(2, 5, device=device), _mask(device)
    return [(values, mask), (values, mask, False)]


def _advantage_cases(device: torch.device) -> list[tuple[Any, ...]]:
    def trainer(whiten_rewards: bool) -> Any:
        config = SimpleNamespace(gamma=0.9, lam=0.75, whiten_rewards=whiten_rewards)
        return SimpleNamespace(config=config)

    rest = small(2, 5, device=device), small(2, 5, device=device, step=3), _mask(device)
    return [(trainer(False), *rest), (trainer(True), *rest)]


_CORE, _PPO = "trl.core", "trl.trainer.ppo_trainer"
REPLACEMENTS = (
    Replacement(
        _CORE, "logprobs_from_logits", "token_logprobs", _logprobs_from_logits, _logits_and_labels
    ),
    Replacement(_CORE, "entropy_from_logits", "token_logprobs", _entropy_from_logits, _logits),
    Replacement(_CORE, "masked_mean", "masked_mean", _masked_mean, _values_and_mask),
    Replacement(_CORE, "masked_var", "masked_var", _masked_var, _values_and_mask),
    Replacement(_CORE, "masked_whiten", "masked_whiten", _masked_whiten, _whiten_cases),
    Replacement(
        _PPO, "PPOTrainer.compute_advantages", "gae", _compute_advantages, _advantage_cases
    ),
)
