"""A command on several processes, one of which is killed: it ends, and is resumed bit for bit."""

import functools
import signal

import pytest

from fastrl.run.checkpoints import Checkpoints, verify
from tests.faults.test_kills import command, results
from tests.processes.killed import run_killed
from tests.processes.launch import accelerate_launch, fork, launch

# Where which process dies: as it generates, updates, and writes.
INSTANTS = [
    *(
        ("grpo", x)
        for x in ("rollout:40:1", "update:11:1", "update:11:0", "save:2:0", "metrics:4:0")
    ),
    ("sft", "update:4:1"),
]
SETTINGS = {
    # Two groups of each process in each step.
    "grpo": {"steps": 5, "batch-size": 8, "mini-batch-size": 4, "group-size": 4},
    "sft": {"max-steps": 5},
}


def words(name, data, folder):
    return command(name, data, folder, **SETTINGS[name])


@pytest.fixture(scope="module")
def straight(data, count, tmp_path_factory):
    """What a command leaves that nothing interrupts."""

    @functools.cache
    def left(name):
        folder = tmp_path_factory.mktemp("straight") / "run"
        ended = fork(run_killed, "never", *words(name, data, folder), processes=count)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return results(folder)

    return left


def assert_whole(folder):
    kept = Checkpoints(folder / "checkpoints").paths()
    assert kept
    for path in kept:
        verify(path)


@pytest.mark.parametrize(("name", "instant"), INSTANTS)
def test_a_run_of_which_one_process_is_killed_is_resumed_bit_for_bit(
    name, instant, straight, data, count, tmp_path
):
    given = words(name, data, tmp_path / "run")
    ended = fork(run_killed, instant, *given, processes=count)
    assert ended.returncode != 0
    assert_whole(tmp_path / "run")
    ended = fork(run_killed, "never", *given, "--resume", processes=count)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert results(tmp_path / "run") == straight(name)


@pytest.mark.parametrize(("name", "instant"), INSTANTS[:1])
def test_accelerate_launch_ends_soon_and_starts_it_again(
    name, instant, straight, data, count, tmp_path
):
    given = words(name, data, tmp_path / "run")
    starter = accelerate_launch(count)
    ended = launch("-m", "tests.processes.killed", instant, *given, starter=starter)
    assert ended.returncode == 1
    assert f"{-signal.SIGKILL}" in ended.stderr
    assert_whole(tmp_path / "run")
    ended = launch("-m", "tests.processes.killed", "never", *given, "--resume", starter=starter)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert results(tmp_path / "run") == straight(name)
