"""TRL 0.11.4: what its classic PPO makes of logits, of masked values, and of rewards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.patch.coverage import has_one_index, is_plain, softmax_dtype
from fastrl.patch.replacement import Calls, Replacement, small


def _covers(values: Tensor, mask: Any) -> bool:
    """A mask of the values' shape, of booleans or integers: floating ones might be weights."""
    return (
        is_plain(values)
        and isinstance(mask, Tensor)
        and not mask.is_floating_point()
        and mask.shape == values.shape
    )


def _logprobs_from_logits(original: Any, calls: Calls) -> Any:
    def logprobs_from_logits(logits: Tensor, labels: Tensor, gather: bool = True) -> Tensor:
        if not gather or logits.dim() != 3 or not has_one_index(logits, labels):
            calls.delegated += 1
            return original(logits, labels, gather=gather)
        calls.ours += 1
        return fastrl_kernels.token_logprobs(logits, labels).to(softmax_dtype(logits))

    return logprobs_from_logits


def _entropy_from_logits(original: Any, calls: Calls) -> Any:
    def entropy_from_logits(logits: Tensor) -> Tensor:
        index = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        if not has_one_index(logits, index):
            calls.delegated += 1
            return original(logits)
        calls.ours += 1
        entropies = fastrl_kernels.token_logprobs(logits, index, entropy=True)[1]
        return entropies.to(softmax_dtype(logits))

    return entropy_from_logits


def _masked_mean(original: Any, calls: Calls) -> Any:
    def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
        if axis is not None or not _covers(values, mask):
            calls.delegated += 1
            return original(values, mask, axis=axis)
        calls.ours += 1
        return fastrl_kernels.masked_mean(values, mask.bool()).to(values.dtype)

    return masked_mean


def _masked_var(original: Any, calls: Calls) -> Any:
    def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
        if not _covers(values, mask):
            calls.delegated += 1
            return original(values, mask, unbiased=unbiased)
        calls.ours += 1
        return fastrl_kernels.masked_var(values, mask.bool(), unbiased=unbiased).to(values.dtype)

    return masked_var


def _masked_whiten(original: Any, calls: Calls) -> Any:
    def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
        # The moments are constants below; TRL's callers need no gradient here.
        if not _covers(values, mask) or (values.requires_grad and torch.is_grad_enabled()):
            calls.delegated += 1
            return original(values, mask, shift_mean=shift_mean)
        calls.ours += 1
        return _whiten(values, mask, shift_mean)

    return masked_whiten


def _whiten(values: Tensor, mask: Tensor, shift_mean: bool) -> Tensor:
    """With the counted elements' moments, but everywhere: as TRL does it."""
    moments = fastrl_kernels.masked_moments(values, mask.bool())
    everywhere = torch.ones_like(values, dtype=torch.bool)
    whitened = fastrl_kernels.masked_whiten(values, everywhere, shift_mean, moments=moments)
    return whitened.to(values.dtype)


def _compute_advantages(original: Any, calls: Calls) -> Any:
    def compute_advantages(
        self: Any, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        covered = (
            _covers(values, mask)
            and _covers(rewards, mask)
            and values.dim() == 2
            and not torch.is_grad_enabled()
            and 0 <= config.gamma <= 1
            and 0 <= config.lam <= 1
        )
        if not covered:
            calls.delegated += 1
            return original(self, values, rewards, mask)
        calls.ours += 1
        values, rewards = values * mask, rewards * mask
        if config.whiten_rewards:
            rewards = _whiten(rewards, mask, shift_mean=False)
        # No mask here: TRL's recurrence runs through what does not count, as values of 0.
        advantages, returns = fastrl_kernels.gae(
            rewards, values, gamma=config.gamma, lam=config.lam
        )
        dtype = torch.result_type(values, rewards)
        return values, _whiten(advantages, mask, shift_mean=True).to(dtype), returns.to(dtype)

    return compute_advantages


def _logits_and_labels(device: torch.device) -> list[tuple[Any, ...]]:
    labels = torch.arange(6, device=device).reshape(2, 3)
    return [(small(2, 3, 7, device=device, requires_grad=True), labels)]


def _logits(device: torch.device) -> list[tuple[Any, ...]]:
    return [(small(2, 3, 7, device=device, requires_grad=True),)]


def _mask(device: torch.device) -> Tensor:
    """[2, 5], with a hole and a tail that do not count."""
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
