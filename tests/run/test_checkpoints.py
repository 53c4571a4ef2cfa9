"""Checkpoints: there as a whole or not at all; a damaged one is named, and the one before taken."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from fastrl.run import checkpoints as module
from fastrl.run import stopping
from fastrl.run.checkpoints import (
    BadCheckpoint,
    Checkpoints,
    find_checkpoint,
    verify,
    warn_of_another_machine,
)
from fastrl.run.machine import remedies
from fastrl.run.processes import OneProcess
from fastrl.run.state import load_tree, save_tree


def write(checkpoints, step, text="state"):
    with checkpoints.new(step) as folder:
        (folder / "state.json").write_text(text * 100)
        (folder / "part").mkdir()
        (folder / "part" / "x").write_text(text)
    return checkpoints.path(step)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


def test_the_newest_whole_one_is_found(checkpoints):
    for step in (2, 10, 9):
        write(checkpoints, step)
    assert checkpoints.newest_good() == checkpoints.path(10)
    assert verify(checkpoints.path(10))["step"] == 10


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 3]), (1, [3]), (2, [2, 3])])
def test_older_ones_are_removed_once_a_new_one_is_there(tmp_path, keep, left):
    checkpoints = Checkpoints(tmp_path, keep)
    for step in (1, 2, 3):
        write(checkpoints, step)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]


def damage_truncate(path):
    os.truncate(path / "state.json", 3)


def damage_bit(path):
    data = bytearray((path / "state.json").read_bytes())
    data[7] ^= 1
    (path / "state.json").write_bytes(data)


def damage_missing(path):
    (path / "part" / "x").unlink()


def damage_manifest(path):
    os.truncate(path / "manifest.json", 40)


def damage_no_manifest(path):
    (path / "manifest.json").unlink()


@pytest.mark.parametrize(("damage", "said"), [
    (damage_truncate, r"checkpoint-4/state\.json is damaged: it has 3 bytes, not 500"),
    (damage_bit, r"checkpoint-4/state\.json is damaged: its checksum"),
    (damage_missing, "checkpoint-4/part/x is missing"),
    (damage_manifest, r"checkpoint-4/manifest\.json is damaged"),
    (damage_no_manifest, r"checkpoint-4 is no whole checkpoint .* no manifest\.json"),
])  # fmt: skip
def test_a_damaged_one_is_named_and_the_one_before_it_taken(checkpoints, damage, said):
    write(checkpoints, 2)
    damage(write(checkpoints, 4))
    with pytest.warns(UserWarning, match=f"{said}.*: it is not used"):
        assert find_checkpoint(True, checkpoints) == checkpoints.path(2)
    with pytest.raises(BadCheckpoint, match=said):
        find_checkpoint(checkpoints.path(4), checkpoints)
    damage_no_manifest(checkpoints.path(2))
    with (
        pytest.warns(UserWarning, match="checkpoint-"),
        pytest.raises(BadCheckpoint, match=r"no checkpoint in .* is whole: pass --overwrite"),
    ):
        find_checkpoint("latest", checkpoints)


def test_one_of_a_newer_fastrl_is_refused(checkpoints):
    path = write(checkpoints, 2)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": module.FORMAT + 1}))
    with pytest.raises(BadCheckpoint, match=r"newer fastrl .*: update fastrl"):
        verify(path)


def test_a_name_that_is_no_checkpoint_is_refused(checkpoints, tmp_path):
    assert find_checkpoint(True, checkpoints) is None
    with pytest.raises(FileNotFoundError, match="resume: there is no folder"):
        find_checkpoint(tmp_path / "nowhere", checkpoints)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        find_checkpoint(tmp_path, checkpoints)


def test_a_run_is_named_by_its_folder(checkpoints, tmp_path):
    write(checkpoints, 3)
    assert find_checkpoint(tmp_path, Checkpoints(tmp_path / "other")) == checkpoints.path(3)


def test_a_full_disk_leaves_the_last_good_one(checkpoints):
    write(checkpoints, 2)

    def save():
        with checkpoints.new(4) as folder:
            (folder / "half").write_text("x")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"checkpoint-4 could not be saved .*; the last good .*-2"):
        save()
    assert names(checkpoints.folder) == ["checkpoint-2"]
    assert checkpoints.newest_good() == checkpoints.path(2)


KILLED = """
import os, sys
from pathlib import Path
from fastrl.run import checkpoints, files
from fastrl.run.checkpoints import Checkpoints
real = getattr(files, sys.argv[2])
def dying(*args):
    os.kill(os.getpid(), 9)
