"""What is private in other packages and used here: how it is found in our sources, and what has
changed in theirs.

`python -m tests.private_parts` writes the record of transformers anew, once each change has been
looked at.
"""

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("private_parts.json")
TRAINER = "transformers/trainer.py:Trainer"
# Classes whose private names are theirs, even where something of ours has the same.
CLASSES = (
    TRAINER,
    "transformers/modeling_utils.py:PreTrainedModel",
    "transformers/configuration_utils.py:PreTrainedConfig",
    "transformers/training_args.py:TrainingArguments",
    "transformers/trainer_callback.py:CallbackHandler",
    "transformers/tokenization_utils_base.py:PreTrainedTokenizerBase",
    "transformers/generation/utils.py:GenerationMixin",
    "accelerate/accelerator.py:Accelerator",
    "accelerate/state.py:AcceleratorState",
    "peft/peft_model.py:PeftModel",
    "datasets/arrow_dataset.py:Dataset",
    "datasets/iterable_dataset.py:IterableDataset",
)
NOT_THEIRS = {"fastrl", "fastrl_kernels", *sys.stdlib_module_names}
PRIVATE = re.compile(r"_[A-Za-z]\w*")
OF_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public, whatever their names say
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "pop", "get"}


class Use(NamedTuple):
    """A private name of others in a file of ours."""

    file: str
    line: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} uses {self.name}: {self.text}"


@cache
def sources() -> dict[str, ast.Module]:
    """Our files, by their paths."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "fastrl").rglob("*.py"))
    }


@cache
def text_of(file: str) -> str:
    """A file of another package, by a path that begins with the package's name."""
    package, _, rest = file.partition("/")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / rest).read_text(encoding="utf-8")


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def definition(text: str, *names: str) -> Any:
    """A class, or something in it, in a source; None where it is not there."""
    found: Any = parsed(text)
    for name in names:
        found = next((x for x in found.body if getattr(x, "name", "") == name), None)
        if found is None:
            return None
    return found


def given_names(trees: Iterable[ast.AST]) -> set[str]:
    """What gets a name there: functions, classes, variables, attributes of ``self``."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def members(owner: str) -> set[str]:
    """Methods of a class of another package, as ``file:Class``, and attributes that it sets."""
    file, _, name = owner.partition(":")
    body = definition(text_of(file), name)
    inside = given_names([body]) - {x.id for x in ast.walk(body) if isinstance(x, ast.Name)}
    return {x for x in inside if not x.startswith("_")} - {name}


@cache
def private_names(owner: str) -> frozenset[str]:
    """Those of a class of another package, as ``file:Class``."""
    file, _, name = owner.partition(":")
    return frozenset(filter(PRIVATE.fullmatch, given_names([definition(text_of(file), name)])))


def uses(trees: Mapping[str, ast.Module], trainers: Iterable[str] = ()) -> Iterator[Use]:
    """The private names of others that are read, set, deleted or called, also by their names as
    texts, or imported.

    Args:
        trainers: files of classes that inherit from transformers' Trainer.
    """
    named = given_names(trees.values())
    own = named - {x for owner in CLASSES for x in private_names(owner)}
    for file, tree in trees.items():
        imported = {name for node in ast.walk(tree) for name in _imported(node)}
        inherited = private_names(TRAINER) if file in trainers else frozenset()
        for name, node, base in _private(tree):
            owner = "" if base is None else ast.unparse(base)
            if name in OF_TUPLES or owner.startswith(("torch.ops.", "aten")):
                continue
            if owner in ("self", "cls", "super()"):
                theirs = name in inherited or name not in named
            else:
                theirs = base is None or name not in own or owner.split(".")[0] in imported
            if theirs:
                yield Use(file, node.lineno, name, ast.unparse(node))


def _private(tree: ast.AST) -> Iterator[tuple[str, Any, ast.AST | None]]:
    """Private names, where they are, and what they are attributes of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            yield node.attr, node, node.value
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            of = node.args[0] if isinstance(node.func, ast.Name) and node.args else node.func
            for x in node.args if called in BY_NAME else ():
                if isinstance(x, ast.Constant) and PRIVATE.fullmatch(str(x.value)):
                    yield x.value, node, of
        elif isinstance(node, ast.ImportFrom):
            parts = (*(node.module or "").split("."), *(x.name for x in node.names))
            for x in parts if parts[0] not in NOT_THEIRS else ():
                if PRIVATE.fullmatch(x):
                    yield x, node, None


