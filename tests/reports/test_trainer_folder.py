"""What a trainer leaves in its output_dir is read as a run."""

import json
from pathlib import Path
from typing import Any

import pytest

import fastrl
from fastrl import alignment
from fastrl.cli import main
from fastrl.tools.reports.curves import RunCurves
from fastrl.tools.reports.trainer_folder import open_run
from tests import tiny_models
from tests.alignment.conftest import make_factory
from tests.golden import tiny
from tests.trainers.conftest import pairs, reward_model, texts
from tests.trl import test_dpo, test_kto
from tests.trl.test_online import make


def state(folder: Path, steps: int, **numbers: Any) -> None:
    """Writes a log for each of so many steps, as transformers keeps them."""
    logs = [{"step": s, "loss": 1.0, "learning_rate": 1e-3, **numbers} for s in range(1, steps + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"global_step": steps, "log_history": logs})
    (folder / "trainer_state.json").write_text(text)


def test_doctor_and_report_read_a_trainers_folder(tmp_path: Path, capsys: Any) -> None:
    def equal(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [1.0 for _ in completion_ids]

    args: dict[str, Any] = {"max_steps": 4, "beta": 0.1, "save_strategy": "steps", "save_steps": 2}
    make(tmp_path, "grpo", equal, logging_steps=1, **args).train()
    capsys.readouterr()
    assert main(["doctor", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "equal scores" in said
    # The settings by this trainer's names.
    assert "raise max_completion_length" in said
    assert "max_new_tokens" not in said
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    for title in ("Reward", "KL to the reference", "Policy entropy", "Response length"):
        assert f"{title}<" in page or f"{title}, of a token<" in page
    assert "max_completion_length" in page
    assert (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_every_command_reads_an_online_trainers_folder(
    kind: str, tmp_path: Path, capsys: Any
) -> None:
    args: dict[str, Any] = {"max_steps": 2, "logging_steps": 1}
    saved = {"save_strategy": "steps", "save_steps": 1, "ledger": True}
    make(tmp_path / "ledger", kind, **args, **saved).train()
    unsaved = make(tmp_path / "unsaved", kind, **args, save_strategy="no", log_completions=True)
    unsaved.train()
    capsys.readouterr()

    def said(command: str, name: str, *words: str) -> str:
        main([command, str(tmp_path / name), *words])
        return "".join(capsys.readouterr())

    assert "finish_reason" in said("samples", "ledger")
    name = {"grpo": "GRPOTrainer", "rloo": "RLOOTrainer"}[kind]
    assert f"ledger is of a {name} in a program, which alone can make it again: there, from " in (
        said("replay", "ledger", "--step", "1")
    )
    for command in ("report", "doctor"):
        assert "whose program calls trainer.save_state() at its end" in said(command, "unsaved")
    assert f"{tmp_path / 'unsaved' / 'completions'} has the latest" in said("samples", "unsaved")
    unsaved.save_state()
    assert "report.html" in said("report", "unsaved")
    assert "check" in said("doctor", "unsaved")


LEARNS_NOTHING: dict[str, Any] = {
    "max_steps": 8, "learning_rate": 0.0, "logging_steps": 1, "save_strategy": "steps",
    "save_steps": 8, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip


def of_texts(folder: Path, trainer: Any, config: Any, model: Any, data: Any) -> Any:
    args = config(output_dir=str(folder), **LEARNS_NOTHING)
    return trainer(model, args, train_dataset=data, processing_class=tiny.tokenizer())


@pytest.mark.parametrize("kind", ["dpo", "kto", "sft", "reward", "align"])
def test_an_illness_is_found_whoever_trains(kind: str, tmp_path: Path, capsys: Any) -> None:
    if kind == "dpo":
        trainer = test_dpo.trainer(tmp_path, **LEARNS_NOTHING)
    elif kind == "kto":
        trainer = test_kto.trainer(tmp_path, **LEARNS_NOTHING)
    elif kind == "align":
        args = alignment.AlignmentConfig(output_dir=str(tmp_path), **LEARNS_NOTHING)
        model = tiny_models.language_model()
        factory = make_factory("offline-pairwise")
        trainer = alignment.Trainer(model, args, factory, alignment.make_loss("dpo"))
    elif kind == "sft":
        made = tiny_models.language_model()
        trainer = of_texts(tmp_path, fastrl.SFTTrainer, fastrl.SFTConfig, made, texts())
    else:
        trainer = of_texts(
            tmp_path, fastrl.RewardTrainer, fastrl.RewardConfig, reward_model("gpt2"), pairs()
        )
    trainer.train()
    capsys.readouterr()
    assert main(["doctor", str(tmp_path)]) == 1
    assert "nothing is learned" in capsys.readouterr().out
    name = {
        "sft": "SFTTrainer", "reward": "RewardTrainer", "dpo": "DPOTrainer", "kto": "KTOTrainer",
    }  # fmt: skip
    if kind in name:
        for command in (["samples"], ["replay", "--step=1"]):
            assert main([*command, str(tmp_path)]) == 2
            assert f"{name[kind]} learns from data alone" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 0


def test_the_state_with_the_most_steps_is_read(tmp_path: Path) -> None:
    for step in (4, 8, 12):  # checkpoint-8 comes behind checkpoint-12 by its name
        state(tmp_path / f"checkpoint-{step}", step)
    assert len(open_run(tmp_path).rows()) == 12
    state(tmp_path, 15)  # as save_state() does
    assert open_run(tmp_path).summary() == {"steps": 15}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert open_run(tmp_path).rows() == [{"step": 1, "loss": 2.0}]  # of a command


def test_names_are_those_of_commands_where_they_mean_the_same(tmp_path: Path) -> None:
    both = {"kl": 3.0, "entropy": 2.0, "reward": 1.0, "rewards/f/mean": 1.0, "rewards/g/mean": 0.0}
    state(tmp_path / "grpo" / "checkpoint-2", 2, **both, **{"completions/mean_length": 7.0})
    state(tmp_path / "kto" / "checkpoint-2", 2, **both)
    sampled, kto = (RunCurves.of(open_run(tmp_path / name)) for name in ("grpo", "kto"))
    assert sampled.read(["objective/kl_per_token"]).values == [3.0, 3.0]
    assert sampled.read(["reward/g/mean"]).values == [0.0, 0.0]
    assert not kto.read(["objective/kl_per_token", "ppo/policy/entropy"])
    assert kto.read(["kl"]).values == [3.0, 3.0]


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="output_dir of a trainer"):
        open_run(tmp_path)
    state(tmp_path / "checkpoint-2", 2)
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{")
    with pytest.raises(ValueError, match=r"checkpoint-2/trainer_state\.json is not JSON"):
        open_run(tmp_path)
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="global_step"):
        open_run(tmp_path)
