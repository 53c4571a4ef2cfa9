"""Finds what a program that was written for TRL calls and uses, from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_CHECKS = ("isinstance", "issubclass")


class Call(NamedTuple):
    """A call of an object that :func:`calls_of` looks for.

    Attributes:
        node: the call.
        name: the name of the object that is called, not the program's alias.
        keywords: the call's keywords, and the entries of dicts that it unpacks, as far as the
            program writes them out.
    """

    node: ast.Call
    name: str
    keywords: list[ast.keyword]


def called(call: ast.Call) -> str:
    """The last part of the called object's name: c of ``a.b.c()``."""
    return _last(call.func)


def calls_of(tree: ast.Module, names: Mapping[str, str]) -> Iterator[Call]:
    """Yields all calls of some objects: under the program's aliases, through variables that hold
    the object, by ``functools.partial``, and as a subclass's call of ``__init__``.

    Args:
        names: the objects' names by the program's aliases.
    """
    nodes = list(ast.walk(tree))
    bound = dict(names)
    dicts: dict[str, list[ast.keyword]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (x.id for x in targets if isinstance(x, ast.Name)):
                values = [node.value]
                if isinstance(node.value, ast.IfExp):
                    values = [node.value.body, node.value.orelse]
                held = [bound[_last(x)] for x in values if _last(x) in bound]
                if held:
                    bound.setdefault(target, held[0])
                dicts[target] = [*dicts.get(target, []), *_entries(node.value)]
    supers = {
        id(node): bound[base]
        for kind in nodes
        if isinstance(kind, ast.ClassDef)
        for base in map(_last, kind.bases)
        if base in bound
        for node in ast.walk(kind)
        if isinstance(node, ast.Call) and _is_super_init(node)
    }
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        func = node.func
        name = supers.get(id(node)) or bound.get(called(node))
        if called(node) == "partial" and node.args:
            name = bound.get(_last(node.args[0]))
        elif name is None and called(node) == "__init__" and isinstance(func, ast.Attribute):
            name = bound.get(_last(func.value))
        if name is not None:
            keywords = [x for keyword in node.keywords for x in _written(keyword, dicts)]
            yield Call(node, name, keywords)


def _last(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _is_super_init(node: ast.Call) -> bool:
    func = node.func
    if not (isinstance(func, ast.Attribute) and func.attr == "__init__"):
        return False
    return isinstance(func.value, ast.Call) and called(func.value) == "super"


def _written(keyword: ast.keyword, dicts: Mapping[str, list[ast.keyword]]) -> Iterator[ast.keyword]:
    """The keyword; for ``**settings`` also the entries that the program writes out in settings."""
    yield keyword
    if keyword.arg is None:
        yield from dicts.get(_last(keyword.value), ()) or _entries(keyword.value)


def _entries(node: ast.expr) -> list[ast.keyword]:
    """The entries of a dict's literal, or of ``dict(...)``, as keywords."""
    if isinstance(node, ast.Call) and called(node) == "dict":
        return [x for x in node.keywords if x.arg is not None]
    if not isinstance(node, ast.Dict):
        return []
    return [
        ast.copy_location(ast.keyword(key.value, value), key)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    ]


def only_named(tree: ast.Module, imported: Mapping[str, str]) -> set[str]:
    """Imported names without which a program runs: it has them only in annotations, in checks of a
    type, or in functions and classes that nothing uses. A name that a ``try`` imports is left out,
    since the program handles its absence.

    Args:
        imported: the names by the program's aliases.
    """
    bodies: dict[str, list[ast.AST]] = {}
    tried: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bodies.setdefault(node.name, []).extend(_inside(node))
        elif isinstance(node, ast.Try):
            nodes = (x for part in node.body for x in ast.walk(part))
            imports = (x for x in nodes if isinstance(x, ast.ImportFrom))
            tried |= {alias.asname or alias.name for x in imports for alias in x.names}
    used: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        for name in _used_by(waiting.pop()):
            if name not in used:
                used.add(name)
                waiting += bodies.get(name, ())
    return {name for shown, name in imported.items() if shown not in used | tried}


def _inside(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[ast.AST]:
    """The nodes that run where a function or class is used; a class's methods are used with it."""
    if not isinstance(node, ast.ClassDef):
        return [*node.body]
    methods = [x for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = [part for x in methods for part in x.body]
    return [*node.bases, *(x.value for x in node.keywords), *node.body, *inner]


def _used_by(node: ast.AST) -> Iterator[str]:
    """The names that a node uses when it runs: none in annotations, in bodies of functions and
    classes, or in checks of a type."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        parts: list[ast.AST] = [*node.decorator_list, *node.args.defaults]
        parts += [x for x in node.args.kw_defaults if x is not None]
    elif isinstance(node, ast.ClassDef):
        parts = [*node.decorator_list]
    elif isinstance(node, ast.AnnAssign):
        parts = [] if node.value is None else [node.value]
    elif isinstance(node, ast.Call) and called(node) in _CHECKS:
        parts = [*node.args[:1]]
    else:
        parts = [*ast.iter_child_nodes(node)]
        if name := _last(node):
            yield name
    for part in parts:
        yield from _used_by(part)
