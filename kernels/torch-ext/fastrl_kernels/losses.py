"""The losses as modules: settings at construction, tensors at the call.

``PPOLoss(cliprange=0.1)(logprobs, old_logprobs, advantages, mask)`` is ``ppo_loss`` of these, with
``cliprange=0.1``. What changes from call to call, such as ``value=`` or ``denominator=``, may be
given to the call as well, and comes before what the module was made with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from . import preference
from .linear_nll import linear_nll_loss
from .ppo_loss import linear_ppo_loss, ppo_loss

__all__ = [
    "DPOLoss",
    "IPOLoss",
    "KTOLoss",
    "LinearNLLLoss",
    "LinearPPOLoss",
    "ORPOLoss",
    "PPOLoss",
    "PairLoss",
    "RewardLoss",
    "SLiCLoss",
    "SimPOLoss",
]


class _Loss(nn.Module):
    """An op whose keyword arguments may be given beforehand."""

    op: ClassVar[Callable[..., Any]]

    def __init__(self, **settings: Any) -> None:
        """
        Args:
            settings: keyword arguments of the op.

        Raises:
            TypeError: one that the op does not have.
        """
        super().__init__()
        op = type(self).op
        known = [
            p.name for p in inspect.signature(op).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
        if unknown := sorted(settings.keys() - set(known)):
            raise TypeError(
                f"{type(self).__name__} has no setting {', '.join(unknown)}: {op.__name__} takes "
                f"{', '.join(known)}"
            )
        self.settings = settings

    def forward(self, *tensors: Any, **settings: Any) -> Any:
        """The op's results."""
        return type(self).op(*tensors, **{**self.settings, **settings})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


class PPOLoss(_Loss):
    """:func:`~fastrl_kernels.ppo_loss` of (logprobs, old_logprobs, advantages, mask): the loss and
    its ``LossStats``."""

    op = staticmethod(ppo_loss)


class LinearPPOLoss(_Loss):
    """:func:`~fastrl_kernels.linear_ppo_loss` of (hidden, weight, labels, old_logprobs, advantages,
    mask): the loss and its ``LinearLossStats``."""

    op = staticmethod(linear_ppo_loss)


class LinearNLLLoss(_Loss):
    """:func:`~fastrl_kernels.linear_nll_loss` of (hidden, weight, labels)."""

    op = staticmethod(linear_nll_loss)


class DPOLoss(_Loss):
    """:func:`~fastrl_kernels.dpo_loss` of (policy_chosen, policy_rejected, ref_chosen,
    ref_rejected), per example."""

    op = staticmethod(preference.dpo_loss)


class IPOLoss(_Loss):
    """:func:`~fastrl_kernels.ipo_loss` of (policy_chosen, policy_rejected, ref_chosen,
    ref_rejected), per example."""

    op = staticmethod(preference.ipo_loss)


class PairLoss(_Loss):
    """:func:`~fastrl_kernels.pair_loss` of (policy_chosen, policy_rejected, ref_chosen,
    ref_rejected), per example; ``kind`` names it."""

    op = staticmethod(preference.pair_loss)


class SimPOLoss(_Loss):
    """:func:`~fastrl_kernels.simpo_loss` of (mean_chosen, mean_rejected), per example."""

    op = staticmethod(preference.simpo_loss)


class ORPOLoss(_Loss):
    """:func:`~fastrl_kernels.orpo_loss` of (mean_chosen, mean_rejected), per example."""

    op = staticmethod(preference.orpo_loss)


class SLiCLoss(_Loss):
    """:func:`~fastrl_kernels.slic_loss` of (policy_chosen, policy_rejected), per example."""

    op = staticmethod(preference.slic_loss)


class KTOLoss(_Loss):
    """:func:`~fastrl_kernels.kto_loss` of (policy, reference, desirable, kl), per example."""

    op = staticmethod(preference.kto_loss)


class RewardLoss(_Loss):
    """:func:`~fastrl_kernels.reward_loss` of (chosen, rejected, margin=None), per example."""

    op = staticmethod(preference.reward_loss)
