"""``fastrl migrate``: what becomes of a program that was written for TRL, without running it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastrl.compat.programs.migrate import (
    AS_IT_IS,
    THERE,
    UNKNOWN,
    Outcome,
    read_config,
    read_program,
    rewritten,
)
from fastrl.compat.programs.names import read_source
from fastrl.eras import REFUSED
from fastrl.run.files import free_name, write_file
from fastrl.run.terminal import plain, run_console
from fastrl.tools.commands.flags import own_parser, yaml_settings

# Why lines are left as they were.
_LEFT = {
    "only fastrl run-trl runs them": (THERE,),
    "fastrl refuses them or has nothing of that name": (REFUSED, UNKNOWN),
}


def run_migrate(arguments: Sequence[str]) -> int:
    """Prints what fastrl makes of TRL's names and settings (``--all``: of those that stay, too) in
    a program and in YAML files that its parser reads; ``--write`` makes the program's safe changes.

    Returns 1 where fastrl refuses something or lacks it, else 0. Raises FileNotFoundError without
    the program, and ValueError for one that does not parse.
    """
    flags = make_parser().parse_args(list(arguments))
    path = Path(flags.script)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {path}")
    try:
        source = read_source(path)
        findings = read_program(source)
    except SyntaxError as error:
        raise ValueError(f"{path} does not parse: line {error.lineno}: {error.msg}") from error
    read = {path: findings}
    for config in map(Path, flags.config):
        yaml_settings(config)  # raises UsageError for a file without settings
        read[config] = read_config(config.read_text(encoding="utf-8"), source)
    _print(read, flags.all)
    if flags.write:
        _write(path, source, findings)
    return 1 if any(x.kind in ("refused", UNKNOWN) for each in read.values() for x in each) else 0


def make_parser() -> argparse.ArgumentParser:
    parser = own_parser("migrate", __doc__)
    parser.add_argument("script", metavar="SCRIPT", help="A Python program that imports trl.")
    parser.add_argument(
        "config",
        metavar="CONFIG.yaml",
        nargs="*",
        help="Settings that the program's parser reads (--config), which are read too.",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="Change what is safe: imports, names, and settings that change nothing. The program "
        "as it was is kept beside it.",
    )
    parser.add_argument("--all", action="store_true", help="Show what stays as it is, too.")
    return parser


def _print(read: Mapping[Path, Sequence[Outcome]], in_full: bool) -> None:
    console, left = run_console(), 0
    for path, findings in read.items():
        shown = [x for x in findings if in_full or x.kind != AS_IT_IS]
        left += len(findings) - len(shown)
        for x in shown:
            text = f": {x.text}" if x.text else ""
            console.print(plain(f"{path}:{x.line}: {x.name}: {x.kind}{text}"), soft_wrap=True)
    if not in_full:
        console.print(f"{left} more stay as they are: --all shows them")


def _write(path: Path, source: str, findings: list[Outcome]) -> None:
    console, changed = run_console(), rewritten(source, findings)
    if changed == source:
        console.print("nothing to change")
    else:
        kept = free_name(path, "before")
        write_file(kept, source)
        write_file(path, changed)
        console.print(plain(f"written: {path}; as it was: {kept}"), soft_wrap=True)
    for why, kinds in _LEFT.items():
        left = sorted({x.line for x in findings if x.kind in kinds})
        if left:
            lines = f"line{'s'[: len(left) > 1]} {', '.join(map(str, left))} of the old program"
            note = f"left, as {why}: {lines}; what to write is said above"
            console.print(note, soft_wrap=True)
