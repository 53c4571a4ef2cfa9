"""The run folder: what is overwritten, what stays, and that nothing is seen half written."""

import errno
import json
import math
import os
import signal
import stat
import subprocess
import sys
from subprocess import PIPE

import pytest

from fastrl.run.checkpoints import Checkpoints
from fastrl.run.files import _warn_of_folders
from fastrl.run.folder import RunFolder
from fastrl.run.lock import FolderInUse, FolderLock, _warn_of_no_locks
from fastrl.run.metrics import MetricsFile


def save(text):
    def to(folder):
        (folder / text).write_text(text)

    return to


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def earlier(tmp_path):
    """The folder of a run that has ended."""
    folder = RunFolder(tmp_path / "new" / "run", {"command": "ppo"})
    with folder.claim():
        folder.begin()
        for step in range(5):
            MetricsFile(folder.metrics).append(step, {"x": step / 2})
        folder.write_model(save("weights"))
        folder.write_rows("samples.jsonl", [{"prompt": "a"}])
        folder.write_summary({"gain": 1.0})
        folder.report.write_text("png")
        for step in (2, 4):
            with Checkpoints(folder.checkpoints).new(step) as part:
                (part / "x").write_text(str(step))
    return folder


def test_a_run_that_overwrites_another_leaves_its_model_until_there_is_a_new_one(earlier):
    folder = RunFolder(earlier.path, {"command": "grpo"})
    with folder.claim(overwrite=True):
        folder.begin()
    assert names(folder.path) == ["metrics.jsonl", "model", "run.json"]
    assert names(folder.model) == ["weights"]
    found = RunFolder.open(folder.path)
    assert found.config == {"command": "grpo"}
    assert found.rows() == []


def test_a_run_is_neither_overwritten_nor_continued_by_accident(earlier):
    before = {path: path.read_bytes() for path in earlier.path.rglob("*") if path.is_file()}
    with (
        pytest.raises(ValueError, match=r"holds a run already \(checkpoint-4\): pass --resume"),
        RunFolder(earlier.path).claim(),
    ):
        raise AssertionError
    with (
        pytest.raises(ValueError, match="holds a run of ppo, which sft cannot resume"),
        RunFolder(earlier.path, {"command": "sft"}).claim(resume=True),
    ):
        raise AssertionError
    after = {path: path.read_bytes() for path in earlier.path.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"overwrite": True}])
def test_a_strangers_files_are_never_touched(flags, tmp_path):
    (tmp_path / "model.safetensors").write_text("precious")
    with (
        pytest.raises(ValueError, match=r"not a run's \(model\.safetensors\): name a new or empty"),
        RunFolder(tmp_path).claim(**flags),
    ):
        raise AssertionError
    assert names(tmp_path) == ["model.safetensors"]


def test_two_runs_do_not_write_one_folder(tmp_path):
    first, second = (RunFolder(tmp_path / "run") for _ in range(2))
    with first.claim():
        first.begin()
        with (
            pytest.raises(FolderInUse, match=f"another run \\(process {os.getpid()} on"),
            second.claim(resume=True),
        ):
            raise AssertionError
    with second.claim(resume=True):
        pass


HOLDS = """
import os, sys
from pathlib import Path
from fastrl.run.lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
if os.fork() == 0:
    os.kill(os.getppid(), 9)
    print("alone", flush=True)
    sys.stdin.read()
    os.close(lock._file)
    os.write(1, b"closed")
    os._exit(0)
os.wait()
"""


