"""bf16 autocast is the default where a device can, and whatever is said wins."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from fastrl.run import precision
from fastrl.run.precision import default_precision, kind_of_device, precision_for, said_outside
from fastrl.trainers.low_memory import settle_precision
from fastrl.trainers.ppo.setup import choose_precision
from tests import tiny_models
from tests.golden import tiny

FLOAT32 = {torch.float32}


@pytest.mark.parametrize(("device", "supports", "weights", "said", "chosen"), [
    ("cuda", True, FLOAT32, None, "bf16"),
    ("cuda", False, FLOAT32, None, None),
    ("cpu", True, FLOAT32, None, None),
    ("xpu", True, FLOAT32, None, None),
    ("cuda", True, {torch.bfloat16}, None, None),
    ("cuda", True, {torch.float32, torch.bfloat16}, None, None),
    ("cuda", True, {torch.float64}, None, None),
    ("cuda", True, FLOAT32, "no", None),
    ("cuda", True, FLOAT32, "fp16", None),
    ("cuda", True, FLOAT32, "bf16", None),
])  # fmt: skip
def test_the_decision(
    device: str, supports: bool, weights: set[torch.dtype], said: str | None, chosen: str | None
) -> None:
    assert default_precision(device, supports, weights, said) == chosen


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine as if its GPU could bf16, in a process that has no Accelerator yet."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr("accelerate.state.is_initialized", lambda: False)
    monkeypatch.setattr("fastrl.trainers.ppo.setup.kind_of_device", lambda settings: "cuda")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    return monkeypatch


def test_a_launcher_and_an_earlier_accelerator_are_heard(cuda: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    assert precision_for(model, "cuda", None) == "bf16"
    assert precision_for(model, "cuda", "no") is None
    cuda.setenv("ACCELERATE_MIXED_PRECISION", "no")  # accelerate launch without --mixed_precision
    assert said_outside() == "no"
    assert precision_for(model, "cuda", None) is None
    cuda.delenv("ACCELERATE_MIXED_PRECISION")
    cuda.setattr("accelerate.state.is_initialized", lambda: True)
    cuda.setattr(
        "accelerate.state.AcceleratorState", lambda: type("State", (), {"mixed_precision": "fp16"})
    )
    assert said_outside() == "fp16"
    assert precision_for(model, "cuda", None) is None


def test_ppo_records_what_was_chosen(cuda: pytest.MonkeyPatch) -> None:
    config = PPOConfig()
    assert choose_precision(config, nn.Linear(2, 2)) == "bf16"
    assert config.accelerator_kwargs == {"mixed_precision": "bf16"}
    assert config.to_dict()["accelerator_kwargs/mixed_precision"] == "bf16"
    config = PPOConfig(accelerator_kwargs={"mixed_precision": "no"})
    assert choose_precision(config, nn.Linear(2, 2)) is None
    assert config.accelerator_kwargs == {"mixed_precision": "no"}


@pytest.mark.parametrize(
    ("settings", "bf16"),
    [({}, True), ({"bf16": None}, True), ({"bf16": False}, False), ({"fp16": True}, False)],
)
def test_transformers_trainers_take_it_from_their_arguments(
    cuda: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], bf16: bool
) -> None:
    args = SFTConfig(output_dir=str(tmp_path), report_to="none", **settings)
    cuda.setattr(type(args), "device", torch.device("cuda"))
    if args.bf16 is None:
        settle_precision(args, nn.Linear(2, 2))
    assert args.bf16 is bf16
    assert (args.mixed_precision == "bf16") is bf16


@pytest.mark.parametrize("shared", ["bf16", "fp16", "no"])
def test_arguments_take_the_precision_of_an_earlier_accelerator(
    cuda: pytest.MonkeyPatch, tmp_path: Path, shared: str
) -> None:
    """Accelerate refuses another one, also where the arguments were made before."""
    args = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    cuda.setattr("accelerate.state.is_initialized", lambda: True)
    state = type("State", (), {"mixed_precision": shared})
    cuda.setattr("accelerate.state.AcceleratorState", state)
    assert not settle_precision(args, nn.Linear(2, 2))
    assert args.mixed_precision == shared
    assert (args.bf16, args.fp16) == (shared == "bf16", shared == "fp16")


def test_fp16_weights_in_fp16_mixed_precision_are_refused_at_construction(tmp_path: Path) -> None:
    model = tiny_models.language_model("gpt2").half()
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(model)
    config = PPOConfig(accelerator_kwargs={"mixed_precision": "fp16"})
    args = SFTConfig(output_dir=str(tmp_path), fp16=True, use_cpu=True, report_to="none")
    rows = [{"text": "w3 w4"}]
    with pytest.raises(ValueError, match="fp16 mixed precision needs float32 weights"):
        SFTTrainer(model, args, train_dataset=rows, tokenizer=tiny.tokenizer())
    AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match="fp16 mixed precision needs float32 weights"):
        PPOTrainer(config, policy, None, tiny.tokenizer())
    AcceleratorState._reset_state(True)


def test_a_cpu_keeps_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert precision_for(nn.Linear(2, 2), "cpu", None) is None
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(
        precision.torch.accelerator, "current_accelerator", lambda: torch.device("cuda")
    )
    assert kind_of_device({}) == "cpu"
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    assert kind_of_device({"cpu": True}) == "cpu"
    assert kind_of_device({}) == "cuda"
