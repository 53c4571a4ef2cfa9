"""Which settings the code behind a trainer reads, by the source of the functions it reaches."""

import ast
import importlib
import inspect
import re
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

_ENTRIES = {"__init__", "train", "evaluate", "save_model", "step", "generate", "__post_init__"}
_CHECK = re.compile(r"_?check_(?!divergence)")
# Names of what holds settings.
_HOLDERS = {
    "args", "config", "settings", "_settings", "training_args", "flags", "given", "job", "demo",
}  # fmt: skip
_WITHIN = ("fastrl", "transformers.train", "transformers.integrations", "transformers.modelcard")


def read_by(
    entries: Sequence[Any], trainer: type | None, *configs: type
) -> tuple[set[str], set[str]]:
    """The settings that functions read which a trainer or a command reaches, and those that they
    overwrite without a look: of methods that are overridden only what ``super()`` still calls.
    Checks are no use of a setting, nor is what a configuration of ours does as it is made.

    Args:
        entries: where to begin.
        trainer: whose methods may be called; None: of a command.
        configs: classes of settings, likewise.
    """
    seen: set[Any] = set()
    read: set[str] = set()
    overwritten: set[str] = set()
    own: dict[str, list[Any]] = {}
    for kind in (trainer, *configs):
        for method in () if kind is None else _methods(kind):
            own.setdefault(method.__name__, []).append(method)
    todo = [*entries, *(x for name in _ENTRIES for x in own.get(name, ()))]
    bases = {base.__name__ for config in configs for base in config.__mro__}
    while todo:
        function = inspect.unwrap(todo.pop())
        if function in seen or _CHECK.match(function.__name__):
            continue
        seen.add(function)
        tree = _tree(function)
        if tree is None or (function.__name__ == "__post_init__" and _ours(function)):
            continue
        used = _used(tree, function.__qualname__.split(".")[0] in bases)
        read |= used
        overwritten |= _stored(tree) - used
        todo += [x for name in _attributes(tree) for x in own.get(name, ())]
        todo += _referred(function)
    return read, overwritten


def _ours(function: Any) -> bool:
    return function.__module__.startswith("fastrl")


def _methods(kind: type) -> Iterator[Any]:
    """The methods that an object of a class calls, by its MRO."""
    for name in {name for base in kind.__mro__ for name in vars(base)}:
        for base in kind.__mro__:
            if name not in vars(base) or not base.__module__.startswith(_WITHIN):
                continue
            found = vars(base)[name]
            found = getattr(found, "fget", None) or getattr(found, "func", found)
            found = getattr(found, "__func__", found)
            if not isinstance(found, types.FunctionType):
                break
            yield found
            tree = _tree(inspect.unwrap(found))
            if tree is None or not ("super()" in ast.unparse(tree) or name in _called_above(base)):
                break


@cache
def _called_above(kind: type) -> set[str]:
    """The methods that a class calls on ``super()``, in whichever of its own."""
    trees = [_tree(x) for x in vars(kind).values() if isinstance(x, types.FunctionType)]
    calls = [node for tree in trees if tree is not None for node in ast.walk(tree)]
    return {
        node.attr
        for node in calls
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"
    }


def _functions(found: Any) -> Iterator[Any]:
    if isinstance(found, types.FunctionType) and found.__module__.startswith(_WITHIN):
        yield found
    elif (
        isinstance(found, type)
        and not isinstance(found, types.GenericAlias)  # list[int], which Python 3.10 calls a type
        # Another trainer or configuration is not run, though its name may be read.
        and not issubclass(found, Trainer | TrainingArguments)
    ):
        yield from _methods(found)


@cache
def _referred(function: Any) -> list[Any]:
    """The functions that a function names, and the methods of such classes."""
    return [found for x in _named(function) for found in _functions(x)]


@cache
def _nodes(path: str) -> dict[int, ast.AST]:
    """The functions of a file by their first lines, those of decorators."""
    return {
        min([node.lineno, *(each.lineno for each in node.decorator_list)]): node
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@cache
def _tree(function: Any) -> ast.AST | None:
    code = function.__code__
    known = _nodes(code.co_filename) if Path(code.co_filename).is_file() else {}
    return known.get(code.co_firstlineno)


@cache
def _used(tree: ast.AST, of_config: bool) -> set[str]:
    """Attributes of settings that are loaded; where settings are read by name, all such texts."""
    found, by_name = set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            holder = node.value
            name = getattr(holder, "attr", getattr(holder, "id", None))
            if name in _HOLDERS or (of_config and name == "self"):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "getattr":
            by_name = by_name or ast.unparse(node.args[0]).split(".")[-1] in {*_HOLDERS, "self"}
    if by_name:
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        found |= {text for text in texts if isinstance(text, str)}
    return found


@cache
def _attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@cache
def _stored(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "attr", getattr(node.value, "id", None)) == "args"
    }


def _named(function: Any) -> Iterator[Any]:
    """What the names in a function mean: globals, attributes of modules, what it imports."""
    for node in ast.walk(_tree(function)):  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            yield function.__globals__.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = function.__globals__.get(node.value.id)
            if isinstance(module, types.ModuleType):
                yield getattr(module, node.attr, None)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_WITHIN):
            module = None
            with suppress(ModuleNotFoundError):  # needs a package that is not there
                module = importlib.import_module(node.module)  # type: ignore[arg-type]
            yield from (getattr(module, alias.name, None) for alias in node.names)
