"""What importing the kernels costs, and what they say where Triton cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints; Triton's interpreter mode is off unless asked for."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_needs_torch_only():
    code = """
import sys, fastrl_kernels
print(sorted({"triton", "transformers", "datasets", "fastrl", "accelerate"} & sys.modules.keys()))
"""
    assert python(code) == "[]"


def test_the_pytorch_path_runs_without_triton():
    code = """
import sys, torch
sys.modules["triton"] = None
import fastrl_kernels
logits = torch.zeros(2, 9, requires_grad=True)
fastrl_kernels.token_logprobs(logits, torch.zeros(2, dtype=torch.int64), backend="torch").sum()
print(fastrl_kernels.full_kl(logits, torch.zeros(2, 9), backend="torch").sum().item())
"""
    assert python(code) == "0.0"


def test_forced_triton_on_the_cpu_says_what_to_do():
    code = """
import torch, fastrl_kernels
logits, labels = torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64)
for op in (
    lambda: fastrl_kernels.token_logprobs(logits, labels, backend="triton"),
    lambda: fastrl_kernels.full_kl(logits, logits, backend="triton"),
):
    try:
        op()
    except ValueError as error:
        print(error)
"""
    said = python(code).splitlines()
    assert len(said) == 2
    for line in said:
        assert "backend='triton' cannot be honoured" in line
        assert "TRITON_INTERPRET=1" in line
        assert "backend='torch'" in line


@pytest.mark.parametrize("name", ["__init__.py", "torch-ext/__init__.py"])
def test_the_kernels_folder_is_no_package(name):
    """With an __init__.py, transformers would import it in place of Hugging Face's `kernels`."""
    assert not (ROOT / "kernels" / name).exists()
