"""`python -m benchmarks fits`: what fits in 24 and 80 GiB, by `fastrl plan`, written into
`docs/memory.md` between its markers. Nothing else writes figures there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import textwrap
from pathlib import Path

from benchmarks import ROOT
from benchmarks.public_models import write_config
from benchmarks.report import BEGIN, END, table

_FULL = "--method ppo --batch-size 64 --mini-batch-size 4 --gradient-checkpointing true"
_ADAPTER = (
    "--method grpo --lora-r 16 --dtype bfloat16 --batch-size 64 --mini-batch-size 1 "
    "--gradient-accumulation-steps 8 --gradient-checkpointing true"
)
_LENGTHS = "--prompt-tokens 512 --response-tokens 512"
_4K = "--prompt-tokens 512 --response-tokens 3584 --rollout-sleep true"
COMMANDS = (
    f"Qwen/Qwen2.5-1.5B {_FULL} {_LENGTHS} --gpu-gib 80",
    f"Qwen/Qwen2.5-1.5B {_FULL} {_LENGTHS} --gpu-gib 24",
    f"Qwen/Qwen2.5-1.5B {_FULL} --rollout-sleep true --offload-optimizer true {_LENGTHS} "
    "--gpu-gib 24",
    f"Qwen/Qwen2.5-3B {_FULL} {_LENGTHS} --gpu-gib 80",
    f"Qwen/Qwen2.5-3B {_ADAPTER} {_LENGTHS} --gpu-gib 24",
    f"meta-llama/Llama-3.1-8B {_ADAPTER} {_4K} --rollout-slots 8 --gpu-gib 24",
    f"meta-llama/Llama-3.1-8B {_ADAPTER} --load-in-4bit true {_4K} --rollout-slots 8 --gpu-gib 24",
    f"meta-llama/Llama-3.1-8B {_ADAPTER} {_4K} --rollout-slots 64 --gpu-gib 80",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks fits`."""
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "memory.md")


def run(args: argparse.Namespace) -> int:
    """Plans each command and writes the table."""
    text = args.page.read_text()
    if BEGIN not in text or END not in text:
        print(f"{args.page} lacks {BEGIN} … {END}", file=sys.stderr)
        return 1
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    rows, blocks = [], []
    for i, command in enumerate(COMMANDS, start=1):
        rows.append([str(i), *planned(command)])
        lines = textwrap.wrap(f"fastrl plan {command}", 90, break_on_hyphens=False)
        blocks.append(f"# {i}\n" + " \\\n    ".join(lines))
    head = ("", "model", "method", "peak", "in", "GPU", "fits, or the cheapest change that does")
    made = table(head, rows)
    commands = "```bash\n" + "\n".join(blocks) + "\n```"
    args.page.write_text(f"{before}{BEGIN}\n{made}\n\n{commands}\n{END}{after}")
    return 0


def planned(command: str) -> list[str]:
    """A row of the table."""
    from fastrl.tools.commands.plan import planned_run
    from fastrl.trainers.plan.advice import what_to_change
    from fastrl.trainers.plan.report import gib

    name, *flags = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        run = planned_run([write_config(name, Path(folder)), *flags])
    plan, gpu = run.plan(), run.job.gpu_gib
    trained = f"LoRA {run.job.lora_r}" if run.job.lora_r else "all weights"
    on = ", four bits" if run.job.load_in_4bit else ""
    what = f"{run.job.method}, {trained}{on}"
    verdict = "fits" if plan.fits(gpu) else what_to_change(run, plan, gpu)
    return [name, what, gib(plan.peak), plan.widest, f"{gpu:g} GiB", verdict]
