"""The run folder: what is overwritten, what stays, and that nothing is seen half written."""

import json
import math

import pytest

from fastrl.run.folder import RunFolder
from fastrl.run.metrics import MetricsFile


def save(text):
    def to(folder):
        folder.mkdir()
        (folder / text).write_text(text)

    return to


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_run_in_the_folder_of_another_overwrites_all_but_the_model(tmp_path):
    first = RunFolder(tmp_path / "new" / "run", {"command": "ppo"})
    first.begin()
    first.save_model(save("weights"))
    MetricsFile(first.metrics).append(1, {"x": 1.0})
    first.write_rows("samples.jsonl", [{"prompt": "a"}])
    first.write_summary({"gain": 1.0})
    first.report.write_text("png")
    first.checkpoints.mkdir()
    RunFolder(first.path, {"command": "grpo"}).begin()
    assert names(first.path) == ["checkpoints", "metrics.jsonl", "model", "run.json"]
    assert names(first.model) == ["weights"]
    found = RunFolder.open(first.path)
    assert found.config == {"command": "grpo"}
    assert found.rows() == []


def test_a_model_is_replaced_as_a_whole(tmp_path):
    folder = RunFolder(tmp_path)
    folder.save_model(save("adapter"))
    folder.save_model(save("weights"))
    assert names(folder.model) == ["weights"]
    assert names(tmp_path) == ["model"]


def test_a_model_that_cannot_be_saved_leaves_the_old_one(tmp_path):
    folder = RunFolder(tmp_path)
    folder.save_model(save("old"))

    def fail(path):
        save("half")(path)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        folder.save_model(fail)
    assert names(folder.model) == ["old"]
    assert names(tmp_path) == ["model"]


def test_a_model_is_saved_under_the_name_that_it_will_have(tmp_path):
    seen = []
    RunFolder(tmp_path).save_model(lambda path: (seen.append(path.name), path.mkdir()))
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
