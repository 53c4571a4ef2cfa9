"""Command-line flags of dataclasses, with their YAML files and help.

``--help`` shows the flags that matter, ``--help-all`` all of them.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, get_origin

from fastrl.eras import eras_of, flags_taken
from fastrl.nearest import did_you_mean, did_you_mean_path
from fastrl.tools.commands.aliases import Alias, Words, aliases_of
from fastrl.tools.recipes import Recipe, recipes

_KINDS = {int: "int", float: "float", str: "text", dict: "JSON"}
_FIRST = {"plan": "MODEL|CONFIG.yaml"}  # what a command takes before its flags, beside a YAML file
_LONGEST_CHOICES = 24  # characters of a list of choices beside its flag
_LINES = 2  # lines that a flag's text may take in --help
_RAGGED = 8  # characters that a line may lose because it breaks at words
_HELP_FLAGS = ("help", "help_all")
# Argparse takes a negative number with an exponent for a flag.
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)
_JSON = re.compile(r"\(JSON|as JSON|JSON config")  # in the help of a flag that takes JSON


class UsageError(ValueError):
    """An error in a command line or a configuration file."""


def parse(
    command: str,
    kinds: Sequence[Any],
    arguments: Sequence[str],
    aliases: Mapping[str, Alias] | None = None,
) -> tuple[Any, ...]:
    """Parses "[config.yaml] [--flag value ...]" into instances of the dataclasses ``kinds``.

    The first dataclass may name the flags that ``--help`` shows, in ``essentials``: a dict from the
    titles of groups to flags' names, separated by spaces. Without it, ``--help`` shows all.

    Flags win over the file, and both over the recipe that ``--recipe`` names, see
    :mod:`fastrl.tools.recipes`. Settings of other versions of TRL are taken as well, see
    :mod:`fastrl.eras`, and other libraries' names, see :mod:`fastrl.tools.commands.aliases`.

    Args:
        aliases: other names of settings; by default those of the command.

    Raises:
        UsageError: an unknown flag or setting, a value of the wrong type, a missing setting.
        ValueError: a setting of another version that is not honoured, an alias that is refused, a
            setting by two names with two values, or what a dataclass refuses.
        SystemExit: after ``--help`` or ``--help-all``, with 0.
    """
    parser = make_parser(command, kinds)
    actions = {n: a for n, a in _actions(parser).items() if n not in _HELP_FLAGS}
    spellings = {**_spellings(actions), **actions}
    words = Words(
        aliases_of(command) if aliases is None else aliases,
        {name: action.dest for name, action in spellings.items()},
    )
    for name, alias in words.aliases.items():
        if alias.setting:
            vars(actions[alias.base]).setdefault("also", []).append((name, alias.key))
    flags, words_left = [], list(arguments)
    of_eras = dict.fromkeys(name for kind in kinds for name in eras_of(kind))
    of_aliases = {name: actions.get(alias.base) for name, alias in words.aliases.items()}
    names = {**of_eras, **of_aliases, **spellings}
    recipe = early_value("recipe", words_left) if "recipe" in actions else None
    if recipe is not None:
        preset = recipe_of(command, recipe)
        settings = yaml_settings(preset.path)
        if command == "plan":  # a plan needs no data and no reward
            settings = {name: value for name, value in settings.items() if name in names}
            settings |= {"method": planned_method(preset), "gpu_gib": preset.gpu_gib, **preset.plan}
        flags = words.read(_flags_of(preset.path, settings, names), place=f"recipe {recipe}: ")
    if words_left and not words_left[0].startswith("-"):
        path = Path(words_left.pop(0))
        flags += words.read(_flags_of(path, yaml_settings(path), names), place=f"{path}: ")
    for word in words_left:
        name = word.partition("=")[0]
        if name[:1] == "-" and name[1:].replace("-", "_") in {*spellings, *words.aliases}:
            raise UsageError(f"unknown argument {name!r}: did you mean '-{name}'?")
    flags += words.read(words_left)
    with flags_taken(kinds, [*flags, *words.objects()]) as todays:
        *parsed, unknown = parser.parse_args_into_dataclasses(
            todays, return_remaining_strings=True, look_for_args_file=False
        )
    if unknown:
        name = unknown[0].partition("=")[0].replace("_", "-")
        # Other libraries' names share words with many flags: suggest only very similar ones.
        near = difflib.get_close_matches(name, [*map(_as_flag, words.aliases)], n=1, cutoff=0.85)
        raise UsageError(unknown_name("argument", name, [*map(_as_flag, sorted(actions)), *near]))
    words.check(parsed)
    return tuple(parsed)


def make_parser(command: str, kinds: Sequence[Any]) -> Any:
    """The parser of a command's dataclasses, see :func:`parse`."""
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            # argparse shows all spellings of a flag, --batch_size/--batch-size: keep one.
            short = re.sub(r"--\w+/(--[\w-]+)(?:/--[\w-]+)*", r"\1", message)
            raise UsageError(f"{short} (see fastrl {command} --help)")

    parser = Parser(
        list(kinds),
        prog=f"fastrl {command}",
        usage=f"fastrl {command} {_FIRST.get(command, '[CONFIG.yaml]')} [--flag value ...]",
        formatter_class=_AllFlags,
        allow_abbrev=False,
        add_help=False,
    )
    parser._negative_number_matcher = _NEGATIVE
    essentials = getattr(kinds[0], "essentials", None) if kinds else None
    names = ["-h", "--help", *([] if essentials else ["--help-all"])]
    parser.add_argument(*names, action=_Help, essentials=essentials, help="Show this help.")
    if essentials:
        parser.add_argument("--help-all", action=_Help, help="Show all flags.")
    return parser


