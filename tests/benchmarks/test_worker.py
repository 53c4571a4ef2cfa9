"""Workers: processes that answer, or say why they do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.before import ppo_cases
from benchmarks.before.worker import Absent, Worker, WorkerError, environment


def a_worker(python: Path) -> Worker:
    shape = ppo_cases.QUICK[0].shape
    return Worker(python, "trl", shape, "--reference", "copy", script=Path("worker.py"))


def test_a_worker_that_ends_tells_why(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    broken.chmod(0o755)
    with (
        a_worker(broken) as worker,
        pytest.raises(WorkerError, match="no such library"),
    ):
        worker.ready()


def test_a_worker_that_lacks_something_tells_what(tmp_path: Path) -> None:
    lacking = tmp_path / "python"
    lacking.write_text("""#!/bin/sh\necho '{"absent": "no peft"}'\n""")
    lacking.chmod(0o755)
    with (
        a_worker(lacking) as worker,
        pytest.raises(Absent, match="trl: no peft"),
    ):
        worker.ready()
    assert worker.process.args[-2:] == ["--reference", "copy"]


def test_a_worker_is_shown_a_gpu_unless_it_is_to_run_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert environment("trl", "cuda")["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment("trl", "cpu")["CUDA_VISIBLE_DEVICES"] == ""


def test_only_our_own_sides_see_the_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert "PYTHONPATH" not in environment("trl")
    for ours in ("fastrl", "eager"):
        root, kernels = environment(ours)["PYTHONPATH"].split(os.pathsep)
        assert (Path(root) / "benchmarks" / "before" / "worker.py").exists()
        assert (Path(kernels) / "fastrl_kernels").exists()
