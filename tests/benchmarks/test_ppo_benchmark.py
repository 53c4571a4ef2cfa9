"""The PPO benchmark's gate, its arithmetic, and the report that it feeds."""

import argparse
import json
from pathlib import Path

import pytest

import fastrl
from benchmarks import ppo, record, report
from benchmarks.ppo_worker import Side


def a_result(**changes: object) -> dict:
    seconds = {"fastrl": [1.0, 2.0, 4.0], "peer": [3.0, 4.0, 4.0], "ratio": 2.0}
    return {
        "benchmark": "ppo",
        "date": "2025-01-02",
        "commit": "abc1234",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8},
        "versions": {"fastrl": {"torch": "2"}, "peer": {"torch": "2"}},
        "peer": "trl==0.11.4",
        "shape": vars(ppo.QUICK),
        "phases": dict.fromkeys(ppo.PHASES, seconds),
    } | changes


def test_agreement_is_within_the_tolerance() -> None:
    theirs = [{"objective/kl": 2.0, "ppo/policy/policykl": 0.0}]
    assert not list(
        ppo.disagreements([{"objective/kl": 2.001, "ppo/policy/policykl": 9e-6}], theirs)
    )


@pytest.mark.parametrize(
    "ours", [{}, {"objective/kl": 2.003}, {"objective/kl": float("nan")}], ids=str
)
def test_a_statistic_that_is_missing_or_off_is_named(ours: dict) -> None:
    (line,) = ppo.disagreements([ours], [{"objective/kl": 2.0}])
    assert "objective/kl" in line


def test_the_ratio_is_the_median_over_pairs() -> None:
    timings = [
        {"fastrl": {"seconds": {"step": ours}}, "peer": {"seconds": {"step": theirs}}}
        for ours, theirs in ((1.0, 3.0), (2.0, 4.0), (4.0, 4.0))
    ]
    assert ppo.summary(timings, "step") == {
        "fastrl": [1.0, 2.0, 4.0],
        "peer": [3.0, 4.0, 4.0],
        "ratio": 2.0,
    }


def test_a_worker_reports_every_phase() -> None:
    shape = vars(ppo.QUICK) | {"layers": 1, "batch": 2, "epochs": 1}
    side = Side(fastrl, shape)
    first, second = side.check()["statistics"]
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["objective/kl"] != 0.0
    seconds = side.iterate()["seconds"]
    assert seconds.keys() == ppo.PHASES.keys()
    assert all(value > 0 for value in seconds.values())


def test_a_red_gate_prints_no_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class Stub:
        def __init__(self, python: Path, implementation: str, shape: ppo.Shape) -> None:
            self.kl = 1.0 if implementation == "fastrl" else 2.0

        def __enter__(self) -> "Stub":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def ready(self) -> dict:
            return {}

        def ask(self, command: str) -> dict:
            assert command == "check", "timed in spite of a red gate"
            return {"statistics": [{"objective/kl": self.kl}]}

    monkeypatch.setattr(ppo, "Worker", Stub)
    parser = argparse.ArgumentParser()
    ppo.add_arguments(parser)
    assert ppo.run(parser.parse_args(["--peer-python", "python", "--quick"])) == 1
    assert "objective/kl is 1, the peer has 2" in capsys.readouterr().out


def test_a_worker_that_ends_tells_why(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    broken.chmod(0o755)
    with (
        ppo.Worker(broken, "trl", ppo.QUICK) as worker,
        pytest.raises(ppo.WorkerError, match="no such library"),
    ):
        worker.ready()


@pytest.fixture
def checkout(tmp_path: Path) -> argparse.Namespace:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    return argparse.Namespace(results=tmp_path / "benchmarks" / "results", root=tmp_path)


def test_the_report_takes_the_newest_result_and_leaves_the_rest_alone(
    checkout: argparse.Namespace,
) -> None:
    for date in ("2025-01-03", "2025-01-02"):
        record.save(a_result(date=date), checkout.results / "cpu-2core" / f"{date}.json")
    other = checkout.results / "cpu-2core" / "2025-01-04-other.json"
    other.write_text(json.dumps({"benchmark": "something else"}))

    assert report.run(checkout) == 0
    once = (checkout.root / "README.md").read_text()
    assert once.startswith(f"above\n{report.BEGIN}\n")
    assert once.endswith(f"{report.END}\nbelow\n")
    assert "2025-01-03" in once
    assert "2025-01-02" not in once
    assert "old" not in once
    assert "2.00 (1.00–3.00)" in once
    assert "old and reference scores" in (checkout.root / "benchmarks/README.md").read_text()

    assert report.run(checkout) == 0
    assert (checkout.root / "README.md").read_text() == once


def test_the_report_says_when_there_is_nothing_to_write(
    checkout: argparse.Namespace, capsys: pytest.CaptureFixture
) -> None:
    assert report.run(checkout) == 1
    assert "no result files" in capsys.readouterr().err


def test_a_result_is_filed_by_device_date_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    path = record.save(a_result())
    assert path.relative_to(tmp_path) == Path("cpu-2core/2025-01-02-abc1234-ppo.json")
    assert record.device_slug({"accelerator": "NVIDIA H100 80GB HBM3"}) == "nvidia-h100-80gb-hbm3"
