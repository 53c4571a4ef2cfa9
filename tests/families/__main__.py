"""Runs every family of causal language models that can be built tiny through every kind of batch.

python -m tests.families                 all of them; PART=WORD: one twelfth
python -m tests.families llama mamba2    these
python -m tests.families --write         all, and writes docs/families.md
"""

import os
import sys

import torch
import transformers

from tests.families import page
from tests.families.checks import CHECKS, FAILED, SILENT, Outcome, outcome
from tests.families.tiny import names, tiny
from tests.part import drawn

_PARTS = 12


def main(arguments: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    given = [x for x in arguments if not x.startswith("--")]
    part = drawn(range(_PARTS), "families")
    chosen = given or [x for i, x in enumerate(names()) if i % _PARTS in part]
    found: dict[str, dict[str, Outcome]] = {}
    unbuilt: dict[str, str] = {}
    for name in chosen:
        try:
            tiny(name)
        except Exception as error:
            unbuilt[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            continue
        made = {title: outcome(name, check) for title, check in CHECKS.items()}
        found[name] = {title: each for title, each in made.items() if each is not None}
        told = ", ".join(f"{title}: {x.kind} {x.why}".strip() for title, x in found[name].items())
        print(f"{name}: {told}", flush=True)
    wrong = [
        f"{name}, {title}: {x.kind} {x.why}"
        for name, row in found.items()
        for title, x in row.items()
        if x.kind in (SILENT, FAILED)
    ]
    if "--write" in arguments:
        page.write(found, unbuilt)
    wrong += [f"{name}: docs/families.md says something else" for name in page.stale(found)]
    print(f"{len(found)} families, {len(unbuilt)} not built, {len(wrong)} silent, failed or stale")
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    raise SystemExit(main(sys.argv[1:]))
