"""Scripts read the configurations from command lines, by transformers' parser or TRL's."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

import fastrl

NAMES = ("GRPOConfig", "RLOOConfig", "DPOConfig", "KTOConfig", "SFTConfig", "RewardConfig")
FLAGS = ["--use_cpu", "--bf16", "false", "--report_to", "none", "--learning_rate", "0.5"]


def parsed(parser: Any, folder: Path, *flags: str) -> Any:
    return parser.parse_args_into_dataclasses(["--output_dir", str(folder), *FLAGS, *flags])[0]


@pytest.mark.parametrize("name", NAMES)
def test_flags_make_the_configuration(name: str, tmp_path: Path) -> None:
    config = getattr(fastrl, name)
    found = parsed(HfArgumentParser(config), tmp_path)
    expected = config(str(tmp_path), use_cpu=True, bf16=False, report_to="none", learning_rate=0.5)
    for field in dataclasses.fields(config):
        if field.name not in ("logging_dir", "accelerator_config"):
            assert getattr(found, field.name) == getattr(expected, field.name), field.name


def test_lists_and_json_are_read(tmp_path: Path) -> None:
    flags = ["--reward_weights", "0.5", "2", "--generation_kwargs", '{"min_new_tokens": 2}']
    found = parsed(HfArgumentParser(fastrl.GRPOConfig), tmp_path, *flags)
    assert found.reward_weights == [0.5, 2.0]
    assert found.generation_arguments["min_new_tokens"] == 2


def test_a_flag_that_is_not_honoured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eos_token='x' is not supported by GRPOConfig: set eos"):
        parsed(HfArgumentParser(fastrl.GRPOConfig), tmp_path, "--eos_token", "x")


def test_trls_parser_reads_them_too(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    (tmp_path / "run.yaml").write_text("num_generations: 4\nbeta: 0.1\n")
    flags = ["--config", str(tmp_path / "run.yaml"), "--output_dir", str(tmp_path), *FLAGS]
    parser = trl.TrlParser((fastrl.GRPOConfig, trl.ModelConfig))
    found, model = parser.parse_args_and_config([*flags, "--model_name_or_path", "here"])
    assert (found.num_generations, found.beta, found.learning_rate) == (4, 0.1, 0.5)
    assert model.model_name_or_path == "here"
