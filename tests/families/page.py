"""The table of docs/families.md."""

from collections.abc import Mapping
from pathlib import Path

import transformers

from tests.families.checks import CHECKS, EQUAL, FAILED, REFUSED, SILENT, TOLD, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
_BEGIN, _END = "<!-- families -->\n", "<!-- end of families -->"
_SIGNS = {EQUAL: "=", TOLD: "warned", REFUSED: "refused", SILENT: "**wrong**", FAILED: "**fails**"}
_OF_VERSION = f"transformers {transformers.__version__}: "
Found = Mapping[str, Mapping[str, Outcome]]


def write(found: Found, unbuilt: Mapping[str, str]) -> None:
    """Writes what was found of all families into the page."""
    front, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(front + _BEGIN + _table(found, unbuilt) + _END + rest.partition(_END)[2])


def stale(found: Found) -> list[str]:
    """Families of which the page says something else; none where it is of another transformers."""
    page = PAGE.read_text()
    if _OF_VERSION not in page:
        return []
    return [name for name, row in found.items() if _row(name, row) not in page]


def _row(name: str, row: Mapping[str, Outcome]) -> str:
    cells = (_SIGNS[row[title].kind] if title in row else "" for title in CHECKS)
    return f"| `{name}` | {' | '.join(cells)} |\n"


def _table(found: Found, unbuilt: Mapping[str, str]) -> str:
    return "".join(
        [
            f"{_OF_VERSION}{len(found)} families.\n\n",
            f"| family | {' | '.join(CHECKS)} |\n",
            f"| --- |{' --- |' * len(CHECKS)}\n",
            *(_row(name, row) for name, row in found.items()),
            f"\nNot built tiny: {', '.join(f'`{name}`' for name in unbuilt) or 'none'}.\n",
        ]
    )
