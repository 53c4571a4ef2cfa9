"""What every reference does for a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.models.trunk import TrunkCache

if TYPE_CHECKING:
    from accelerate import Accelerator


class Reference:
    """The policy that the KL penalty measures against.

    Chosen once, when a trainer is made (:func:`fastrl.ref_model.choose_reference`).

    Attributes:
        mode: its name in ``PPOConfig.reference``.
        why: why it was chosen, in words.
        model: the reference as a model of its own, where there is one.
    """

    mode: str
    why: str = ""
    model: Any = None

    def place(self, policy: nn.Module, accelerator: Accelerator) -> None:
        """Brings it where it computes, once the policy is prepared."""

    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        """What it says of a batch, without gradients; inputs are those of the policy."""
        raise NotImplementedError

    def as_policy(self) -> AbstractContextManager[nn.Module]:
        """The reference as a model to generate with."""
        raise NotImplementedError

    def boundaries(self, sequences: Sequence[Tensor]) -> TrunkCache | None:
        """What policy and reference have in common for sequences of a batch; None: nothing."""
        return None

    def follow(self, weight: float) -> None:
        """ref ← weight·policy + (1 - weight)·ref, of every weight that the two do not share.

        Raises:
            ValueError: a mode whose reference is fixed.
        """
        raise ValueError(cannot_follow(self.mode))

    def verify(self) -> None:
        """
        Raises:
            ValueError: what is shared and must not change has changed.
        """


def cannot_follow(mode: str) -> str:
    return (
        f"sync_ref_every: reference={mode!r} has no weights of its own to move towards the policy: "
        "choose reference='copy', 'trunk' or 'offload', or leave sync_ref_every at 0"
    )
