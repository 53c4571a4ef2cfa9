"""Reference models of the KL: a copy, the policy with its adapter off or as training began, a copy
that shares layers, a copy in host memory, or none."""

from fastrl.learn.ref_model.adapter import (
    AdapterOffRefModel,
    LiveRefModel,
    OwnAdapterRefModel,
    StartAdapterRefModel,
)
from fastrl.learn.ref_model.arguments import ReferenceArguments
from fastrl.learn.ref_model.base import RefModel
from fastrl.learn.ref_model.choose import (
    ReferenceSettings,
    choose_ref_model,
    create_reference_model,
)
from fastrl.learn.ref_model.copy import CopyRefModel
from fastrl.learn.ref_model.following import Follow
from fastrl.learn.ref_model.none import NoRefModel
from fastrl.learn.ref_model.offload import OffloadRefModel
from fastrl.learn.ref_model.trunk import TrunkRefModel

__all__ = [
    "AdapterOffRefModel",
    "CopyRefModel",
    "Follow",
    "LiveRefModel",
    "NoRefModel",
    "OffloadRefModel",
    "OwnAdapterRefModel",
    "RefModel",
    "ReferenceArguments",
    "ReferenceSettings",
    "StartAdapterRefModel",
    "TrunkRefModel",
    "choose_ref_model",
    "create_reference_model",
]
