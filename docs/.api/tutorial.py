"""The tutorial's outputs: `python docs/.api/tutorial.py run` runs its commands, in minutes on two
CPU cores, and keeps what they print in tutorial.json and their curves in docs/tutorial.svg. Without
`run` the page gets what is kept.

A shell block below `<!-- run -->` is run, in one folder after the other blocks, and a block of text
behind it gets its output; below `<!-- run: 3 -->` the last three lines of it. Blocks below
`<!-- file: name -->` are written first.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
FIGURE = PAGE.with_suffix(".svg")
RECORD = Path(__file__).with_suffix(".json")
_FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
_RUN = re.compile(
    r"(<!-- run(?:: (\d+))? -->\n```bash\n(.*?)```\n\n```text\n)(.*?)(```)", re.DOTALL
)
_PANELS = {
    "reward/mean": "reward",
    "objective/kl": "KL to the reference\n[nats per response]",
    "ppo/policy/entropy": "entropy\n[nats per token]",
    "ppo/policy/clipfrac": "clip fraction",
}


def commands(text: str) -> list[str]:
    """The blocks that are run."""
    return [found[3] for found in _RUN.finditer(text)]


def render(text: str) -> str:
    """The page with what its commands printed.

    Raises:
        KeyError: a command that was not run as it stands there.
    """
    printed = json.loads(RECORD.read_text(encoding="utf-8"))

    def block(found: re.Match[str]) -> str:
        lines = printed[found[3]]
        if found[2] and len(lines) > int(found[2]):
            lines = ["…", *lines[-int(found[2]) :]]
        return found[1] + "".join(f"{line}\n" for line in lines) + found[5]

    return _RUN.sub(block, text)


def run(text: str) -> None:
    """Runs all blocks, and keeps what they print and the figure.

    Raises:
        RuntimeError: a command fails; the doctor's exit status of an ill run is none.
    """
    printed = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve()
        for name, content in _FILE.findall(text):
            (path / name).write_text(content, encoding="utf-8")
        programs = path / ".bin"
        programs.mkdir()
        for name, module in (("fastrl", " -m fastrl"), ("python", "")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
            program.chmod(0o755)
        own = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        for command in commands(text):
            print(command, flush=True)
            done = subprocess.run(
                ["bash", "-c", command], cwd=path, env={**os.environ, **own},
                capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode and "fastrl doctor" not in command:
                raise RuntimeError(f"{command}\n{done.stderr}")
            lines = done.stdout.replace(f"{path}/", "").splitlines()
            printed[command] = [line.rstrip() for line in lines]
            print("\n".join(printed[command]), flush=True)
        draw({name: path / "runs" / name / "metrics.jsonl" for name in ("ppo", "sick")})
    RECORD.write_text(json.dumps(printed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def draw(runs: dict[str, Path]) -> None:
    """The figure: a row of curves for each run."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "tutorial", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(runs), len(_PANELS), figsize=(10, 4), sharex="row", layout="constrained"
    )
    for row, (name, path) in zip(axes, runs.items(), strict=True):
        logs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for axis, (key, title) in zip(row, _PANELS.items(), strict=True):
            known = [(log["step"], log[key]) for log in logs if key in log]
            axis.plot(*zip(*known, strict=True), color="#D55E00" if name == "sick" else "#0072B2")
            if min(value for _, value in known) >= 0:
                axis.set_ylim(bottom=0)
            axis.set_title(title if name == next(iter(runs)) else "", fontsize=9)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"runs/{name}")
    figure.savefig(FIGURE, facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
