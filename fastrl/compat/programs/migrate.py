"""Reads a program that was written for TRL, without running it, and finds what fastrl makes of each
name and setting."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fastrl.compat.programs.calls import Call, called, calls_of
from fastrl.compat.programs.names import (
    HOMES,
    MODULES,
    find,
    home_of,
    imported_names,
    is_trl,
    missing,
    of_its_time,
    only_named_in,
)
from fastrl.compat.programs.taken_away import GONE, KEYWORDS
from fastrl.eras import DEFAULTS, IDLE, KEPT, REFUSED, RENAMED, TRAINING, Era, eras_of
from fastrl.overrides import not_called
from fastrl.settings import idle_settings, refusals

_BITS = ("load_in_8bit", "load_in_4bit")
AS_IT_IS, DEFAULT, UNKNOWN = "as it is", "another default", "not there"
THERE = "with fastrl run-trl alone"
_TODAY = "today: "
_LINE = 100  # characters


# The begin and end (line, column in bytes) of a text to be replaced, and the new text.
Edit = tuple[tuple[int, int], tuple[int, int], str]


class Outcome(NamedTuple):
    """What becomes of a name or a setting.

    Attributes:
        kind: AS_IT_IS, DEFAULT, UNKNOWN; a kind of :class:`fastrl.eras.Era` ("kept": under its old
            name); or THERE where only ``fastrl run-trl`` runs the line.
        text: what a reader should know of the change.
        edit: what ``--write`` changes; None: nothing.
    """

    line: int
    name: str
    kind: str
    text: str = ""
    edit: Edit | None = None


def read_program(source: str) -> list[Outcome]:
    """All findings in a program's source, in order of lines; raises SyntaxError, with the line,
    where it does not parse."""
    tree = ast.parse(source)
    renamed, aliases = of_its_time(source), _aliases(tree)
    only_named = only_named_in(source)
    outcomes: list[Outcome] = []
    for call in calls_of(tree, {"TrainingArguments": "TrainingArguments", **aliases}):
        if call.name == "TrainingArguments":
            outcomes += _of_training_arguments(call)
        else:
            outcomes += _of_call(call, renamed.get(call.name, call.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_trl(node.module) and not node.level:
            outcomes += _of_import_from(node, renamed, only_named)
        elif isinstance(node, ast.ImportFrom) and node.module in ("transformers", "peft"):
            outcomes += _of_gone(node)
        elif isinstance(node, ast.Import):
            outcomes += _of_import(node)
        elif isinstance(node, ast.Call):
            outcomes += _taken_away(node)
        elif isinstance(node, ast.ClassDef):
            bases = (getattr(base, "attr", getattr(base, "id", "")) for base in node.bases)
            named = [aliases[name] for name in bases if name in aliases]
            outcomes += _of_subclass(node, [renamed.get(name, name) for name in named])
        elif isinstance(node, ast.FunctionDef) and node.name == "compute_loss":
            outcomes += _of_compute_loss(node)
        elif isinstance(node, ast.Constant) and node.value == "return_all_scores":
            text = _TODAY + KEYWORDS["pipeline", "return_all_scores"]
            outcomes.append(Outcome(node.lineno, "return_all_scores", THERE, text))
        elif isinstance(node, ast.Assign):
            outcomes += _of_two_results(node)
    outcomes += _imports_of(tree, outcomes)
    return sorted(_parsing(source, outcomes), key=lambda x: (x.line, x.name))


def read_config(settings: str, program: str) -> list[Outcome]:
    """All findings in a YAML file of settings, by the configurations that the program names.

    Args:
        settings: the file's text, a mapping.
        program: the program's source.

    Raises:
        ValueError: the program names no configuration.
    """
    import yaml

    tree, renamed = ast.parse(program), of_its_time(program)
    aliases, nodes = _aliases(tree), list(ast.walk(tree))
    used = {getattr(node, "id", getattr(node, "attr", "")) for node in nodes}
    names = [renamed.get(name, name) for shown, name in aliases.items() if shown in used]
    kinds = {name: kind for name in names if dataclasses.is_dataclass(kind := find(name))}
    if not kinds:
        raise ValueError("the program names no configuration of TRL's, which would read settings")
    fields = {
        getattr(part.target, "id", "")
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for part in node.body
        if isinstance(part, ast.AnnAssign)
    }
    outcomes = []
    mapping = yaml.compose(settings, Loader=yaml.SafeLoader)
    for key, _ in mapping.value if mapping is not None else ():
        line, setting = key.start_mark.line + 1, str(key.value).replace("-", "_")
        if setting in fields or setting == "env":
            outcomes.append(Outcome(line, setting, AS_IT_IS))
            continue
        of_settings = [_of_setting(name, kind, setting, line) for name, kind in kinds.items()]
        recognised = [x for x in of_settings if x.kind != UNKNOWN]
        outcomes.append((recognised or of_settings)[0])
    return outcomes


def rewritten(source: str, findings: Sequence[Outcome]) -> str:
    """The program with all edits of its findings."""
    lines = io.StringIO(source, newline="").readlines()  # lines as Python counts them
    for (first, start), (last, end), text in reversed(_joined(findings)):
        before = lines[first - 1].encode()[:start].decode()
        behind = lines[last - 1].encode()[end:].decode()
        lines[first - 1 : last] = [before + text + behind]
    return "".join(lines)


def _joined(findings: Sequence[Outcome]) -> list[Edit]:
    """The edits in order of their places; overlapping removals become one."""
    edits: list[Edit] = []
    for first, last, text in sorted(x.edit for x in findings if x.edit is not None):
        if edits and first < edits[-1][1] and text == edits[-1][2] == "":
            edits[-1] = (edits[-1][0], max(last, edits[-1][1]), "")
        else:
            edits.append((first, last, text))
    return edits


def _parsing(source: str, findings: list[Outcome]) -> list[Outcome]:
    """The findings, without those edits that overlap others or break the program's syntax."""
    if _parses(source, findings):
        return findings
    kept: list[Outcome] = []
    for x in findings:
        if x.edit is not None and not _parses(source, [*kept, x]):
            text = f"{_TODAY}{x.edit[2].strip()}" if x.edit[2].strip() else x.text
            x = x._replace(kind=THERE, text=text, edit=None)
        kept.append(x)
    return kept