def own_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a command without dataclasses of settings; its errors are :class:`UsageError`.

    Args:
        description: the docstring of the command's module, "``fastrl COMMAND``: what it does."
    """

    class Parser(argparse.ArgumentParser):
        def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
            parsed, unknown = self.parse_known_args(args, namespace)
            if unknown:
                name = unknown[0].partition("=")[0]
                flags = [x for x in self._option_string_actions if x.startswith("--")]
                self.error(unknown_name("argument", name, flags))
            return parsed

        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message} (see fastrl {command} --help)")

    text = (description or "").partition(": ")[2].partition("\n")[0]
    return Parser(prog=f"fastrl {command}", description=text[:1].upper() + text[1:])


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The parser's actions by setting; of a boolean's two actions the one without --no-."""
    return {action.dest: action for action in reversed(parser._actions)}


def _spellings(actions: Mapping[str, argparse.Action]) -> dict[str, argparse.Action]:
    """The parser's actions by all option names of settings."""
    return {
        option[2:].replace("-", "_"): action
        for action in actions.values()
        for option in action.option_strings
        if action.nargs != 0  # not --no-...
    }


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def unknown_name(kind: str, name: str, names: Iterable[str]) -> str:
    """An error message that suggests the most similar known name."""
    likeness = 0.6 if kind == "command" else 0.7  # a wrong suggestion is worse than none
    return f"unknown {kind} {name!r}{did_you_mean(name.lower(), names, likeness)}"


