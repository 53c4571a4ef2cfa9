"""Runs TRL's own trainers on fastrl_kernels, by rebinding a few names in TRL's modules."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fastrl.compat.patch.replacement import Calls, Replacement

__all__ = ["Calls", "Replaced", "TRLPatch", "call_counts", "patch_trl", "unpatch_trl"]

# The start of a version, and the module with its replacements.
_SUPPORTED = {"0.11.4": "fastrl.compat.patch.trl_0_11", "1.16.": "fastrl.compat.patch.trl_1_16"}


class Replaced(NamedTuple):
    """An object of TRL, the op that runs instead, and every name that was bound to the object."""

    name: str
    op: str
    bindings: tuple[str, ...]


@dataclass(frozen=True)
class TRLPatch:
    """What :func:`patch_trl` replaced. Leaving it as a context manager undoes the patch."""

    version: str
    replaced: tuple[Replaced, ...]
    _calls: dict[str, Calls] = field(repr=False, compare=False)
    _swaps: tuple[tuple[Any, Any], ...] = field(repr=False, compare=False)  # (TRL's own, ours)
    _owners: tuple[Any, ...] = field(repr=False, compare=False)

    def call_counts(self) -> dict[str, Calls]:
        """How often each replacement has run so far, by its name in TRL."""
        return {name: dataclasses.replace(calls) for name, calls in self._calls.items()}

    def __enter__(self) -> TRLPatch:
        return self

    def __exit__(self, *_: object) -> None:
        unpatch_trl()

    def __str__(self) -> str:
        lines = [f"TRL {self.version} runs on fastrl_kernels:"]
        for name, op, bindings in self.replaced:
            lines += [f"  {name} -> {op}", *(f"    {binding}" for binding in bindings)]
        return "\n".join(lines)


_active: TRLPatch | None = None


def patch_trl(*, device: torch.device | str | None = None) -> TRLPatch:
    """Makes the installed TRL's trainers run on fastrl_kernels, with the same results.

    TRL 1.16: the fused head of its SFT, DPO, KTO, GRPO and RLOO trainers, and the log-probs and
    entropies of its experimental ones. TRL 0.11.4: what its classic PPO computes from logits, its
    masked statistics and its advantages. Each op is first compared with TRL's own, by signature and
    on small inputs with gradients; a difference raises, and nothing is changed then. Every module
    of TRL that has a name for a replaced object gets ours, modules imported later too. Patching
    twice is patching once.

    Calls that an op does not cover (float64, several indices per row, a sharded head, …) go to
    TRL's own function and are counted apart. Where no element counts or no deviation exists,
    TRL 0.11.4's statistics raise or are NaN; ours are 0.

    Args:
        device: where the comparison runs; by default a GPU if torch sees one.

    Returns:
        What was replaced, which can be printed. ``with patch_trl():`` undoes the patch at its end.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: another version of TRL, or a TRL whose objects are not those of its version.
    """
    global _active
    if _active is not None:
        return _active
    version = _installed_version()
    replacements = _replacements(version)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    originals = [replacement.original() for replacement in replacements]
    for replacement, original in zip(replacements, originals, strict=True):
        replacement.check(original, device)

    calls = {replacement.name: Calls() for replacement in replacements}
    swaps = tuple(
        (original, replacement.build(original, calls[replacement.name]))
        for replacement, original in zip(replacements, originals, strict=True)
    )
    homes = (replacement.owner()[0] for replacement in replacements)
    owners = tuple(home for home in homes if inspect.isclass(home))
    try:
        bindings = rebind("trl", owners, swaps)
    except BaseException:
        rebind("trl", owners, [(ours, original) for original, ours in swaps])
        raise
    replaced = tuple(
        Replaced(replacement.name, f"fastrl_kernels.{replacement.op}", tuple(names))
        for replacement, names in zip(replacements, bindings, strict=True)
    )
    _active = TRLPatch(version, replaced, calls, swaps, owners)
    return _active


def unpatch_trl() -> None:
    """Binds TRL's own objects again, under every name that has one of ours, in modules of TRL that
    were imported since, too. Names that were rebound to other objects stay; without a patch it does
    nothing.
    """
    global _active
    if _active is not None:
        rebind("trl", _active._owners, [(ours, original) for original, ours in _active._swaps])
        _active = None


def call_counts() -> dict[str, Calls]:
    """How often each replacement of the active patch has run; empty where TRL is not patched."""
    return {} if _active is None else _active.call_counts()


def _installed_version() -> str:
    try:
        return str(importlib.import_module("trl").__version__)
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ImportError(f"TRL is not installed: install {_supported()}") from None


def _replacements(version: str) -> tuple[Replacement, ...]:
    for start, module in _SUPPORTED.items():
        if version == start or (start.endswith(".") and version.startswith(start)):
            return importlib.import_module(module).REPLACEMENTS
    raise RuntimeError(
        f"TRL {version} is installed, and patch_trl knows {_supported()}: install one of them"
    )


def _supported() -> str:
    return " and ".join(f"trl=={start}{'*' * start.endswith('.')}" for start in _SUPPORTED)


def _modules(package: str) -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == package or name.startswith(f"{package}.")):
            yield name, module


def rebind(
    package: str, owners: Sequence[Any], swaps: Sequence[tuple[Any, Any]]
) -> list[list[str]]:
    """Replaces each old object by the new, in the package's modules and in ``owners`` (classes).

    Module dictionaries keep their order; a lazy module loads no attribute.

    Args:
        package: a package whose loaded modules are all searched.
        swaps: (old, new), compared by identity.

    Returns:
        For each swap, the bindings that were changed: "module.name".
    """
    changed: list[list[str]] = [[] for _ in swaps]
    index_of = {id(old): i for i, (old, _) in enumerate(swaps)}
    searched = [
        *_modules(package),
        *((f"{owner.__module__}.{owner.__qualname__}", owner) for owner in owners),
    ]
    for where, owner in searched:
        for name, value in list(vars(owner).items()):
            index = index_of.get(id(value))
            if index is not None:
                setattr(owner, name, swaps[index][1])
                changed[index].append(f"{where}.{name}")
    return changed
