"""Processes that each hold a share of the weights do together what one does alone."""

import shutil

import pytest

from fastrl.run.checkpoints import BadCheckpoint, verify
from fastrl.run.state import load_tree
from tests.processes.launch import TOLERANCE, asked_for, assert_close, fork, kept
from tests.processes.sharded import JOBS, POLICIES, TOLERANCES, run


@pytest.fixture(scope="module")
def done(request, tmp_path_factory, count):
    """A folder with what each job did, as one process and as several."""
    folder = tmp_path_factory.mktemp("sharded")
    asked = asked_for(request, JOBS)
    for processes in (count, 1):  # the one reads what the others have written
        ended = fork(run, folder, *asked, processes=processes)
        assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


def trees(done, name, count):
    return [*kept(done, name, 1), *kept(done, name, count)]


@pytest.mark.parametrize("name", JOBS)
def test_sharded_weights_learn_as_whole_ones_do(done, count, name):
    one, *several = trees(done, name, count)
    for each in several:
        assert_close(one["done"], each["done"], tolerance=TOLERANCES.get(name, TOLERANCE))


@pytest.mark.parametrize("name", ["checkpoints", "sft, checkpoints"])
def test_one_process_goes_on_from_shares_as_if_nothing_had_happened(done, name):
    one = kept(done, name, 1)[0]["done"]
    assert_close(one["from whole weights"], one["from shares"])


@pytest.mark.parametrize("name", ["masters of weights in bf16"])
def test_spread_masters_of_bf16_weights_go_on_from_their_shares(done, count, name):
    for each in trees(done, name, count):
        assert_close(each["done"]["straight"], each["done"]["resumed"])


@pytest.mark.parametrize("name", POLICIES)
def test_each_process_holds_its_share_of_policy_moments_and_reference(done, count, name):
    one, *several = trees(done, name, count)
    for what, size in one["held"].items():
        shares = [each["held"][what] for each in several]
        # Nothing twice; a tiny weight may have fewer rows than there are processes.
        assert sum(shares) <= 1.02 * size, what
        assert max(shares) <= 0.55 * size, what


@pytest.mark.parametrize("name", POLICIES)
def test_the_head_is_fused_and_the_rollouts_logprobs_are_reused(done, count, name):
    for each in trees(done, name, count):
        assert set(each["heads"]) == {"FusedHead"}
        assert set(each["reused"]) == {1.0}


@pytest.mark.parametrize("name", ["sft"])
def test_the_head_is_fused_in_supervised_training(done, count, name):
    assert all(each["heads"] == ["FusedHead"] for each in trees(done, name, count))


@pytest.mark.parametrize("name", ["sft, checkpoints"])
def test_no_process_writes_a_whole_model_for_supervised_training(done, count, name):
    checkpoint = done / "sft in shares" / "checkpoint-2"
    assert verify(checkpoint)["step"] == 2
    names = {path.name for path in checkpoint.rglob("*") if path.is_file()}
    assert {f"weights-1-of-{count}.safetensors", f"optimizer-2-of-{count}.safetensors"} <= names
    assert not {"model.safetensors", "optimizer.pt"} & names


@pytest.mark.parametrize("name", ["checkpoints"])
def test_each_process_writes_its_share_of_a_checkpoint(done, count, name):
    """And no more than that: the rest are numbers."""
    shares, whole = (done / name / "checkpoints" / "checkpoint-2" for name in ("sharded", "ddp"))
    assert {path.name for path in shares.glob("*.safetensors")} >= {
        f"{name}-{i}-of-{count}.safetensors" for name in ("policy", "optimizer") for i in (1, 2)
    }
    assert not (shares / "policy.safetensors").exists()
    size = (whole / "policy.safetensors").stat().st_size
    for i in (1, 2):
        # Both name every tensor.
        assert (shares / f"policy-{i}-of-{count}.safetensors").stat().st_size < 0.7 * size


@pytest.mark.parametrize("name", ["checkpoints"])
def test_a_share_that_is_missing_is_named(done, count, tmp_path, name):
    shutil.copytree(done / "sharded" / "checkpoints" / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / f"policy-2-of-{count}.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=rf"policy-2-of-{count}\.safetensors is missing"):
        verify(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match=r"policy/.* elements, and the shares that are there"):
        load_tree(tmp_path / "checkpoint-2")
