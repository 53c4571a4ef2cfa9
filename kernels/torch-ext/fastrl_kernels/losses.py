"""The losses as modules: settings at construction, tensors at the call.

``PPOLoss(cliprange=0.1)(logprobs, old_logprobs, advantages, mask)`` is ``ppo_loss`` of these, with
``cliprange=0.1``. What changes from call to call, such as ``value=`` or ``denominator=``, may be
given to the call as well, and comes before what the module was made with.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import preference
from .argument_types import misfit
from .checks import check_choice
from .dispatch import BACKENDS
from .linear_kl import linear_kl_loss
from .linear_nll import linear_nll_loss
from .linear_ppo_loss import linear_ppo_loss
from .ppo_loss import ppo_loss
from .types import TeacherHead

__all__ = [
    "DPOLoss",
    "IPOLoss",
    "KTOLoss",
    "LinearKLLoss",
    "LinearNLLLoss",
    "LinearPPOLoss",
    "ORPOLoss",
    "PPOLoss",
    "PairLoss",
    "RewardLoss",
    "SLiCLoss",
    "SimPOLoss",
]


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _examples(count: int) -> list[Any]:
    return [_zeros(1)] * count


def _tokens() -> list[Any]:
    """Old log-probs, advantages and a mask."""
    return [*[_zeros(*_TOKENS)] * 2, _zeros(*_TOKENS, dtype=torch.bool)]


def _scored_tokens() -> list[Any]:
    """Hidden states, weight and labels."""
    return [_zeros(*_TOKENS, 1), _zeros(1, 1), _zeros(*_TOKENS, dtype=torch.int64)]


_TOKENS = 1, 2


def _with_zeros(setting: Any) -> Any:
    """A term of a loss with zeros in place of its tensors; other settings as they are."""
    if not hasattr(setting, "_fields"):
        return setting
    return type(setting)(*(_zeros(*_TOKENS) if isinstance(x, Tensor) else x for x in setting))


class _Loss(nn.Module):
    """An op whose keyword arguments may be given beforehand."""

    op: ClassVar[Callable[..., Any]]
    trial: ClassVar[Callable[[], list[Any]]]  # the smallest arguments that the op takes

    def __init__(self, *given: Any, **settings: Any) -> None:
        """Keeps settings of the op, checked.

        Args:
            settings: keyword arguments of the op.

        Raises:
            TypeError: one that the op does not have, or of another type.
            ValueError: what the op refuses, other than by its tensors.
        """
        super().__init__()
        op = type(self).op
        known = [
            p.name for p in inspect.signature(op).parameters.values() if p.kind is p.KEYWORD_ONLY
        ]
        if given:
            raise TypeError(
                f"{type(self).__name__} takes settings by their names, such as {known[0]}=…: "
                "tensors are the call's"
            )
        if unknown := sorted(settings.keys() - set(known)):
            raise TypeError(
                f"{type(self).__name__} has no setting {', '.join(unknown)}: {op.__name__} takes "
                f"{', '.join(known)}"
            )
        self.settings = settings
        self._judge(settings)

    @classmethod
    def _judge(cls, settings: dict[str, Any]) -> None:
        """Refuses settings before training, with the op's own errors: it is called on zeros."""
        hints = typing.get_type_hints(cls.op)
        for name, setting in settings.items():
            if message := misfit(name, setting, hints[name]):
                raise TypeError(message)
        check_choice("backend", settings.get("backend", "auto"), BACKENDS)
        # What depends on devices, processes or the shapes of tensors is judged at the call.
        left_out = {name for name, setting in settings.items() if isinstance(setting, Tensor)}
        left_out |= {"backend", "shift", "vocab_parallel", "vocabulary"}
        tried = {name: _with_zeros(settings[name]) for name in settings.keys() - left_out}
        if "backend" in hints:
            tried["backend"] = "torch"
        with torch.no_grad(), unset_fake_temporarily():
            cls.op(*cls.trial(), **tried)

    def forward(self, *tensors: Any, **settings: Any) -> Any:
        """The op's results."""
        return type(self).op(*tensors, **{**self.settings, **settings})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items())


class PPOLoss(_Loss):
    """:func:`~fastrl_kernels.ppo_loss` of (logprobs, old_logprobs, advantages, mask): the loss and
    its ``LossStats``."""

    op = staticmethod(ppo_loss)
    trial = staticmethod(lambda: [_zeros(*_TOKENS), *_tokens()])


class LinearPPOLoss(_Loss):
    """:func:`~fastrl_kernels.linear_ppo_loss` of (hidden, weight, labels, old_logprobs, advantages,
    mask): the loss and its ``LinearLossStats``."""

    op = staticmethod(linear_ppo_loss)
    trial = staticmethod(lambda: [*_scored_tokens(), *_tokens()])


class LinearKLLoss(_Loss):
    """:func:`~fastrl_kernels.linear_kl_loss` of (hidden, weight, labels, teacher): the loss and its
    ``TokenDivergences``."""

    op = staticmethod(linear_kl_loss)
    trial = staticmethod(
        lambda: [*_scored_tokens(), TeacherHead(_zeros(*_TOKENS, 1), _zeros(1, 1))]
    )


class LinearNLLLoss(_Loss):
    """:func:`~fastrl_kernels.linear_nll_loss` of (hidden, weight, labels)."""

    op = staticmethod(linear_nll_loss)
    trial = staticmethod(_scored_tokens)


class DPOLoss(_Loss):
    """:func:`~fastrl_kernels.dpo_loss` of (policy_chosen, policy_rejected, ref_chosen,
    ref_rejected), per example."""

    op = staticmethod(preference.dpo_loss)
    trial = staticmethod(partial(_examples, 4))


class IPOLoss(_Loss):
    """:func:`~fastrl_kernels.ipo_loss` of (policy_chosen, policy_rejected, ref_chosen,
    ref_rejected), per example."""

    op = staticmethod(preference.ipo_loss)
    trial = staticmethod(partial(_examples, 4))


class PairLoss(_Loss):
    """:func:`~fastrl_kernels.pair_loss` of (policy_chosen, policy_rejected, ref_chosen,
    ref_rejected), per example; ``kind`` names it."""

    op = staticmethod(preference.pair_loss)
    trial = staticmethod(partial(_examples, 4))


class SimPOLoss(_Loss):
    """:func:`~fastrl_kernels.simpo_loss` of (mean_chosen, mean_rejected), per example."""

    op = staticmethod(preference.simpo_loss)
    trial = staticmethod(partial(_examples, 2))


class ORPOLoss(_Loss):
    """:func:`~fastrl_kernels.orpo_loss` of (mean_chosen, mean_rejected), per example."""

    op = staticmethod(preference.orpo_loss)
    trial = staticmethod(partial(_examples, 2))


class SLiCLoss(_Loss):
    """:func:`~fastrl_kernels.slic_loss` of (policy_chosen, policy_rejected), per example."""

    op = staticmethod(preference.slic_loss)
    trial = staticmethod(partial(_examples, 2))


class KTOLoss(_Loss):
    """:func:`~fastrl_kernels.kto_loss` of (policy, reference, desirable, kl), per example."""

    op = staticmethod(preference.kto_loss)
    trial = staticmethod(lambda: [*_examples(2), _zeros(1, dtype=torch.bool), 0.0])


class RewardLoss(_Loss):
    """:func:`~fastrl_kernels.reward_loss` of (chosen, rejected, margin=None), per example."""

    op = staticmethod(preference.reward_loss)
    trial = staticmethod(partial(_examples, 2))