setattr(files, sys.argv[2], dying)
with Checkpoints(Path(sys.argv[1])).new(4) as folder:
    (folder / "state.json").write_text("new")
    if sys.argv[2] == "write_file":
        dying()
"""


@pytest.mark.parametrize("at", ["write_file", "sync_file"])
def test_a_kill_during_the_save_leaves_what_was_there(checkpoints, at):
    write(checkpoints, 2)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(checkpoints.folder), at])
    assert killed.returncode == -9
    assert checkpoints.newest_good() == checkpoints.path(2)
    assert checkpoints.paths() == [checkpoints.path(2)]
    write(checkpoints, 4)
    assert names(checkpoints.folder) == ["checkpoint-2", "checkpoint-4"]


def interrupt(checkpoints, times):
    """As Ctrl-C does in the midst of a save."""
    with checkpoints.new(9) as part:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        (part / "x").write_text("9")


@pytest.mark.parametrize("forwarded", [False, True])
def test_a_save_is_not_cut_by_signals(checkpoints, forwarded, monkeypatch):
    """A launcher's second signal does not cut it either."""
    monkeypatch.setattr(stopping, "process_count", lambda: 2 if forwarded else 1)
    with pytest.raises(KeyboardInterrupt):
        interrupt(checkpoints, times=2 if forwarded else 1)
    assert checkpoints.newest_good().name == "checkpoint-9"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_cuts_a_save(checkpoints):
    with pytest.raises(KeyboardInterrupt):
        interrupt(checkpoints, times=2)
    assert "checkpoint-9" not in [path.name for path in checkpoints.paths()]
    assert not list(checkpoints.folder.glob(".saving-*"))


def test_another_machine_is_told_of(checkpoints):
    manifest = verify(write(checkpoints, 1))
    warn_of_another_machine(manifest)
    manifest["machine"]["threads"] = 77
    manifest["versions"]["torch"] = "1.0"
    with pytest.warns(UserWarning, match=r"torch: 1\.0 → .*; threads: 77 → .*OMP_NUM_THREADS=77 "):
        warn_of_another_machine(manifest)


def test_another_way_to_draw_tokens_is_told_of(checkpoints):
    manifest = verify(write(checkpoints, 1))
    del manifest["versions"]["draws"]  # as before there was a second way
    with pytest.warns(UserWarning, match="draws: None → 2.*tokens are drawn in another way"):
        warn_of_another_machine(manifest)


@pytest.mark.parametrize(("before", "now", "said"), [
    ({"threads": 2}, {"threads": 2}, ""),
    ({"threads": 2}, {"threads": 1}, "OMP_NUM_THREADS=2"),
    ({"cpu_capability": "AVX2"}, {"cpu_capability": "AVX512"}, "ATEN_CPU_CAPABILITY=avx2"),
    ({"cpu_capability": "NO AVX"}, {"cpu_capability": "AVX2"}, "ATEN_CPU_CAPABILITY=default"),
    ({"cpu_capability": "AVX512"}, {"cpu_capability": "AVX2"}, ""),  # it may have no more
    ({"cpu_capability": "AVX2"}, {"cpu_capability": "SVE256"}, ""),
    ({}, {"threads": 2, "cpu_capability": "AVX2"}, ""),
    ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, {}, "ONEDNN_MAX_CPU_ISA=AVX2"),
    ({"MKL_CBWR": "AVX2"}, {"MKL_CBWR": "AVX"}, "MKL_CBWR=AVX2"),
    ({}, {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, "MKL_ENABLE_INSTRUCTIONS="),
    ({}, {"kernels": "native 1a2b"}, "FASTRL_KERNELS_BACKEND=torch"),
    ({"kernels": "native 1a2b"}, {"kernels": "torch"}, "FASTRL_KERNELS_BACKEND=native"),
    ({"kernels": "native 1a2b"}, {"kernels": "native 3c4d"}, ""),
])  # fmt: skip
def test_the_variables_that_bring_the_same_bits_are_named(before, now, said):
    assert remedies(before, now) == said