def _imported(node: ast.AST) -> set[str]:
    """Names that an import of other packages gives."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in NOT_THEIRS:
        return {x.asname or x.name for x in node.names}
    if isinstance(node, ast.Import):
        return {x.asname or x.name.split(".")[0] for x in node.names} - NOT_THEIRS
    return set()


def replacements(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """By files: attributes of others that are set or deleted where they have another value, and
    all that :func:`fastrl.run.contexts.attributes_set` sets."""
    found: dict[str, list[str]] = {}
    for file, tree in trees.items():
        imported = {name for node in ast.walk(tree) for name in _imported(node)}
        for node in ast.walk(tree):
            written = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr")
            text = ast.unparse(node.args[0]) if call else ast.unparse(node) if written else ""
            attribute = call or isinstance(node, ast.Attribute)
            of_others = attribute and re.split(r"\W", text)[0] in imported
            by_dict = text.startswith("vars(") and isinstance(node, ast.Subscript)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "attributes_set":
                by_dict, text = True, ", ".join(map(ast.unparse, node.args))
            if of_others or by_dict:
                found.setdefault(file, []).append(text)
    return found


def described(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Of functions of others, as ``file:Class.function``: signature, a hash of what they do, and
    the names that they use; comments and docstrings do not count."""
    found = {}
    for name in sorted(names):
        file, _, path = name.partition(":")
        function = definition(text_of(file), *path.split("."))
        found[name] = None if function is None else describe(function)
    return {name: each for name, each in found.items() if each is not None}


def describe(function: ast.FunctionDef) -> dict[str, Any]:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    text = "\n".join(map(ast.unparse, body))
    called = (x for part in body for x in ast.walk(part) if isinstance(x, ast.Attribute | ast.Name))
    names = {ast.unparse(x) for x in called if not isinstance(x.ctx, ast.Store)}
    return {
        "signature": f"({ast.unparse(function.args)})",
        "source": hashlib.sha256(text.encode()).hexdigest()[:16],
        "uses": " ".join(sorted(x for x in names if re.fullmatch(r"[\w.]+", x))),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any], newer: bool = True) -> list[str]:
    """What is to be looked at, in words.

    Args:
        newer: False: ``now`` is of an older version, which may do otherwise what has the same name.
    """
    found = []
    for name, known in before.items():
        if name not in now:
            found.append(f"{name} is gone")
        elif known["signature"] != now[name]["signature"]:
            found.append(f"{name}{known['signature']} is {name}{now[name]['signature']}")
        elif known["source"] != now[name]["source"] and newer:
            old, new = (set(each["uses"].split()) for each in (known, now[name]))
            more = [f"uses {x}" for x in sorted(new - old)]
            less = [f"uses {x} no more" for x in sorted(old - new)]
            what = ", ".join([*more, *less]) or "uses the same in another way"
            found.append(f"{name} does something else: it {what}")
    return found


def known() -> dict[str, Any]:
    """What is recorded: a version of transformers, and its functions. Where the installed one has
    been looked at beside that, it and its functions."""
    content = json.loads(RECORD.read_text(encoding="utf-8"))
    other = content.pop("newer", {}).get(version("transformers"))
    if other is not None:
        content["transformers"] = version("transformers")
        content["functions"].update(other)
    return content


def record(names: Iterable[str]) -> None:
    """Writes what is installed: as the record where `make` installs that version of transformers,
    else beside it what differs."""
    installed, now = version("transformers"), described(names)
    content = json.loads(RECORD.read_text(encoding="utf-8"))
    newer = content.setdefault("newer", {})
    constrained = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if re.search(rf"^transformers=={re.escape(installed)}(?![\w.])", constrained, re.MULTILINE):
        content |= {"transformers": installed, "functions": now}
    else:
        before = content["functions"]
        newer[installed] = {name: x for name, x in now.items() if before.get(name) != x}
    RECORD.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from tests.test_private_parts import functions

    record(functions())
