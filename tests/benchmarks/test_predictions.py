"""Predictions: of every case, as the command writes them, and beside what a device measured."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import ROOT, predict, report, results
from benchmarks.cases import OURS, Case
from benchmarks.harness import Measurement, Run
from benchmarks.predict import FILE, Gpu
from benchmarks.timing import Side

COMMITTED = results.RESULTS / FILE
CASE = ("sample_tokens", "N=256 V=151936 bf16")
H200 = "NVIDIA H200"


def a_case(cases: list[predict.Prediction]) -> predict.Prediction:
    return next(case for case in cases if (case["name"], case["label"]) == CASE)


def measured(seconds: float, device: str = H200, **changes: object) -> results.Result:
    """A result file of one case on a GPU."""
    run = Run(torch.device("cpu"), rounds=2)
    name, label = CASE
    measurement = Measurement(run, Case("ops", name, label))
    measurement.measure({OURS: Side(lambda: {"device": seconds, "call": 1.0})}, 2)
    machine = {"cpu": "C", "cores": 2, "memory_gib": 8, "load": 0.0, "accelerator": device}
    fixed = {"date": "2030-01-02", "time": "10:00:00", "commit": "abc1234", "machine": machine}
    return run.results["ops"] | fixed | changes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of results, with the predictions as committed but for what was measured."""
    cases = predict.read(COMMITTED)
    predict.write(tmp_path / FILE, [case | {"measured": {}} for case in cases])
    return tmp_path


def test_every_case_of_a_gpu_has_a_prediction_from_counts() -> None:
    """After a new case, or a change of what is counted: `python -m benchmarks predict`."""
    found = {(case["name"], case["label"]): case for case in predict.read(COMMITTED)}
    assert list(found) == [(case.name, case.label) for case in predict.all_cases()]
    for case in found.values():
        assert case["counted"]["bytes"] > 0
        assert case["counted"]["launches"] > 0
        assert case["counted"]["instructions per byte"], "no kernel was compiled for it"
        for told in case["predicted"].values():
            assert told["seconds"] > 0


def test_the_committed_file_is_what_the_command_writes(tmp_path: Path) -> None:
    """But for instructions, which compiling would tell."""
    shutil.copy(COMMITTED, tmp_path)
    hidden = ("TRITON_INTERPRET", "FASTRL_KERNELS_BACKEND")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks", "predict"]
    subprocess.run(
        [*command, "--keep-instructions", "--results", str(tmp_path)],
        cwd=ROOT, env=environment, check=True,
    )  # fmt: skip
    assert (tmp_path / FILE).read_text() == COMMITTED.read_text()


def test_a_time_is_that_of_products_of_bytes_or_instructions_and_of_launches() -> None:
    device = Gpu("D", 100.0, 1000.0, 50.0, launch_seconds=0.5)
    counts = {
        "bytes": 300, "forward bytes": 100, "flops": 0, "launches": 2,
        "instructions per byte": {"_op_fwd_kernel": 0.1, "_op_bwd_kernel": 0.2},
    }  # fmt: skip
    assert predict.predict(counts, device) == {"seconds": 4.0, "most of it": "memory"}
    busy = counts | {"instructions per byte": {"_op_fwd_kernel": 1.0, "_op_bwd_kernel": 2.0}}
    # 1·100 + 2·200 instructions at 50 a second.
    assert predict.predict(busy, device) == {"seconds": 11.0, "most of it": "instructions"}
    remains = counts | {"instructions per byte": {"_op_merge_kernel": 99.0}}
    assert predict.predict(remains, device)["seconds"] == 4.0
    product = counts | {"flops": 5000}
    assert predict.predict(product, device) == {"seconds": 9.0, "most of it": "products"}
    assert predict.predict(counts | {"launches": 20}, device)["most of it"] == "launches"


def test_a_result_file_fills_its_case_and_a_slow_one_is_marked(folder: Path) -> None:
    expected = a_case(predict.read(folder / FILE))["predicted"]["H200"]["seconds"]
    results.save(measured(1.25 * expected), folder)
    assert predict.fill_file(folder)
    cases = predict.read(folder / FILE)
    told = a_case(cases)["measured"][H200]
    assert told["seconds"] == pytest.approx(1.25 * expected, rel=1e-3)
    assert (told["date"], told["commit"]) == ("2030-01-02", "abc1234")
    assert predict.verdict(a_case(cases), H200).endswith("(H200), 80%")
    results.save(measured(1.61 * expected, time="11:00:00", commit="fffffff"), folder)
    predict.fill_file(folder)
    cases = predict.read(folder / FILE)
    assert predict.verdict(a_case(cases), H200).endswith("62%, **1.6× the prediction**")
    assert [case for case in cases if case["measured"]] == [a_case(cases)]
    text = predict.section(cases)
    assert text.count("**1.6× the prediction**") == 1
    assert "| not yet |" in text


def test_measurements_of_a_cpu_fill_nothing(folder: Path) -> None:
    before = (folder / FILE).read_text()
    machine = {"cpu": "C", "cores": 2, "memory_gib": 8, "load": 0.0}
    results.save(measured(1e-3, machine=machine), folder)
    assert not predict.fill_file(folder)
    assert (folder / FILE).read_text() == before


def test_the_report_shows_predictions_and_what_peers_published(folder: Path) -> None:
    results.save(measured(40e-6), folder)
    (folder / "root" / "benchmarks").mkdir(parents=True)
    for page in report.PAGES:
        (folder / "root" / page).parent.mkdir(exist_ok=True)
        (folder / "root" / page).write_text(f"{report.BEGIN}\n{report.END}\n")
    arguments = argparse.Namespace(results=folder, root=folder / "root", compare=None)
    assert report.run(arguments) == 0
    text = (folder / "root" / "docs" / "benchmarks.md").read_text()
    assert "## Predictions, beside what peers published" in text
    assert "40 µs (H200), 55%, **1.8× the prediction**" in text
    assert "Liger-Kernel, cuTile: 26.15 ms" in text
    # Of a rate, the time of our bytes.
    assert "quack: 3.0 TB/s, 2.49 ms of these bytes" in text
