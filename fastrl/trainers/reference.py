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
    :class:`fastrl.learn.ref_model.RefModel`; with ``args.sync_ref_model`` a reference that can
    follow the policy.

    Args:
        fresh: whether the policy's adapter, if any, is new: the reference is then the base; with
            ``sync_ref_model``, or where the adapter's initialisation changes the base, as PiSSA's
            does, a copy of the adapter.

    Raises:
        ValueError: a reference that the policy cannot have, or that cannot follow it.
    """
    # "auto" copies the adapter where the reference is to follow the policy: the base cannot.
    kind = "off" if fresh and not args.sync_ref_model else "auto"
    configs = getattr(policy.pretrained_model, "peft_config", {})
    if any(moves_base(config) for config in configs.values()):
        kind = "start"
    settings = args.reference_settings(reference_adapter=kind)
    return choose_ref_model(settings, policy, given)


def model_of(reference: RefModel | None, accelerator: Any) -> Any:
    """The plain model of a reference; None without one, or where it has no model of its own."""
    if reference is None or reference.model is None:
        return None
    return accelerator.unwrap_model(reference.model).pretrained_model
