"""Two processes do together what one does alone: the same samples, numbers and weights."""

import pytest
import torch

from fastrl.run.state import load_tree
from tests.processes.jobs import JOBS, run
from tests.processes.launch import assert_close, fork


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder with what each job did, as one process and as two."""
    folder = tmp_path_factory.mktemp("jobs")
    for processes in (1, 2):
        ended = fork(run, folder, *JOBS, processes=processes)
        assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


def trees(done, name):
    return [load_tree(done / f"{name}-{which}") for which in ("1-0", "2-0", "2-1")]


@pytest.mark.parametrize("name", JOBS)
def test_two_processes_do_what_one_does(done, name):
    one, *both = trees(done, name)
    for each in both:
        assert_close(one, each)
    for parameter, value in both[0]["weights"].items():
        assert torch.equal(value, both[1]["weights"][parameter]), parameter


@pytest.mark.parametrize("name", JOBS)
def test_it_learned(done, name):
    """Or weights that nobody has changed would be equal."""
    one = trees(done, name)[0]
    assert one["evaluations"][0] != one["evaluations"][-1]
