"""What our trainers override of transformers' Trainer beside its public methods, and when that
changes there.

`python -m tests.trainers.test_transformers_private` writes the record anew, once each change has
been looked at.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import fastrl
from fastrl.alignment import Trainer as AlignmentTrainer

RECORD = Path(__file__).with_name("transformers_private.json")
TRAINERS: tuple[Any, ...] = (
    fastrl.SFTTrainer, fastrl.RewardTrainer, fastrl.DPOTrainer, fastrl.KTOTrainer,
    fastrl.GRPOTrainer, fastrl.RLOOTrainer, AlignmentTrainer,
)  # fmt: skip


def overridden() -> dict[str, set[str]]:
    """Private methods of transformers' Trainer that classes of ours have, too; with these."""
    found: dict[str, set[str]] = {}
    for trainer in TRAINERS:
        for kind in trainer.__mro__[: trainer.__mro__.index(transformers.Trainer)]:
            for name in vars(kind):
                theirs = getattr(transformers.Trainer, name, None)
                if name.startswith("_") and not name.startswith("__") and callable(theirs):
                    found.setdefault(name, set()).add(kind.__name__)
    return found


def as_it_is() -> dict[str, Any]:
    """Of each of them its signature, and a hash of its source."""
    methods = {}
    for name in sorted(overridden()):
        method = getattr(transformers.Trainer, name)
        source = hashlib.sha256(inspect.getsource(method).encode()).hexdigest()[:16]
        methods[name] = {"signature": str(inspect.signature(method)), "source": source}
    return {"transformers": transformers.__version__, "methods": methods}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is to be looked at, in words."""
    found = []
    for name, method in now["methods"].items():
        known = before["methods"].get(name)
        if known is None:
            found.append(f"{name} is overridden, and was not")
        elif known["signature"] != method["signature"]:
            found.append(f"{name}{known['signature']} is {name}{method['signature']} now")
        elif known["source"] != method["source"]:
            found.append(f"{name} does something else than in {before['transformers']}")
    found += [
        f"{name} is not overridden any more" for name in before["methods"].keys() - now["methods"]
    ]
    return found


def test_what_is_overridden_is_as_it_was() -> None:
    before, now = json.loads(RECORD.read_text()), as_it_is()
    if before["transformers"] != now["transformers"]:
        before["methods"] = {
            name: {**method, "source": now["methods"].get(name, method)["source"]}
            for name, method in before["methods"].items()
        }  # of another version only what it is called with
    said = "\n".join(changes(before, now))
    assert not said, (
        f"transformers {now['transformers']}, recorded with {before['transformers']}:\n{said}\n"
        "Look at what each override relies on; then "
        "python -m tests.trainers.test_transformers_private"
    )


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("signature", "(self)", "_save_checkpoint(self) is _save_checkpoint(self, model"),
        ("source", "0", "_save_checkpoint does something else"),
    ],
)
def test_a_change_is_told(field: str, value: str, said: str) -> None:
    before = as_it_is()
    before["methods"]["_save_checkpoint"] = {**before["methods"]["_save_checkpoint"], field: value}
    (found,) = changes(before, as_it_is())
    assert found.startswith(said)


def test_there_are_no_more_of_them() -> None:
    assert len(overridden()) <= 8, overridden()


if __name__ == "__main__":
    RECORD.write_text(json.dumps(as_it_is(), indent=1) + "\n")
