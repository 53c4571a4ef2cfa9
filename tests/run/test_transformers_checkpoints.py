"""Checkpoints of trainers on transformers' Trainer: whole or not there, checked, saved when a run
fails or is stopped; no code in them is executed."""

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState, TrainingArguments

from fastrl import SFTConfig, SFTTrainer
from fastrl.run import checkpoints, transformers_files
from fastrl.run.checkpoints import BadCheckpoint, verify, write_manifest
from tests import tiny_models
from tests.golden import tiny
from tests.resuming import assert_same_run, resumed, straight, untimed, with_dropout
from tests.trainers.conftest import SETTINGS, texts, weights

Make = Callable[..., SFTTrainer]


def make(folder: Path, model: Any = None, data: Any = None, **settings: Any) -> SFTTrainer:
    """Of five steps, two of which make an epoch; a checkpoint after each."""
    given = {
        k: settings.pop(k) for k in ("callbacks", "peft_config", "optimizers") if k in settings
    }
    tokenizer = settings.pop("processing_class", None) or tiny.tokenizer()
    args = {
        **SETTINGS, "max_steps": 5, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2,
        "eval_strategy": "epoch", **settings,
    }  # fmt: skip
    return SFTTrainer(
        with_dropout(tiny_models.language_model()) if model is None else model,
        SFTConfig(output_dir=str(folder), **args),
        train_dataset=texts(8) if data is None else data,
        eval_dataset=texts(4, seed=1),
        processing_class=tokenizer,
        **given,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class At(TrainerCallback):
    """Does something as a step ends or begins."""

    def __init__(self, event: str, step: int, act: Callable[[], None]):
        def do(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                act()

        setattr(self, event, do)
        self.step_of = lambda state: do(None, state, None)


def failing(*_: Any, **__: Any) -> None:
    raise RuntimeError("the machine is tired")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SFTTrainer:
    return straight(make, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def copied(whole: SFTTrainer, tmp_path: Path) -> Path:
    """The whole run's checkpoints, to be damaged."""
    return Path(shutil.copytree(str(whole.args.output_dir), tmp_path / "copy"))


def assert_refused(
    trainer: Any, resume: Any, said: str, error: type[Exception] = BadCheckpoint
) -> None:
    """With an error, and nothing else happens."""
    before, folder = weights(trainer.model), Path(trainer.args.output_dir)
    files = names(folder) if folder.is_dir() else None
    with pytest.raises(error, match=said):
        trainer.train(resume_from_checkpoint=resume)
    assert all(torch.equal(x, before[name]) for name, x in weights(trainer.model).items())
    assert (names(folder) if folder.is_dir() else None) == files


# Which checkpoint is taken.


def test_a_checkpoint_is_whole_and_says_what_wrote_it(whole: SFTTrainer) -> None:
    paths = whole.checkpoints.paths()
    assert [path.name for path in paths] == [f"checkpoint-{i}" for i in range(1, 6)]
    files = verify(paths[-1])["files"]
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json"} <= set(files)
    assert "process-0/state.json" in files
    assert names(Path(whole.args.output_dir)) == [path.name for path in paths]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "process-0/state.json"])
def test_a_damaged_one_is_named_and_the_one_before_it_taken(
    name: str, whole: SFTTrainer, copied: Path
) -> None:
    file = copied / "checkpoint-5" / name
    file.write_bytes(file.read_bytes()[:-1])
    (copied / "checkpoint-4" / name).unlink()
    said = rf"checkpoint-5/{name} is damaged"
    assert_refused(make(copied), copied / "checkpoint-5", said)
    with (
        pytest.warns(UserWarning, match=rf"{said}.*: it is not used"),
        pytest.warns(UserWarning, match=rf"checkpoint-4/{name} is missing: it is not used"),
        pytest.warns(UserWarning, match=r"later than .*checkpoint-3: they are now in .*copy\.sup"),
    ):
        again = resumed(make, copied, True)
    assert_same_run(again, whole)
    assert names(Path(f"{copied}.superseded-1")) == ["checkpoint-4", "checkpoint-5"]
    assert names(copied) == [f"checkpoint-{i}" for i in range(1, 6)]


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    assert_refused(trainer, True, "there is no checkpoint in .*run", FileNotFoundError)
    assert_refused(trainer, tmp_path / "gone", "there is no folder .*gone", FileNotFoundError)


def test_checkpoints_of_an_earlier_run_do_not_mix_with_new_ones(copied: Path) -> None:
    trainer = make(copied, max_steps=1)
    with pytest.warns(UserWarning, match=r"holds checkpoints of an earlier run: they are now in"):
        trainer.train()
    assert names(copied) == ["checkpoint-1"]
    assert len(names(Path(f"{copied}.superseded-1"))) == 5


def test_one_that_transformers_wrote_is_taken_with_a_warning(
    whole: SFTTrainer, copied: Path, tmp_path: Path
) -> None:
    path = copied / "checkpoint-4"
    (path / "manifest.json").unlink()
    shutil.rmtree(path / "process-0")
    with pytest.warns(UserWarning, match=r"checkpoint-4 has no manifest\.json.*not verified"):
        (again := make(tmp_path / "again")).train(resume_from_checkpoint=path)
    assert all(
        torch.equal(x, weights(whole.model)[name]) for name, x in weights(again.model).items()
    )
    other = make(tmp_path / "other", tiny_models.language_model(n_embd=32))
    assert_refused(other, path, "is of another model, whose transformer")


# What does not fit.


def tokenizer_with_another_token() -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<more>"])
    return tokenizer


@pytest.mark.filterwarnings("ignore:.* tokens and are cut")
@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.parametrize(("changes", "said"), [
    ({"data": texts(9)}, r"whose data differs \(8 examples.*, here 9 examples.*resume with th"),
    ({"data": texts(8, seed=7)}, r"whose data differs .*8 examples.*, here 8 examples"),
    ({"max_length": 3}, "whose data differs"),
    ({"processing_class": tokenizer_with_another_token()}, "whose tokenizer differs: resume"),
    ({"optim_args": "eps=1e-6"}, "whose optimizer differs .*eps=1e-6"),
    ({"optim": "sgd"}, "whose optimizer differs .*, here sgd"),
    ({"family": "gpt_neox"}, r"whose model differs \(GPT2LMHeadModel, here GPTNeoX"),
    ({"vocab_size": 120}, r"whose vocabulary differs \(97, here 120\)"),
    ({"n_embd": 32}, r"whose transformer\.wte\.weight is float32 \[\d+, 16\], here .*, 32\]"),
    ({"frozen": True}, "whose frozen weights differ: make the trainer"),
    ({"peft_config": tiny_models.lora()}, "whose model differs"),
])  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(
    changes: dict[str, Any], said: str, whole: SFTTrainer, tmp_path: Path
) -> None:
    shape = {k: changes[k] for k in ("family", "vocab_size", "n_embd") if k in changes}
    model = tiny_models.language_model(**shape)
    if "frozen" in changes:
        model.transformer.wpe.weight.requires_grad_(False)
    others = {k: v for k, v in changes.items() if k not in (*shape, "frozen")}
    trainer = make(tmp_path / "run", model, **others)
    assert_refused(trainer, whole.checkpoints.path(3), said)


def test_other_settings_are_told_of(whole: SFTTrainer, tmp_path: Path) -> None:
    changed = {"learning_rate": 5e-4, "max_steps": 6, "eval_strategy": "no"}
    trainer = make(tmp_path / "run", **changed)
    with pytest.warns(UserWarning, match=r"learning_rate: 0\.001, not 0\.0005") as caught:
        trainer.train(resume_from_checkpoint=whole.checkpoints.path(5))
    (said,) = (str(w.message) for w in caught)
    assert "max_steps: 5 → 6" in said
    assert "eval" not in said
    assert trainer.state.global_step == 6


def test_weights_that_are_tied_are_not_missed(
    whole: SFTTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint has them once."""
    trainer = make(tmp_path / "run")
    assert trainer.model.lm_head.weight is trainer.model.transformer.wte.weight
    trainer.train(resume_from_checkpoint=whole.checkpoints.path(5))
    assert "missing keys" not in caplog.text


@pytest.mark.filterwarnings("ignore:resume. .* has no manifest.json")
@pytest.mark.parametrize("lacks", ["transformer.wpe.weight", "transformer.wte.weight"])
def test_weights_that_a_checkpoint_of_transformers_lacks_are_named(
    lacks: str,
    copied: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for those that are tied to one that it has."""
    path = copied / "checkpoint-4"
    (path / "manifest.json").unlink()
    shutil.rmtree(path / "process-0")
    kept = load_file(path / "model.safetensors")
    del kept[lacks]
    save_file(kept, path / "model.safetensors")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    make(tmp_path / "run").train(resume_from_checkpoint=path)
    missed = [lacks] if "wpe" in lacks else [lacks, "lm_head.weight"]
    assert f"missing keys in the checkpoint model loaded: {missed}" in caplog.text


def test_a_run_that_had_ended_takes_no_further_step(whole: SFTTrainer, tmp_path: Path) -> None:
    """Its last step is not the last of an epoch: transformers alone would take one more."""
    assert_same_run(resumed(make, tmp_path / "run", whole.checkpoints.path(5)), whole)


@pytest.mark.parametrize("step", [5, 6])
def test_a_run_that_went_on_at_an_epochs_end_goes_on_again_within_the_next_one(
    step: int, tmp_path: Path
) -> None:
    """The order of its data is drawn as the epoch begins."""

    def grouped(folder: Path) -> SFTTrainer:
        order = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 2}
        return make(folder, data=texts(7), max_steps=8, **order)

    whole = straight(grouped, tmp_path / "whole")
    once = resumed(grouped, tmp_path / "once", whole.checkpoints.path(4))
    assert_same_run(once, whole)
    assert_same_run(resumed(grouped, tmp_path / "again", once.checkpoints.path(step)), whole)


# Code in a checkpoint.


class Canary:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "adapter.pkl"]
)
@pytest.mark.parametrize("manifest", ["kept", "made anew", "none"])
def test_no_pickle_is_executed(name: str, manifest: str, copied: Path, tmp_path: Path) -> None:
    path, sang = copied / "checkpoint-4", tmp_path / "sang"
    for pickled in (True, False):
        if pickled:
            (path / name).write_bytes(pickle.dumps(Canary(sang)))
        else:
            torch.save({"state": Canary(sang)}, path / name)
        (path / "manifest.json").unlink(missing_ok=True)
        if manifest == "made anew":
            write_manifest(path, 4)
        trainer = make(tmp_path / f"run {pickled}")
        if name in ("training_args.bin", "adapter.pkl"):
            if manifest == "made anew":
                trainer.train(resume_from_checkpoint=path)
        elif manifest != "kept":
            assert_refused(trainer, path, f"{name} cannot be read .*nothing in it was executed")
        assert not sang.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_weights_of_transformers_alone_are_no_pickle(
    name: str, copied: Path, tmp_path: Path
) -> None:
    path = copied / "checkpoint-4"
    torch.save({"state": torch.ones(1)}, path / name)
    (path / "model.safetensors").unlink()
    (path / "manifest.json").unlink()
    assert_refused(make(tmp_path / "other"), path, f"{name}: no pickle is read")