def _parses(source: str, findings: Sequence[Outcome]) -> bool:
    edits = _joined(findings)
    if any(before[1] > behind[0] for before, behind in itertools.pairwise(edits)):
        return False
    try:
        ast.parse(rewritten(source, findings))
    except SyntaxError:
        return False
    return True


def _aliases(tree: ast.Module) -> dict[str, str]:
    """TRL's names by the names that the program gives them; ``trl.X`` is called X."""
    names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(is_trl(alias.name) for alias in node.names):
            names = {**{name: name for name in HOMES}, **names}
    return {shown: name for shown, name in names.items() if name in HOMES}


def _of_gone(node: ast.ImportFrom) -> Iterator[Outcome]:
    """What becomes of imported names that transformers or PEFT has dropped or moved."""
    for alias in node.names:
        today = GONE.get((str(node.module), alias.name))
        if today is None:
            continue
        full, (home, _, name) = f"{node.module}.{alias.name}", today.rpartition(".")
        if home == node.module:
            edit = _whole(alias, f"{name} as {alias.asname or alias.name}")
            yield Outcome(node.lineno, full, RENAMED, f"now {name}", edit)
        else:
            yield Outcome(node.lineno, full, THERE, _TODAY + today)


def _of_import_from(
    node: ast.ImportFrom, renamed: dict[str, str], only_named: set[str]
) -> Iterator[Outcome]:
    """What becomes of names from TRL; if all exist, imports from fastrl replace the statement."""
    homes: dict[str, list[str]] = defaultdict(list)
    all_known = True
    for alias in node.names:
        home = home_of(renamed.get(alias.name, alias.name))
        if home is None:
            all_known = False
            try:
                find(alias.name)
                yield Outcome(node.lineno, alias.name, THERE)
            except AttributeError:
                kind = THERE if alias.name in only_named else UNKNOWN
                yield Outcome(node.lineno, alias.name, kind, missing(alias.name, str(node.module)))
            continue
        module, todays = home
        kind = AS_IT_IS if todays == alias.name else RENAMED
        yield Outcome(
            node.lineno, alias.name, kind, "" if todays == alias.name else f"now {todays}"
        )
        shown = alias.asname or alias.name
        homes[module].append(todays if todays == shown else f"{todays} as {shown}")
    if all_known:
        indent = " " * node.col_offset
        is_spread = node.lineno != node.end_lineno
        lines = [_import_line(x, names, indent, is_spread) for x, names in homes.items()]
        text = f"\n{indent}".join(lines)
        yield Outcome(node.lineno, str(node.module), RENAMED, "now fastrl", _whole(node, text))


