"""The SFT benchmark's gate, its arithmetic, its worker, and what the report says of it."""

import argparse
import sys
from pathlib import Path

import pytest

import fastrl
from benchmarks import peer, record, report, sft
from benchmarks.sft_worker import EOS, IGNORED, Side, labels_of, texts


def a_result(**changes: object) -> dict:
    return {
        "benchmark": "sft",
        "date": "2025-01-02",
        "commit": "abc1234",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8},
        "versions": {"fastrl": {"torch": "2"}, "peer": {"torch": "2"}},
        "peer": sft.PEER,
        "shape": vars(sft.QUICK),
        "tokens": 1200,
        "difference": 2e-7,
        "sides": {
            "fastrl": {"seconds": [1.0, 2.0, 4.0], "peak": 2**20, "beyond_gradients": 2**10},
            "peer": {"seconds": [3.0, 4.0, 4.0], "peak": 2**22, "beyond_gradients": 2**11},
        },
    } | changes


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sft.add_arguments(parser)
    return parser.parse_args([*given, "--peer-python", "python", "--quick"])


class Stub:
    """A worker whose losses, memory and epochs are given."""

    losses: dict[str, list[float]]

    def __init__(self, python: Path, implementation: str, shape: sft.Shape, script: Path) -> None:
        assert script == sft.SCRIPT
        self.implementation = implementation
        self.epochs = 0

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ready(self) -> dict:
        return {"torch": "2"}

    def ask(self, command: str) -> dict:
        ours = self.implementation == "fastrl"
        if command == "check":
            return {"losses": self.losses[self.implementation]}
        assert self.losses["fastrl"][0] < 6.0, "measured in spite of a red gate"
        if command == "memory":
            return {"peak": 100 if ours else 200, "beyond_gradients": 10 if ours else 20}
        self.epochs += 1
        return {"seconds": 99.0 if self.epochs == 1 else (1.0 if ours else 1.5)}


def test_losses_agree_within_the_tolerance() -> None:
    assert not list(sft.disagreements([5.0004, 4.0], [5.0, 4.0]))


@pytest.mark.parametrize("ours", [[5.0006, 4.0], [5.0, float("nan")], [5.0], []], ids=str)
def test_losses_that_are_apart_or_missing_are_named(ours: list[float]) -> None:
    (line,) = sft.disagreements(ours, [5.0, 4.0])
    assert "loss is" in line or f"fastrl made {len(ours)} steps, the peer 2" in line


def test_no_steps_at_all_are_no_agreement() -> None:
    assert list(sft.disagreements([], []))


def test_a_red_gate_prints_no_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sft, "Worker", Stub)
    monkeypatch.setattr(Stub, "losses", {"fastrl": [6.0], "trl": [6.1]}, raising=False)
    assert sft.run(arguments()) == 1
    printed = capsys.readouterr().out
    assert "step 0: the loss is 6, the peer's 6.1" in printed
    assert "per second" not in printed


def test_sides_take_turns_and_the_first_epoch_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sft, "Worker", Stub)
    monkeypatch.setattr(Stub, "losses", {"fastrl": [5.0001], "trl": [5.0]}, raising=False)
    result = sft.measure(arguments(), sft.QUICK)
    assert result["sides"] == {
        "fastrl": {"seconds": [1.0, 1.0], "peak": 100, "beyond_gradients": 10},
        "peer": {"seconds": [1.5, 1.5], "peak": 200, "beyond_gradients": 20},
    }
    assert result["tokens"] == sum(map(len, texts(vars(sft.QUICK))))
    assert result["difference"] == pytest.approx(2e-5)
    assert sft.speedups(result) == [1.5, 1.5]


def test_goals_are_of_speed_and_memory_on_cpus() -> None:
    machine = {"cpu": "Some CPU", "cores": 2, "load": 0.0}
    result = a_result(machine=machine)
    assert [reached for _, reached in sft.verdicts(result)] == [True, True]
    result["sides"]["fastrl"] = {"seconds": [2.4, 3.2, 3.2], "peak": 2**21 + 1}
    assert [reached for _, reached in sft.verdicts(result)] == [False, False]
    assert sft.verdicts(a_result(machine=machine | {"accelerator": "NVIDIA H100"})) == []


def test_texts_are_ragged_end_and_do_not_learn_their_first_token() -> None:
    shape = vars(sft.Shape())
    found = texts(shape)
    assert found == texts(shape)
    assert len(found) == 10 * shape["batch"]
    lengths = {len(ids) for ids in found}
    assert shape["shortest"] <= min(lengths) < max(lengths) <= shape["longest"]
    assert len(lengths) > 20
    for ids in found:
        assert ids[-1] == EOS
        assert min(ids[:-1]) > EOS
        assert max(ids) < shape["vocabulary"]
    assert labels_of([7, 8, 9]) == [IGNORED, 8, 9]


# TRL 1.16 takes transformers 4 too, which knows no other name.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*deprecated:FutureWarning")
def test_a_worker_trains_and_says_what_it_took(tmp_path: Path) -> None:
    side = Side(fastrl, vars(sft.QUICK) | {"layers": 1}, str(tmp_path))
    losses = side.check()["losses"]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    before = [p.detach().clone() for p in side.trainer.model.parameters()]
    memory = side.memory()
    assert 0 < memory["beyond_gradients"] < memory["peak"]
    assert all(p.grad is None for p in side.trainer.model.parameters())
    pairs = zip(before, side.trainer.model.parameters(), strict=True)
    assert all(bool((old == new).all()) for old, new in pairs)
    assert side.epoch()["seconds"] > 0
    assert side.check()["losses"][-1] < losses[-1]


def test_a_peer_that_is_installed_beside_us_needs_no_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer.importlib.metadata, "version", lambda name: "1.16.0")
    assert peer.peer_python(sft.PEER) == Path(sys.executable)


def test_the_report_has_a_table_with_goals_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    results = tmp_path / "benchmarks" / "results"
    record.save(a_result(), results / record.place(a_result()))
    assert report.run(argparse.Namespace(results=results, root=tmp_path)) == 0
    row = (
        "| tokens per second of training | 600 (300–1200) | 300 (300–400) | 2.00 (1.00–3.00) "
        "| ≥ 1.3× the tokens/s: reached |"
    )
    memory = "| peak memory above the model | 1 MiB | 4 MiB | 0.25 | ≤ 0.5× the memory: reached |"
    for name in ("README.md", "benchmarks/README.md"):
        written = (tmp_path / name).read_text()
        assert row in written
        assert memory in written
    missing = (tmp_path / "README.md").read_text().split("Not measured yet on cpu-2core: ")[1]
    assert "sft" not in missing
    plot = (tmp_path / "benchmarks/plots/cpu-2core/sft.svg").read_text()
    assert "tokens per second" in plot
