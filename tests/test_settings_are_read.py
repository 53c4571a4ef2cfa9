"""Each setting of each surface acts, or is refused, or is said to change nothing."""

import dataclasses
import importlib
import inspect
import re
from typing import Any

import pytest

import fastrl
from fastrl.alignment import Trainer
from fastrl.alignment.arguments import AlignmentConfig
from fastrl.eras import IDLE, eras_of
from fastrl.settings import idle_settings, refusals
from fastrl.tools.commands import COMMANDS
from fastrl.tools.commands.plan import run_plan
from fastrl.tools.commands.plan_job import PlanJob
from tests.read_settings import read_by
from tests.trl.test_settings import page

ONLINE = ("GRPO", "RLOO")
HERE = ("SFT", "Reward", "DPO", "KTO", *ONLINE, "PPOv2", "RLOOv1", "Alignment")
# Settings that no function below reads by name, and what becomes of them.
ELSEWHERE = {
    "vllm_importance_sampling_cap": "as a configuration is made, it becomes clip_max",
    "do_train": "of scripts, as transformers has it",
    "do_predict": "of scripts, as transformers has it",
    "resume_from_checkpoint": "of scripts and commands; train() takes it",
    "local_rank": "of launchers, which transformers asks accelerate about",
    **dict.fromkeys(
        ("project", "run_name", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
        "transformers' callbacks of trackers read them, which are found by their names",
    ),
    "optim_target_modules": "of GaLore and its like, which are refused",
    "length_column_name": "of group_by_length, which is refused online",
    "include_for_metrics": "of compute_metrics, which the alignment framework takes none of",
    **dict.fromkeys(
        ("exp_name", "query_dataset", "reward_model", "task_name", "steps"),
        "PPO's, for trackers or for planning: their texts say so",
    ),
    **dict.fromkeys(("sft_model_path", "reward_model_path"), "of scripts: their texts say so"),
    "stop_token": "responses end at EOS, which is all that it may be",
    "dataloader_pin_memory": "of prompts there is no loader, and transformers itself unsets it",
    **dict.fromkeys(("max_kl", "max_ratio"), "check_divergence reads PPO's by a table"),
    "dataset_num_proc": "PPO's: a warning says that nothing reads it",
}
# Names of one setting, to all of which a configuration gives its value: a version of transformers
# reads one of them.
SAME = [
    {"gradient_checkpointing", "activation_checkpointing"},
    {"gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"},
]
# Settings that a trainer has a value of its own for.
SET = {
    "remove_unused_columns": "its text says that it changes nothing",
    "logging_nan_inf_filter": "on_nonfinite has its meaning",
    "dataloader_pin_memory": "the alignment framework's batches stay on the host",
    "per_device_train_batch_size": "of the alignment framework: refused but for the factory's",
    "ignore_data_skip": "of the alignment framework: it warns",
    "greater_is_better": "of online tasks without a metric: a reward or win rate, which is said",
}


@pytest.mark.parametrize("surface", [*HERE, "PPO"])
def test_every_setting_of_a_trainer_acts_or_is_refused(surface: str) -> None:
    trainer: Any = Trainer if surface == "Alignment" else getattr(fastrl, f"{surface}Trainer")
    config = AlignmentConfig if surface == "Alignment" else getattr(fastrl, f"{surface}Config")
    made = config() if surface == "PPO" else config("out", use_cpu=True, report_to="none")
    said = {*refusals(made), *idle_settings(made)}
    said |= {name for name, era in eras_of(config).items() if era.kind == IDLE}
    for name, note in page().DIFFERENT.get(surface, {}).items():
        said |= {name} if note.startswith("no effect") else set()
    read, overwritten = read_by((), trainer, config)
    read = read.union(*(names for names in SAME if names & read))
    settings = {each.name for each in dataclasses.fields(config) if each.init}
    assert sorted(settings - read - said - ELSEWHERE.keys() - overwritten) == []
    assert sorted(overwritten & settings - SET.keys() - said) == []


@pytest.mark.parametrize("command", [*(x for x, (_, k, _) in COMMANDS.items() if k), "plan"])
def test_every_flag_of_a_command_acts(command: str) -> None:
    """Those of its job, and those beside the settings of its trainer."""
    if command == "plan":
        run, kinds = run_plan, [PlanJob]
    else:
        path, names, function = COMMANDS[command]
        module = importlib.import_module(f"fastrl.{path}")
        run, kinds = getattr(module, function), [getattr(module, name) for name in names]
    own = {each.name for each in dataclasses.fields(kinds[0]) if each.init}
    for flags in kinds[1:]:
        theirs = {each.name for base in flags.__mro__[1:] for each in _fields(base)}
        own |= {each.name for each in _fields(flags)} - theirs
    read, _ = read_by((run,), None, *kinds)
    assert sorted(own - read - {"recipe"}) == []  # which gives the others, as they are parsed


def _fields(kind: type) -> Any:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


@pytest.mark.parametrize("command", [name for name, (_, kinds, _) in COMMANDS.items() if not kinds])
def test_every_flag_of_a_command_on_runs_is_read(command: str) -> None:
    source = inspect.getsource(importlib.import_module(f"fastrl.{COMMANDS[command][0]}"))
    flags = re.findall(r'add_argument\(\s*"(?:-\w", ")?(?:--)?([\w-]+)"', source)
    unread = [x for x in flags if not re.search(rf"\w\.{x.replace('-', '_')}\b", source)]
    assert unread == []


def test_what_is_read_is_told_from_what_is_not() -> None:
    @dataclasses.dataclass
    class Config:
        acts: int = 0
        by_name: int = 0
        checked: int = 0
        overwritten: int = 0
        forgotten: int = 0

        def __post_init__(self) -> None:
            assert self.forgotten == 0

    def check_it(args: Config) -> None:
        assert args.checked == 0

    def run(args: Config) -> None:
        check_it(args)
        args.overwritten = 3
        assert [args.acts, *(getattr(args, name) for name in ("by_name",))]

    assert read_by((run,), None, Config) == ({"acts", "by_name"}, {"overwritten"})
