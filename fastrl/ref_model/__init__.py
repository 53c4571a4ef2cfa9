"""The policy that training is held near to: kept and computed as cheaply as the model allows."""

from fastrl.ref_model.adapter import AdapterReference, StartAdapterReference
from fastrl.ref_model.base import Reference
from fastrl.ref_model.choose import choose_reference, create_reference_model
from fastrl.ref_model.copy import CopyReference
from fastrl.ref_model.none import NoReference
from fastrl.ref_model.offload import OffloadReference
from fastrl.ref_model.trunk import TrunkReference

__all__ = [
    "AdapterReference",
    "CopyReference",
    "NoReference",
    "OffloadReference",
    "Reference",
    "StartAdapterReference",
    "TrunkReference",
    "choose_reference",
    "create_reference_model",
]
