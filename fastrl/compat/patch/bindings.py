"""Names in loaded modules that are bound to an object, found and rebound by identity."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any


def _modules(package: str) -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == package or name.startswith(f"{package}.")):
            yield name, module


def rebind(
    package: str, owners: Sequence[Any], swaps: Sequence[tuple[Any, Any]]
) -> list[list[str]]:
    """Replaces each old object by the new, in the package's modules and in ``owners`` (classes).

    Module dictionaries keep their order; attributes that a lazy module has not loaded stay so.

    Args:
        package: all loaded modules of it are searched.
        owners: further places to search.
        swaps: (old, new), compared by identity.

    Returns:
        For each swap, the bindings that were changed: "module.name".
    """
    changed: list[list[str]] = [[] for _ in swaps]
    place_of = {id(old): i for i, (old, _) in enumerate(swaps)}
    places = [
        *_modules(package),
        *((f"{owner.__module__}.{owner.__qualname__}", owner) for owner in owners),
    ]
    for where, owner in places:
        for name, value in list(vars(owner).items()):
            place = place_of.get(id(value))
            if place is not None:
                setattr(owner, name, swaps[place][1])
                changed[place].append(f"{where}.{name}")
    return changed
