"""Configurations as scripts make them: from command lines and YAML, with TRL's settings."""

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from transformers import HfArgumentParser

import fastrl
from fastrl.settings import idle_settings, refusals
from tests import tiny_models
from tests.golden import tiny
from tests.together import together
from tests.trainers.conftest import pairs, texts

DOCS = Path(__file__).parents[2] / "docs"
METHODS = ("SFT", "Reward", "DPO", "KTO", "GRPO", "RLOO", "Distillation", "GKD", "SDFT")
REFUSED = [
    (method, name, default, remedy)
    for method in METHODS
    for name, (default, remedy) in refusals(getattr(fastrl, f"{method}Config")).items()
]
IDLE = [
    (m, n)
    for m in ("GRPO", "RLOO", "Distillation", "GKD", "SDFT")
    for n in idle_settings(getattr(fastrl, f"{m}Config"))
]
# As TRL's documentation writes them, and what they are then.
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": (
        "--packing --packing_strategy bfd-requeue --eos_token </s> --pad_to_multiple_of auto "
        "--model_init_kwargs {\"dtype\":\"bfloat16\"} --no_remove_unused_columns",
        {
            "packing": True, "packing_strategy": "bfd_split", "eos_token": "</s>",
            "pad_to_multiple_of": None, "model_init_kwargs": {"dtype": "bfloat16"},
            "remove_unused_columns": False,
        },
    ),
    "Reward": (
        "--center_rewards_coefficient 0.01 --max_length 2048 --disable_dropout",
        {"center_rewards_coefficient": 0.01, "max_length": 2048, "disable_dropout": True},
    ),
    "DPO": (
        "--loss_type sigmoid sft --loss_weights 1 0.5 --no_remove_unused_columns "
        "--no_disable_dropout",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "disable_dropout": False},
    ),
    "KTO": (
        "--loss_type apo_zero_unpaired --desirable_weight 1.5 --warmup_steps 0.1 --max_length 64",
        {"loss_type": "apo_zero_unpaired", "desirable_weight": 1.5, "warmup_steps": 0.1},
    ),
    "GRPO": (
        "--num_generations 4 --reward_weights 1 0.5 --scale_rewards batch --no_shuffle_dataset "
        "--generation_kwargs {\"top_k\":5} --epsilon_high 0.28 --no_use_bias_correction_kl",
        {
            "num_generations": 4, "reward_weights": [1.0, 0.5], "scale_rewards": "batch",
            "shuffle_dataset": False, "generation_kwargs": {"top_k": 5}, "epsilon_high": 0.28,
            "use_bias_correction_kl": False,
        },
    ),
    "RLOO": (
        "--reward_clip_range -1 1 --normalize_advantages --chat_template_kwargs {\"think\":false}",
        {
            "reward_clip_range": [-1.0, 1.0], "normalize_advantages": True,
            "chat_template_kwargs": {"think": False},
        },
    ),
    "Distillation": (
        "--beta 0.5 --teacher_model_name_or_path teacher --teacher_model_init_kwargs "
        "{\"dtype\":\"float32\"} --max_completion_length 64 --no_shuffle_dataset",
        {
            "beta": 0.5, "teacher_model_name_or_path": "teacher", "max_completion_length": 64,
            "teacher_model_init_kwargs": {"dtype": "float32"}, "shuffle_dataset": False,
        },
    ),
    "GKD": (
        "--lmbda 0.25 --beta 0.1 --max_new_tokens 64 --seq_kd --max_length 256",
        {"lmbda": 0.25, "beta": 0.1, "max_new_tokens": 64, "seq_kd": True, "max_length": 256},
    ),
    "SDFT": (
        "--distillation_alpha 1.0 --distillation_mode full_logits --num_loss_tokens_to_skip 3 "
        "--teacher_model_kind ema --num_generations 4",
        {
            "distillation_alpha": 1.0, "distillation_mode": "full_logits", "beta": 1.0,
            "num_loss_tokens_to_skip": 3, "teacher_model_kind": "ema", "num_generations": 4,
        },
    ),
}  # fmt: skip


def config_of(method: str) -> Any:
    return getattr(fastrl, f"{method}Config")


def parsed(method: str, *words: str) -> Any:
    (config,) = HfArgumentParser(config_of(method)).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", "--report_to", "none", *words]
    )
    return config


def page() -> ModuleType:
    """What writes the tables of docs/trl_1x.md."""
    spec = importlib.util.spec_from_file_location("trl_1x", DOCS / ".api" / "trl_1x.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", METHODS)
def test_a_command_line_without_settings_gives_the_defaults(method: str) -> None:
    made = config_of(method)(output_dir="out", use_cpu=True, report_to="none")
    found = parsed(method)
    differing = {
        f.name for f in dataclasses.fields(made) if getattr(found, f.name) != getattr(made, f.name)
    }
    assert differing <= {"logging_dir", "deepspeed_plugin", "accelerator_config"}


