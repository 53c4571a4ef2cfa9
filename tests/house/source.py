"""The sources of a checkout, parsed: files by module, imports, classes with their bases."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"fastrl": "fastrl", "fastrl_kernels": "kernels/torch-ext/fastrl_kernels"}
FOLDERS |= {"benchmarks": "benchmarks"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Class(NamedTuple):
    """A class at the top of a module of fastrl."""

    module: str
    node: ast.ClassDef

    @property
    def methods(self) -> list[Function]:
        return [x for x in self.node.body if isinstance(x, Function)]


class Source:
    """A checkout's modules; each is read when it is asked for."""

    def __init__(self, root: Path):
        self.root = root
        self.modules = dict[str, Path]()
        for package, folder in FOLDERS.items():
            for path in sorted((root / folder).rglob("*.py")):
                parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                self.modules[name] = path
        self._trees = dict[str, ast.Module]()
        self._nodes = dict[str, dict[type, list[Any]]]()

    def tree(self, name: str) -> ast.Module:
        if name not in self._trees:
            self._trees[name] = ast.parse(self.modules[name].read_text(encoding="utf-8"))
        return self._trees[name]

    def nodes(self, name: str, *kinds: type) -> list[Any]:
        """The nodes of these kinds in a module, in no order."""
        if name not in self._nodes:
            of_kind: dict[type, list[Any]] = defaultdict(list)
            for node in ast.walk(self.tree(name)):
                of_kind[type(node)].append(node)
            self._nodes[name] = dict(of_kind)
        return [node for kind in kinds for node in self._nodes[name].get(kind, ())]

    @cached_property
    def ours(self) -> list[str]:
        """The modules of fastrl, without those of the kernels."""
        return [name for name in self.modules if room(name) not in FOLDERS or name == "fastrl"]

    def file(self, name: str) -> str:
        """The path of a module below the root."""
        return self.modules[name].relative_to(self.root).as_posix()

    def imported(self, name: str, node: ast.AST) -> dict[str, str]:
        """What an import statement binds: names, and the objects' paths that they stand for."""
        package = name if self.modules[name].name == "__init__.py" else name.rpartition(".")[0]
        if isinstance(node, ast.Import):
            return {alias.asname or alias.name: alias.name for alias in node.names}
        if not isinstance(node, ast.ImportFrom):
            return {}
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, *([base] if base else [])])
        return {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}

    def imports(self, name: str, nodes: Iterable[ast.AST] | None = None) -> set[str]:
        """The modules that a module imports, in these nodes of its tree, by default in all."""
        found = set()
        for node in self.nodes(name, ast.Import, ast.ImportFrom) if nodes is None else nodes:
            for each in self.imported(name, node).values():
                while each and each not in self.modules:
                    each = each.rpartition(".")[0]
                found.add(each)
        return found - {name, ""}

    @cached_property
    def classes(self) -> list[Class]:
        """The classes at the top of fastrl's modules."""
        nodes = ((name, node) for name in self.ours for node in self.tree(name).body)
        return [Class(name, node) for name, node in nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def _by_name(self) -> dict[str, Class]:
        return {f"{each.module}.{each.node.name}": each for each in self.classes}

    def bases(self, of: Class) -> list[Class]:
        """Those bases of a class that are fastrl's, in its order."""
        bound, found = dict[str, str](), []
        for node in self.nodes(of.module, ast.Import, ast.ImportFrom):
            bound |= self.imported(of.module, node)
        for base in of.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            first, dot, rest = name.partition(".")
            path = bound.get(first, f"{of.module}.{first}") + dot + rest
            last = path.rpartition(".")[2]
            alike = [x for x in self.classes if x.node.name == last and path.startswith("fastrl")]
            each = self._by_name.get(path) or (alike[0] if len(alike) == 1 else None)
            found += [each] if each is not None and each is not of else []
        return found

    def mro(self, of: Class) -> list[Class]:
        """A class and those of its bases, at any distance, that are fastrl's, in the order in which
        Python looks for a method."""
        bases = self.bases(of)
        waiting, order = [*map(self.mro, bases), list(bases)], [of]
        while waiting := [line for line in waiting if line]:
            free = (x[0] for x in waiting if not any(x[0] in line[1:] for line in waiting))
            order.append(first := next(free))
            waiting = [[x for x in line if x is not first] for line in waiting]
        return order


def room(name: str) -> str:
    """The first part below the package, such as "data" for "fastrl.data.batch"; for a module of
    another package that package."""
    package, *rest = name.split(".")
    return rest[0] if package == "fastrl" and rest else package


@cache
def here() -> Source:
    """The checkout that this file belongs to; read once by a process."""
    return Source(ROOT)
