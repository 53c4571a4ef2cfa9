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
        fresh: whether the policy's adapter, if it has one, is new: then the reference is its base,
            or a copy of the adapter as it begins, where that begins by changing the base.

    Raises:
        ValueError: a reference that the policy cannot have, or that cannot follow it.
    """
    # "auto" copies an adapter that is to follow the policy: the base has no weights that could.
    kind = "off" if fresh and not args.sync_ref_model else "auto"
    configs = getattr(policy.pretrained_model, "peft_config", {})
    if any(moves_base(config) for config in configs.values()):
        kind = "start"
    settings = args.reference_settings(reference_adapter=kind)
    return choose_ref_model(settings, policy, given)


def model_of(reference: RefModel | None, accelerator: Any) -> Any:
    """The reference as a plain model; None without one, or where it is the policy's base."""
    if reference is None or reference.model is None:
        return None
    return accelerator.unwrap_model(reference.model).pretrained_model
