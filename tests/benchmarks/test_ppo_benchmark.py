"""The PPO benchmark's gate, its arithmetic, and the report that it feeds."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fastrl
from benchmarks import ppo, ppo_worker, record, report
from benchmarks.ppo_worker import Side

SECONDS = {"fastrl": [1.0, 2.0, 4.0], "peer": [3.0, 4.0, 4.0], "ratio": 2.0}


def a_result(**changes: object) -> dict:
    """As files were before there was a choice of references."""
    return {
        "benchmark": "ppo",
        "date": "2025-01-02",
        "commit": "abc1234",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8},
        "versions": {"fastrl": {"torch": "2"}, "peer": {"torch": "2"}},
        "peer": "trl==0.11.4",
        "shape": vars(ppo.QUICK),
        "phases": dict.fromkeys(ppo.PHASES, SECONDS),
    } | changes


def an_entry(reference: str, **changes: object) -> dict:
    phases = dict.fromkeys(ppo.PHASES, SECONDS)
    found = {"reference": reference, "absent": None, "red": None, "trained": 1234}
    return found | {"phases": phases} | changes


def a_result_of(*entries: dict) -> dict:
    found = a_result(references=list(entries))
    del found["phases"]
    return found


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


@pytest.mark.parametrize(("kl", "red"), [(float("nan"), False), (0.0, True)])
def test_what_cannot_be_known_must_not_be_there(kl: float, red: bool) -> None:
    lines = list(
        ppo.disagreements([{"objective/kl": kl}], [{"objective/kl": 2.0}], ppo.UNKNOWN["none"])
    )
    assert bool(lines) == red


@pytest.mark.parametrize(
    "theirs", [{"head": 6}, {"head": 6, "wte": 8}, {"head": 5, "wte": 9}], ids=str
)
def test_both_must_train_the_same_parameters(theirs: dict) -> None:
    (line,) = ppo.trained_otherwise({"head": 6, "wte": 9}, theirs)
    name = "head" if theirs["head"] == 5 else "wte"
    assert line.startswith(f"{name}: ")


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


@pytest.mark.filterwarnings("ignore:the LM head shares its weight:UserWarning")
@pytest.mark.parametrize("reference", list(ppo.REFERENCES))
def test_a_worker_keeps_the_reference_that_was_asked_for(reference: str) -> None:
    shape = vars(ppo.QUICK) | {"batch": 2, "mini_batch": 2, "epochs": 1}
    side = Side(fastrl, shape, reference)
    assert side.trainer.reference.mode == reference

    found = side.check()
    first, second = (statistics["objective/kl"] for statistics in found["statistics"])
    if reference == "none":
        assert first != first
        assert side.trainer.config.init_kl_coef == 0
    else:
        # An adapter's policy is off its base from the start: the gate sees which one is scored.
        assert (abs(first) > 1e-4) == (reference == "adapter")
        assert first != second

    layers = {name.split(".h.")[1][0] for name in found["trained"] if ".h." in name}
    assert layers == ({"1"} if reference == "trunk" else {"0", "1"})
    assert any("wte" in name for name in found["trained"]) == (
        reference not in ("trunk", "adapter")
    )
    assert found["trained"]["v_head.summary.weight"] == ppo.QUICK.width
    assert any("lora_B" in name for name in found["trained"]) == (reference == "adapter")


def test_the_peer_is_told_of_the_kl_coefficient_alone() -> None:
    class Trl:
        __name__ = "trl"

    assert ppo_worker.settings(Trl, "offload") == {}
    assert ppo_worker.settings(Trl, "none") == {"init_kl_coef": 0.0}


def test_without_peft_an_adapter_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ppo_worker.why_absent("adapter") is None
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "peft cannot be imported" in ppo_worker.why_absent("adapter")
    assert ppo_worker.why_absent("trunk") is None


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict]]:
    """Runs the command with stand-ins for the workers; the exit status, and what was saved."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)

    def measured(worker: type, *references: str) -> tuple[int, dict]:
        monkeypatch.setattr(ppo, "Worker", worker)
        parser = argparse.ArgumentParser()
        ppo.add_arguments(parser)
        asked = ["--reference", *references] if references else []
        output = tmp_path / "result.json"
        given = ["--peer-python", "python", "--repeats", "2", "--output", str(output)]
        status = ppo.run(parser.parse_args([*given, *asked]))
        return status, json.loads(output.read_text()) if output.exists() else {}

    return measured


class StandIn:
    """A worker that agrees with the other and takes one second, the peer three."""

    def __init__(
        self, python: Path, implementation: str, shape: ppo.Shape, flag: str, reference: str
    ) -> None:
        assert flag == "--reference"
        self.ours, self.reference = implementation == "fastrl", reference

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ready(self) -> dict:
        return {"torch": "2"} | ({"peft": "1"} if self.reference == "adapter" else {})

    def ask(self, command: str) -> dict:
        if command == "iterate":
            return {"seconds": dict.fromkeys(ppo.PHASES, 1.0 if self.ours else 3.0)}
        kl = float("nan") if self.ours and self.reference == "none" else 1.0
        return {"statistics": [{"objective/kl": kl}], "trained": {"v_head": 7}}


