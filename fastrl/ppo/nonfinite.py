"""Samples, losses and gradients that are not finite, and must not reach a weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from fastrl.rollout import RolloutOutput


class NonFiniteNumbers:
    """Raises or goes on where numbers are not finite; they are not learned from in either case.

    Args:
        on_nonfinite: of ``PPOConfig``: "raise", or "skip". Skipped samples are named once, in a
            warning; skipped losses and gradients are counted by the update, which warns of them.
    """

    def __init__(self, on_nonfinite: str) -> None:
        self._raises = on_nonfinite == "raise"
        self._warned = False

    def samples(self, which: Sequence[int], name: Callable[[int], str]) -> None:
        """Handles samples of a rollout that ended in NaN logits; ``name`` names a prompt."""
        if self._raises:
            raise FloatingPointError(f"{_samples(which, name)}: nothing has changed")
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{_samples(which, name)}: left out of the step (weight 0, in no baseline or "
                "mean), as any later ones will be; ppo/nan_samples counts them",
                stacklevel=4,
            )

    def losses(self, count: int) -> None:
        """Handles as many mini-batches of one optimizer step, before it is taken."""
        if self._raises:
            raise FloatingPointError(
                f"non-finite loss in {count} mini-batch(es): this optimizer step is not taken"
            )

    def gradients(self) -> None:
        """Handles an optimizer step whose gradient is not finite, before it is left out."""
        if self._raises:
            raise FloatingPointError("non-finite gradient norm: this optimizer step is not taken")


def samples_left_out(
    rollout: RolloutOutput, nonfinite: NonFiniteNumbers, name: Callable[[int], str]
) -> list[int]:
    """Indices of samples that ended in NaN logits, whose continuation is not known.

    Raises:
        FloatingPointError: all of them did; or one did, where ``nonfinite`` raises.
    """
    which = [i for i, reason in enumerate(rollout.finish_reasons) if reason == "nan"]
    if which and len(which) == len(rollout.finish_reasons):
        raise FloatingPointError(
            f"all {len(which)} samples of a rollout ended in NaN logits: the model is broken. Load "
            "a sound checkpoint; where training broke it, lower learning_rate or set max_grad_norm"
        )
    if which:
        nonfinite.samples(which, name)
    return which


def _samples(which: Sequence[int], name: Callable[[int], str]) -> str:
    shown = ", ".join(f"{i} (prompt {name(i)})" for i in which[:3])
    more = f" and {len(which) - 3} more" if len(which) > 3 else ""
    return f"NaN logits in {len(which)} sample(s) of the rollout: {shown}{more}"
