"""The reference model of a trainer by TRL's settings, and by ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from fastrl.config import PPOConfig
from fastrl.models import CausalLMPolicy
from fastrl.ref_model import ReferenceSettings, RefModel, choose_ref_model
from fastrl.settings import setting, setting_like

REFERENCES = ("auto", "copy", "adapter", "trunk", "offload")


@dataclass
class ReferenceArguments:
    """How the reference model is kept."""

    reference: str = setting(
        "Reference model: copy (a frozen copy), adapter (a PEFT model's base), trunk (a copy that "
        "shares the bottom layers, which stay as they are), offload (a copy in host memory); auto: "
        "adapter for PEFT models, trunk with num_shared_layers, else copy.",
        "auto",
        choices=REFERENCES,
    )
    num_shared_layers: int | None = setting_like(PPOConfig, "num_shared_layers")
    reference_dtype: str = setting_like(PPOConfig, "reference_dtype")

    def refuse_reference(self, cause: str) -> None:
        """
        Raises:
            ValueError: a setting of a reference that is not there, because of ``cause``.
        """
        for name, default in (
            ("reference", "auto"),
            ("num_shared_layers", None),
            ("reference_dtype", "auto"),
        ):
            value = getattr(self, name)
            if value != default:
                raise ValueError(
                    f"{name}={value!r} is of a reference model, and with {cause} there is none: "
                    f"leave {name} out"
                )


def reference_of(
    args: Any, policy: CausalLMPolicy, given: CausalLMPolicy | None = None, fresh: bool = False
) -> RefModel:
    """``given``, or the policy as training begins, see :class:`fastrl.ref_model.RefModel`; with
    ``args.sync_ref_model`` one that can follow the policy.

    Args:
        fresh: the policy's adapter, if it has one, is new: its base is the reference, however the
            adapter begins.

    Raises:
        ValueError: a reference that the policy cannot have, or that cannot follow it.
    """
    settings = ReferenceSettings(
        reference=args.reference,
        num_shared_layers=args.num_shared_layers,
        reference_adapter="off" if fresh else "auto",
        reference_dtype=args.reference_dtype,
    )
    if args.sync_ref_model:  # of an adapter, a copy: the base has no weights that could follow
        settings = settings._replace(
            reference_adapter="start",
            sync_ref_every=args.ref_model_sync_steps,
            ref_ema=args.ref_model_mixup_alpha,
        )
    return choose_ref_model(settings, policy, given)


def model_of(reference: RefModel | None, accelerator: Any) -> Any:
    """The reference as a plain model of its own; None where it is the policy's base."""
    if reference is None or reference.model is None:
        return None
    return accelerator.unwrap_model(reference.model).pretrained_model


def following_weights(reference: RefModel | None, args: Any) -> dict[str, Tensor]:
    """For a checkpoint: the weights of a reference that follows the policy, on the host; none of
    one that stays as it is."""
    if reference is None or not args.sync_ref_model:
        return {}
    return {name: x.detach().cpu() for name, x in reference.own_weights().items()}


@torch.no_grad()
def load_following_weights(reference: RefModel | None, saved: Mapping[str, Tensor]) -> None:
    """Gives the reference what :func:`following_weights` returned."""
    if saved:
        assert reference is not None
        weights = reference.own_weights()
        for name, x in saved.items():
            weights[name].copy_(x)


class Follow(TrainerCallback):
    """ref ← α·policy + (1 - α)·ref each ``ref_model_sync_steps``, α = ``ref_model_mixup_alpha``."""

    def __init__(self, reference: RefModel | None, args: Any):
        assert reference is not None
        self.reference, self.every = reference, args.ref_model_sync_steps
        self.weight = args.ref_model_mixup_alpha

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0:
            self.reference.follow(self.weight)
