"""``fastrl recipes``: settings of whole runs that come with fastrl, listed, printed or copied."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastrl.run.files import write_file
from fastrl.run.terminal import plain, run_console
from fastrl.tools.commands.flags import own_parser, planned_method, recipe_of, yaml_settings
from fastrl.tools.recipes import Recipe, recipes

if TYPE_CHECKING:
    from rich.table import Table


def run_recipes(arguments: Sequence[str]) -> int:
    """Lists, prints or copies recipes; raises ValueError if a name is unknown or a file exists."""
    parser = make_parser()
    flags = parser.parse_args(list(arguments))
    if flags.name is None:
        if flags.write is not None:
            parser.error("--write copies a recipe: name it")
        console = run_console()
        console.print(table())
        console.print("run one: fastrl COMMAND --recipe NAME; flags beside it win", highlight=False)
        return 0
    recipe = recipe_of("plan", flags.name)
    if flags.write is None:
        print(recipe.text, end="")
        return 0
    if Path(flags.write).exists():
        raise ValueError(f"{flags.write} is there: name a new file")
    write_file(Path(flags.write), recipe.text)
    message = f"saved: {flags.write}; fastrl {recipe.command} {flags.write} runs it"
    run_console().print(plain(message), soft_wrap=True)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = own_parser("recipes", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="Print the YAML of this recipe.")
    parser.add_argument("--write", metavar="FILE", help="Copy the recipe to a new file.")
    return parser


def table() -> Table:
    """All recipes as a table for a terminal."""
    from rich.table import Table

    from fastrl.trainers.plan.report import gib

    listed = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    listed.add_column(no_wrap=True, style="bold")
    listed.add_column()
    for recipe in recipes().values():
        memory = f"{gib(sum(recipe.planned.values()))} of " if recipe.planned else ""
        model = yaml_settings(recipe.path)["model"]
        text = f"{recipe.what}\n{method_of(recipe)}; {model}; {memory}{recipe.device}"
        listed.add_row(recipe.name, plain(text))
    return listed


def method_of(recipe: Recipe) -> str:
    """The recipe's command, preference loss and adapter, and whether its base has four bits."""
    settings = yaml_settings(recipe.path)
    method = planned_method(recipe)
    if method != recipe.command:
        online = str(settings.get("task", "")).startswith("online")
        method = f"{recipe.command}: {'online ' * online}{method}"
    if "lora_r" in settings:
        method += f", LoRA {settings['lora_r']}"
    return f"{method}, four bits" if settings.get("load_in_4bit") else method
