"""`python -m benchmarks recipes`: what the recipes need, and what comes of those for a CPU.

The memory of each is planned on its model's shape, and written to
`fastrl/tools/recipes/plans.json`. With `--runs` those of the demo's world are run, which takes
minutes, and their held-out rewards written to `benchmarks/results/recipes.json`. `docs/recipes.md`
and its picture are rendered from both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.markdown import table
from benchmarks.public_models import MODELS, write_config
from fastrl.tools.recipes import PLANS, Recipe, recipes

PAGE, PICTURE = ROOT / "docs" / "recipes.md", ROOT / "docs" / "recipes.svg"
RUNS = ROOT / "benchmarks" / "results" / "recipes.json"
RESPONSES = 128  # of a step, in each recipe of the demo's world
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks recipes`."""
    parser.add_argument("--only", nargs="*", metavar="NAME", help="plan these anew, or none")
    parser.add_argument("--runs", action="store_true", help="run those for a CPU, too")


def run(args: argparse.Namespace) -> int:
    """Plans, runs and writes what is asked for."""
    from fastrl.trainers.plan.report import gib

    plans = {} if args.only is None else json.loads(PLANS.read_text())
    on_gpus = {name: recipe for name, recipe in recipes().items() if recipe.gpu_gib is not None}
    for name in on_gpus if args.only is None else args.only:
        plans[name] = planned(on_gpus[name])
        print(name, gib(plans[name]["peak"]), gib(plans[name]["judge"]), flush=True)
    there = {name: plans[name] for name in on_gpus if name in plans}
    PLANS.write_text(json.dumps(there, indent=1) + "\n")
    recipes.cache_clear()
    if args.runs:
        RUNS.write_text(json.dumps(ran(), indent=1) + "\n")
    PAGE.write_text(rendered(PAGE.read_text()))
    draw(json.loads(RUNS.read_text())["runs"])
    return 0


def planned(recipe: Recipe) -> dict[str, int]:
    """What a recipe needs, in bytes: "peak", by ``fastrl plan``, and "judge", the peak of a reward
    model or a judge beside it."""
    from fastrl.tools.commands.flags import yaml_settings
    from fastrl.tools.commands.plan import planned_run

    settings = yaml_settings(recipe.path)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--recipe", recipe.name]
        for name in ("model", "teacher"):
            if name in settings:
                (Path(folder) / name).mkdir()
                words += [f"--{name}", write_config(settings[name], Path(folder) / name)]
        plan = planned_run(words).plan()
    found = {"peak": plan.peak, "judge": 0}
    tokens = sum(recipe.plan.values())
    if settings.get("reward") in MODELS:
        found["judge"] = classifier(settings["reward"], settings["reward_batch_size"], tokens)
    if "judge" in settings:
        both_orders = 2 * settings["per_device_train_batch_size"]
        tokens += recipe.plan["response_tokens"]  # of the second response
        found["judge"] = judge(settings["judge"], both_orders, tokens)
    return found


def classifier(name: str, batch_size: int, tokens: int) -> int:
    """The most memory of a reward model that scores texts of so many tokens."""
    import torch

    from fastrl.trainers.plan.rehearsal import SCORING, rehearsal
    from fastrl.trainers.plan.skeleton import Skeleton
    from fastrl.trainers.rehearse import reward_model

    with tempfile.TemporaryDirectory() as folder, rehearsal("cuda") as found:
        model = reward_model(Skeleton.read(write_config(name, Path(folder)), "auto")).eval()
        with found.log.phase(SCORING), torch.no_grad():
            ids = torch.zeros(batch_size, tokens, dtype=torch.long)
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return found.log.peaks[SCORING].total


def judge(name: str, questions: int, tokens: int) -> int:
    """The most memory of a model that answers questions of so many tokens."""
    import torch

    from fastrl.rollout import SamplingParams
    from fastrl.rollout.rehearsed_engine import RehearsedEngine
    from fastrl.trainers.plan import skeleton
    from fastrl.trainers.plan.rehearsal import ROLLOUT, rehearsal

    answer = SamplingParams(max_new_tokens=64, temperature=0)
    with tempfile.TemporaryDirectory() as folder, rehearsal("cuda") as found:
        read = skeleton.Skeleton.read(write_config(name, Path(folder)), "bfloat16")
        model = read.build().requires_grad_(False).eval()
        with found.log.phase(ROLLOUT), torch.no_grad():
            prompts = [skeleton.tokens(tokens, 1000, start=i) for i in range(questions)]
            RehearsedEngine(model, skeleton.blank_tokenizer()).rehearse(prompts, answer)
        return found.log.peaks[ROLLOUT].total


