"""``fastrl recipes`` and ``--recipe``: the recipes that come with fastrl, on tiny models."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from benchmarks.recipes import PAGE, planned, rendered
from fastrl import cli
from fastrl.tools.commands import COMMANDS
from fastrl.tools.commands.flags import parse, yaml_settings
from fastrl.tools.commands.plan import parse_plan
from fastrl.tools.recipes import recipes
from fastrl.trainers.plan.report import usable
from tests import chat_tokenizer

NAMES = sorted(recipes())
ON_GPUS = [name for name in NAMES if recipes()[name].gpu_gib is not None]
# What is smaller here than in a recipe, beside its model and its data.
SMALL: dict[str, Any] = {
    "max_length": 96, "max_prompt_length": 48, "max_new_tokens": 4, "max_completion_length": 4,
    "batch_size": 4, "mini_batch_size": 4, "group_size": 2, "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 1, "steps": 2,
    "num_train_epochs": 1, "eval_every": 0, "eos_token": "<|end|>",
}  # fmt: skip
OFFLINE = {"max_steps": 2, "eval_examples": 0, "use_cpu": "true", "save_steps": 0}
ONLINE = {"steps": 2, "eval_prompts": 0, "save_every": 0, "samples": 0}


def parsed(command: str, *arguments: str) -> Any:
    module, kinds, _ = COMMANDS[command]
    home = importlib.import_module(f"fastrl.{module}")
    return parse(command, [getattr(home, kind) for kind in kinds], list(arguments))


def refused(capsys: Any, *arguments: str) -> str:
    assert cli.main([*arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_settings_of_its_command(name: str) -> None:
    recipe = recipes()[name]
    job, flags = parsed(recipe.command, "--recipe", name)
    said = yaml_settings(recipe.path)
    assert (job.model, job.dataset) == (said["model"], said["dataset"])
    assert float(said["learning_rate"]) == flags.learning_rate
    assert recipe.what
    assert recipe.source
    assert set(recipe.columns.values()) <= {"text", "chat", "number", "bool"}
    assert name.endswith(recipe.device.replace(" ", "").lower())


def test_flags_win_over_a_file_and_a_file_over_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("recipe: grpo-qwen2.5-7b-80gb\nlr: 1.0e-6\nsteps: 7\n")
    job, flags = parsed("grpo", str(file), "--steps", "9", "--num-generations", "4")
    assert (job.recipe, job.model) == ("grpo-qwen2.5-7b-80gb", "Qwen/Qwen2.5-7B-Instruct")
    assert (flags.learning_rate, flags.steps, flags.group_size) == (1e-6, 9, 4)
    assert flags.cliprange_high == 0.28
    assert job.record()["job"]["recipe"] == "grpo-qwen2.5-7b-80gb"


def test_a_copy_of_a_recipe_is_the_recipe(tmp_path: Path, capsys: Any) -> None:
    copy = tmp_path / "copy.yaml"
    name = "kto-qwen2.5-1.5b-8gb"
    assert cli.main(["recipes", name, "--write", str(copy)]) == 0
    job, _ = parsed("align", str(copy))
    again, _ = parsed("align", "--recipe", name)
    assert vars(job) | {"recipe": name} == vars(again)
    capsys.readouterr()
    assert cli.main(["recipes", name]) == 0
    assert capsys.readouterr().out == copy.read_text()
    assert f"{copy} is there" in refused(capsys, "recipes", name, "--write", str(copy))


def test_all_recipes_are_listed_with_their_memory(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["recipes"]) == 0
    said = capsys.readouterr().out
    for name, recipe in recipes().items():
        assert name in said
        assert recipe.what in said
    assert "sft, LoRA 16, four bits; meta-llama/Llama-3.1-8B-Instruct; " in said
    assert said.count(" GiB of ") == len(ON_GPUS)


@pytest.mark.parametrize(("arguments", "message"), [
    (["ppo", "--recipe", "ppo-qwen2.5-0.5b-8"], "did you mean 'ppo-qwen2.5-0.5b-8gb'?"),
    (["ppo", "--recipe", "none"], "unknown recipe 'none' (see fastrl recipes)"),
    (["recipes", "none"], "unknown recipe 'none'"),
    (["plan", "--recipe", "none"], "unknown recipe 'none'"),
    (["grpo", "--recipe", "dpo-qwen3-4b-24gb"], "fastrl align --recipe dpo-qwen3-4b-24gb"),
    (["recipes", "--write", "a.yaml"], "--write copies a recipe: name it"),
    (["env", "--recipe", "ppo-demo-cpu"], "unknown argument '--recipe'"),
    (["ppo", "--recipe", "--lora-r", "8"], "--recipe: expected one argument"),
])  # fmt: skip
def test_what_no_recipe_is_is_refused(capsys: Any, arguments: list[str], message: str) -> None:
    assert message in refused(capsys, *arguments)


def test_every_plan_fits_its_device() -> None:
    for name in ON_GPUS:
        recipe = recipes()[name]
        whole = recipe.planned["peak"] + recipe.planned["judge"]
        assert 0 < whole <= usable(recipe.gpu_gib or 0), name
        job, _ = parse_plan(["--recipe", name])
        assert job.gpu_gib == recipe.gpu_gib
        lengths = job.prompt_tokens, job.response_tokens, job.teacher_prompt_tokens or 0
        assert sum(lengths) == sum(recipe.plan.values())


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_plan_is_what_the_plan_of_today_is(name: str) -> None:
    assert planned(recipes()[name]) == pytest.approx(recipes()[name].planned, rel=0.02), (
        "python -m benchmarks recipes writes it anew"
    )


def test_the_documents_have_what_the_result_files_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert rendered(text) == text, "python -m benchmarks recipes --only writes it anew"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model, another that teaches it and a reward model."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = chat_tokenizer.tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048, num_labels=1,
        **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    for kind, name in (
        (AutoModelForCausalLM, "model"),
        (AutoModelForCausalLM, "teacher"),  # a student's own weights have nothing to teach it
        (AutoModelForSequenceClassification, "reward"),
    ):
        kind.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def cell(column: str, holds: str, i: int) -> Any:
    """What a data set's column holds in row ``i``."""
    if holds == "number":
        return float(i)
    if holds == "bool":
        return bool(i % 2)
    if holds == "text":
        return f"${i}$" if column == "solution" else f"a text {i}"
    asked = {"role": "user", "content": f"What is {i}?"}
    answer = {"role": "assistant", "content": f"It is {i} {column}."}
    return {"prompt": [asked], "completion": [answer]}.get(column, [asked, answer])