def _import_line(module: str, names: list[str], indent: str, is_spread: bool) -> str:
    """An import, with a name on each line if ``is_spread``, or if one line would be too long."""
    line = f"from {module} import {', '.join(names)}"
    if len(names) > 1 and (is_spread or len(indent + line) > _LINE):
        inner = "".join(f"{indent}    {name},\n" for name in names)
        return f"from {module} import (\n{inner}{indent})"
    return line


def _of_import(node: ast.Import) -> Iterator[Outcome]:
    for alias in node.names:
        if is_trl(alias.name):
            is_module = alias.name in MODULES
            kind = AS_IT_IS if is_module else UNKNOWN
            plain = alias.name == "trl" and len(node.names) == 1
            text = f"import fastrl as {alias.asname or 'trl'}"
            edit = _whole(node, text) if plain else None
            why = "" if is_module else missing(alias.name)
            yield Outcome(node.lineno, alias.name, kind, why, edit)


def _of_call(call: Call, name: str) -> Iterator[Outcome]:
    """What becomes of the keywords of a call that makes a configuration or a trainer."""
    kind = find(name)
    if isinstance(kind, type) and name.endswith("Trainer"):
        yield from _of_trainer(call, name, kind)
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield from _of_config(call, name, kind)


def _of_subclass(node: ast.ClassDef, bases: list[str]) -> Iterator[Outcome]:
    """What becomes of the methods of TRL's trainers that a program's subclass overrides."""
    kinds = [kind for kind in map(find, bases) if isinstance(kind, type)]
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            for kind in kinds:
                instead = not_called(kind).get(part.name)
                if instead is not None:
                    yield Outcome(part.lineno, f"{node.name}.{part.name}", REFUSED, instead)


def _of_compute_loss(node: ast.FunctionDef) -> Iterator[Outcome]:
    """What becomes of ``compute_loss``, to which transformers now passes another argument."""
    signature = node.args
    names = {x.arg for x in (*signature.args, *signature.kwonlyargs)}
    takes_more = signature.kwarg or signature.vararg or signature.kwonlyargs
    is_method = bool(signature.args) and signature.args[0].arg == "self"
    if is_method and not takes_more and "num_items_in_batch" not in names:
        edit = _behind([*signature.args, *signature.defaults], ", num_items_in_batch=None")
        text = "transformers passes num_items_in_batch, too"
        yield Outcome(node.lineno, "compute_loss", RENAMED, text, edit)


def _of_two_results(node: ast.Assign) -> Iterator[Outcome]:
    """What becomes of an assignment of two results, log-probs and entropies, of a TRL method that
    now has a third one, the experts' loss."""
    name, (target, *_) = "_get_per_token_logps_and_entropies", node.targets
    two = isinstance(target, ast.Tuple) and len(target.elts) == 2
    if two and isinstance(node.value, ast.Call) and called(node.value) == name:
        assert isinstance(target, ast.Tuple)
        yield Outcome(
            node.lineno, name, RENAMED, "it returns three", _behind([*target.elts], ", _")
        )


def _of_trainer(call: Call, name: str, kind: Any) -> Iterator[Outcome]:
    """What becomes of a trainer's keywords, and of settings that trainers took in earlier
    versions."""
    parameters = inspect.signature(kind).parameters
    config = find(name.removesuffix("Trainer") + "Config")
    settings = {x.name: Era(KEPT, "") for x in dataclasses.fields(config)} | eras_of(config)
    both = {"tokenizer", "processing_class"} <= parameters.keys()
    old = {"tokenizer": "processing_class"} if both else {}
    old |= getattr(kind, "old_keywords", {})
    refused = getattr(kind, "refused_keywords", {})
    keywords = {keyword.arg for keyword in call.keywords}
    for keyword in call.keywords:
        argument = keyword.arg
        if argument is None:  # **settings
            continue
        full, line = f"{name}({argument}=)", keyword.value.lineno
        if argument in refused:
            yield Outcome(line, full, REFUSED, refused[argument])
        elif argument in old:
            edit = None
            if old[argument] not in keywords and keyword in call.node.keywords:
                edit = _renamed(keyword, old[argument])
            yield Outcome(line, full, RENAMED, f"now {old[argument]}", edit)
        elif argument in settings and (argument in parameters or "settings" in parameters):
            era = settings[argument]
            text = f"a setting of {config.__name__} now"
            is_over = era.kind in (IDLE, REFUSED)
            yield Outcome(line, full, era.kind if is_over else KEPT, era.today if is_over else text)
        elif argument in parameters:
            yield Outcome(line, full, AS_IT_IS)
        else:
            yield Outcome(line, full, UNKNOWN, "no version of TRL that fastrl knows has it")