def ran() -> dict[str, Any]:
    """What came of each recipe for a CPU: its held-out reward by the responses it has seen."""
    import torch

    from benchmarks.results import start_of_result, versions

    result = start_of_result("recipes", torch.device("cpu"))
    kept = ("date", "commit", "machine", "threads")
    found: dict[str, Any] = {key: result[key] for key in kept}
    found |= {"versions": versions("fastrl-lm", "torch", "transformers"), "runs": {}}
    with tempfile.TemporaryDirectory() as folder:

        def fastrl(*words: str) -> None:
            subprocess.run([sys.executable, "-m", "fastrl", *words], cwd=folder, check=True)

        fastrl("demo")
        for name, recipe in recipes().items():
            if recipe.gpu_gib is None:
                output = Path(folder) / "runs" / name
                fastrl(recipe.command, "--recipe", name, "--output", str(output))
                found["runs"][name] = curve(output)
    return found


def curve(output: Path) -> dict[str, Any]:
    """Of a run's folder: seconds, and at each evaluation the responses, and the reward with its
    error, or the divergence from the teacher."""
    rows = list(map(json.loads, (output / "metrics.jsonl").read_text().splitlines()))
    seconds = {"seconds": json.loads((output / "summary.json").read_text())["seconds"]}
    apart = {row["step"]: row["eval_divergence"] for row in rows if "eval_divergence" in row}
    if apart:
        steps = [step * RESPONSES for step in apart]
        return {**seconds, "responses": steps, "divergence": list(apart.values())}
    points = [
        (row["step"] * RESPONSES, row[f"eval{sign}"], row[sem])
        for row in rows
        for sign, sem in (("/reward_mean", "eval/reward_sem"), ("_reward", "eval_reward_sem"))
        if f"eval{sign}" in row
    ]
    by_step = {point[0]: point for point in points}  # the last evaluation may be there twice
    names = ("responses", "reward", "sem")
    values = dict(zip(names, map(list, zip(*by_step.values(), strict=True)), strict=True))
    return {**seconds, **values}


def rendered(page: str) -> str:
    """The page with its tables, between the markers."""
    before, rest = page.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    runs = json.loads(RUNS.read_text())
    machine = f"{runs['machine']['cpu']}, threads: {runs['threads']}"
    parts = [
        on_gpus(),
        f"Those for a CPU, on {machine}, {runs['date']}, commit {runs['commit']}; held-out reward "
        "with its standard error, of distillation the divergence from the teacher, in nats per "
        "token:",
        on_cpus(runs["runs"]),
        f"![Held-out reward by responses]({PICTURE.name})",
    ]
    return "\n".join([f"{before}{BEGIN}", "\n\n".join(parts), f"{END}{after}"])


def on_gpus() -> str:
    """The table of the recipes for GPUs."""
    from fastrl.tools.commands.flags import yaml_settings
    from fastrl.tools.commands.recipes import method_of
    from fastrl.trainers.plan.report import gib

    rows = []
    for name, recipe in recipes().items():
        if recipe.gpu_gib is None:
            continue
        said, planned = yaml_settings(recipe.path), recipe.planned
        judged = said.get("reward") or said.get("judge") or said.get("teacher") or ""
        rows.append(
            [
                *(f"`{name}`", method_of(recipe), said["model"], said["dataset"], judged),
                *(gib(sum(planned.values())), gib(planned["judge"]) if planned["judge"] else ""),
                recipe.device,
            ]
        )
    head = (
        "recipe",
        "method",
        "model",
        "data",
        "reward, judge or teacher",
        "planned",
        "of it the judge",
    )
    return table([*head, "GPU"], rows, left=5)


def on_cpus(runs: dict[str, Any]) -> str:
    """The table of the recipes for a CPU, which were run."""
    rows = [
        [
            f"`{name}`",
            *(
                f"{found['divergence'][i]:.3f}"
                if "divergence" in found
                else f"{found['reward'][i]:.2f} ± {found['sem'][i]:.2f}"
                for i in (0, -1)
            ),
            str(found["responses"][-1]),
            f"{found['seconds']:.0f} s",
            recipes()[name].what,
        ]
        for name, found in runs.items()
    ]
    return table(("recipe", "before", "after", "responses", "time", "what for"), rows)


def draw(runs: dict[str, Any]) -> None:
    """Writes the picture, which comes out the same from the same figures."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": "fastrl", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axes = figure.subplots()
        for name, found in runs.items():
            if "reward" not in found:
                continue
            axes.errorbar(found["responses"], found["reward"], found["sem"], label=name, capsize=2)
        axes.set_xlabel("responses")
        axes.set_ylabel("held-out reward")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(PICTURE, format="svg", metadata={"Date": None, "Creator": "fastrl"})
    lines = (line.rstrip() for line in PICTURE.read_text().splitlines())
    PICTURE.write_text("\n".join(lines) + "\n")