@pytest.mark.filterwarnings("ignore:offload_optimizer has no effect on a CPU:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs(name: str, tiny: Path, tmp_path: Path, capsys: Any) -> None:
    recipe = recipes()[name]
    said = yaml_settings(recipe.path)
    data = tmp_path / "data.jsonl"
    rows = [{c: cell(c, holds, i) for c, holds in recipe.columns.items()} for i in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed: dict[str, Any] = {"dataset": data, "output": tmp_path / "run"}
    changed |= {key: value for key, value in SMALL.items() if key in said}
    changed |= {key: data for key in ("eval_dataset",) if key in said}
    changed |= {key: tiny / "model" for key in ("model", "judge") if key in said}
    changed |= {key: tiny / "teacher" for key in ("teacher",) if key in said}
    changed |= {key: tiny / "reward" for key in ("annotator", "reward") if key in said}
    if said.get("reward") == "math":
        changed["reward"] = "math"
    if "judge" in said:
        changed["judge_unparsed"] = "tie"  # a tiny model's answers say nothing
    changed |= ONLINE if recipe.command in ("ppo", "grpo") else OFFLINE
    flags = [word for key, value in changed.items() for word in (f"--{key}", str(value))]
    assert cli.main([recipe.command, "--recipe", name, *flags]) == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["job"]["recipe"] == name
