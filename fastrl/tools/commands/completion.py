"""``fastrl completion``: prints what completes commands, flags, choices and paths in a shell.

The script holds all flags itself, so that nothing is imported as it completes.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from fastrl.tools.commands import COMMANDS
from fastrl.tools.commands.flags import UsageError, make_parser, spellings_of, values_of

SHELLS = ("bash", "zsh", "fish")
HELP = """\
usage: fastrl completion bash|zsh|fish

Prints what completes fastrl's commands, flags, choices and paths. Run one of
these, and again after each update of fastrl:

  fastrl completion bash > ~/.local/share/bash-completion/completions/fastrl
  fastrl completion zsh > ~/.fastrl-completion.zsh   # source it in ~/.zshrc
  fastrl completion fish > ~/.config/fish/completions/fastrl.fish
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
# "--flag=VALUE" is three words for bash. Behind a flag that takes a number nothing is offered;
# behind a flag that takes a text, and where no flag stands, files are.
_BASH = """\
_fastrl() {
  local now="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" flags="" values=" "
  [ "$now" = "=" ] && now=""
  [ "$before" = "=" ] && before="${COMP_WORDS[COMP_CWORD-2]}"
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "COMMANDS" -- "$now"))
    return
  fi
  case "${COMP_WORDS[1]}" in
FLAGS  esac
  case "${COMP_WORDS[1]}:${before//_/-}" in
VALUES  esac
  case "$now" in
    -*) COMPREPLY=($(compgen -W "$flags" -- "${now//_/-}")) ;;
    *)
      if [ "$values" = " " ]; then
        compopt -o filenames 2>/dev/null
        local IFS=$'\\n'
        COMPREPLY=($(compgen -f -- "$now"))
      else
        COMPREPLY=($(compgen -W "$values" -- "$now"))
      fi ;;
  esac
}
complete -F _fastrl fastrl
"""


class Flag(NamedTuple):
    names: list[str]
    values: list[str] | None  # None: paths; []: nothing can be offered


def run_completion(arguments: Sequence[str]) -> None:
    """Prints the completion script of a shell; raises UsageError for another word."""
    if list(arguments) in (["--help"], ["-h"]):
        print(HELP, end="")
        return
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise UsageError(f"name a shell: fastrl completion {'|'.join(SHELLS)}")
    flags = flags_by_command()
    if arguments[0] == "fish":
        print(fish(flags), end="")
    else:
        print((_ZSH if arguments[0] == "zsh" else "") + bash(flags), end="")


def flags_by_command() -> dict[str, list[Flag]]:
    """The flags of all commands; for ``plan`` those of a plan of PPO."""
    flags = {}
    for command, (module, kinds, _) in COMMANDS.items():
        home = importlib.import_module(f"fastrl.{module}")
        parser: argparse.ArgumentParser | None = None
        if command == "plan":
            from fastrl.tools.commands.ppo import PPOFlags

            parser = make_parser(command, [home.PlanJob, PPOFlags])
        elif kinds:
            parser = make_parser(command, [getattr(home, kind) for kind in kinds])
        elif hasattr(home, "make_parser") and command != "completion":
            parser = home.make_parser()
        flags[command] = [
            Flag(names, values_of(action))
            for action in (parser._actions if parser else ())
            if (names := spellings_of(command, action))
        ]
    return flags


def bash(flags: dict[str, list[Flag]]) -> str:
    """The script for bash."""
    names, values = "", []
    for command, options in flags.items():
        flag_names = " ".join(name for flag in options for name in flag.names)
        names += f'    {command}) flags="{flag_names}" ;;\n'
        for flag in options:
            if flag.values is not None:
                cases = "|".join(f"{command}:{name}" for name in flag.names)
                values.append(f"    {cases}) values={shlex.quote(' '.join(flag.values))} ;;\n")
    values.append(f"    completion:*) values={shlex.quote(' '.join(SHELLS))} ;;\n")
    script = _BASH.replace("COMMANDS", " ".join(flags))
    return script.replace("FLAGS", names).replace("VALUES", "".join(values))


def fish(flags: dict[str, list[Flag]]) -> str:
    """The script for fish."""
    lines = [f"complete -c fastrl -f -n __fish_use_subcommand -a {shlex.quote(' '.join(flags))}"]
    for command, options in flags.items():
        start = f"complete -c fastrl -n '__fish_seen_subcommand_from {command}'"
        for flag in options:
            value = (
                " -r -F" if flag.values is None else f" -x -a {shlex.quote(' '.join(flag.values))}"
            )
            lines += [f"{start} -l {name[2:]}{value}" for name in flag.names]
    lines.append(
        "complete -c fastrl -f -n '__fish_seen_subcommand_from completion' -a "
        f"{shlex.quote(' '.join(SHELLS))}"
    )
    return "\n".join(lines) + "\n"
