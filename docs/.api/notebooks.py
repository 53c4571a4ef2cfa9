"""Pages of the notebooks, for the site: `python docs/.api/notebooks.py` writes docs/notebooks/.

Git does not keep them: a notebook is its own source.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "notebooks"


def page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """Of a notebook its Markdown, and its pictures by the names that it gives them."""
    pictures: dict[str, bytes] = {}

    def parts() -> Iterator[str]:
        heading = name
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                heading = ([heading] + re.findall(r"^#+ (.+)", source, re.MULTILINE))[-1]
                links = re.sub(r"\]\(\.\./\.\./docs/", "](../", source)
                yield re.sub(r"\]\((\w+)\.ipynb", r"](\1.md", links)
                continue
            yield f"```python\n{source.removeprefix('%%capture').lstrip()}\n```"
            for output in cell["outputs"]:
                data = output.get("data", {})
                if "image/png" in data:
                    picture = f"{name}_{len(pictures)}.png"
                    pictures[picture] = base64.b64decode(data["image/png"])
                    yield f"![{heading}: figure {len(pictures)}]({picture})"
                else:
                    text = "".join(output.get("text") or data["text/plain"])
                    yield f"```text\n{text.rstrip()}\n```"

    return "\n\n".join(parts()) + "\n", pictures


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        text, pictures = page(json.loads(path.read_text(encoding="utf-8")), path.stem)
        (PAGES / f"{path.stem}.md").write_text(text, encoding="utf-8")
        for name, picture in pictures.items():
            (PAGES / name).write_bytes(picture)
