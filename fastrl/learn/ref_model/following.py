"""A reference model that follows the policy while it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from fastrl.learn.ref_model.arguments import ReferenceArguments
from fastrl.learn.ref_model.base import RefModel


class Follow(TrainerCallback):
    """ref ← weight·policy + (1 - weight)·ref each ``every`` optimizer steps; 0: never."""

    def __init__(self, reference: RefModel | None, every: int, weight: float):
        self.reference, self.follows = reference, every > 0
        self.every, self.weight = every, weight

    @classmethod
    def of(cls, reference: RefModel | None, args: ReferenceArguments) -> Follow:
        """Makes it by the settings ``sync_ref_model``, ``ref_model_sync_steps`` and
        ``ref_model_mixup_alpha``."""
        every = args.ref_model_sync_steps if args.sync_ref_model else 0
        return cls(reference, every, args.ref_model_mixup_alpha)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.after(state.global_step)

    def after(self, step: int) -> None:
        """Moves the reference where the step that has ended is one of those."""
        if self.follows and step % self.every == 0:
            assert self.reference is not None
            self.reference.follow(self.weight)

    @property
    def moving(self) -> list[RefModel]:
        """The reference, if it follows the policy."""
        return [self.reference] if self.follows and self.reference is not None else []

    def weights(self) -> dict[str, Tensor]:
        """The weights of a reference that follows the policy, the tensors themselves; else {}."""
        return next((x.own_weights() for x in self.moving), {})

    def state(self) -> dict[str, Tensor]:
        """Copies of :meth:`weights` on the host, to be saved."""
        return {name: x.detach().cpu() for name, x in self.weights().items()}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Copies the weights of a :meth:`state` to the reference."""
        if saved:
            assert self.reference is not None
            weights = self.reference.own_weights()
            for name, x in saved.items():
                weights[name].copy_(x)