def test_a_killed_processs_lock_is_free_once_its_forks_have_let_go_of_it(tmp_path):
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout.readline() == "alone\n"
        assert process.wait() == -signal.SIGKILL
        with pytest.raises(FolderInUse, match=f"process {process.pid} on"):
            FolderLock(tmp_path).acquire()
        process.stdin.close()
        assert process.stdout.read() == "closed"
    FolderLock(tmp_path).acquire()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_warned_of_once(number, tmp_path, monkeypatch, recwarn):
    def lock(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fastrl.run.lock.lock_descriptor", lock)
    _warn_of_no_locks.cache_clear()
    for name in ("one", "two"):
        with RunFolder(tmp_path / name).claim():
            RunFolder(tmp_path / name).begin()
    (warned,) = recwarn
    assert "has no locks: nothing keeps a second run" in str(warned.message)
    assert names(tmp_path / "two") == ["metrics.jsonl", "run.json"]


def test_a_lock_that_fails_for_another_reason_ends_the_run(tmp_path, monkeypatch):
    def lock(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fastrl.run.lock.lock_descriptor", lock)
    with pytest.raises(OSError, match="Input/output error"), RunFolder(tmp_path / "run").claim():
        pytest.fail("claimed")


def fsync_failing(of_folders, number):
    """As ``os.fsync``, which fails for folders, or for files."""
    sync = os.fsync

    def fsync(file):
        if stat.S_ISDIR(os.fstat(file).st_mode) == of_folders:
            raise OSError(number, os.strerror(number))
        sync(file)

    return fsync


def test_folders_that_cannot_be_synced_are_warned_of_once(earlier, monkeypatch, recwarn):
    monkeypatch.setattr(os, "fsync", fsync_failing(True, errno.EINVAL))
    _warn_of_folders.cache_clear()
    earlier.write_model(save("new"))
    with Checkpoints(earlier.checkpoints).new(6) as part:
        (part / "x").write_text("6")
    (warned,) = recwarn
    assert "does not sync folders" in str(warned.message)
    assert names(earlier.model) == ["new"]
    assert Checkpoints(earlier.checkpoints).newest_good().name == "checkpoint-6"


@pytest.mark.parametrize(
    ("of_folders", "number"), [(True, errno.ENOSPC), (True, errno.EIO), (False, errno.EINVAL)]
)
def test_what_the_disk_did_not_get_is_not_saved(of_folders, number, earlier, monkeypatch):
    monkeypatch.setattr(os, "fsync", fsync_failing(of_folders, number))
    checkpoints = Checkpoints(earlier.checkpoints)
    with (
        pytest.raises(OSError, match=r"checkpoint-6 could not be saved .* is checkpoint-4"),
        checkpoints.new(6) as part,
    ):
        (part / "x").write_text("6")
    assert [path.name for path in checkpoints.paths()] == ["checkpoint-2", "checkpoint-4"]


def test_a_claim_that_wrote_nothing_leaves_nothing(tmp_path):
    with RunFolder(tmp_path / "run").claim():
        pass
    assert names(tmp_path) == []


def test_a_run_that_was_killed_before_it_began_is_no_strangers_folder(tmp_path):
    """transformers' Trainer makes the folder of checkpoints long before the first file."""
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    with folder.claim(resume=True):
        folder.resume(None)
    (tmp_path / "other" / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    with (
        pytest.raises(ValueError, match="files that are not a run's"),
        RunFolder(tmp_path / "other").claim(),
    ):
        pass


def test_a_run_that_is_interrupted_at_once_names_its_newest_checkpoint(earlier):
    for error in (KeyboardInterrupt(), KeyboardInterrupt("stopped after step 4")):
        with pytest.raises(KeyboardInterrupt) as caught, earlier.claim(resume=True):
            raise error
        said = str(error) if error.args[0].startswith("stopped") else "interrupted; the newest "
        assert str(caught.value).startswith(said)
    with (
        pytest.raises(KeyboardInterrupt, match=r"checkpoint-4: --resume"),
        earlier.claim(resume=True),
    ):
        raise KeyboardInterrupt


def test_records_after_the_checkpoint_are_moved_and_not_lost(earlier):
    with earlier.metrics.open("a") as file:
        file.write('{"step": 5, "x"')
    lines = earlier.metrics.read_text().splitlines(keepends=True)
    folder = RunFolder(earlier.path, {"command": "ppo", "changed": 1})
    with folder.claim(resume=True):
        folder.resume(folder.checkpoints / "checkpoint-2")
    assert folder.metrics.read_text() == "".join(lines[:3])
    assert (folder.path / "metrics.superseded-1.jsonl").read_text() == "".join(lines[3:])
    assert names(folder.checkpoints) == ["checkpoint-2"]
    assert names(folder.path / "checkpoints.superseded-1") == ["checkpoint-4"]
    assert json.loads((folder.path / "run.superseded-1.json").read_text()) == {"command": "ppo"}
    with folder.claim(resume=True):
        folder.resume(None)
    assert folder.rows() == []
    assert (folder.path / "metrics.superseded-2.jsonl").read_text() == "".join(lines[:3])


def test_lines_of_metrics_are_counted_once(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin()
    file = MetricsFile(folder.metrics)
    for step in range(3):
        file.append(step, {"x": 1.0})
    assert folder.count_rows() == 3
    with folder.metrics.open("r+") as opened:  # without its ends of lines
        opened.write(" " * folder.metrics.stat().st_size)
    file.append(3, {"x": 1.0})
    assert folder.count_rows() == 4
    folder.resume(None)
    file.append(0, {"x": 1.0})
    assert folder.count_rows() == 1


def test_a_run_may_be_resumed_from_another_working_directory(tmp_path):
    config = {"command": "ppo", "job": {"model": "m"}}
    for place in ("here", "there"):
        folder = RunFolder(tmp_path / "run", {**config, "started_in": place})
        with folder.claim(resume=True):
            folder.resume(None)
        assert folder.read("run.json")["started_in"] == place
    assert names(folder.path) == ["metrics.jsonl", "run.json"]
    other = RunFolder(folder.path, {**config, "job": {"model": "n"}, "started_in": "there"})
    other.resume(None)
    assert "run.superseded-1.json" in names(folder.path)


def test_half_a_line_at_the_end_is_not_read(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1}\n{"st')
    assert folder.rows() == [{"step": 1}]


def test_a_model_is_replaced_as_a_whole(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_model(save("adapter"))
    folder.write_model(save("weights"))
    assert names(folder.model) == ["weights"]
    assert names(tmp_path) == ["model"]


def test_a_model_that_cannot_be_saved_leaves_the_old_one(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_model(save("old"))

    def fail(path):
        save("half")(path)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        folder.write_model(fail)
    assert names(folder.model) == ["old"]
    assert names(tmp_path) == ["model"]


def test_a_model_is_saved_under_the_name_that_it_will_have(tmp_path):
    seen = []
    RunFolder(tmp_path).write_model(lambda path: seen.append(path.name))
    assert seen == ["model"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write("summary.json", {"a": 1})

    def fail(self, text, **_):
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError("the disk is full")

    monkeypatch.setattr("pathlib.Path.write_text", fail)
    with pytest.raises(OSError, match="full"):
        folder.write("summary.json", {"a": 2})
    assert folder.read("summary.json") == {"a": 1}


def test_values_that_json_has_no_form_for_are_written_as_text(tmp_path):
    RunFolder(tmp_path, {"path": tmp_path}).begin()
    assert RunFolder.open(tmp_path).config == {"path": str(tmp_path)}


def test_metrics_leave_out_what_is_not_known(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.begin()
    file.append(3, {"loss": 0.5, "grad_norm": math.nan})
    assert json.loads(file.path.read_text()) == {"step": 3, "loss": 0.5}


@pytest.mark.parametrize("name", ["", "  "])
def test_a_folder_needs_a_name(name):
    with pytest.raises(ValueError, match="output is empty: name a folder"):
        RunFolder(name).check()


def test_the_working_directory_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunFolder(".").check()


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run: there is no metrics\.jsonl"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_configuration_that_is_no_object_is_named(text, tmp_path):
    RunFolder(tmp_path).begin()
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json is not"):
        RunFolder.open(tmp_path)