def _of_config(call: Call, name: str, kind: Any) -> Iterator[Outcome]:
    eras, keywords = eras_of(kind), {keyword.arg for keyword in call.keywords}
    for keyword in call.keywords:
        if keyword.arg is None:  # **settings
            continue
        outcome = _of_setting(name, kind, keyword.arg, keyword.value.lineno)
        era = eras.get(keyword.arg)
        yield outcome if era is None else _of_era(call, keyword, outcome.name, era)
    for setting, value in getattr(kind, "to_be_named", {}).items():
        given = [x.value for x in call.keywords if x.arg == setting]
        if given:
            another = isinstance(given[0], ast.Constant) and given[0].value != value
        else:
            another = None not in keywords
        if another:
            text = f"name {setting}={value!r}: a trainer refuses other values, TRL's default, too"
            yield Outcome(call.node.lineno, f"{name}({setting}=)", REFUSED, text)
    for setting, theirs in DEFAULTS.get(name, {}).items():
        ours = kind.__dataclass_fields__[setting].default
        if setting not in keywords and ours != theirs and None not in keywords:
            text = f"{ours!r} here, {theirs!r} in TRL 1.16"
            yield Outcome(call.node.lineno, f"{name}({setting}=)", DEFAULT, text)


def _of_setting(name: str, kind: Any, setting: str, line: int) -> Outcome:
    """What becomes of a configuration's setting, whatever its value."""
    era, idle, refused = eras_of(kind).get(setting), idle_settings(kind), refusals(kind)
    full = f"{name}({setting}=)"
    if era is not None:
        return _outcome(line, full, era)
    if setting in refused:
        return Outcome(line, full, REFUSED, refused[setting][1])
    if setting in idle:
        return Outcome(line, full, IDLE, idle[setting][1])
    if any(field.name == setting and field.init for field in dataclasses.fields(kind)):
        return Outcome(line, full, AS_IT_IS)
    return Outcome(line, full, UNKNOWN, "no version of TRL that fastrl knows has it")


def _outcome(line: int, full: str, era: Era) -> Outcome:
    if era.kind == RENAMED and full.endswith(f"({era.today}=)"):
        return Outcome(line, full, AS_IT_IS, "some of its values have other names now")
    return Outcome(line, full, era.kind, era.today)


def _of_era(call: Call, keyword: ast.keyword, full: str, era: Era) -> Outcome:
    outcome = _outcome(keyword.value.lineno, full, era)
    if keyword not in call.node.keywords:  # the keyword is in a dict, which may have other readers
        return outcome
    if outcome.kind == RENAMED and era.today not in {x.arg for x in call.keywords}:
        return outcome._replace(edit=_of_value(call.node, keyword, era))
    if outcome.kind == IDLE:
        return outcome._replace(edit=_without(call.node, keyword))
    return outcome


def _of_training_arguments(call: Call) -> Iterator[Outcome]:
    for keyword in call.keywords:
        era = TRAINING.get(str(keyword.arg))
        if era is not None:
            full = f"TrainingArguments({keyword.arg}=)"
            outcome = _of_era(call, keyword, full, era)
            if outcome.edit is None and era.today != keyword.arg:
                outcome = outcome._replace(kind=THERE, text=_TODAY + era.today)
            yield outcome


def _of_value(node: ast.Call, keyword: ast.keyword, era: Era) -> Edit | None:
    """The edit to today's setting and value; None for a computed value that has to change."""
    if era.is_plain:
        return _renamed(keyword, era.today)
    if not isinstance(keyword.value, ast.Constant):
        return None
    beside = {str(x.arg): x.value.value for x in node.keywords if isinstance(x.value, ast.Constant)}
    value = era.value(keyword.value.value, beside)
    if value is None:
        return _without(node, keyword)
    return _whole(keyword, f"{era.today}={value!r}")


