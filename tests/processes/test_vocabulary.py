"""Processes that share a head's rows compute what one computes of the whole head."""

import pytest
import torch

from tests.processes.launch import assert_close, fork, kept
from tests.processes.vocabulary import head, learned, losses, run

# Compiling is slow, and the same for all numbers of processes.
JOBS = {2: ("ranges", "dtensor", "compiled"), 3: ("ranges", "dtensor", "some processes")}


@pytest.fixture(scope="module", params=JOBS)
def done(request, tmp_path_factory):
    """What each job did, by process."""
    folder = tmp_path_factory.mktemp("vocabulary")
    names = JOBS[request.param]
    ended = fork(run, folder, *names, processes=request.param)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {name: kept(folder, name, request.param) for name in names}


@pytest.fixture(scope="module")
def whole():
    """Of one process."""
    leaves = {k: x.requires_grad_(x.is_floating_point()) for k, x in head().items()}
    return learned(leaves, losses(leaves))


def assert_shared(found, whole):
    """Each process has the whole results, to the bit the same, and its own rows' gradients."""
    for each in found:
        start, stop = each["rows"]
        expected = {k: x[start:stop] if k in ("dweight", "dbias") else x for k, x in whole.items()}
        assert_close(expected, each["found"])
        for name in whole.keys() - {"dweight", "dbias"}:
            assert torch.equal(each["found"][name], found[0]["found"][name]), name
    assert sorted(each["rows"] for each in found)[-1][1] == len(whole["dbias"])


def test_each_process_has_what_one_would_compute(done, whole):
    assert_shared(done["ranges"], whole)


def test_runs_of_several_processes_give_the_same_bits(done):
    for each in done["ranges"]:
        for name, x in each["found"].items():
            assert torch.equal(each["again"][name], x), name


def test_the_rows_of_a_dtensor(done):
    hidden, weight, bias, labels = head().values()
    leaves = {"hidden": hidden, "weight": weight, "bias": bias}
    for leaf in leaves.values():
        leaf.requires_grad_()
    logits = torch.nn.functional.linear(hidden, weight, bias)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    for each in done["dtensor"]:
        expected = {"nll": loss.detach(), **{f"d{k}": x.grad for k, x in leaves.items()}}
        assert_close(expected, each["found"])
        assert "must be Shard(0) once" in each["refusal"]
    sizes = [stop - start for start, stop in (each["rows"] for each in done["dtensor"])]
    assert sizes in ([27, 26], [18, 18, 17])


@pytest.mark.parametrize("done", [3], indirect=True)
def test_a_group_of_some_processes(done, whole):
    outside, *members = done["some processes"]
    assert "this process is not in the group" in outside["refusal"]
    assert_shared(members, whole)


@pytest.mark.parametrize("done", [2], indirect=True)
def test_compiled_code_takes_the_vocabulary_that_it_is_called_with(done, whole):
    for which in ("first", "second"):
        assert_shared([each[which] for each in done["compiled"]], whole)
