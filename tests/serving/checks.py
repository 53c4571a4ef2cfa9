"""Does a folder that a run has left hold what it trained: for transformers and PEFT, as it is and
merged, and for an upload?"""

import contextlib
import io
from pathlib import Path
from typing import Any

import peft
from torch import Tensor

from fastrl import cli
from tests.serving.folders import World, auto_class, is_adapter, logits, write_folder

CLOSE = 1e-4
Row = dict[str, Any]  # by what loads the folder: the largest difference, or what went wrong


def check(kind: str, world: World, folder: Path, merged: Path) -> tuple[Tensor, Row]:
    """Writes a folder and a merged one.

    Returns:
        the logits that the model had as it was saved, and what they differ by, by what loads it.
    """
    said = write_folder(kind, world, folder)
    plain = auto_class(kind)
    row: Row = {"transformers": difference(said, load(plain, folder))}
    adapts = is_adapter(folder)
    if adapts:
        own = getattr(peft, plain.__name__.replace("AutoModel", "AutoPeftModel"))
        row["PEFT"] = difference(said, load(own, folder))
    whole = () if adapts else ("--dtype", "float32")
    run("merge", folder, merged, *whole)
    row["merged"] = difference(said, load(plain, merged))
    row["push"] = pushed(folder)
    return said, row


def load(loader: Any, folder: Path) -> Tensor:
    """What the model says that a class of transformers or PEFT loads."""
    options = {"num_labels": 1} if "SequenceClassification" in loader.__name__ else {}
    return logits(loader.from_pretrained(folder, **options))


def difference(said: Tensor, found: Tensor) -> float:
    assert said.shape == found.shape, (said.shape, found.shape)
    return float((said - found).abs().max())


def pushed(folder: Path) -> str:
    """What a dry run says; "ok" where that names the weights, no pickle, and the repository in
    fastrl's card."""
    shown = run("push", folder, "me/tuned", "--dry-run")
    weights = [x.name for x in folder.glob("*.safetensors")]
    good = all(name in shown for name in weights) and ".bin" not in shown and "# me/tuned" in shown
    return "ok" if good else shown


def run(*words: Any) -> str:
    """What a command prints.

    Raises:
        AssertionError: it ends with an error.
    """
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = cli.main([str(x) for x in words])
    assert status == 0, out.getvalue()
    return out.getvalue()


def failed(found: Any) -> bool:
    """Whether an entry of a row is none that it should be."""
    return not found <= CLOSE if isinstance(found, float) else found != "ok"
