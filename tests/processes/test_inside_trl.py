"""TRLRollouts on several processes: TRL's own GRPOTrainer with whole weights and with shares."""

import sys

import pytest
import torch

from tests.processes.inside_trl import JOBS, run
from tests.processes.launch import fork, kept

if sys.version_info < (3, 11):
    pytest.skip("TRL 1.16 needs Python 3.11", allow_module_level=True)
pytest.importorskip("trl")

TRAINED = ["ddp", "ddp, groups across processes", "fsdp2"]


@pytest.fixture(scope="module")
def done(tmp_path_factory, count):
    """A folder with what each job did."""
    folder = tmp_path_factory.mktemp("inside")
    ended = fork(run, folder, *JOBS, processes=count)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", TRAINED)
def test_log_probs_are_those_that_trl_computes_in_each_process(done, count, name):
    """After updates too, and in evaluation. Sums in fp32 differ by less than 1e-5."""
    first, *others = kept(done, name, count)
    for each in (first, *others):
        assert [x["training"] for x in each["seen"]].count(True) == 3
        assert each["moved"] > 1e-2
        assert max(each["off"]) <= 1e-4
    assert len(first["rewards"]) == 2
    for other in others:
        assert other["rewards"] == first["rewards"]
        for parameter, value in first["weights"].items():
            assert torch.equal(value, other["weights"][parameter]), parameter


@pytest.mark.parametrize("name", TRAINED)
def test_responses_of_each_process_are_its_own(done, count, name):
    """In evaluation too, and where they belong to one prompt."""
    for steps in zip(*(each["seen"] for each in kept(done, name, count)), strict=True):
        drawn = [[tuple(x) for x in step["completion_ids"]] for step in steps]
        assert len({len(x) for each in drawn for x in each}) > 1, "of other lengths"
        assert len(set(map(tuple, drawn))) == count
        if name.endswith("across processes") and steps[0]["training"]:
            assert steps[0]["prompt_ids"] == steps[1]["prompt_ids"]


def test_no_draw_comes_twice_though_all_processes_are_seeded_alike(done, count):
    """Nor though they have other numbers of responses."""
    drawn = [x for each in kept(done, "drawn alike", count) for x in each["seen"]]
    assert len(drawn) == 3 + 8 * (count - 1)
    assert len({tuple(x[:3]) for x in drawn}) == len(drawn)


def test_a_model_that_would_be_trained_without_ddp_is_refused(tmp_path, count):
    """In each process."""
    ended = fork(run, tmp_path, "evaluated first", processes=count)
    assert ended.returncode != 0
    said = "ValueError: evaluate() was called before train(), and transformers would now train"
    assert ended.stderr.count(said) == count


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("a reward", ["LookupError: the judge is gone"]),
        *(
            (
                name,
                [
                    "ValueError: prompts[0] has 400 tokens",
                    "PeerFailed: process 1 of {count} failed: ValueError: prompts[0] has 400",
                ],
            )
            for name in ("a prompt", "a prompt, fsdp2")
        ),
    ],
)
def test_an_error_in_one_process_ends_all_soon(tmp_path, count, name, messages):
    ended = fork(run, tmp_path, name, processes=count)
    assert ended.returncode != 0
    for message in messages:
        assert message.format(count=count) in ended.stderr
