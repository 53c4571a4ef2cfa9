"""DeepSpeed: ZeRO-3 is refused with a file that accelerate takes, ZeRO-2 trains as DDP does."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from fastrl import SFTConfig
from tests.patience import PATIENCE

ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


def file_of(error: pytest.ExceptionInfo[ValueError], folder: Path) -> Any:
    """What accelerate makes of the file that an error prints."""
    _, text = str(error.value).split("fsdp2.yaml:\n\n")
    path = folder / "fsdp2.yaml"
    path.write_text(text)
    return load_config_from_file(str(path))


@pytest.mark.parametrize(
    "how", ["dict", "text", "base64", "file", "launched", "launched with a file"]
)
def test_zero3_is_refused_with_a_file_for_fsdp2(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, given = tmp_path / "ds.json", {}
    path.write_text(json.dumps(ZERO3 | {"bf16": {"enabled": True}}))
    monkeypatch.setenv("WORLD_SIZE", "1")
    if how.startswith("launched"):
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    if how == "launched":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    elif how == "launched with a file":
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    else:
        asked = {"dict": json.loads(path.read_text()), "text": path.read_text(), "file": str(path)}
        long = json.dumps(asked["dict"], indent=99)  # no path is as long
        asked["base64"] = base64.urlsafe_b64encode(long.encode()).decode()
        given = {"deepspeed": asked[how]}
    with pytest.raises(ValueError, match="ZeRO-3 is not supported: take ZeRO-2, or FSDP2") as error:
        SFTConfig(str(tmp_path), use_cpu=True, report_to="none", **given)
    found = file_of(error, tmp_path)
    assert (found.distributed_type, found.mixed_precision, found.num_processes) == (
        "FSDP",
        "bf16",
        1,
    )
    assert (found.fsdp_config["fsdp_version"], found.fsdp_config["fsdp_offload_params"]) == (
        2,
        True,
    )


PROGRAM = """\
import sys, torch
from datasets import Dataset
from fastrl import SFTConfig, SFTTrainer
from tests import tiny_models
from tests.golden import tiny

kind, folder = sys.argv[1:]
zero = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
zero |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
given = {"deepspeed": zero} if kind == "zero2" else {}
args = SFTConfig(
    folder, max_steps=2, learning_rate=1e-2, per_device_train_batch_size=2, use_cpu=True,
    report_to="none", save_strategy="no", disable_tqdm=True, **given,
)
data = Dataset.from_list([{"text": f"w{3 + i} w4 w5"} for i in range(8)])
trainer = SFTTrainer(
    tiny_models.language_model("llama"), args=args, train_dataset=data,
    processing_class=tiny.tokenizer(),
)
trainer.train()
state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
if trainer.accelerator.is_main_process:
    torch.save(state, f"{folder}/{kind}.pt")
"""


def test_zero2_has_the_weights_of_ddp(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    found = []
    for kind in ("ddp", "zero2"):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        command = [*launch, "--standalone", str(script), kind, str(tmp_path)]
        path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, timeout=PATIENCE)
        found.append(torch.load(tmp_path / f"{kind}.pt"))
    assert all(torch.allclose(x, found[1][name], atol=1e-6) for name, x in found[0].items())
