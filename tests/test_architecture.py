"""What the rooms may know of each other, and what only one of them does.

Imports inside functions count, and so do those under ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from fastrl.learn.preferences import PAIR_LOSSES, UNPAIRED_LOSSES
from fastrl.trainers import sft
from fastrl.trainers.groups import policy_loss
from fastrl.trainers.pairs import dpo_config
from fastrl_kernels.policy_losses import POLICY_LOSSES
from tests.house import budget
from tests.house.measures import measured
from tests.house.source import FOLDERS, ROOT, here, room

# From low to high; a room, or a room within one, imports what stands in a lower line, and itself.
LAYERS = (
    {"config", "core", "eras", "moved", "nearest", "overrides", "registry", "settings",
     "timing"} | {"user_code"},
    {"run"}, {"samples"}, {"models"}, {"data"}, {"trainers.plan"}, {"rollout"},
    {"learn.ref_model", "rewards"}, {"learn"}, {"collect"}, {"trainers"}, {"trainers.ppo"},
    {"alignment"}, {"trainers.groups", "trainers.pairs"},
    {"compat", "compat.older", "compat.scripts", "tools.reports"},
    {"compat.programs", "tools.recipes"}, {"tools.commands", "tools.demo", "tools"}, {"cli"},
    {"__main__", "run_trl"},
)  # fmt: skip
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
TOGETHER = LAYERS[0]  # single files: they may import each other
APART = "compat.patch"  # it is set into other libraries' programs, and imports nothing of fastrl


def floor(name: str) -> str:
    """The room that a module stands in, or the room within that one, such as "trainers.ppo"."""
    inner = ".".join(name.split(".")[1:3])
    within = room(name) != inner and name.startswith("fastrl.")
    return inner if within and (inner in RANK or inner == APART) else room(name)


MODULES = here().modules


@cache
def trees() -> dict[str, ast.Module]:
    """What each file holds; read by the worker that asks."""
    return {name: here().tree(name) for name in MODULES}


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, but for those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield other
                yield from executed(other)
            continue
        yield child
        yield from executed(child)


@cache
def graph() -> dict[str, set[str]]:
    """The imports of each module."""
    return {name: here().imports(name, executed(here().tree(name))) for name in MODULES}


@cache
def named() -> dict[str, set[str]]:
    """The imports of each module, with those of type checkers."""
    return {name: here().imports(name) for name in MODULES}


def reachable(start: str, known: dict[str, set[str]] | None = None) -> dict[str, str]:
    """Every module that one imports, at any distance, and what imports it on the way."""
    came_from: dict[str, str] = {}
    waiting, known = [start], known or graph()
    while waiting:
        here = waiting.pop()
        for there in known[here]:
            if there not in came_from:
                came_from[there] = here
                waiting.append(there)
    return came_from


def circle(name: str) -> list[str]:
    """The modules of a circle of imports through this one, those of type checkers among them; empty
    where there is none."""
    # The package's own names are loaded when they are asked for.
    came_from = reachable(name, {**named(), "fastrl": set()})
    if name not in came_from:
        return []
    path = [name]
    while (before := came_from[path[-1]]) != name:
        path.append(before)
    return [name, *reversed(path)]


def test_the_graph_is_that_of_the_packages():
    """Or every other test here would pass on nothing."""
    assert len(MODULES) > 100
    assert "fastrl.trainers.ppo" in graph()["fastrl.tools.commands.ppo"]  # inside a function
    assert "fastrl.cli" not in reachable("fastrl.tools.reports.report")
    assert sum(map(len, graph().values())) > 400


@pytest.mark.parametrize("package", FOLDERS)
def test_no_file_imports_itself_by_way_of_others(package):
    names = [name for name in MODULES if name.split(".")[0] == package]
    circles = {frozenset(found): " → ".join(found) for name in names if (found := circle(name))}
    assert not circles, "\n".join(circles.values())


def test_every_room_has_its_layer():
    rooms = {floor(name) for name in MODULES if name.startswith("fastrl.")}
    assert rooms == set(RANK) | {APART}


def test_rooms_import_what_is_lower_and_name_its_types_alone():
    wrong = []
    for name, imported in named().items():
        here = floor(name)
        if name == "fastrl" or here == "benchmarks":
            continue  # its names are loaded when they are asked for
        for other in sorted(imported):
            there = floor(other)
            if here == there or {here, there} <= TOGETHER or there == "fastrl_kernels":
                continue
            if here == APART or RANK.get(there, len(LAYERS)) >= RANK.get(here, -1):
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_larger_than_its_budget_and_budgets_follow_what_falls():
    now, ceilings = budget.numbers(measured(here())), budget.read()
    found = budget.above(ceilings, now) + budget.below(ceilings, now)
    assert not found, "\n".join(found)


def test_a_ceiling_that_was_raised_has_its_reason():
    assert not (found := budget.raised(budget.read(), budget.versions())), "\n".join(found)


def test_the_kernels_know_nothing_of_fastrl():
    for name, imported in graph().items():
        if room(name) == "fastrl_kernels":
            assert {room(other) for other in imported} <= {"fastrl_kernels"}, name


def test_a_class_name_stands_in_one_room():
    homes = defaultdict(set)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and room(name) != "benchmarks":
                homes[node.name].add(room(name))
    shared = {name: sorted(rooms) for name, rooms in homes.items() if len(rooms) > 1}
    assert not shared


def calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Every call, and the name of the innermost function that it stands in."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[ast.Call, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield child, function
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from visit(child, child.name if inside else function)

    return visit(tree, "")


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))


def outside(*rooms: str) -> Iterator[str]:
    return (n for n in MODULES if n.startswith("fastrl.") and room(n) not in rooms)


TOKENIZERS = {"tokenizer", "_tokenizer", "processing_class"}
OF_TOKENIZERS = {"apply_chat_template", "encode_plus", "batch_encode_plus"}
JOINING = {"append", "extend", "insert", "cat", "endswith", "startswith"}
JOINING |= {"removesuffix", "removeprefix", "strip", "lstrip", "rstrip", "index", "replace"}


def is_end_or_start(node: ast.AST) -> bool:
    """Of a sequence: whether a BOS or EOS token is read there."""
    return any(
        isinstance(each, ast.Attribute)
        and each.attr in ("bos_token", "eos_token", "bos_token_id", "eos_token_id")
        for each in ast.walk(node)
    )


def encodes(call: ast.Call) -> bool:
    name = called(call)
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    of_a_tokenizer = getattr(owner, "attr", getattr(owner, "id", "")) in TOKENIZERS
    return (
        name in OF_TOKENIZERS
        or name in TOKENIZERS
        or (name == "encode" and of_a_tokenizer)
        or any(keyword.arg == "add_special_tokens" for keyword in call.keywords)
    )


def test_the_data_room_alone_makes_token_ids_of_texts():
    """It calls tokenizers and their chat templates, and adds and strips BOS and EOS."""
    wrong = []
    for name in outside("data"):
        for call, _ in calls(trees()[name]):
            if encodes(call):
                wrong.append(f"{name}:{call.lineno} calls {ast.unparse(call.func)}")
            if called(call) in JOINING and any(map(is_end_or_start, call.args)):
                wrong.append(f"{name}:{call.lineno} adds or strips BOS or EOS")
        for node in ast.walk(trees()[name]):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                sides = (node.left, node.right)
                if any(map(is_end_or_start, sides)):
                    wrong.append(f"{name}:{node.lineno} adds BOS or EOS")
    assert not wrong, "\n".join(wrong)


def names_of_losses() -> set[str]:
    """All but those that are names of methods, too."""
    pairs = {*PAIR_LOSSES, *UNPAIRED_LOSSES, *dpo_config.DPO_LOSSES}
    tables = {*POLICY_LOSSES, *pairs, *policy_loss.GRPO_LOSSES, *sft.SFT_LOSSES}
    return tables - {"sft", "kto", "dpo", "grpo", "rloo"}


def test_no_loss_is_asked_for_by_its_name():
    """What others than a loss need to know of it is a field of its row."""
    wrong, names = [], names_of_losses()
    for name in outside():
        for node in ast.walk(trees()[name]):
            if isinstance(node, ast.Compare):
                texts = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant)} & names
                wrong += [f"{name}:{node.lineno} asks for {text}" for text in texts]
    assert not wrong, "\n".join(wrong)


WRITES = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "unlink", "rmdir", "rmtree", "touch"),
    *("savefig", "save_file", "save_model", "save_pretrained", "to_json", "to_csv", "to_parquet"),
}
# They write to the folder that they are given, for run/ or for a user; these names are those of
# transformers, TRL, and the callables that run/ takes.
SAVES = {"save", "_save", "save_model", "save_pretrained", "save_to_json", "push_to_hub"}
SAVES |= {"write_model"}  # what save_model of ours calls
SAVES |= {"mount_point"}  # of the rewards' sandbox: a folder in memory, which ends with its program
SAVES |= {"save_beside_adapter"}  # of the data room: what a reward model has learned to read
FILES = {"run.json", "metrics.jsonl", "samples.jsonl", "summary.json"}
FILES |= {"report.png", "report.html"}


def writes(call: ast.Call) -> bool:
    name = called(call)
    if name == "open":
        mode = [*call.args, *(keyword.value for keyword in call.keywords)]
        texts = [each.value for each in mode if isinstance(each, ast.Constant)]
        return any(isinstance(text, str) and set(text) & set("wax+") for text in texts[-1:])
    if call.args and getattr(call.args[0], "id", "") == "buffer":  # no file
        return False
    if name in ("save", "dump"):  # torch.save, json.dump
        return getattr(getattr(call.func, "value", None), "id", "") in ("torch", "json", "pickle")
    return name in WRITES


def test_the_run_room_alone_writes_files_and_names_them():
    wrong = []
    for name in outside("run"):
        for call, function in calls(trees()[name]):
            if writes(call) and function not in SAVES:
                wrong.append(f"{name}:{call.lineno} calls {ast.unparse(call.func)} in {function}")
        for node in ast.walk(trees()[name]):
            if isinstance(node, ast.Constant) and node.value in FILES:
                wrong.append(f"{name}:{node.lineno} names {node.value}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("source", "found"), [
    ("tokenizer.apply_chat_template(x)", True),
    ("self.tokenizer(texts)", True),
    ("make(texts, add_special_tokens=False)", True),
    ("tokenizer.encode(text)", True),
    ("text.encode()", False),
    ("tokenizer.decode(ids)", False),
])  # fmt: skip
def test_what_counts_as_encoding(source, found):
    ((call, _),) = calls(ast.parse(source))
    assert encodes(call) == found


@pytest.mark.parametrize(("source", "found"), [
    ("path.write_text(x)", True),
    ("open(path, 'w')", True),
    ("path.open('a')", True),
    ("path.open(mode='xb')", True),
    ("path.open()", False),
    ("path.open('rb')", False),
    ("torch.save(x, path)", True),
    ("trainer.save_model(path)", True),
    ("json.dumps(x)", False),
])  # fmt: skip
def test_what_counts_as_writing(source, found):
    ((call, _),) = calls(ast.parse(source))
    assert writes(call) == found


def test_contributors_are_told_of_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = {x.name for x in (ROOT / "fastrl").iterdir() if (x / "__init__.py").is_file()}
    assert {x for x in rooms if f" {x}/" not in text} == set()
    order = text.partition("in this order: ")[2].partition(";")[0]
    named = [{x.strip() for x in line.split(",")} for line in order.split("<")]
    assert named == [x & set().union(*named) for x in LAYERS if x & set().union(*named)]
    assert rooms - {x.partition(".")[0] for x in set().union(*named)} == set()
