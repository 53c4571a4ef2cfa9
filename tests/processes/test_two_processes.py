"""Two processes do together what one does alone: the same samples, numbers and weights."""

import pytest
import torch

from fastrl.run.ledger import read_ledger
from fastrl.run.state import load_tree
from tests.processes.jobs import JOBS, train
from tests.processes.launch import TOLERANCE, assert_close, launch, torchrun


def run(*arguments, processes=2):
    """Runs jobs."""
    return launch("-m", "tests.processes.jobs", *arguments, starter=torchrun(processes))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder with what each job did, as one process and as two."""
    folder = tmp_path_factory.mktemp("jobs")
    for processes in (1, 2):
        ended = run(folder, *JOBS, processes=processes)
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


@pytest.mark.filterwarnings("ignore:.*the KL estimate is negative")
def test_a_process_that_fails_ends_both_with_the_state_saved(tmp_path):
    failed = run(tmp_path / "run", "fails")
    assert failed.returncode != 0
    assert "LookupError: the judge is gone" in failed.stderr
    assert "PeerFailed: process 1 of 2 failed: LookupError: the judge is gone" in failed.stderr
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-2").is_dir()
    straight = train(tmp_path / "straight")
    with pytest.warns(UserWarning, match=r"the run had 2 process\(es\), and has 1: samples are"):
        resumed = train(tmp_path / "run", resume=True)
    columns = ["step", "sample", "seed", "sample_id", "completion_ids", "reward"]
    one, other = (read_ledger(tmp_path / name / "ledger", columns) for name in ("straight", "run"))
    assert one.num_rows == 64
    assert one.equals(other)
    for name, weight in straight._unwrapped.state_dict().items():
        assert float((weight - resumed._unwrapped.state_dict()[name]).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("name", JOBS)
def test_it_learned(done, name):
    """Or weights that nobody has changed would be equal."""
    one = trees(done, name)[0]
    assert one["evaluations"][0] != one["evaluations"][-1]