def test_a_pickle_that_is_not_in_the_manifest_is_not_opened(copied: Path, tmp_path: Path) -> None:
    path, sang = copied / "checkpoint-4", tmp_path / "sang"
    for name in ("pytorch_model.bin", "adapter_model.bin", "scaler.pt.bak"):
        torch.save({"state": Canary(sang)}, path / name)
    make(tmp_path / "run").train(resume_from_checkpoint=path)
    optimizer = path / "optimizer.pt"
    torch.save({"state": Canary(sang)}, optimizer)
    assert_refused(make(tmp_path / "other"), path, "optimizer.pt is damaged")
    assert not sang.exists()


# How many are kept.


def test_older_ones_go_but_not_the_best(tmp_path: Path) -> None:
    trainer = make(
        tmp_path / "run",
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # as if: the loss falls
    )
    trainer.train()
    best = trainer.state.best_global_step
    assert best < 4
    assert trainer.state.best_model_checkpoint == str(trainer.checkpoints.path(best))
    assert names(tmp_path / "run") == [f"checkpoint-{best}", "checkpoint-5"]
    for path in trainer.checkpoints.paths():
        state = json.loads((path / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == str(trainer.checkpoints.path(best))


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")]
)
def test_a_full_disk_leaves_the_last_good_one(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, save = make(tmp_path / "run"), transformers_files.save_tree

    def full(tree: Any, folder: Path) -> None:
        if trainer.state.global_step == 3:
            raise error
        save(tree, folder)

    monkeypatch.setattr(transformers_files, "save_tree", full)
    said = r"checkpoint-3 could not be saved .*No space.*; the last good checkpoint is checkpoint-2"
    with pytest.raises(OSError, match=said):
        trainer.train()
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
    assert [verify(path)["step"] for path in trainer.checkpoints.paths()] == [1, 2]


# Runs that fail or are stopped.


def break_a_forward(trainer: SFTTrainer, step: int) -> None:
    """Makes the step after ``step`` fail, in its second forward pass."""
    loss, passes = trainer.compute_loss, itertools.count(1)

    def late(*args: Any, **kwargs: Any) -> Any:
        found = loss(*args, **kwargs)
        if trainer.state.global_step == step and trainer.model.training and next(passes) == 2:
            failing()
        return found

    trainer.compute_loss = late  # type: ignore[method-assign]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_after_an_exception_in_a_step_the_state_before_it_is_saved(
    step: int, tmp_path: Path
) -> None:
    def often(folder: Path) -> SFTTrainer:
        parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        return make(folder, save_steps=10, **parts)

    trainer = often(tmp_path / "run")
    break_a_forward(trainer, step)
    trainer.evaluate()
    with (
        pytest.warns(UserWarning, match=rf"after RuntimeError the state is saved in .*-{step}; --"),
        pytest.raises(RuntimeError, match="tired"),
    ):
        trainer.train()
    assert names(tmp_path / "run") == [f"checkpoint-{step}"]
    again = resumed(often, tmp_path / "run", True)
    assert_same_run(again, straight(often, tmp_path / "whole"))


BEHIND = ("on_step_end", "on_log", "prediction_step", "on_evaluate", "on_save")
CASES = [*itertools.product(BEHIND, [(2, "steps"), (4, "epoch"), (5, "steps")])]
CASES += [("on_epoch_end", (4, "epoch")), ("on_epoch_end", (5, "steps"))]


@pytest.mark.parametrize(("event", "case"), CASES)
def test_after_an_exception_behind_a_step_what_was_due_is_done(
    event: str, case: tuple[int, str], tmp_path: Path
) -> None:
    """The state behind the step is saved; the resumed run logs, evaluates and judges the step, so
    that it ends with the same logs and the same best weights."""

    failed, strategy = case

    def judged(folder: Path, **given: Any) -> SFTTrainer:
        told = {f"{x}_strategy": strategy for x in ("eval", "save")}
        steps = {"save_steps": 1, "eval_steps": 1, "logging_steps": 1}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        return make(folder, **told, **steps, **best, **given)

    at = At(event, failed, failing)
    trainer = judged(tmp_path / "run", callbacks=[at] if event.startswith("on_") else [])
    if event == "prediction_step":
        predict = trainer.prediction_step

        def prediction_step(*args: Any, **kwargs: Any) -> Any:
            at.step_of(trainer.state)
            return predict(*args, **kwargs)

        trainer.prediction_step = prediction_step  # type: ignore[method-assign]
    saved = pytest.warns(UserWarning, match="after RuntimeError the state is saved")
    behind_it = event == "on_save"  # the checkpoint is there
    with contextlib.nullcontext() if behind_it else saved, pytest.raises(RuntimeError):
        trainer.train()
    assert f"checkpoint-{failed}" in names(tmp_path / "run")
    again, whole = resumed(judged, tmp_path / "run", True), straight(judged, tmp_path / "whole")
    assert_same_run(again, whole)
    assert again.state.best_global_step == whole.state.best_global_step
    best = [Path(str(x.state.best_model_checkpoint)).name for x in (again, whole)]
    assert best[0] == best[1]


class Stops(TrainerCallback):
    """Stops a run by what an evaluation of a step says."""

    def __init__(self, step: int):
        self.step = step

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


@pytest.mark.parametrize(("failed", "strategy"), [(3, "steps"), (4, "steps"), (4, "epoch")])
def test_an_evaluation_that_is_due_may_end_the_run(
    failed: int, strategy: str, tmp_path: Path
) -> None:
    """It leaves what a run that has not failed leaves, from which others go on."""

    def stopping(folder: Path, *others: Any, stops: bool = True, **given: Any) -> SFTTrainer:
        told = {f"{x}_strategy": strategy for x in ("eval", "save")}
        callbacks = [*[Stops(failed)] * stops, *others]
        return make(folder, **told, eval_steps=1, logging_steps=1, callbacks=callbacks, **given)

    whole = straight(stopping, tmp_path / "whole")
    fails = stopping(tmp_path / "run", At("on_prediction_step", failed, failing))
    with pytest.warns(UserWarning, match="the state is saved"), pytest.raises(RuntimeError):
        fails.train()
    again = resumed(stopping, tmp_path / "run", True)
    assert_same_run(again, whole)
    assert again.state.global_step == failed

    def on(folder: Path) -> SFTTrainer:
        return stopping(folder, stops=False)

    assert_same_run(*(resumed(on, tmp_path / name, True) for name in ("run", "whole")))


def test_an_evaluation_that_is_switched_off_is_not_due(tmp_path: Path) -> None:
    fails = make(tmp_path, eval_strategy="steps", callbacks=[At("on_evaluate", 2, failing)])
    with pytest.warns(UserWarning, match="the state is saved"), pytest.raises(RuntimeError):
        fails.train()
    again = make(tmp_path, eval_strategy="no")
    again.eval_dataset = None
    again.train(resume_from_checkpoint=True)
    assert not any("eval_loss" in row for row in again.state.log_history)


def test_callbacks_are_told_of_an_evaluation_once_and_in_a_run(tmp_path: Path) -> None:
    """Of one that is due: patience counts it once, a callback that is added knows the run."""

    class Knows(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.seen = list[int]()

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append(state.global_step)

    def patient(folder: Path, *others: Any) -> SFTTrainer:
        callbacks = [EarlyStoppingCallback(3), *others]
        evaluating = {"eval_strategy": "steps", "eval_steps": 1, "greater_is_better": True}
        best = {"metric_for_best_model": "eval_loss", "load_best_model_at_end": True}
        best["restore_callback_states_from_checkpoint"] = True
        return make(folder, max_steps=8, callbacks=callbacks, **evaluating, **best)

    def noting(args: Any, state: Any, *_: Any, **__: Any) -> None:
        state.log_history.append({"a program's own": 1})  # has no step

    fails = patient(tmp_path / "run", At("on_evaluate", 2, failing))
    fails.add_callback(type("Notes", (TrainerCallback,), {"on_step_end": staticmethod(noting)})())
    with pytest.warns(UserWarning, match="the state is saved"), pytest.raises(RuntimeError):
        fails.train()
    again, knows = patient(tmp_path / "run"), Knows()
    again.add_callback(knows)
    again.train(resume_from_checkpoint=True)
    whole = straight(patient, tmp_path / "whole")
    assert again.state.global_step == whole.state.global_step < 8
    assert knows.seen == list(range(2, again.state.global_step + 1))


def test_a_state_whose_weights_are_ahead_is_not_saved(tmp_path: Path) -> None:
    """An exception behind the optimizer step: what else the step does is not done."""
    at = At("on_optimizer_step", 3, failing)
    trainer = make(tmp_path / "run", save_steps=2, callbacks=[at])
    with (
        pytest.warns(UserWarning, match="the state is not saved: the last checkpoint is .*-2"),
        pytest.raises(RuntimeError, match="tired"),
    ):
        trainer.train()
    assert names(tmp_path / "run") == ["checkpoint-2"]


def test_a_run_that_saves_nothing_saves_nothing_when_it_fails(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", save_strategy="no", gradient_accumulation_steps=2)
    break_a_forward(trainer, 2)
    with pytest.raises(RuntimeError, match="tired"):
        trainer.train()
    assert not names(tmp_path / "run")


@pytest.mark.parametrize("step", [3, 4])
def test_a_signal_stops_a_run_at_a_steps_end(step: int, tmp_path: Path) -> None:
    """At an epoch's end (step 4) behind its evaluation, which the resumed run does not repeat."""

    def rarely(folder: Path, **more: Any) -> SFTTrainer:
        return make(folder, save_steps=10, **more)

    callback = At("on_step_begin", step - 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trainer = rarely(tmp_path / "run", callbacks=[callback])
    trainer.evaluate()
    said = rf"stopped after step {step}; saved: .*-{step}; --resume"
    with pytest.raises(KeyboardInterrupt, match=said) as e:
        trainer.train()
    assert isinstance(e.value, SystemExit)
    assert e.value.code == 143
    assert names(tmp_path / "run") == [f"checkpoint-{step}"]
    assert_same_run(resumed(rarely, tmp_path / "run", True), straight(rarely, tmp_path / "whole"))


def test_a_signal_during_a_save_stops_the_run_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write_manifest(*given)

    monkeypatch.setattr(checkpoints, "write_manifest", writes)
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 1; saved: .*-1; --resume"):
        make(tmp_path / "run").train()


def test_a_run_that_saves_nothing_saves_nothing_when_it_is_stopped(tmp_path: Path) -> None:
    stop = At("on_step_begin", 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    trainer = make(tmp_path / "run", save_strategy="no", callbacks=[stop])
    with pytest.raises(KeyboardInterrupt, match="stopped after step 2; its state is not saved"):
        trainer.train()
    assert not names(tmp_path / "run")


def test_a_state_is_written_once_with_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainerState, "save_to_json", failing)  # copies them
    found: list[Any] = []

    def read() -> None:
        text = (tmp_path / "checkpoint-2" / "trainer_state.json").read_text()
        found.extend((json.loads(text), dataclasses.asdict(trainer.state)))

    callbacks = [At("on_save", 2, read)]
    trainer = make(tmp_path, max_steps=2, logging_steps=1, callbacks=callbacks)
    trainer.train()
    assert found[0] == found[1]
    assert [log["step"] for log in found[0]["log_history"]] == [1, 2, 2]


def test_states_of_callbacks_are_saved_each_once(tmp_path: Path) -> None:
    both = [EarlyStoppingCallback(9), EarlyStoppingCallback(8)]
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss"}
    trainer = make(tmp_path, callbacks=both, load_best_model_at_end=True, **evaluating)
    both[1].early_stopping_patience_counter = 3
    trainer.train()
    text = (tmp_path / "checkpoint-5" / "trainer_state.json").read_text()
    saved = json.loads(text)["stateful_callbacks"]
    assert saved["EarlyStoppingCallback"] == [x.state() for x in both]
    assert saved["TrainerControl"]["args"]["should_save"]


def test_what_is_kept_is_there_again(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", max_steps=1)
    trainer.kept["before"] = {"loss": 0.1 + 0.2}
    trainer.train()
    again = make(tmp_path / "again", max_steps=1)
    again.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-1")
    assert again.kept == {"before": {"loss": 0.1 + 0.2}}


def test_transformers_own_arguments_do(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path / "run"), **{**SETTINGS, "report_to": "none"}, save_steps=1
    )
    args.save_strategy = SFTConfig(str(tmp_path), save_strategy="steps").save_strategy
    trainer = SFTTrainer(
        tiny_models.language_model(),
        args,
        train_dataset=texts(4),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    assert untimed(trainer.state.log_history)
    assert names(tmp_path / "run") == ["checkpoint-1"]


@pytest.mark.filterwarnings("ignore:trainer.state.log_history keeps")
def test_logs_are_bounded_and_a_run_resumes_with_those_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastrl.trainers.base.KEPT_LOGS", 3)
    with pytest.warns(UserWarning, match="keeps the latest 3 logs: raise logging_steps"):
        trainer = straight(lambda folder: make(folder, logging_steps=1), tmp_path / "run")
    assert [log.get("step") for log in trainer.state.log_history] == [5, 5, 5]
    state = json.loads((trainer.checkpoints.path(4) / "trainer_state.json").read_text())
    assert [log["step"] for log in state["log_history"]] == [3, 4, 4]
    again = resumed(
        lambda folder: make(folder, logging_steps=1),
        tmp_path / "again",
        trainer.checkpoints.path(3),
    )
    assert_same_run(again, trainer)


@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_epoch_end"])
def test_the_last_epochs_evaluation_is_done_though_its_last_step_failed(
    event: str, tmp_path: Path
) -> None:
    """The best model is chosen by it."""

    def ends(folder: Path, *callbacks: Any) -> SFTTrainer:
        epochs = {"num_train_epochs": 2, "max_steps": -1, "logging_steps": 1}
        each = {"save_strategy": "epoch", "load_best_model_at_end": True}
        best = {"metric_for_best_model": "eval_loss", "greater_is_better": False}
        return make(folder, callbacks=list(callbacks), **epochs, **each, **best)

    fails = ends(tmp_path / "run", At(event, 4, failing))
    with pytest.warns(UserWarning, match="the state is saved"), pytest.raises(RuntimeError):
        fails.train()
    again, whole = resumed(ends, tmp_path / "run", True), straight(ends, tmp_path / "whole")
    assert_same_run(again, whole)
    assert again.state.best_global_step == whole.state.best_global_step == 4