def test_a_red_gate_prints_no_figures(measured: Callable, capsys: pytest.CaptureFixture) -> None:
    class Off(StandIn):
        def ask(self, command: str) -> dict:
            assert command == "check", "timed in spite of a red gate"
            kl = 1.0 if self.ours else 2.0
            return {"statistics": [{"objective/kl": kl}], "trained": {"v_head": 7}}

    assert measured(Off) == (1, {})
    assert "objective/kl is 1, the peer has 2" in capsys.readouterr().out


def test_each_reference_has_an_entry(measured: Callable, capsys: pytest.CaptureFixture) -> None:
    status, result = measured(StandIn, "copy", "adapter", "none", "copy")
    assert status == 0
    assert [entry["reference"] for entry in result["references"]] == ["copy", "adapter", "none"]
    assert {entry["phases"]["step"]["ratio"] for entry in result["references"]} == {3.0}
    assert {entry["trained"] for entry in result["references"]} == {7}
    assert result["versions"]["peer"] == {"torch": "2", "peft": "1"}
    out = capsys.readouterr().out
    assert "two steps, objective/kl aside" in out
    assert ppo.REFERENCES["adapter"] in out


def test_one_reference_that_is_absent_or_red_leaves_the_others(
    measured: Callable, capsys: pytest.CaptureFixture
) -> None:
    class Some(StandIn):
        def ready(self) -> dict:
            if self.reference == "adapter":
                raise ppo.Absent("trl: peft cannot be imported")
            if self.reference == "offload":
                raise ppo.WorkerError("the trl worker ended:\nTraceback\nMemoryError: no more")
            return {}

        def ask(self, command: str) -> dict:
            found = super().ask(command)
            if self.reference == "trunk" and self.ours:
                found["trained"] = {}
            return found

    status, result = measured(Some, *ppo.REFERENCES)
    assert status == 1
    copied, adapter, trunk, offload, none = result["references"]
    assert copied["phases"]
    assert none["phases"]
    assert adapter["absent"] == "trl: peft cannot be imported"
    assert "v_head: fastrl trains 0 numbers of it, the peer 7" in trunk["red"]
    assert offload["red"] == "MemoryError: no more"
    assert [entry["phases"] for entry in (adapter, trunk, offload)] == [{}, {}, {}]
    assert "absent: trl: peft cannot be imported" in capsys.readouterr().out

    assert measured(Some, "adapter")[0] == 0  # nothing is wrong with fastrl


def test_a_worker_that_ends_tells_why(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    broken.chmod(0o755)
    with (
        ppo.Worker(broken, "trl", ppo.QUICK, "--reference", "copy") as worker,
        pytest.raises(ppo.WorkerError, match="no such library"),
    ):
        worker.ready()


def test_a_worker_that_lacks_something_tells_what(tmp_path: Path) -> None:
    lacking = tmp_path / "python"
    lacking.write_text("""#!/bin/sh\necho '{"absent": "no peft"}'\n""")
    lacking.chmod(0o755)
    with (
        ppo.Worker(lacking, "trl", ppo.QUICK, "--reference", "adapter") as worker,
        pytest.raises(ppo.Absent, match="trl: no peft"),
    ):
        worker.ready()
    assert worker.process.args[-2:] == ["--reference", "adapter"]


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


def test_the_report_has_every_reference(checkout: argparse.Namespace) -> None:
    none = {"phases": {}, "trained": 0}
    result = a_result_of(
        an_entry("copy"),
        an_entry("adapter", absent="trl: no peft", **none),
        an_entry("trunk"),
        an_entry("offload", red="step 0: objective/kl is missing", **none),
    )
    record.save(result, checkout.results / record.place(result))
    assert report.run(checkout) == 0
    brief, details = (
        (checkout.root / path).read_text() for path in ("README.md", "benchmarks/README.md")
    )
    assert "`python -m benchmarks ppo --peer trl==0.11.4 --reference copy adapter trunk" in brief
    assert "| generate; reference `copy` | 2 (1–4) |" in brief.replace(".00", "")
    assert "| iteration, whole; reference `adapter` | – | – | absent: trl: no peft |" in brief
    assert "| iteration, whole; reference `trunk` | 2 (1–4) | 4 (3–4) | 2.00 (1.00–3.00) |" in brief
    assert "generate; reference `trunk`" not in brief
    assert f"- Reference `trunk`: {ppo.REFERENCES['trunk']}." in brief
    assert details.count("| old and reference scores | 2 (1–4) |") == 2
    assert "| red: step 0: objective/kl is missing |" in brief
    assert "red: step 0: objective/kl is missing" in details
    assert "1,234 parameters are trained" in details
    plot = (checkout.root / "benchmarks/plots/cpu-2core/ppo.svg").read_text()
    assert "reference trunk" in plot
    assert "reference adapter" not in plot


def test_the_report_stands_without_any_figures(checkout: argparse.Namespace) -> None:
    result = a_result_of(an_entry("adapter", absent="trl: no peft", phases={}))
    record.save(result, checkout.results / record.place(result))
    assert report.run(checkout) == 0
    assert "absent: trl: no peft" in (checkout.root / "README.md").read_text()
    assert not (checkout.root / "benchmarks/plots/cpu-2core/ppo.svg").exists()


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
