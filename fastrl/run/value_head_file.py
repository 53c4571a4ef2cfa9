"""The file of a value head: other libraries load the language model's weights beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fastrl.run.files import write_file

if TYPE_CHECKING:
    from torch import Tensor

HEAD_NAME = "value_head.safetensors"
HEAD_PREFIX = "v_head."
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"


def forget_index(folder: Path) -> None:
    """Removes the index of an earlier model's shards from a folder where a whole model will be
    saved: transformers leaves the index there."""
    (folder / INDEX_NAME).unlink(missing_ok=True)


def write_value_head(folder: Path, head: dict[str, Tensor], *, of_adapter: bool) -> None:
    """Writes a value head beside weights just saved, or removes the head of an earlier save. With a
    head, a whole model in one file gets an index of its weights, which leaves the head out.

    Args:
        head: the head's weights, whose names begin with :data:`HEAD_PREFIX`; {} for no head.
        of_adapter: whether the weights are those of an adapter, not of a whole model.
    """
    weights, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if head:
        from safetensors.torch import save_file  # imports torch; model cards are written without

        save_file(head, folder / HEAD_NAME, metadata={"format": "pt"})
    else:
        (folder / HEAD_NAME).unlink(missing_ok=True)
    if index.exists() and not of_adapter:  # a single file would be read in place of the shards
        weights.unlink(missing_ok=True)
    if not weights.is_file():
        return
    sizes = _sizes(weights)
    if of_adapter:
        if all(name.startswith(HEAD_PREFIX) for name in sizes):  # an earlier save's head
            weights.unlink()
    elif head:
        # vLLM and SGLang load every *.safetensors that no index leaves out.
        record = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": dict.fromkeys(sorted(sizes), WEIGHTS_NAME),
        }
        write_file(index, json.dumps(record, indent=2) + "\n")


def _sizes(file: Path) -> dict[str, int]:
    """The size of each tensor in a safetensors file, in bytes, from the file's header."""
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    header.pop("__metadata__", None)
    return {name: x["data_offsets"][1] - x["data_offsets"][0] for name, x in header.items()}
