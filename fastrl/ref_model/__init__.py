"""Reference models of the KL penalty: a copy, the policy without its adapter, shared layers, a copy
in host memory, or none."""

from fastrl.ref_model.adapter import AdapterOffRefModel, StartAdapterRefModel
from fastrl.ref_model.arguments import ReferenceArguments
from fastrl.ref_model.base import RefModel
from fastrl.ref_model.choose import (
    ReferenceSettings,
    choose_ref_model,
    create_reference_model,
)
from fastrl.ref_model.copy import CopyRefModel
from fastrl.ref_model.following import Follow
from fastrl.ref_model.none import NoRefModel
from fastrl.ref_model.offload import OffloadRefModel
from fastrl.ref_model.trunk import TrunkRefModel

__all__ = [
    "AdapterOffRefModel",
    "CopyRefModel",
    "Follow",
    "NoRefModel",
    "OffloadRefModel",
    "RefModel",
    "ReferenceArguments",
    "ReferenceSettings",
    "StartAdapterRefModel",
    "TrunkRefModel",
    "choose_ref_model",
    "create_reference_model",
]