@pytest.mark.parametrize("method", METHODS)
def test_a_command_line_sets_what_it_names(method: str) -> None:
    line, expected = LINES[method]
    found = parsed(method, *line.split())
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_yaml_file_sets_what_a_command_line_does(method: str, tmp_path: Path) -> None:
    expected = LINES[method][1]
    path = tmp_path / "config.yaml"
    common = {"output_dir": "out", "use_cpu": True, "report_to": "none"}
    path.write_text(yaml.safe_dump({**common, **expected}))
    (found,) = HfArgumentParser(config_of(method)).parse_yaml_file(str(path))
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_has_a_text_for_its_flag(method: str) -> None:
    help_of = {f.name: f.metadata.get("help", "") for f in dataclasses.fields(config_of(method))}
    assert [name for name, text in help_of.items() if not text.strip()] == []
    shown = " ".join(HfArgumentParser(config_of(method)).format_help().split())
    for name, (_, remedy) in refusals(config_of(method)).items():
        assert f"Not supported: {remedy}." in help_of[name]
        assert "Not supported" in shown
    for name, (_, instead) in idle_settings(config_of(method)).items():
        assert help_of[name] == f"Changes nothing: {instead}."


def another(default: Any) -> Any:
    match default:
        case bool():
            return not default
        case int() | float():
            return default + 1
        case None:
            return 7
        case _:
            return "another"


@together(("method", "name", "default", "remedy"), REFUSED)
def test_what_is_not_honoured_is_refused_with_a_remedy(
    method: str, name: str, default: Any, remedy: str
) -> None:
    message = re.escape(f" is not supported by {method}Config: {remedy}")
    with pytest.raises(ValueError, match=f"^{name}=.*{message}"):
        config_of(method)(output_dir="out", use_cpu=True, **{name: another(default)})


def make(method: str, args: Any, **given: Any) -> Any:
    if method in ("GRPO", "RLOO"):
        given["reward_funcs"] = lambda completions, **_: [0.0 for _ in completions]
        data = texts().rename_column("text", "prompt")
    else:
        data = texts() if method == "SFT" else pairs()
    return getattr(fastrl, f"{method}Trainer")(
        model=tiny_models.language_model("llama"),
        args=args,
        train_dataset=data,
        processing_class=tiny.tokenizer(),
        **given,
    )


@pytest.mark.parametrize(("method", "name"), {m: n for m, n, *_ in REFUSED}.items())
def test_it_is_refused_where_a_script_sets_it_after_parsing(method: str, name: str) -> None:
    args = parsed(method)
    setattr(args, name, another(getattr(args, name)))
    with pytest.raises(ValueError, match=f"^{name}="):
        make(method, args)


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_settings_of_other_engines_change_nothing_and_are_named_in_one_warning(method: str) -> None:
    own = dict.fromkeys([name for m, name in IDLE if m == method])
    values = {name: another(getattr(parsed(method), name)) for name in own}
    short = ("--max_completion_length", "4")  # the model's context is
    args = parsed(method, "--use_vllm", "--vllm_mode", "server", *short)
    for name, value in values.items():
        setattr(args, name, value)
    with pytest.warns(UserWarning, match="settings that change nothing") as found:
        make(method, args)
    (text,) = [str(x.message) for x in found]
    assert [name for name, value in values.items() if f"{name}={value!r}" not in text] == []
    assert "rollout_kv_cache_gib" in text
    assert text.count("generates in this process") == 1
    make(method, parsed(method, *short))  # without a warning


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (method, name)
        for method, notes in page().ARGUMENTS.items()
        for name, note in notes.items()
        if note.startswith("refused")
    ],
)
def test_arguments_that_the_page_calls_refused_are_refused(method: str, name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        make(method, parsed(method), **{name: [len]})


def test_the_pages_tables_are_those_of_the_code() -> None:
    text = (DOCS / "trl_1x.md").read_text(encoding="utf-8")
    assert page().render(text) == text, "python docs/.api/trl_1x.py writes them anew"
    found = re.findall(r"^<!-- (?:settings|arguments): (\w+) -->$", text, re.MULTILINE)
    assert sorted(found) == sorted([*METHODS, "all"])


def test_the_page_says_why_a_default_differs_and_of_nothing_that_is_not_there() -> None:
    module = page()
    for method in METHODS:
        every = {s.name: s for s in module.settings(method)}
        assert [s.name for s in every.values() if s.ours != s.theirs and not s.note] == []
        assert set(module.DIFFERENT[method]) <= set(every)
        assert [s.name for s in every.values() if s.note and (s.remedy or s.instead)] == []
        assert set(module.ARGUMENTS[method]) <= set(module.trl_names()["arguments"][method])
        taken = inspect.signature(getattr(fastrl, f"{method}Trainer").__init__).parameters
        refused = {n for n, note in module.ARGUMENTS[method].items() if note.startswith("refused")}
        assert set(module.trl_names()["arguments"][method]) - refused <= set(taken)


def test_the_pages_names_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    if not trl.__version__.startswith("1.16"):
        pytest.skip(f"the page is of TRL 1.16, and {trl.__version__} is installed")
    module = page()
    assert module.read_trl() == module.trl_names(), "python docs/.api/trl_1x.py --trl reads them"
