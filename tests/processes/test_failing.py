"""What goes wrong in one process ends all of them, soon, with the state saved."""

import json

import pytest

from fastrl.run.checkpoints import Checkpoints
from fastrl.run.ledger import read_ledger
from tests.processes.failing import fail, find
from tests.processes.jobs import train
from tests.processes.launch import TOLERANCE, fork, kept

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the KL estimate is negative",
    r"ignore:resume. the run had \d process\(es\)",
    r"ignore:resume. settings differ .*\(code or weights of reward",  # it fails no more
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of one process."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, train(folder)


def assert_resumed_by_one_process_like(straight, folder):
    path, trainer = straight
    resumed = train(folder, resume=True)
    columns = ["step", "sample", "seed", "sample_id", "completion_ids", "reward"]
    one, other = (read_ledger(each / "ledger", columns) for each in (path, folder))
    assert one.num_rows == 64
    assert one.equals(other)
    for name, weight in trainer._unwrapped.state_dict().items():
        assert float((weight - resumed._unwrapped.state_dict()[name]).abs().max()) <= TOLERANCE


@pytest.mark.parametrize(("name", "message"), [
    ("raises", "PeerFailed: process 1 of {count} failed: LookupError: the judge is gone"),
    ("exits", "PeerFailed: process 1 of {count} failed: ExitCalled: it called sys.exit(None)"),
    ("raises in a callback", "LookupError: the disk of the notes is full"),
    ("dies", "PeerFailed: another process has ended, or did not answer"),
    ("main dies", "PeerFailed: another process has ended, or did not answer"),
    ("is stopped", "stopped after step 2; saved: "),
    ("hangs", "PeerFailed: another process has ended, or did not answer within"),
])  # fmt: skip
def test_one_process_ends_all_soon_with_the_state_saved(straight, tmp_path, count, name, message):
    folder = tmp_path / "run"
    grace = {"grace": 3} if name == "hangs" else {}
    ended = fork(fail, name, folder, processes=count, **grace)
    assert ended.returncode != 0
    assert message.format(count=count) in ended.stderr
    assert (folder / "checkpoints" / "checkpoint-2").is_dir()
    assert_resumed_by_one_process_like(straight, folder)


def test_where_one_process_cannot_write_none_waits_and_no_half_checkpoint_is_left(tmp_path, count):
    ended = fork(fail, "cannot write", tmp_path / "run", processes=count)
    assert ended.returncode != 0
    said = "checkpoint-3 could not be saved (process 1 of {} failed: OSError: [Errno 28] No space"
    assert said.format(count) in ended.stderr
    assert "the last good checkpoint is checkpoint-2" in ended.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
    ]


def test_processes_share_the_search_for_a_checkpoint_that_is_whole(tmp_path, count):
    """A damaged file, which one of them finds, sends all to the checkpoint before it; none reads a
    file that another has read, and none twice."""
    checkpoints, sizes = Checkpoints(tmp_path), [1000, 900, 300, 200]
    for step in (2, 4):
        with checkpoints.new(step) as folder:
            for i, size in enumerate(sizes):
                (folder / str(i)).write_bytes(bytes(size))
    with (checkpoints.path(4) / "1").open("r+b") as file:
        file.write(b"x")
    ended = fork(find, tmp_path, processes=count)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = kept(tmp_path, "find", count)
    assert {each["found"] for each in found} == {"checkpoint-2"}
    read = [each["bytes"] for each in found]
    # Of the damaged one a process may leave off.
    assert 2 * sum(sizes) - 300 <= sum(read) <= 2 * sum(sizes)
    assert max(read) <= 2 * (sizes[0] + sizes[2])


def test_a_run_of_one_process_goes_on_as_several(straight, tmp_path, count):
    train(tmp_path / "run", steps=2)
    ended = fork(fail, "goes on", tmp_path / "run", processes=count)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_resumed_by_one_process_like(straight, tmp_path / "run")


def test_a_run_that_failed_breaks_no_later_one_off(straight, tmp_path, count):
    ended = fork(fail, "begins anew", tmp_path / "run", processes=count)
    assert ended.returncode == 0, ended.stderr[-3000:]
    columns = ["step", "sample", "completion_ids", "reward"]
    one, other = (read_ledger(x / "ledger", columns) for x in (straight[0], tmp_path / "run"))
    assert one.slice(0, 16).equals(other)


def test_processes_that_differ_all_refuse_to_begin(tmp_path, count):
    ended = fork(fail, "differs", tmp_path, processes=count)
    assert ended.returncode == 0, ended.stderr[-3000:]
    main, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert main[:6] == other[:6]
    for message, expected in zip(
        main,
        [
            "ValueError: PPOConfig: learning_rate differs between processes 0 and 1 (0.2 and 0.1)",
            "ValueError: PPOTrainer: reference differs between processes 0 and 1",
            "ValueError: train(): prompts differs between processes 0 and 1",
            "ValueError: train(): steps differs between processes 0 and 1 (4 and 5)",
            "ValueError: train(): output differs between processes 0 and 1",
            f"ValueError: 1 eval_prompts are fewer than {count} processes",
            f"PeerFailed: process 1 of {count} failed: ValueError: queries has 0 elements",
        ],
        strict=True,
    ):
        assert message.startswith(expected)
    assert other[6].startswith("ValueError: queries has 0 elements")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{i}.json" for i in range(count)]


@pytest.fixture(scope="module")
def unseeded(tmp_path_factory, count):
    """What each process says of trainers whose models it made without a seed."""
    folder = tmp_path_factory.mktemp("unseeded")
    ended = fork(fail, "unseeded", folder, processes=count)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def test_a_timeout_in_transformers_arguments_holds_on_cpus(unseeded):
    assert {each["timeout"] for each in unseeded} == {77}


@pytest.mark.parametrize("kind", ["plain", "with ref_model", "with an adapter", "aligned"])
def test_new_weights_are_the_main_processes(unseeded, kind):
    main, *others = (each[kind] for each in unseeded)
    assert len(main) == 2 + 4 * (kind == "with an adapter")  # weight and bias, A and B of a layer
    assert all(other == main for other in others)