def test_limits_of_instructions_are_part_of_the_machine(checkpoints, monkeypatch):
    name = "MKL_ENABLE_INSTRUCTIONS"
    monkeypatch.delenv(name, raising=False)
    manifest = verify(write(checkpoints, 1))
    monkeypatch.setenv(name, "AVX2")
    with pytest.warns(UserWarning, match=f"{name}: None → AVX2.*start it with {name}= for"):
        warn_of_another_machine(manifest)


def test_kernels_are_part_of_the_machine(checkpoints, monkeypatch):
    name = "FASTRL_KERNELS_BACKEND"
    monkeypatch.setenv(name, "torch")
    manifest = verify(write(checkpoints, 1))
    monkeypatch.setenv(name, "triton")
    with pytest.warns(UserWarning, match=f"kernels: torch → triton.*start it with {name}=torch"):
        warn_of_another_machine(manifest)


class Main(OneProcess):
    """The first of two processes, of which the other answers with texts."""

    count = 2

    def balanced(self, sizes):
        return [[0], [1]]

    def objects(self, own):
        return [own, {"state.json": "the other's"}]


def test_each_process_computes_the_checksums_of_its_share(checkpoints):
    with checkpoints.new(1, processes=Main()) as part:
        (part / "part").write_text("own")
        (part / "state.json").write_text("{}")
    files = json.loads((checkpoints.path(1) / "manifest.json").read_text())["files"]
    own = hashlib.sha256(b"own").hexdigest()
    assert {name: x["sha256"] for name, x in files.items()} == {
        "part": own,
        "state.json": "the other's",
    }


def test_what_another_process_does_not_see_the_main_one_reads(checkpoints, monkeypatch):
    monkeypatch.setattr(Main, "objects", lambda self, own: [own, {}])
    with checkpoints.new(1, processes=Main()) as part:
        (part / "part").write_text("own")
        (part / "state.json").write_text("{}")
    assert len(verify(checkpoints.path(1))["files"]) == 2


def test_one_that_the_main_process_saves_alone_has_its_own_checksums(checkpoints):
    with checkpoints.new(1, processes=Main()) as part:
        (part / "state.json").write_text("{}")
    with checkpoints.new(2, processes=OneProcess()) as part:
        (part / "state.json").write_text("{} ")
    verify(checkpoints.path(2))


def test_a_tree_is_read_as_it_was_written(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    tree = {
        "weights": {"a": shared, "b": shared.t(), "c/d": torch.tensor(2, dtype=torch.bfloat16)},
        "plain": {"x": [1, 2.5, None, True, "text"], "big": 1 << 63, "tuple": (1, 2)},
        "arrays": {"words": np.arange(4, dtype=np.uint32), "bytes": b"\x00\xff"},
        "nan": float("nan"),
    }
    save_tree(tree, tmp_path)
    found = load_tree(tmp_path)
    assert torch.equal(found["weights"]["b"], shared.t())
    assert found["weights"]["c/d"].dtype == torch.bfloat16
    assert found["plain"] == {"x": [1, 2.5, None, True, "text"], "big": 1 << 63, "tuple": [1, 2]}
    assert found["arrays"]["words"].dtype == np.uint32
    assert found["arrays"]["words"].tolist() == [0, 1, 2, 3]
    assert found["arrays"]["bytes"] == b"\x00\xff"
    assert found["nan"] != found["nan"]
    assert names(tmp_path) == ["arrays.safetensors", "state.json", "weights.safetensors"]


@pytest.mark.parametrize(
    ("tree", "said"),
    [({"a": {"b": object()}}, "a/b is a object"), ({"a": {1: 2}}, "a has the key 1")],
)
def test_what_a_checkpoint_cannot_hold_is_named(tree, said, tmp_path):
    with pytest.raises(TypeError, match=said):
        save_tree(tree, tmp_path)
