"""What can be changed in a source: operators, conditions, constants, returns, statements, keywords.

A mutant is told by file, line, column and kind, and found again in another tree by its line's text.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_COMPARE = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_ARITHMETIC = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr},
}
_LOGIC = {ast.And: ast.Or, ast.Or: ast.And}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Strings that are keys, names or choices. Others are prose.
_WORD = re.compile(r"[\w./:-]+")
# Parts of a source that are not run, or are for readers alone.
_TYPES = ("annotation", "returns", "type_comment", "type_params")
_TYPE = re.compile(r"(Callable|Literal|Union|Optional|dict|list|tuple)\[")
_FOR_READERS = {"logger", "logging", "warnings", "print", "cast", "TypeVar", "NewType"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Mutant:
    """A change of one place of a source."""

    file: str
    line: int
    column: int
    kind: str
    text: str  # the line's
    scope: str  # names of the classes and functions around it
    before: str
    after: str

    @property
    def place(self) -> tuple[int, int, str]:
        """What names it in its file."""
        return self.line, self.column, self.kind

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.kind}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Site:
    """A place of a parsed source that can be changed."""

    line: int
    column: int
    kind: str
    scope: str
    old: ast.AST
    new: ast.AST
    change: Callable[[], None]  # in the tree
    # Lines that show which tests run it, the closest first: of a statement and its function, or,
    # where it runs at import, of what it is part of.
    lines: tuple[range, ...]
    at_import: bool


@dataclass(frozen=True)
class _Around:
    scope: tuple[str, ...]
    lines: tuple[range, ...]
    at_import: bool


def sites(text: str) -> tuple[ast.Module, list[Site]]:
    """A source, parsed, and where it can be changed."""
    tree = ast.parse(text)
    everything = range(1, text.count("\n") + 2)
    found = _of_children(tree, _Around((), (everything,), True))
    by_place = {(x.line, x.column, x.kind): x for x in found}
    return tree, list(by_place.values())


def mutants(texts: Mapping[str, str]) -> Iterator[Mutant]:
    """All mutants of some sources, by their paths."""
    for file, text in texts.items():
        lines = text.split("\n")
        for x in sites(text)[1]:
            shown = ast.unparse(x.old), ast.unparse(x.new)
            yield Mutant(file, x.line, x.column, x.kind, lines[x.line - 1], x.scope, *shown)


def draw(texts: Mapping[str, str], count: int, seed: int) -> list[Mutant]:
    everything = list(mutants(texts))
    return random.Random(seed).sample(everything, min(count, len(everything)))


def site_of(mutant: Mutant, text: str) -> tuple[ast.Module, Site]:
    """Where a mutant of this text is in it."""
    tree, found = sites(text)
    return tree, next(x for x in found if (x.line, x.column, x.kind) == mutant.place)


def found_again(old: Mutant, texts: Mapping[str, str]) -> Mutant | None:
    """The same change in other sources: of a line of the same text, in the same file or else in a
    function of the same name. Of several, the nearest line; None where there is none."""

    def inside(mutant: Mutant) -> tuple[str, str, str, int]:
        indent = len(mutant.text) - len(mutant.text.lstrip())
        return mutant.kind, mutant.before, mutant.text.strip(), mutant.column - indent

    here = {old.file: texts[old.file]} if old.file in texts else {}
    same = [x for x in mutants(here) if inside(x) == inside(old)]
    if not same:
        others = {file: text for file, text in texts.items() if old.text.strip() in text}
        name = old.scope.rpartition(".")[2]
        same = [x for x in mutants(others) if inside(x) == inside(old)]
        same = [x for x in same if x.scope.rpartition(".")[2] == name]
    return min(
        same,
        key=lambda x: (
            (x.scope != old.scope, Path(x.file).name != Path(old.file).name)
            + (abs(x.line - old.line),)
        ),
        default=None,
    )


def _of_children(node: ast.AST, around: _Around) -> Iterator[Site]:
    for field, value in ast.iter_fields(node):
        if field in _TYPES:
            continue
        # A function's body runs when it is called; its defaults and decorators do at import.
        inside = _inside(node, field, around)
        if isinstance(value, list):
            for i, child in enumerate(value):
                if isinstance(child, ast.AST):
                    yield from _of(child, node, _put_item(value, i), inside)
        elif isinstance(value, ast.AST):
            yield from _of(value, node, _put_field(node, field), inside)


def _inside(node: ast.AST, field: str, around: _Around) -> _Around:
    if not isinstance(node, _DEFINITIONS):
        return around
    scope = (*around.scope, node.name)
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    if field == "body" and not isinstance(node, ast.ClassDef):
        return _Around(scope, (lines,), False)
    if not around.at_import:
        return _Around(scope, around.lines, False)
    return _Around(scope, (lines, *around.lines), True)


def _put_item(items: list, i: int) -> Callable[[ast.AST], None]:
    return lambda new: items.__setitem__(i, new)


def _put_field(node: ast.AST, field: str) -> Callable[[ast.AST], None]:
    return lambda new: setattr(node, field, new)


def _of(
    node: ast.AST, parent: ast.AST, put: Callable[[ast.AST], None], around: _Around
) -> Iterator[Site]:
    if _not_run(node, parent):
        return
    if isinstance(node, ast.stmt) and not around.at_import:
        lines = range(node.lineno, node.lineno + 1), around.lines[-1]
        around = _Around(around.scope, lines, False)
    for place, kind, old, new in _changes(node):
        yield Site(
            place.lineno,
            place.col_offset,
            kind,
            ".".join(around.scope),
            old,
            new,
            _change(old, new, node, put),
            around.lines,
            around.at_import,
        )
    if not isinstance(node, ast.Raise | ast.JoinedStr):  # messages
        yield from _of_children(node, around)


def _change(
    old: ast.AST, new: ast.AST, node: ast.AST, put: Callable[[ast.AST], None]
) -> Callable[[], None]:
    ast.copy_location(new, old)
    ast.fix_missing_locations(new)
    if old is node:
        return lambda: put(new)
    field = next(x for x, value in ast.iter_fields(node) if value is old)
    return lambda: setattr(node, field, new)


def _not_run(node: ast.AST, parent: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return True
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).partition(".")[0] in _FOR_READERS
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _not_run(node.value, node) and "warn(" not in ast.unparse(node)
    if isinstance(node, ast.Assign):
        text = ast.unparse(node.value)
        return ast.unparse(node.targets[0]) == "__all__" or bool(_TYPE.match(text))
    # set[str]() and the like
    return isinstance(node, ast.Subscript) and isinstance(parent, ast.Call) and node is parent.func


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST, ast.AST]]:
    """Each with the node whose place it has, its kind, what goes and what comes."""
    if isinstance(node, ast.Compare):
        for i, (op, right) in enumerate(zip(node.ops, node.comparators, strict=True)):
            ops = [*node.ops[:i], _COMPARE[type(op)](), *node.ops[i + 1 :]]
            yield right, "comparison", node, ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        op = _ARITHMETIC[type(node.op)]()
        yield node.right, "arithmetic", node, ast.BinOp(node.left, op, node.right)
    elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        op = _ARITHMETIC[type(node.op)]()
        yield node.value, "arithmetic", node, ast.AugAssign(node.target, op, node.value)
    elif isinstance(node, ast.BoolOp):
        other = ast.BoolOp(_LOGIC[type(node.op)](), node.values)
        yield node.values[1], "and/or", node, other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        dropped = "not" if isinstance(node.op, ast.Not) else "sign"
        yield node, f"dropped {dropped}", node, node.operand
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node)
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield node, "returned None", node, ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Break):
        yield node, "break", node, ast.Continue()
    elif isinstance(node, ast.Continue):
        yield node, "continue", node, ast.Break()
    if _can_go(node):
        yield node, "removed statement", node, ast.Pass()
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not _changes_whole(node.test):
        new = ast.UnaryOp(ast.Not(), node.test)
        yield node.test, "negated condition", node.test, new


def _other_constants(
    node: ast.Constant,
) -> Iterator[tuple[ast.AST, str, ast.AST, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield node, "constant", node, ast.Constant(not value)
    elif isinstance(value, int | float):
        yield node, "constant + 1", node, ast.Constant(value + 1)
        yield node, "constant - 1", node, ast.Constant(value - 1)
    elif isinstance(value, str) and _WORD.fullmatch(value):
        yield node, "string", node, ast.Constant(f"{value}_")


def _other_calls(node: ast.Call) -> Iterator[tuple[ast.AST, str, ast.AST, ast.AST]]:
    for i, keyword in enumerate(node.keywords):
        prose = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str)
        if keyword.arg and not (prose and not _WORD.fullmatch(keyword.value.value)):
            left = [*node.keywords[:i], *node.keywords[i + 1 :]]
            yield keyword, "removed keyword", node, ast.Call(node.func, node.args, left)
    function = node.func
    if isinstance(function, ast.Name) and function.id in _NAMES:
        yield function, "name", function, ast.Name(_NAMES[function.id], ast.Load())
    elif isinstance(function, ast.Attribute) and function.attr in _NAMES:
        other = ast.Attribute(function.value, _NAMES[function.attr], ast.Load())
        yield node, "name", function, other


def _changes_whole(test: ast.expr) -> bool:
    """Whether a condition is negated by another of its changes."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn)
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _can_go(node: ast.AST) -> bool:
    """Whether a statement can be left out without a name being missed."""
    if isinstance(node, ast.Assign):
        return all(isinstance(x, ast.Attribute | ast.Subscript) for x in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Assert)
