"""``import trl``, resolved to fastrl."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fastrl.compat.programs.names import MODULES, SECOND_PPO, find, missing, only_named_by, stand_in


class TRLImporter(MetaPathFinder, Loader):
    """Finds ``trl`` and its submodules, whether TRL is installed or not; their attributes are
    fastrl's, looked up when they are read. It finds no other module.

    Args:
        renamed: fastrl's names by TRL's, where the two differ.
    """

    def __init__(self, renamed: Mapping[str, str]):
        self.renamed = renamed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module of TRL's; raises ImportError for one, or a name of ``from trl import
        name``, that fastrl lacks."""
        if fullname.partition(".")[0] != "trl":
            return None
        if fullname not in MODULES:
            where, _, name = fullname.rpartition(".")
            raise ImportError(missing(name, where), name=fullname)
        return ModuleSpec(fullname, self, origin="fastrl", is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        renamed = SECOND_PPO if module.__name__ == "trl.experimental.ppo" else self.renamed
        module.__getattr__ = partial(_found, module, renamed)  # type: ignore[method-assign]


def _found(module: ModuleType, renamed: Mapping[str, str], name: str) -> Any:
    """fastrl's object for a name of TRL's, or a stand-in where the importing file can run without
    the object; raises AttributeError without either."""
    try:
        return find(name, renamed)
    except AttributeError:
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if name in only_named_by(frame.f_code.co_filename):
            vars(module)[name] = stand_in(name)
            return vars(module)[name]
        raise


@contextmanager
def importing_fastrl(renamed: Mapping[str, str]) -> Iterator[None]:
    """Context in which ``import trl`` is fastrl; after it TRL's modules are those of before.

    Args:
        renamed: see :class:`TRLImporter`.
    """
    before = {name: x for name, x in sys.modules.items() if name.partition(".")[0] == "trl"}
    for name in before:
        del sys.modules[name]
    only_named_by.cache_clear()  # files may have changed
    finder = TRLImporter(renamed)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [x for x in sys.modules if x.partition(".")[0] == "trl"]:
            del sys.modules[name]
        sys.modules.update(before)
