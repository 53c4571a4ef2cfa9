"""What `fastrl completion` prints completes commands, flags, choices and paths."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastrl.cli import main
from fastrl.tools.commands import COMMANDS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fastrl.bash").write_text(script("bash", capsys))
    for name in ("two words.yaml", "twice.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()

    def offered(*words: str) -> list[str]:
        program = (
            'source fastrl.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fastrl; '
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        call = ["bash", "--norc", "-c", program, "bash", "fastrl", *words]
        ran = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert ran.stderr == ""
        return sorted(filter(None, ran.stdout.split("\n")))

    assert offered("") == sorted(COMMANDS)
    assert offered("re") == ["recipes", "replay", "report", "reward"]
    assert offered("grpo", "--num-g") == ["--num-generations"]
    assert offered("sft", "--dataset_te") == ["--dataset-text-field"]
    assert offered("ppo", "--policy-loss", "c") == ["cispo", "clip"]
    assert offered("ppo", "--dtype", "=", "bf") == ["bfloat16"]
    assert offered("sft", "--torch_dtype", "=", "b") == ["bfloat16"]
    assert offered("sft", "--packing", "") == ["false", "true"]
    assert offered("align", "--dataset", "tw") == ["twice.jsonl", "two words.yaml"]
    assert offered("ppo", "two") == ["two words.yaml"]
    assert offered("ppo", "--steps", "tw") == []
    assert offered("report", "ru") == ["runs"]
    assert offered("samples", "--sort", "") == ["length", "reward", "step"]
    assert offered("plan", "--gpu") == ["--gpu-gib"]
    assert offered("completion", "") == ["bash", "fish", "zsh"]


def test_the_others_have_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("zsh", capsys).endswith(script("bash", capsys))
    lines = script("fish", capsys).splitlines()
    of = "complete -c fastrl -n '__fish_seen_subcommand_from ppo'"
    assert f"{of} -l steps -x -a ''" in lines
    assert f"{of} -l model -r -F" in lines
    assert any(x.startswith(f"{of} -l policy-loss -x -a 'clip cispo") for x in lines)


def test_a_shell_is_named() -> None:
    call = [sys.executable, "-m", "fastrl", "completion", "tcsh"]
    ran = subprocess.run(call, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (
        2,
        "fastrl: error: name a shell: fastrl completion bash|zsh|fish\n",
    )