def _taken_away(node: ast.Call) -> Iterator[Outcome]:
    """What becomes of keywords that libraries have renamed, dropped or given a new default."""
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if called(node) == "apply_chat_template" and "return_dict" not in keywords:
        tokenize = keywords.get("tokenize", ast.Constant(True))
        if isinstance(tokenize, ast.Constant) and tokenize.value is True and None not in keywords:
            note = "for token ids alone it needs return_dict=False now"
            behind = _behind([*node.args, *node.keywords], ", return_dict=False")
            yield Outcome(node.lineno, "apply_chat_template", RENAMED, note, behind)
    for keyword in node.keywords:
        today = KEYWORDS.get((called(node), str(keyword.arg)))
        if today is not None:
            edit = None
            if today.isidentifier() and today not in keywords:
                edit = _renamed(keyword, today)
            elif today.startswith("nothing"):
                edit = _without(node, keyword)
            elif str(keyword.arg) in _BITS:
                edit = _of_bits(node, keyword)
            note = f"now {today}" if edit else _TODAY + today
            full, kind = f"{called(node)}({keyword.arg}=)", RENAMED if edit else THERE
            yield Outcome(keyword.value.lineno, full, kind, note, edit)


def _behind(nodes: list[Any], text: str) -> Edit:
    """The edit that adds a text behind the last of some nodes."""
    place = max((x.end_lineno, x.end_col_offset) for x in nodes)
    return place, place, text


def _of_bits(node: ast.Call, keyword: ast.keyword) -> Edit | None:
    """The edit that writes ``load_in_8bit`` and ``load_in_4bit`` as a quantization_config in place
    of the first of them, or leaves them out where the call has a quantization_config."""
    bits = [x for x in node.keywords if x.arg in _BITS]
    others = [x.arg for x in node.keywords if x.arg not in _BITS]
    if None in others:  # **settings may have one
        return None
    if keyword is not bits[0] or "quantization_config" in others:
        return _without(node, keyword)
    values = {str(x.arg): ast.unparse(x.value) for x in bits}
    used = {name: value for name, value in values.items() if value not in ("False", "None")}
    if not used:
        return _without(node, keyword)
    config = ", ".join(f"{name}={value}" for name, value in used.items())
    # The program may compute whether weights are to be loaded in few bits.
    computed = [f"({x})" if " " in x else x for x in used.values() if x != "True"]
    unless = f" if {' or '.join(computed)} else None" if len(computed) == len(used) else ""
    if len(computed) == len(used) == 1:
        config = f"{next(iter(used))}=True"
    return _whole(keyword, f"quantization_config=BitsAndBytesConfig({config}){unless}")


def _imports_of(tree: ast.Module, findings: list[Outcome]) -> Iterator[Outcome]:
    """An import of BitsAndBytesConfig in front of the first import, if an edit needs it."""
    if not any(x.edit and "BitsAndBytesConfig(" in x.edit[2] for x in findings):
        return
    imports = [x for x in tree.body if isinstance(x, ast.Import | ast.ImportFrom)]
    imported = {
        alias.name for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) for alias in x.names
    }
    if "BitsAndBytesConfig" not in imported:
        usual = [x for x in imports if getattr(x, "module", "") != "__future__"]
        first = [x for x in tree.body if x not in imports and not _is_text(x)]
        decorators = (x.lineno for x in getattr([*usual, *first][0], "decorator_list", ()))
        place = (min([[*usual, *first][0].lineno, *decorators]), 0)
        text = "from transformers import BitsAndBytesConfig\n"
        yield Outcome(place[0], "BitsAndBytesConfig", RENAMED, "imported", (place, place, text))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _renamed(keyword: ast.keyword, today: str) -> Edit:
    line, start = keyword.lineno, keyword.col_offset
    return (line, start), (line, start + len(str(keyword.arg).encode())), today


def _whole(node: ast.stmt | ast.keyword | ast.alias, text: str) -> Edit:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, node.col_offset), end, text


def _without(node: ast.Call, keyword: ast.keyword) -> Edit:
    """The edit that removes a keyword, and the text behind it up to the next, or the call's end."""
    args: list[Any] = sorted([*node.args, *node.keywords], key=lambda x: (x.lineno, x.col_offset))
    i, start = args.index(keyword), (keyword.lineno, keyword.col_offset)
    if i + 1 < len(args):
        return start, (args[i + 1].lineno, args[i + 1].col_offset), ""
    if i:
        start = (args[i - 1].end_lineno, args[i - 1].end_col_offset)
    return start, (node.end_lineno or 0, (node.end_col_offset or 0) - 1), ""
