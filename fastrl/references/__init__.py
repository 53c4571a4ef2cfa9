"""The policy that training is held near to: kept and computed as cheaply as the model allows."""

from fastrl.references.adapter import AdapterReference, StartAdapterReference
from fastrl.references.base import Reference
from fastrl.references.choose import choose_reference, create_reference_model
from fastrl.references.copies import CopyReference
from fastrl.references.none import NoReference
from fastrl.references.offload import OffloadReference
from fastrl.references.trunk import TrunkReference

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
