"""What every trainer and command saves loads in transformers and PEFT, merges and uploads, with the
trainer's logits; `python -m tests.serving` has vLLM load it, too."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import tiny_models
from tests.serving.checks import check, failed
from tests.serving.folders import KINDS, World

pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_holds_what_was_trained(kind: str, world: World, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    _, row = check(kind, world, folder, tmp_path / "merged")
    assert not {name: found for name, found in row.items() if failed(found)}
    if "0.1" not in kind:
        for file in folder.glob("*model*.safetensors"):
            assert not any("v_head." in name for name in load_file(file)), file
