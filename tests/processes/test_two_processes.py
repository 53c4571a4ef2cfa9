"""Several processes do together what one does alone: the same samples, numbers and weights."""

import pytest
import torch

from tests.processes.jobs import JOBS, TOLERANCES, run
from tests.processes.launch import TOLERANCE, asked_for, assert_close, fork, kept


@pytest.fixture(scope="module")
def alone(request, tmp_path_factory):
    """A folder with what each job does as one process."""
    return _done(request, tmp_path_factory, 1)


@pytest.fixture(scope="module")
def together(request, tmp_path_factory, count):
    """What it does as several."""
    return _done(request, tmp_path_factory, count)


def _done(request, tmp_path_factory, processes):
    folder = tmp_path_factory.mktemp("jobs")
    ended = fork(run, folder, *asked_for(request, JOBS), processes=processes)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_several_processes_do_what_one_does(alone, together, count, name):
    (one,), each = kept(alone, name, 1), kept(together, name, count)
    for other in each:
        assert_close(one, other, tolerance=TOLERANCES.get(name, TOLERANCE))
        for parameter, value in each[0]["weights"].items():
            assert torch.equal(value, other["weights"][parameter]), parameter
        for parameter, value in each[0].get("critic", {}).items():
            assert torch.equal(value, other["critic"][parameter]), parameter


@pytest.mark.parametrize("name", JOBS)
def test_it_learned(alone, name):
    """Or weights that nobody has changed would be equal."""
    (one,) = kept(alone, name, 1)
    assert one["evaluations"][0] != one["evaluations"][-1]


@pytest.mark.parametrize("name", ["ppo, steps left out and epochs cut short"])
def test_the_job_that_leaves_steps_out_does(alone, name):
    (one,) = kept(alone, name, 1)
    assert sum(x["ppo/skipped_minibatches"] for x in one["metrics"]) > 0
    assert sum(x["ppo/early_stopped"] for x in one["metrics"]) > 0
