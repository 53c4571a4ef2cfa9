"""The terminal, which texts of models and data sets must not control."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Control characters, C0 and C1: by ESC, or by the one character CSI, a text could set colours.
_CONTROLS = {
    code: repr(chr(code))[1:-1]
    for code in (*range(32), *range(127, 160))
    if chr(code) not in "\n\t"
}


def visible(text: str) -> str:
    r"""The text with control characters other than newline and tab escaped, such as ``\x1b``."""
    return text.translate(_CONTROLS)


def plain(text: str) -> Text:
    """A text for rich, as it is: brackets are no markup, control characters are visible."""
    from rich.text import Text

    return Text(visible(text))


def run_console() -> Console:
    """A console as wide as its terminal; without one, as COLUMNS says, or 100 columns."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdecimal():
        return console
    return Console(highlight=False, width=100)


def activation() -> str:
    """A shell command that puts this environment's programs on the path, with a newline and the
    indent of the next command; "" where ``fastrl`` is on the path, or in no environment."""
    script = Path(sys.prefix, "bin", "activate")
    if shutil.which("fastrl") or not script.is_file():
        return ""
    if script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    return f"source {shlex.quote(str(script))}\n  "
