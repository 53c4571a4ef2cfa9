"""``--load-in-4bit``: every command trains an adapter on a four-bit base, and the next goes on."""

import json

import pytest

from fastrl import cli
from fastrl.models.load import load_language_model
from fastrl.models.quantised import BASE_FILE, is_quantised
from fastrl.rewards.functions import load_reward
from tests import tiny_models
from tests.commands import test_adapters as adapters
from tests.commands.test_adapters import moved, run, weights

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]
FOUR_BITS = {"load-in-4bit": "true", "lora-r": 2}

world = adapters.world


@pytest.fixture(scope="module")
def trained(world):
    """Folders of adapters on four-bit bases, by the command that trained them."""
    folders = {}
    for command in adapters.COMMANDS:
        folders[command] = world / f"four-bits-{command}"
        model = "lm" if command in ("sft", "reward") else folders["sft"]
        flags = FOUR_BITS if model == "lm" else {}
        assert run(command, world, folders[command], model=model, **flags) == 0
    return folders


@pytest.mark.parametrize("command", adapters.COMMANDS)
def test_each_command_trains_on_a_four_bit_base(command, world, trained):
    """That of ppo, grpo and align goes on from an adapter, whose folder says what its base was."""
    model = trained[command] / "model"
    assert (model / BASE_FILE).is_file()
    summary = json.loads((trained[command] / "run.json").read_text())
    assert summary["job"]["load_in_4bit"] is (True if command in ("sft", "reward") else None)
    if command in ("align", "ppo", "grpo"):
        before, after = weights(trained["sft"]), weights(trained[command])
        assert moved(before, after) == set(before)
        assert is_quantised(load_language_model(model))
    assert not any("absmax" in name for name in weights(trained[command]))


@pytest.mark.parametrize("command", ["ppo", "grpo"])
def test_rollouts_agree_with_the_forwards_that_audit_them(command, trained):
    rows = [json.loads(x) for x in (trained[command] / "metrics.jsonl").read_text().splitlines()]
    audits = [row["rollout/audit_max"] for row in rows if "rollout/audit_max" in row]
    assert audits
    assert max(audits) < 1e-4  # of fp32


def test_a_reward_models_adapter_judges_on_its_base(world, trained, tmp_path):
    assert is_quantised(load_reward(str(trained["reward"])).model)
    assert run("ppo", world, tmp_path / "ppo", model="lm", reward=trained["reward"], steps=1) == 0


def test_the_base_may_be_whole_again(world, trained, tmp_path):
    flags = {"load-in-4bit": "false"}
    assert run("sft", world, tmp_path / "run", model=trained["sft"], **flags) == 0
    assert not (tmp_path / "run" / "model" / BASE_FILE).exists()


def test_a_new_adapter_may_have_other_codes_and_types(world, tmp_path):
    flags = {**FOUR_BITS, "bnb-4bit-quant-type": "fp4", "use-bnb-nested-quant": "true"}
    assert run("ppo", world, tmp_path / "run", model="lm", dtype="bfloat16", **flags) == 0
    said = json.loads((tmp_path / "run" / "model" / BASE_FILE).read_text())["quantization_config"]
    assert (said["bnb_4bit_quant_type"], said["bnb_4bit_use_double_quant"]) == ("fp4", True)
    assert said["bnb_4bit_compute_dtype"] == "bfloat16"


def test_a_run_is_resumed(world, tmp_path):
    flags = {**FOUR_BITS, "model": "lm", "save-every": 1}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("grpo", world, whole, steps=2, **flags) == 0
    assert run("grpo", world, parts, steps=1, **flags) == 0
    again = {**flags, "steps": 2, "resume": "latest"}
    assert run("grpo", world, parts, **again) == 0
    assert not moved(weights(whole), weights(parts))


@pytest.mark.parametrize("command", adapters.COMMANDS)
def test_without_an_adapter_it_is_refused_before_anything_is_loaded(
    command, world, tmp_path, capsys, monkeypatch
):
    def loaded(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", loaded)
    flags = {"load-in-4bit": "true", "dataset": "nowhere.jsonl"}
    assert run(command, world, tmp_path / "run", model="lm", **flags) == 2
    error = capsys.readouterr().err
    assert "load_in_4bit without lora_r: four-bit weights cannot be trained" in error
    assert "--lora-r 16" in error
    assert not (tmp_path / "run").exists()


def test_unknown_codes_and_a_missing_package_are_refused(world, tmp_path, capsys, monkeypatch):
    flags = {**FOUR_BITS, "bnb-4bit-quant-type": "int4"}
    assert run("sft", world, tmp_path / "run", model="lm", **flags) == 2
    assert "unknown bnb_4bit_quant_type 'int4': choose one of nf4, fp4" in capsys.readouterr().err
    monkeypatch.setattr("fastrl.models.quantised.is_installed", lambda: False)
    assert run("sft", world, tmp_path / "run", model="lm", **FOUR_BITS) == 2
    assert "load_in_4bit needs bitsandbytes: pip install" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [{"bnb-4bit-quant-type": "fp4"}, {"use-bnb-nested-quant": "true"}])
def test_settings_of_weights_that_are_not_quantised_are_refused(flag, world, tmp_path, capsys):
    assert run("sft", world, tmp_path / "run", model="lm", **{"lora-r": 2, **flag}) == 2
    assert "is for weights that are quantised: set load_in_4bit, too" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dtype_that_a_saved_base_does_not_get_is_warned_of(trained):
    folder = trained["sft"] / "model"
    with pytest.warns(UserWarning, match=r"dtype=torch.bfloat16 is ignored.*torch.float32, as"):
        load_language_model(folder, dtype="bfloat16")
    load_language_model(folder, dtype="float32")


def test_a_sample_is_drawn_again(trained):
    assert cli.main(["replay", str(trained["grpo"]), "--step", "2"]) == 0
