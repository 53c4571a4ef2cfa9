"""What is counted in the sources of a checkout."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.house.source import Class, Function, Source, room

KINDS = ("code", "docstring", "comment", "blank", "imports")
TRAINERS = (
    *(
        "GRPOTrainer",
        "RLOOTrainer",
        "DistillationTrainer",
        "GKDTrainer",
        "SDFTTrainer",
        "PPOTrainer",
        "DPOTrainer",
        "KTOTrainer",
        "SFTTrainer",
    ),
    *("RewardTrainer", "PPOv2Trainer", "RLOOv1Trainer", "alignment.Trainer"),
)


def kinds_of_lines(source: Source, name: str) -> list[str]:
    """The kind of each physical line, one of :data:`KINDS`. What stands inside a docstring, an
    import statement or a string is of its kind, blank or not."""
    lines = source.modules[name].read_text(encoding="utf-8").splitlines()
    found = [
        "blank" if not line.strip() else "comment" if line.lstrip().startswith("#") else "code"
        for line in lines
    ]
    spans = [("imports", x) for x in source.nodes(name, ast.Import, ast.ImportFrom)]
    texts = source.nodes(name, ast.Constant, ast.JoinedStr)
    spans += [("code", x) for x in texts if x.end_lineno > x.lineno]
    spans += [("docstring", x.body[0]) for x in documented(source, name)]
    for kind, node in spans:
        found[node.lineno - 1 : node.end_lineno] = [kind] * (node.end_lineno - node.lineno + 1)
    return found


def documented(source: Source, name: str) -> list[Any]:
    """The module itself, its classes and its functions, as far as they have a docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [x for x in source.nodes(name, *kinds) if ast.get_docstring(x, clean=False) is not None]


def lines(source: Source) -> dict[str, dict[str, int]]:
    """Lines by room, and in these by kind; single files beside the rooms are together one, named
    "single files"."""
    rooms, found = packages(source), defaultdict[str, Counter[str]](Counter)
    for name in source.ours:
        home = room(name) if room(name) in rooms else "single files"
        found[home].update(kinds_of_lines(source, name))
    return {name: {kind: each[kind] for kind in KINDS} for name, each in sorted(found.items())}


def packages(source: Source) -> set[str]:
    """The rooms of the top floor that are folders."""
    deeper = {room(name) for name in source.ours if name.count(".") > 1}
    own = {room(x) for x in source.ours if source.modules[x].name == "__init__.py"}
    return deeper | own - {"fastrl"}


# Words in names of fields that say what is known of samples, one entry for each of them.
_COLUMNS = {
    *("prompt", "prompts", "query", "queries", "response", "responses", "completion"),
    *("completions", "sequences", "texts", "said", "ids", "logprobs", "values", "kls", "returns"),
    *("advantages", "reward", "rewards", "score", "scores", "weights", "mask", "masks", "chosen"),
    *("penalties", "total", "function", "experts", "entropies", "rollout", "examples", "judged"),
}
_OPERATIONS = {"select", "take", "join", "joined", "gathered", "of_all", "split"}
_ROWS = re.compile(r"\b(Tensor|list|tuple|Sequence|Mapping|dict)\b")


def containers(source: Source) -> list[Class]:
    """The classes that hold rows of samples: those that define two of :data:`_OPERATIONS`, and
    records (dataclasses, named tuples, dicts with attributes) of at least two columns, which no
    setting declares. A column is a field for tensors, sequences or mappings whose name has a word
    of :data:`_COLUMNS`, or a field for another container; a field for a function is none. A record
    with a container above it is one, too, and so are records of one row, such as a prompt with its
    responses."""
    found: list[Class] = []
    while True:
        names = {each.node.name for each in found}
        new = [x for x in source.classes if x not in found and _holds_rows(x, names)]
        if not new:
            return found
        found += new


def _holds_rows(each: Class, known: set[str]) -> bool:
    node = each.node
    bases = {re.split(r"[.[]", ast.unparse(base).removeprefix("typing."))[0] for base in node.bases}
    record = any("dataclass" in ast.unparse(x) for x in node.decorator_list)
    if bases & {"Protocol"}:
        return False
    if len({method.name for method in each.methods} & _OPERATIONS) >= 2:
        return True
    if node.name.startswith("_") or not (record or bases & {"NamedTuple", "TypedDict", "dict"}):
        return False
    if bases & known:
        return True
    fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
    for method in each.methods:
        if method.name == "__init__":
            fields += [x for x in ast.walk(method) if isinstance(x, ast.AnnAssign)]
    count = 0
    for field in fields:
        if isinstance(field.value, ast.Call) and "setting" in ast.unparse(field.value.func):
            return False
        name, kind = ast.unparse(field.target).removeprefix("self."), ast.unparse(field.annotation)
        column = set(name.split("_")) & _COLUMNS and _ROWS.search(kind)
        rows = column or set(re.findall(r"\w+", kind)) & known
        count += bool(rows) and "Callable" not in kind
    return count >= 2


