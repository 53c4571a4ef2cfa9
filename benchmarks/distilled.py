"""`python -m benchmarks distilled`: what a policy learns of a teacher, and of itself with hints.

It is kept as a result file, drawn, and written into `docs/distillation.md`; `report` does these two
anew.

A student of half the width of the demo's PPO policy first learns the policy's samples by SFT, until
its held-out loss no longer falls. From there three arms get the same seconds of the processor:

- on-policy distillation: DistillationTrainer, β = 1;
- SFT on further samples of the policy;
- no teacher: the student's own samples, with an advantage of -1 at each token that it drew though
  it gave it less than ``UNLIKELY``, and 0 at others (Ding and Zhang, 2026, arXiv 2608.31046).

And `examples/distill_hints.py`: a model that is its own teacher.
"""

from __future__ import annotations

import argparse
import copy
import json
import runpy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, TrainerCallback

from benchmarks import ROOT, results
from benchmarks.distilled_figures import NAME, START, write
from benchmarks.experiments import add_places

SEEDS, HINT_SEEDS = (0, 1, 2), (0, 1)
SECONDS, SFT_SECONDS, MEASUREMENTS = 30.0, 90.0, 10
BATCH, SAMPLES, LENGTH = 64, 32, 24  # of a step; to each prompt; the most tokens of a response
MEASURED = 4  # responses to each held-out prompt
UNLIKELY = 0.05
START_RATE = 4e-3
RATES = {"distillation": 1e-3, "SFT": 1e-3, "no teacher": 1e-5}
QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False}
QUIET |= {"logging_strategy": "no", "eval_strategy": "no", "gradient_checkpointing": False}


class Stage(NamedTuple):
    """What the arms of a seed have in common: the demo's models, texts, and how to sample."""

    folder: Path
    teacher: GPT2LMHeadModel
    reward: Any
    tokenizer: Any
    prompts: list[str]
    held_out: list[str]

    def sampled(self, model: Any, prompts: Sequence[str], count: int, seed: int) -> Any:
        from fastrl import RolloutEngine, SamplingParams

        engine = RolloutEngine(model, self.tokenizer, max_slots=128)
        params = SamplingParams(max_new_tokens=LENGTH, n=count, seed=seed)
        return engine.generate(list(prompts), params)

    def texts(self, seed: int) -> Any:
        """The teacher's responses, those that end, as data for SFT."""
        from datasets import Dataset

        out = self.sampled(self.teacher, self.prompts, SAMPLES, seed)
        prompts = [prompt for prompt in self.prompts for _ in range(SAMPLES)]
        ended = zip(prompts, out.sequences, out.finish_reasons, strict=True)
        rows = [
            {"prompt": prompt, "completion": self.tokenizer.decode(ids, skip_special_tokens=True)}
            for prompt, ids, reason in ended
            if reason == "eos"
        ]
        return Dataset.from_list(rows)

    @torch.no_grad()
    def measured(self, student: Any) -> dict[str, float]:
        """Of the student's own responses to held-out prompts: the mean over responses of
        Σ_t KL(p_t‖q_t) over the whole vocabulary [nats], that of the reward, and tokens."""
        prompts = [prompt for prompt in self.held_out for _ in range(MEASURED)]
        out = self.sampled(student, self.held_out, MEASURED, 7)
        before = [self.tokenizer(prompt).input_ids for prompt in prompts]
        ids = [torch.tensor([*x, *y]) for x, y in zip(before, out.sequences, strict=True)]
        inputs = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # causal: padding is unread
        of_tokens = torch.cat([self._divergences(student, part) for part in inputs.split(128)])
        total = [
            float(row[len(x) - 1 : len(x) - 1 + len(y)].sum())
            for row, x, y in zip(of_tokens, before, out.sequences, strict=True)
        ]
        said = [self.tokenizer.decode(x, skip_special_tokens=True) for x in out.sequences]
        rewards = [float(x) for x in self.reward(prompts, said)]
        found = {"tokens": statistics.mean(map(len, out.sequences))}
        for name, values in (("kl", total), ("reward", rewards)):
            found |= {name: statistics.mean(values)}
            found |= {f"{name}_sem": statistics.stdev(values) / len(values) ** 0.5}
        return found

    def _divergences(self, student: Any, ids: torch.Tensor) -> torch.Tensor:
        """KL(p‖q) at each position, [B, T]."""
        p, q = (x(ids).logits.float().log_softmax(-1) for x in (student, self.teacher))
        return (p.exp() * (p - q)).sum(-1)


