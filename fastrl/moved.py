"""Modules under their earlier names, by which old programs import them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# A module below several of these names goes by the longest.
_MOVED = {
    "collect.replayed": "collect.compare_replay",
    "commands": "tools.commands",
    "demo": "tools.demo",
    "learn.kl": "learn.kl_penalty",
    "patch": "compat.patch",
    "plan": "trainers.plan",
    "ppo": "trainers.ppo",
    "programs": "compat.programs",
    "recipes": "tools.recipes",
    "ref_model": "learn.ref_model",
    "reports": "tools.reports",
    "scripts": "compat.scripts",
    "trainers.replay": "trainers.replay_walk",
    "trl": "trainers.groups",
    **{
        f"trl.{name}": f"trainers.pairs.{name}"
        for name in ("dpo", "dpo_config", "kto", "kto_config", "preference", "preference_config")
    },
    **{f"trl.{name}": f"compat.older.{name}" for name in ("ppo", "ppo_config", "rloo_v1")},
    "trl.policy": "trainers.policy",
    "trl.reference": "trainers.reference",
    "trl.rollout_func": "compat.rollout_func",
}


def new_name(name: str) -> str | None:
    """The name that a module of fastrl has now; None where it has not moved."""
    package, _, path = name.partition(".")
    if package != "fastrl":
        return None
    rest = ""
    while path and path not in _MOVED:
        path, _, last = path.rpartition(".")
        rest = f".{last}{rest}"
    return f"fastrl.{_MOVED[path]}{rest}" if path else None


class MovedModules(MetaPathFinder, Loader):
    """Imports modules by their earlier names, as the same objects as by their new ones."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = new_name(fullname)
        return None if name is None else ModuleSpec(fullname, self, origin=name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__  # the import sets another
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