def _lines(source: Source) -> dict[str, list[Class]]:
    """The public trainers, each with our classes above it, in Python's order."""
    found = {}
    for name in TRAINERS:
        where, _, last = name.rpartition(".")
        homes = [x for x in source.classes if x.node.name == last and where in x.module]
        homes = [x for x in homes if not x.module.startswith("fastrl.compat.patch")]
        if len(homes) == 1:
            found[name] = source.mro(homes[0])
    return found


def trainers(source: Source) -> dict[str, dict[str, int]]:
    """For each public trainer: our classes above it; the methods of all of them and itself, and
    those that more than one of them defines."""
    found = {}
    for name, line in _lines(source).items():
        methods = Counter(x for each in line for x in {m.name for m in each.methods})
        defined_again = sum(count > 1 for count in methods.values())
        found[name] = {
            "bases": len(line) - 1, "methods": len(methods), "defined again": defined_again
        }  # fmt: skip
    return found


_FROM_BELOW, _UNDECLARED = "read above, set below", "read below, not declared"


def attributes(source: Source) -> dict[str, list[str]]:
    """What the classes of public trainers read of each other though none of them says so, as
    "READER.NAME".

    - :data:`_FROM_BELOW`: a class neither sets nor defines it, nor does one above it, but another
      class of the trainer. A value, or an annotation, in a class's body is no excuse for what a
      method elsewhere sets, and only that.
    - :data:`_UNDECLARED`: attributes that methods of a class above set, and that no class above
      names in its body.

    What transformers' Trainer sets or defines is everybody's below it.
    """
    found: dict[str, set[str]] = {_FROM_BELOW: set(), _UNDECLARED: set()}
    for line in _lines(source).values():
        for reader in line:
            up = source.mro(reader)
            others = [each for each in line if each not in up]
            read = _of_self([reader], ast.Load) - _of_self([reader], ast.Store)
            if "transformers.Trainer" in [ast.unparse(x) for each in up for x in each.node.bases]:
                read -= _of_transformers()
            below = _of_self(others, ast.Store) - _of_self(up, ast.Store) - _methods(up)
            below |= _in_bodies(others) - _in_bodies(up) - _of_self(up, ast.Store)
            undeclared = _of_self(up, ast.Store) - _in_bodies(up[1:])
            for kind, names in ((_FROM_BELOW, below), (_UNDECLARED, undeclared)):
                found[kind] |= {f"{reader.node.name}.{x}" for x in read & names}
    return {kind: sorted(names) for kind, names in found.items()}


def _of_self(classes: list[Class], context: type[ast.expr_context]) -> set[str]:
    """The attributes of ``self`` that methods of classes read, or set."""
    found = set()
    for method in (x for each in classes for x in each.methods if x.args.args):
        own = method.args.args[0].arg
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, context):
                found |= {node.attr} if getattr(node.value, "id", None) == own else set()
    return found


def _methods(classes: list[Class]) -> set[str]:
    return {method.name for each in classes for method in each.methods}


def _in_bodies(classes: list[Class]) -> set[str]:
    """The methods of classes, and what their bodies declare or give a value."""
    nodes = [x for each in classes for x in each.node.body]
    named = [x.target for x in nodes if isinstance(x, ast.AnnAssign)]
    named += [y for x in nodes if isinstance(x, ast.Assign) for y in x.targets]
    return _methods(classes) | {ast.unparse(x) for x in named}


@cache
def _of_transformers() -> set[str]:
    """The attributes and methods of transformers' Trainer, by its source."""
    package: Any = find_spec("transformers")
    tree = ast.parse(Path(package.origin).with_name("trainer.py").read_text(encoding="utf-8"))
    nodes = [x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "Trainer"]
    classes = [Class("transformers.trainer", x) for x in nodes]
    return _of_self(classes, ast.Store) | _in_bodies(classes)


def defined_twice(source: Source) -> dict[str, list[str]]:
    """Functions and classes at the top of modules whose name is defined in several files, with
    these."""
    homes: dict[str, list[str]] = defaultdict(list)
    for name in source.ours:
        tops = {x.name for x in source.tree(name).body if isinstance(x, (Function, ast.ClassDef))}
        for each in tops:
            homes[each].append(source.file(name))
    return {name: files for name, files in sorted(homes.items()) if len(files) > 1}