def stage_of(folder: Path, seed: int) -> Stage:
    """The demo of a seed, run unless it is there."""
    from transformers import AutoModelForSequenceClassification

    from fastrl.rewards.classifier import ClassifierReward
    from fastrl.tools.demo.experiment import Demo, run_demo

    if not (folder / "summary.json").exists():
        run_demo(Demo(seed=seed, output=str(folder)))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    teacher = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "reward" / "model")
    prompts, held_out = (
        [json.loads(line)["prompt"] for line in (folder / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "held_out.jsonl")
    )
    reward = ClassifierReward(judge, tokenizer, batch_size=256)
    return Stage(folder, teacher, reward, tokenizer, prompts, held_out)


class Clock(TrainerCallback):
    """Measures the student as seconds of the processor go by, which the measuring does not count
    in, and stops when they are over."""

    def __init__(self, seconds: float, measure: Callable[[Any], dict[str, float]]):
        self.seconds, self.measure = seconds, measure
        self.rows: list[dict[str, float]] = []
        self._begun = time.process_time()

    def spent(self) -> float:
        return time.process_time() - self._begun

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = time.process_time()
        self._note(kwargs["model"], 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.spent() >= len(self.rows) * self.seconds / MEASUREMENTS:
            self._note(kwargs["model"], state.global_step)
            control.should_training_stop = self.spent() >= self.seconds

    def _note(self, model: Any, step: int) -> None:
        begun, was = time.process_time(), model.training
        self.rows.append({"seconds": self.spent(), "step": step, **self.measure(model.eval())})
        model.train(was)
        self._begun += time.process_time() - begun


def half_as_wide(teacher: GPT2LMHeadModel) -> GPT2LMHeadModel:
    config = type(teacher.config).from_dict(teacher.config.to_dict())
    config.n_embd //= 2
    return GPT2LMHeadModel(config)


def by_sft(stage: Stage, student: Any, clock: Clock, seed: int, rate: float) -> None:
    """Learns the teacher's responses to the prompts, drawn for ``seed``."""
    from fastrl import SFTConfig, SFTTrainer

    args, data = SFTConfig(**_arguments(stage, seed, rate)), stage.texts(seed)
    SFTTrainer(student, args, train_dataset=data, **_made(stage, student, clock, rate)).train()


def by_distillation(stage: Stage, student: Any, clock: Clock, seed: int, rate: float) -> None:
    """Learns the teacher's distributions over responses of its own."""
    from fastrl import DistillationConfig, DistillationTrainer

    args = DistillationConfig(**_arguments(stage, seed, rate), max_completion_length=LENGTH)
    made = _made(stage, student, clock, rate)
    DistillationTrainer(student, stage.teacher, args, _prompts(stage), **made).train()


def without_teacher(stage: Stage, student: Any, clock: Clock, seed: int, rate: float) -> None:
    """Learns to avoid tokens that were unlikely to it as it drew them."""
    from fastrl import GRPOConfig, GRPOTrainer

    class Unlikely(GRPOTrainer):
        """Has one advantage, of unlikely tokens."""

        def _learnable(self, rows: list[dict[str, Any]], mode: str) -> Any:
            samples = super()._learnable(rows, mode)
            drawn = zip(samples.old_logprobs, samples.learned, strict=True)
            found = [-((x.exp() < UNLIKELY) & learned).float() for x, learned in drawn]
            return replace(samples, token_advantages=found)

    settings = {"num_generations": 2, "num_iterations": 2, "beta": 0.0, "loss_type": "dapo"}
    arguments = _arguments(stage, seed, rate) | settings
    args = GRPOConfig(**arguments, max_completion_length=LENGTH)
    made = _made(stage, student, clock, rate)
    Unlikely(student, _nothing, args, _prompts(stage), **made).train()


def _nothing(completions: Sequence[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def _prompts(stage: Stage) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": stage.prompts})


def _arguments(stage: Stage, seed: int, rate: float) -> dict[str, Any]:
    return {
        "output_dir": str(stage.folder / "student"),
        "learning_rate": rate,
        "per_device_train_batch_size": BATCH,
        "max_steps": 1_000_000,  # the clock stops it
        "seed": seed,
        **QUIET,
    }


def _made(stage: Stage, student: Any, clock: Clock, rate: float) -> dict[str, Any]:
    """What all trainers get: the clock, and a learning rate that falls to 0 with its seconds."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate, weight_decay=0.0)

    def share(step: int) -> float:
        return max(0.0, 1 - clock.spent() / clock.seconds)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    return {
        "processing_class": stage.tokenizer,
        "callbacks": [clock],
        "optimizers": (optimizer, schedule),
    }


ARMS: dict[str, Callable[[Stage, Any, Clock, int, float], None]] = {
    "distillation": by_distillation,
    "SFT": by_sft,
    "no teacher": without_teacher,
}


def of_a_teacher(folder: Path, seed: int, seconds: float, sft_seconds: float) -> dict[str, Any]:
    """The curves of a seed: of the SFT that the arms begin with, "start", and of each arm."""
    from fastrl import set_seed

    stage = stage_of(folder, seed)
    set_seed(seed)
    student = half_as_wide(stage.teacher)
    clock = Clock(sft_seconds, stage.measured)
    by_sft(stage, student, clock, 1000 + seed, START_RATE)
    found = {START: clock.rows}
    for name, train in ARMS.items():
        arm, clock = copy.deepcopy(student), Clock(seconds, stage.measured)
        train(stage, arm, clock, 2000 + seed, RATES[name])
        found[name] = clock.rows
        print(f"seed {seed}, {name}: {clock.rows[0]} → {clock.rows[-1]}", flush=True)
    return found


def of_itself(folder: Path, seed: int) -> list[dict[str, float]]:
    """The shares of right answers, by step, see the example."""
    example = runpy.run_path(str(ROOT / "examples" / "distill_hints.py"))
    return example["train"](str(folder), seed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks distilled`."""
    add_places(parser, NAME, SEEDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the processor, an arm")
    parser.add_argument("--sft-seconds", type=float, default=SFT_SECONDS, help="before the arms")
    parser.add_argument("--hint-seeds", type=int, nargs="*", default=HINT_SEEDS)


def run(args: argparse.Namespace) -> int:
    """Runs both experiments on one thread, keeps what was measured, and writes it."""
    torch.set_num_threads(1)
    result = results.start_of_result(NAME, torch.device("cpu"))
    result["versions"] = results.versions("fastrl-lm", "torch", "transformers")
    seconds = args.seconds, args.sft_seconds
    result["seconds"] = dict(zip(("arm", START), seconds, strict=True))
    result["rates"] = RATES
    result["teacher"] = [of_a_teacher(args.folder / f"demo{x}", x, *seconds) for x in args.seeds]
    result["hints"] = [of_itself(args.folder / f"hints{x}", x) for x in args.hint_seeds]
    results.save(result, args.results)
    write(args.results, args.docs)
    return 0