def yaml_settings(path: Path) -> dict[Any, Any]:
    """The settings that a YAML file holds, by name.

    Raises:
        UsageError: the file is not there, is not named .yaml or .yml, or is no YAML of settings.
    """
    import yaml

    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"unexpected argument {str(path)!r}: a configuration ends in .yaml")
    if not path.exists():
        raise UsageError(f"there is no file {path}{did_you_mean_path(path)}")

    class Loader(yaml.SafeLoader):
        """Reads booleans as YAML 1.2 does: no is text, as in "save_strategy: no"."""

        yaml_implicit_resolvers = {  # noqa: RUF012 - not a field, as in SafeLoader
            first: [(tag, form) for tag, form in forms if first in "tTfF" or "bool" not in tag]
            for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [str(key.value).replace("-", "_") for key, _ in node.value]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    line = node.value[i][0].start_mark.line + 1
                    raise UsageError(f"{path} sets {key!r} twice (line {line}): leave one out")
            return super().construct_mapping(node, deep)

    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: save it as UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is not None and mark.buffer is not None and mark.buffer[mark.pointer] == "\t":
            raise UsageError(
                f"{path} has a tab in line {mark.line + 1}, where YAML takes spaces alone"
            ) from error
        raise UsageError(f"{path} is not valid YAML: {error}") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UsageError(f"{path} must hold settings, one 'name: value' per line")
    return settings


def early_value(name: str, arguments: Sequence[str]) -> str | None:
    """The value of a setting by which the other settings are parsed, from the last of its flags or
    the YAML file; None where it is not set."""
    setting = None
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        setting = yaml_settings(Path(arguments[0])).get(name)
    for word, value in zip_longest(arguments, arguments[1:]):
        flag, equals, behind = word.partition("=")
        if flag == f"--{name}" and (equals or not (value or "--").startswith("--")):
            setting = behind if equals else value
    return None if setting is None else str(setting)


def recipe_of(command: str, name: str) -> Recipe:
    """The recipe ``name``.

    Raises:
        UsageError: an unknown recipe, or one of another command; ``plan`` takes all recipes.
    """
    names = recipes()
    if name not in names:
        raise UsageError(f"{unknown_name('recipe', name, names)} (see fastrl recipes)")
    recipe = names[name]
    if command not in (recipe.command, "plan"):
        raise UsageError(
            f"the recipe {name} is of another command: fastrl {recipe.command} --recipe {name}"
        )
    return recipe


def planned_method(recipe: Recipe) -> str:
    """The method of a recipe's plan: its command, or its loss of preference learning."""
    return str(yaml_settings(recipe.path).get("loss", recipe.command))


def _flags_of(
    path: Path, settings: Mapping[Any, Any], actions: Mapping[str, argparse.Action | None]
) -> list[str]:
    """A YAML file's settings as flags, so that both are parsed alike. ``actions`` has each
    name's action; None for a setting of another version of TRL, or for a refused alias."""
    flags = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in actions:
            raise UsageError(f"{path}: {unknown_name('setting', name, actions)}")
        if value is not None:  # null leaves the default
            action = actions[name]
            flags += [f"--{name}={value}"] if action is None else _flag(path, name, action, value)
    return flags


def _flag(path: Path, name: str, action: argparse.Action, value: Any) -> list[str]:
    flag = f"--{name}"
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [flag, *map(str, value)]
    if isinstance(value, (dict, list)):
        if _kind(action) != "JSON":
            what = "a list" if isinstance(value, list) else "a mapping"
            raise UsageError(f"{path}: {name} takes one value ({_kind(action)}), not {what}")
        return [f"{flag}={json.dumps(value)}"]
    if action.nargs == 0:
        return [flag] if value else []
    return [f"{flag}={value}"]


class _Help(argparse.Action):
    def __init__(self, *, essentials: Any = None, **settings: Any):
        super().__init__(nargs=0, default=argparse.SUPPRESS, **settings)
        self.essentials = essentials

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        text = _brief(parser, self.essentials) if self.essentials else parser.format_help()
        print(text, end="", flush=True)
        parser.exit()


def _brief(parser: argparse.ArgumentParser, essentials: Mapping[str, str]) -> str:
    """The help of the flags that matter, in groups."""
    actions = _actions(parser)
    formatter = _FlagsThatMatter(prog=parser.prog)
    formatter.add_usage(parser.usage, [], [])
    for title, names in essentials.items():
        formatter.start_section(title)
        formatter.add_arguments([actions[name] for name in names.split()])
        formatter.end_section()
    count = len(actions) - len(_HELP_FLAGS)
    formatter.add_text(
        f"[...] is a flag's default. --help-all shows all {count} flags and says more of these. A "
        "YAML file may hold any of them as name: value, and --recipe names one of fastrl's (see "
        "fastrl recipes); flags beside it win."
    )
    return formatter.format_help()


class _AllFlags(argparse.HelpFormatter):
    """Shows flags with dashes (underscores work as well), their kinds, choices and defaults."""

    all_names = True  # spellings of other libraries, too

    def _format_action_invocation(self, action: argparse.Action) -> str:
        also = [name for name, key in getattr(action, "also", ()) if not key and self.all_names]
        spellings = [flag for flag in action.option_strings if "_" not in flag]
        flags = ", ".join([*spellings, *map(_as_flag, also)])
        return flags if action.nargs == 0 else f"{flags} {_kind(action)}"

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.nargs == 0 and action.option_strings[0].startswith("--no"):
            return f"The same as --{action.dest.replace('_', '-')} false."
        parts = [action.help or ""]
        parts += [f"{_as_flag(x)} is its {key}." for x, key in _keys(action)]
        if action.choices and not _are_short(action.choices):
            parts.append(f"One of: {', '.join(map(_as_text, action.choices))}.")
        if action.required:
            parts.append("(required)")
        elif _has_default(action):
            parts.append(f"(default: {_as_text(action.default)})".replace("%", "%%"))
        return " ".join(parts)


class _FlagsThatMatter(_AllFlags):
    """Shows as much of each flag's help as fits in two lines: all, its first sentence or clause."""

    all_names = False

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str:
        end = ""
        if action.required:
            end = " (required)"
        elif _has_default(action):
            end = f" [{_as_text(action.default)}]".replace("%", "%%")
        text = (action.help or "").rstrip(".")
        line = self._width - self._max_help_position
        room = _LINES * line - len(end) - _RAGGED
        for stop in (". ", "; ", ": "):
            if len(text) <= room:
                return text + end
            text = text.split(stop)[0]
        if callable(getattr(action.help, "choices", ())):
            return text + end  # a function would read files, or import the kernels, to name them
        with_choices = f"{text}: {', '.join(_choices_of(action))}"  # the choices were cut off
        fits = _choices_of(action) and len(with_choices) <= room
        return (with_choices if fits else text) + end


def _keys(action: argparse.Action) -> list[tuple[str, str]]:
    """Names of other libraries for keys of a JSON setting."""
    return [(name, key) for name, key in getattr(action, "also", ()) if key]


def _kind(action: argparse.Action) -> str:
    """The kind of value that a flag takes, for its help."""
    if action.choices:
        short = _are_short(action.choices)
        return "|".join(map(_as_text, action.choices)) if short else "name"
    kind: Any = action.type
    if _is_bool(action):
        return "true|false"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(_as_text(member) for member in kind)
    if get_origin(kind) is dict or _JSON.search(action.help or ""):
        return "JSON"
    return _KINDS.get(kind, "value") + (" ..." if action.nargs in ("+", "*") else "")


def _is_bool(action: argparse.Action) -> bool:
    return action.nargs == 0 or getattr(action.type, "__name__", "") == "string_to_bool"


def _are_short(choices: Iterable[Any]) -> bool:
    return len("|".join(map(_as_text, choices))) <= _LONGEST_CHOICES


def spellings_of(command: str, action: argparse.Action) -> list[str]:
    """A flag's names, those of other libraries too, with dashes."""
    names = [x for x in action.option_strings if x.startswith("--") and "_" not in x]
    also = [
        name for name, alias in aliases_of(command).items() if names and alias.base == action.dest
    ]
    return [*names, *map(_as_flag, also)]


def _choices_of(action: argparse.Action) -> list[str]:
    choices: Any = action.choices or getattr(action.help, "choices", ())
    return list(map(_as_text, choices() if callable(choices) else choices))


def values_of(action: argparse.Action) -> list[str] | None:
    """The values that may follow a flag: [] for a number or JSON, of which none can be listed; None
    for a text, which may be a path, and for a flag without a value."""
    if choices := _choices_of(action):
        return choices
    if action.nargs == 0:
        return None  # the next word is no value of it
    kind = _kind(action)
    if "|" in kind:
        return kind.split("|")
    return None if kind.startswith("text") else []


def _has_default(action: argparse.Action) -> bool:
    return action.nargs != 0 and action.default not in (None, "", {}, [], argparse.SUPPRESS)


def _as_text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value)