# A docstring that begins so says of something that is not named, or of something that only its
# signature names.
_DANGLING = {
    *("Of", "Those", "That", "These", "Such", "Some", "Also", "As", "By", "Likewise", "Ditto"),
    *("With", "Without", "From", "For", "In", "At", "On", "To", "Into", "Behind", "Between"),
    *("Beside", "Like", "Within", "After", "Before", "During", "Not", "So", "Always", "Once"),
}
_VERBS = re.compile(
    r"\b(is|are|has|have|does|do|can|may|must|will|gives|returns|replaces|takes|reads|writes)\b"
)
_SUBORDINATE = re.compile(
    r"\b(which|that|who|whose|whom|where|what|whether|as|how|however|if|when|but)\b"
)


def is_fragment(docstring: str) -> bool:
    """Whether a docstring begins with a fragment, which cannot be understood alone: with one of the
    words of :data:`_DANGLING`, and no main clause behind the first comma, as "For
    each sample, returns its score" has. Phrases of nouns ("The loss", "Log-probs of the tokens")
    and indirect questions ("Whether", "What", "How many") are none."""
    sentence = re.split(r"(?<=[.:;!?])\s", docstring.strip().split("\n\n")[0])[0]
    first = re.match(r"[A-Za-z]+", sentence)
    if first is None or first[0] not in _DANGLING:
        return False
    rest = sentence.partition(",")[2]
    return not _VERBS.search(_SUBORDINATE.split(rest)[0])


def fragments(source: Source) -> list[str]:
    """Where docstrings begin with a fragment, with their first line."""
    found = []
    for name in source.ours:
        for node in documented(source, name):
            text = ast.get_docstring(node) or ""
            if is_fragment(text):
                line = node.body[0].lineno
                found.append(f"{source.file(name)}:{line}: {text.splitlines()[0]}")
    return found


def settings(source: Source) -> list[str]:
    """Fields of classes that functions of settings.py declare, or functions that return what these
    return."""
    returned = {
        (name.endswith(".settings"), node.name, _called(x.value))
        for name in source.ours
        for node in source.tree(name).body
        if isinstance(node, ast.FunctionDef)
        for x in node.body
        if isinstance(x, ast.Return)
    }
    makers = {"field"}
    for _ in range(3):
        makers |= {
            function
            for declares, function, called in returned
            if called in makers and (called != "field" or declares)
        }
    fields = (
        (each.node.name, x)
        for each in source.classes
        for x in each.node.body
        if isinstance(x, ast.AnnAssign) and _called(x.value) in makers - {"field"}
    )
    return [f"{name}.{ast.unparse(x.target)}" for name, x in fields]


def _called(node: ast.AST | None) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def circles(source: Source) -> list[str]:
    """The files that import themselves by way of others, imports for type checkers among them, and
    those between two circles."""
    # The package's own names are loaded when they are asked for.
    arrows = {(x, y) for x in source.ours if x != "fastrl" for y in source.imports(x)}
    count = len(arrows) + 1
    while len(arrows) < count:
        count = len(arrows)
        inside = {x for x, _ in arrows} & {y for _, y in arrows}
        arrows = {arrow for arrow in arrows if inside.issuperset(arrow)}
    return sorted({x for x, _ in arrows})


def tests(source: Source) -> dict[str, int]:
    """The files of tests/, their lines, and the functions that are tests."""
    files = sorted((source.root / "tests").rglob("*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    functions = re.compile(r"^\s*(?:async )?def test_", re.MULTILINE)
    return {
        "files": len(files),
        "lines": sum(len(text.splitlines()) for text in texts),
        "functions": sum(len(functions.findall(text)) for text in texts),
    }


def measured(source: Source) -> dict[str, Any]:
    """All of these of a checkout, as JSON may have it."""
    rooms = lines(source)
    return {
        "rooms": rooms,
        "files": len(source.ours),
        "top floor": {"rooms": len(rooms) - 1, "single files": _single_files(source)},
        "containers": sorted(f"{x.module}.{x.node.name}" for x in containers(source)),
        "trainers": trainers(source),
        "attributes": attributes(source),
        "defined twice": defined_twice(source),
        "fragments": fragments(source),
        "settings": len(settings(source)),
        "circles": circles(source),
        "tests": tests(source),
    }


def _single_files(source: Source) -> int:
    return len({room(name) for name in source.ours} - packages(source))
