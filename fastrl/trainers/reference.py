"""The reference model of a trainer by TRL's names."""

from __future__ import annotations

from typing import Any

from fastrl.learn.ref_model import RefModel, choose_ref_model
from fastrl.models import CausalLMPolicy
from fastrl.models.adapter_base import moves_base


def reference_of(
    args: Any, policy: CausalLMPolicy, given: CausalLMPolicy | None = None, fresh: bool = False
) -> RefModel:
    """The reference ``given``, or the policy as training begins, see
    :class:`fastrl.learn.ref_model.RefModel`; with ``args.sync_ref_model`` one that can follow the
    policy.

    Args:
        fresh: the policy's adapter, if it has one, is new: its base is the reference, however the
            adapter begins; one that begins by changing the base is copied as it begins.

    Raises:
        ValueError: a reference that the policy cannot have, or that cannot follow it.
    """
    # A copy where an adapter is to follow: the base has no weights that could.
    kind = "off" if fresh and not args.sync_ref_model else "auto"
    configs = getattr(policy.pretrained_model, "peft_config", {})
    if any(moves_base(config) for config in configs.values()):
        kind = "start"
    settings = args.reference_settings(reference_adapter=kind)
    return choose_ref_model(settings, policy, given)


def model_of(reference: RefModel | None, accelerator: Any) -> Any:
    """The reference as a plain model of its own; None where it is the policy's base."""
    if reference is None or reference.model is None:
        return None
    return accelerator.unwrap_model(reference.model).pretrained_model
