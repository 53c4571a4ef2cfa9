"""How a run finds its processes, and what it refuses."""

from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate.utils import DistributedType

from fastrl import cli
from fastrl.run.launcher import _warn_of_a_single_process, launched_accelerator
from fastrl.run.processes import OneProcess, SeveralProcesses
from tests.trainers.conftest import make_sft

__all__ = ["make_sft"]  # a fixture


def found(monkeypatch, kind, count):
    """accelerate, which has found so many processes."""

    class Found:
        def __init__(self, **settings):
            self.num_processes, self.distributed_type = count, kind

    monkeypatch.setattr(accelerate, "Accelerator", Found)


@pytest.mark.parametrize(("environment", "kind", "count", "message"), [
    ({"WORLD_SIZE": "2"}, "NO", 1, "2 processes were started, and accelerate takes each for"),
    ({}, "DEEPSPEED", 1, "DeepSpeed steps the optimizer within backward.*use DDP"),
    ({"ACCELERATE_USE_FSDP": "true"}, "MULTI_CPU", 2, "FSDP was asked for, and accelerate"),
])  # fmt: skip
def test_what_would_train_several_models_is_refused(monkeypatch, environment, kind, count, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "WORLD_SIZE" not in environment:
        monkeypatch.setenv("WORLD_SIZE", str(count))
    found(monkeypatch, DistributedType[kind], count)
    with pytest.raises(ValueError, match=message):
        launched_accelerator()


def test_sequences_and_layers_in_parts_are_refused(monkeypatch):
    found(monkeypatch, DistributedType.MULTI_CPU, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = SimpleNamespace(non_data_parallel_size=2)
    monkeypatch.setattr(accelerate.Accelerator, "parallelism_config", parts, raising=False)
    with pytest.raises(ValueError, match=r"over 2 processes.*leave out its tp_size, cp_size"):
        launched_accelerator()


@pytest.mark.parametrize("door", ["command", "program"])
def test_a_launcher_that_starts_one_process_for_several_is_warned_of(door, monkeypatch, make_sft):
    """``accelerate launch --cpu --num_processes 2`` sets this."""
    find = launched_accelerator if door == "command" else make_sft
    _warn_of_a_single_process.cache_clear()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    find()
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.warns(
        UserWarning, match="several processes, and has started one.*--multi_gpu in place of --cpu"
    ):
        find()
    find()
    _warn_of_a_single_process.cache_clear()
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun's
    find()


@pytest.mark.parametrize(
    ("count", "expected"), [(7, [2, 2, 2, 1]), (8, [2] * 4), (2, [1, 1, 0, 0])]
)
def test_shares_are_as_equal_as_can_be(count, expected):
    processes = object.__new__(SeveralProcesses)
    processes.count = 4
    shares = processes.shares(range(count))
    assert [len(share) for share in shares] == expected
    assert [i for share in shares for i in share] == list(range(count))


def test_balanced_shares_are_about_as_large_and_as_equal_in_number_as_can_be():
    processes = object.__new__(SeveralProcesses)
    processes.count = 3
    sizes = [9, 1, 8, 2, 7, 3, 6]
    shares = processes.balanced(sizes)
    assert sorted(i for share in shares for i in share) == list(range(7))
    assert [len(share) for share in shares] == [3, 2, 2]
    assert [sum(sizes[i] for i in share) for share in shares] == [12, 11, 13]
    assert processes.balanced([4]) == [[0], [], []]


def test_one_process_has_all_and_waits_for_nobody():
    alone, x = OneProcess(), torch.arange(3)
    assert alone.shares([1, 2, 3]) == [[1, 2, 3]]
    assert alone.objects("x") == ["x"]
    assert alone.joined(x, [3]) is alone.sums(x) is x
    with pytest.raises(KeyError), alone.together():
        raise KeyError


@pytest.mark.parametrize(("status", "left"), [(0, True), (1, True), (2, False)])
def test_the_program_leaves_its_group_behind_a_run(status, left, monkeypatch):
    """gloo's threads abort a process now and then that ends within a group."""
    group = torch.distributed
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(cli, "main", lambda: status)
        assert cli.program() == status
        assert group.is_initialized() != left
    finally:
        if group.is_initialized():
            group.destroy_process_group()
