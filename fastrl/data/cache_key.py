"""The key of prepared rows in the cache of ``datasets``.

``datasets`` knows a function that stands in a module by its name alone: an edited function, or
another version of fastrl, would read the rows that the earlier code wrote.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from fastrl.user_code import is_users


def keyed(dataset: Any, *code: Any) -> Any:
    """Returns the data set with a fingerprint that depends on fastrl's and the user's code, as then
    do the fingerprints of all that ``datasets`` makes of it.

    Args:
        dataset: a ``datasets.Dataset``.
        code: the functions, objects and tokenizers that will make rows; None is passed over.
    """
    keys = [dataset._fingerprint, own_code(), user_code(*code)]
    key = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
    return dataset.remove_columns([], new_fingerprint=key)


@functools.cache
def own_code() -> str:
    """A hash of fastrl/data, and of the versions of transformers and tokenizers."""
    import tokenizers
    import transformers

    digest = hashlib.sha256(f"{transformers.__version__} {tokenizers.__version__}".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def user_code(*code: Any) -> str:
    """A hash of the user's files that hold the functions and objects ``code``, and of the user's
    files that they import. For a function of the program or notebook itself, which ``datasets``
    pickles, it takes the files of what the function names."""
    files: dict[str, bytes] = {}
    seen: set[int] = set()
    for each in code:
        _visit(each, files, seen)
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(files[path])
    return digest.hexdigest()


def _visit(x: Any, files: dict[str, bytes], seen: set[int]) -> None:
    """Adds the files of an object's code."""
    if id(x) in seen:
        return
    seen.add(id(x))
    module = x if isinstance(x, ModuleType) else sys.modules.get(getattr(x, "__module__", ""))
    if module is not None and module.__name__ != "__main__":
        _add(getattr(module, "__file__", None), files)
    for part in _parts(x):
        _visit(part, files, seen)


def _parts(x: Any) -> Iterator[Any]:
    """What an object is made of that may be the user's code."""
    if isinstance(x, functools.partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif isinstance(x, MethodType):
        yield from (x.__func__, x.__self__)
    elif isinstance(x, FunctionType):
        yield getattr(x, "__wrapped__", None)
        yield from (cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell))
        if x.__module__ == "__main__":
            yield from (x.__globals__.get(name) for name in _names(x.__code__))
    elif isinstance(x, type):
        yield from x.__mro__[1:]
        if x.__module__ == "__main__":
            yield from vars(x).values()
    elif isinstance(x, list | tuple | set | frozenset):
        yield from x
    elif isinstance(x, dict):
        yield from x.values()
    elif not isinstance(x, ModuleType):
        yield type(x)
        home = sys.modules.get(type(x).__module__)
        if type(x).__module__ == "__main__" or is_users(getattr(home, "__file__", None)):
            yield from getattr(x, "__dict__", {}).values()


def _add(file: str | None, files: dict[str, bytes]) -> None:
    """Adds a user's file, and the user's files that it imports."""
    if file is None or file in files or not is_users(file) or not os.path.isfile(file):
        return
    files[file] = Path(file).read_bytes()
    for imported in _imports(file, files[file], tuple(sys.path)):
        _add(imported, files)


@functools.lru_cache(maxsize=1024)
def _imports(importer: str, source: bytes, folders: tuple[str, ...]) -> tuple[str, ...]:
    """The user's files that a file imports by name, from beside it or from the search path."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return ()
    paths = dict.fromkeys(path for node in nodes for path in _imported(node, importer, folders))
    names = [name for path in paths for name in (f"{path}.py", os.path.join(path, "__init__.py"))]
    return tuple(name for name in names if os.path.isfile(name) and is_users(name))


def _imported(node: ast.AST, importer: str, folders: tuple[str, ...]) -> Iterator[str]:
    """Paths, without an ending, at which the modules that a statement imports may lie."""
    beside = os.path.dirname(importer)
    if isinstance(node, ast.Import):
        names = [each.name for each in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        names = [base, *(f"{base}.{each.name}".lstrip(".") for each in node.names)]
        for _ in range(node.level - 1):
            beside = os.path.dirname(beside)
    else:
        return
    absolute = isinstance(node, ast.Import) or not node.level
    if absolute:
        names = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
    for folder in (beside, *folders) if absolute else (beside,):
        yield from (os.path.join(folder, *name.split(".")) for name in names if name)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names(code: CodeType) -> list[str]:
    """The names that code reads, those read by functions within it too."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _names(c)]
    return [*code.co_names, *inner]
