"""The notebooks as they are committed: run from top to bottom, small, and of no machine.

`python -m tests.notebooks` runs them.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import FOLDER, outputs, texts

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BYTES = 300 * 1024
_PATH = re.compile(r"(?<![\w.:/<])/(?:tmp|home|root|work|usr|opt|var|mnt|Users)/|[A-Z]:\\")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@each
def test_it_is_a_notebook_as_the_format_has_it(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(read(path))


@each
def test_its_cells_ran_one_after_the_other_without_an_error(path: Path) -> None:
    notebook = read(path)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for output in outputs(notebook):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr", output
    pictures = [x for x in outputs(notebook) if "image/png" in x.get("data", {})]
    assert pictures, "a notebook shows its curves"


@each
def test_it_is_small_and_tells_nothing_of_the_machine_it_ran_on(path: Path) -> None:
    notebook = read(path)
    assert path.stat().st_size < BYTES
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    for text in ["".join(cell["source"]) for cell in notebook["cells"]]:
        assert not _PATH.search(text), text
    for text in itertools.chain(*map(texts, outputs(notebook))):
        assert not re.search(rf"{_PATH.pattern}|://|Warning|warning:", text), text


@each
def test_its_links_lead_somewhere(path: Path) -> None:
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            for link in re.findall(r"\]\(([^)#]+)", "".join(cell["source"])):
                assert (path.parent / link).is_file(), link


def test_the_documents_name_every_notebook() -> None:
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\(notebooks/(\w+)\.md\)", page)) == [x.stem for x in NOTEBOOKS]
