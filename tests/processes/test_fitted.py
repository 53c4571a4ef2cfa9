"""The trainers on transformers', on several processes and on one."""

import json
import signal

import pytest
import torch

from fastrl.run.checkpoints import BadCheckpoint
from tests.processes import fitted
from tests.processes.fitted import JOBS, RESUMED, SAVED
from tests.processes.launch import asked_for, assert_close, fork, keep, kept

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def done(request, tmp_path_factory, count):
    """A folder with what each job did, as one process and as several, and what became of runs that
    ended early and were resumed by the other number of processes."""
    folder = tmp_path_factory.mktemp("fitted")
    asked = asked_for(request, JOBS)
    for name in asked:
        keep(JOBS[name](), name, folder)
    fitted.straight(folder)
    fitted.begin(folder)
    ended = fork(fitted.run, folder, *asked, "begin", processes=count)
    assert abs(ended.returncode) == signal.SIGKILL, ended.stderr[-3000:]
    fitted.resume(folder)
    ended = fork(fitted.run, folder, "resume", "differ", processes=count)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_several_processes_do_what_one_does(done, count, name):
    (one,), each = kept(done, name, 1), kept(done, name, count)
    for other in each:
        assert_close(one, other)
        for parameter, value in each[0]["weights"].items():
            assert torch.equal(value, other["weights"][parameter]), parameter
    assert any(log.get("grad_norm") for log in one["logs"])


def assert_went_on_like(straight, resumed):
    assert_close(straight["weights"], resumed["weights"])
    for part in ("judged", "evaluations"):
        assert_close(straight[part][-1:], resumed[part][-1:])


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_with_another_number_of_processes(done, count, name):
    (straight,) = kept(done, f"{name}, straight", 1)
    of_both = [*kept(done, f"{name}, resumed", 1), *kept(done, f"{name}, resumed", count)]
    for resumed in of_both:
        assert_went_on_like(straight, resumed)
        assert_close(straight["logs"], resumed["logs"])


def test_another_number_of_processes_needs_as_many_samples_in_a_step(done):
    saved = done / "begun-1" / "sft"  # which several processes have ended
    with pytest.raises(BadCheckpoint, match=r"and this one has 1, so that per_device.* must be 8 "):
        RESUMED["sft"](folder=str(saved), resume=True, **SAVED, per_device_train_batch_size=2)


def test_processes_that_differ_all_refuse_to_begin(done, count):
    main, *others = (json.loads((done / f"said-{rank}.json").read_text()) for rank in range(count))
    assert others == [main] * (count - 1)
    for message, expected in zip(
        main,
        [
            "train(): learning_rate differs between processes 0 and 1 (0.1 and 0.2): start all",
            "train(): save_steps differs between processes 0 and 1 (4 and 5)",
            "train(): data of the run differs between processes 0 and 1",
            "train(): evaluation data differs between processes 0 and 1",
        ],
        strict=True,
    ):
        assert message.startswith(expected)


@pytest.mark.parametrize(("name", "job", "saved", "message"), [
    ("the collator raises", "sft", 1, "PeerFailed: process 1 of {count} failed: LookupError"),
    ("the loss raises", "reward", 2, "LookupError: there is no such thing"),
    ("a process is killed", "sft", 2, "RuntimeError"),
    ("a process is stopped", "reward", 3, "stopped after step 3; saved: "),
    ("the annotator raises", "dpo, online", 2,
     "PeerFailed: process 1 of {count} failed: LookupError"),
    ("the annotator is stopped", "dpo, online", 2, "stopped after step 2; saved: "),
])  # fmt: skip
def test_what_goes_wrong_in_one_process_ends_all_with_the_state_saved(
    done, tmp_path, count, name, job, saved, message
):
    ended = fork(fitted.run, tmp_path, name, processes=count)
    assert ended.returncode != 0
    assert message.format(count=count) in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-{saved}"]
    (straight,) = kept(done, f"{job}, straight", 1)
    resumed = RESUMED[job](folder=str(tmp_path), resume=True, **SAVED)
    assert_went_on_like(straight, resumed)
