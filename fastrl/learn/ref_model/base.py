"""The interface of reference models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from fastrl.data.token_batch import TokenBatch, TrunkActivations
from fastrl.models.scoring import ScoringRequest, TokenScores

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor


class RefModel(ABC):
    """The reference, the policy that the KL is measured to. A trainer chooses it once, by
    :func:`fastrl.learn.ref_model.choose_ref_model`.

    Attributes:
        mode: its name in ``PPOConfig.reference``.
        why: the reason for the choice, in words.
        model: the reference as a model of its own, where there is one.
        policy: the policy, where that acts as the reference.
    """

    mode: str
    why: str = ""
    model: Any = None
    policy: Any = None

    @abstractmethod
    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        """Log-probs of the requested tokens, [N], without gradients.

        Args:
            inputs: the policy's; a choice of experts among them (``routing``) is not the
                reference's, which chooses its own.
        """

    @abstractmethod
    def as_policy(self) -> AbstractContextManager[nn.Module]:
        """Context that yields the reference, to generate with. Raises ValueError without one."""

    def place(self, policy: nn.Module, accelerator: Accelerator) -> None:  # noqa: B027 - optional
        """Moves the reference to the device where it computes, once the policy is prepared."""

    def trunk_cache(self, batch: TokenBatch) -> TrunkActivations | None:
        """Activations of the layers that policy and reference share, for a batch; None where they
        share none."""
        return None

    def follow(self, weight: float) -> None:
        """ref ← weight·policy + (1 - weight)·ref, for every weight that the two do not share.

        Raises:
            ValueError: a mode whose reference is fixed.
        """
        raise ValueError(cannot_follow(self.mode))

    def own_weights(self) -> dict[str, Tensor]:
        """The weights that are not the policy's, by name; the tensors themselves."""
        return {}

    def verify(self) -> None:  # noqa: B027 - optional
        """Raises ValueError where shared weights that must not change have changed."""


def cannot_follow(mode: str, asked: str = "sync_ref_every") -> str:
    """The message for a mode without weights that could follow the policy.

    Args:
        asked: the setting that makes the reference follow.
    """
    remedy = {"adapter": "reference_adapter='start'"}.get(
        mode, "reference='copy', 'trunk' or 'offload'"
    )
    return (
        f"{asked}: reference={mode!r} has no weights of its own to move towards the policy: choose "
        f"{remedy}, or leave {asked} out"
    )
