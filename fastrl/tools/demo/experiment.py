"""``fastrl demo``: SFT, a reward model and PPO, on film reviews from a grammar.

Text, tokenizer and models are made from a seed. :func:`failures` decides whether PPO has succeeded.
Models of all stages and PPO's prompts stay in the output folder, where other commands can use them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from fastrl.config import PPOConfig
from fastrl.core import set_seed
from fastrl.run.folder import RunFolder
from fastrl.run.terminal import activation, plain, run_console
from fastrl.settings import check_ranges, setting
from fastrl.tools.demo.text import polarity, preference_pairs, reviews, split_openings
from fastrl.tools.reports.report import Comparison, finish_training

if TYPE_CHECKING:  # at run time these are imported where they are used: --help needs none
    from fastrl.rewards.classifier import ClassifierReward
    from fastrl.run.callbacks import Evaluation, TrainResult
    from fastrl.trainers.ppo import PPOTrainer

GENERATION = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": 24}

# The criterion of success.
GAIN_IN_SEMS = 4.0  # gain of the mean reward on held-out prompts, in standard errors
KL_CEILING = 5.0  # KL to the language model that PPO starts from, in nats per sequence

_NEXT = """\
next:

  {activation}fastrl chat {folder}     # "the film is", say: it goes on with a review
  fastrl report {folder}   # a page with its figures and samples
  fastrl new first-try      # a folder of your own to begin in
"""

# The seed of the held-out pairs is far from that of the training texts.
_HELD_OUT_SEED_OFFSET = 1_000_000


@dataclass
class Demo:
    """Settings of ``fastrl demo``."""

    seed: int = setting(
        "Seed of the text, the models and the training.", 0, within="[0, 4294967295]"
    )
    output: str = setting("Folder for the model, the metrics and the report.", "runs/demo")
    steps: int | None = setting(
        "Number of PPO steps; by default 50, or 14 with --quick.", None, within="[1, inf)"
    )
    quick: bool = setting("Less data and fewer steps, for a first look.", False)

    def __post_init__(self) -> None:
        check_ranges(self, Demo)


@dataclass(frozen=True)
class Size:
    """The sizes of a demo's data and the numbers of its steps."""

    reviews: int = 8192
    language_model_steps: int = 400
    pairs: int = 6144
    reward_steps: int = 300
    ppo_steps: int = 50
    batch_size: int = 128
    train_prompts: int = 1024
    eval_prompts: int = 256
    eval_every: int = 10


QUICK = Size(
    reviews=2048,
    language_model_steps=80,
    pairs=2048,
    reward_steps=120,
    ppo_steps=14,
    batch_size=64,
    train_prompts=512,
    eval_every=0,
)


@dataclass(frozen=True)
class Models:
    """The models that PPO starts with."""

    tokenizer: Any
    language_model: Any
    reward: ClassifierReward
    reward_accuracy: float  # on held-out pairs
    seconds: dict[str, float]  # what each stage took


def run_demo(demo: Demo) -> int:
    """Runs and reports all stages; returns 0 if PPO has no :func:`failures`, else 1."""
    size = QUICK if demo.quick else Size()
    folder = RunFolder(
        demo.output,
        {
            "command": "demo",
            "title": "fastrl demo: SFT, reward model and PPO on generated film reviews",
            "job": dataclasses.asdict(demo),
            "settings": dataclasses.asdict(size),
            "stages": ["sft", "reward"],
            "kl_ceiling": KL_CEILING,
        },
    )
    with folder.claim(overwrite=folder.holds("demo")):
        folder.begin()  # an error comes before minutes of work
        return _run(demo, size, folder)


def _run(demo: Demo, size: Size, folder: RunFolder) -> int:
    console, started = run_console(), time.perf_counter()
    steps = demo.steps or size.ppo_steps
    set_seed(demo.seed)
    with _one_thread():
        models = train_models(demo, size, folder, console)
        console.rule(f"3/3  PPO, {steps} steps")
        begin = time.perf_counter()
        trainer, result = improve(models, demo, size, steps, folder)
    seconds = {**models.seconds, "ppo": time.perf_counter() - begin}
    text_facts = text_statistics(result.evaluations[0], result.evaluations[-1])
    comparison = finish_training(
        folder,
        trainer.save_pretrained,
        result,
        {
            "reference": {"mode": trainer.reference.mode, "why": trainer.reference.why},
            "ppo_steps": steps,
            "reward_accuracy": models.reward_accuracy,
            **text_facts,
            "seconds_by_stage": seconds,
            "seconds": time.perf_counter() - started,
        },
    )
    assert comparison is not None  # train() was given evaluation prompts
    console.print(
        "the grammar's own polarity, which PPO never saw: {rule_polarity_before:.2f} → "
        "{rule_polarity_after:.2f}; distinct completions: {distinct_before} → {distinct_after}"
        "".format(**text_facts)
    )
    console.print("time by stage: " + ", ".join(f"{k} {v:.0f} s" for k, v in seconds.items()))
    status = _verdict(failures(comparison), console, time.perf_counter() - started)
    if status == 0:
        text = _NEXT.format(activation=activation(), folder=shlex.quote(demo.output))
        console.print(plain(text), soft_wrap=True, end="")
    return status


def train_models(demo: Demo, size: Size, folder: RunFolder, console: Console) -> Models:
    """Generates the texts, and trains tokenizer, language model and reward model on them."""
    from fastrl.rewards.classifier import ClassifierReward
    from fastrl.tools.demo.models import build_tokenizer, train_language_model, train_reward_model

    seed = demo.seed
    begin = time.perf_counter()
    console.rule("1/3  text, tokenizer, and a language model by SFT")
    corpus = reviews(size.reviews, seed)
    for review in corpus[:3]:
        console.print(f"  {review.text}")
    tokenizer = build_tokenizer([review.text for review in corpus])
    stage = folder.stage("sft", {"title": "fastrl demo: SFT"})
    language_model = train_language_model(tokenizer, corpus, size.language_model_steps, stage)
    fitted = time.perf_counter()

    console.rule("2/3  a reward model from preference pairs")
    pairs = preference_pairs(size.pairs, seed)
    for chosen, rejected in pairs[:2]:
        console.print(f"  preferred: {chosen}\n  to:        {rejected}")
    held_out = preference_pairs(1024, seed + _HELD_OUT_SEED_OFFSET)
    stage = folder.stage("reward", {"title": "fastrl demo: reward model"})
    model, accuracy = train_reward_model(tokenizer, pairs, held_out, size.reward_steps, stage)
    console.print(f"  agrees with the labeller on {accuracy:.0%} of 1024 pairs it never saw")
    seconds = {"sft": fitted - begin, "reward": time.perf_counter() - fitted}
    reward = ClassifierReward(model, tokenizer, batch_size=256)
    return Models(tokenizer, language_model, reward, accuracy, seconds)


def improve(
    models: Models, demo: Demo, size: Size, steps: int, folder: RunFolder
) -> tuple[PPOTrainer, TrainResult]:
    """Trains the language model by PPO; prompts for training and evaluation are disjoint."""
    from fastrl.models import AutoModelForCausalLMWithValueHead
    from fastrl.trainers.ppo import PPOTrainer

    prompts, held_out = split_openings(size.train_prompts, size.eval_prompts, demo.seed)
    for name, texts in (("prompts", prompts), ("held_out", held_out)):
        folder.write_rows(f"{name}.jsonl", ({"prompt": text} for text in texts))
    config = PPOConfig(
        seed=demo.seed,
        learning_rate=5e-4,
        batch_size=size.batch_size,
        mini_batch_size=size.batch_size // 2,
        ppo_epochs=4,
        # At 0.1 the policy ends up repeating a few sentences.
        init_kl_coef=0.4,
        target=3.0,
    )
    trainer = PPOTrainer(
        config,
        AutoModelForCausalLMWithValueHead.from_pretrained(models.language_model),
        tokenizer=models.tokenizer,
    )
    result = trainer.train(
        models.reward.to(trainer.current_device),
        steps=steps,
        prompts=prompts,
        generation_kwargs=GENERATION,
        eval_prompts=held_out,
        eval_every=size.eval_every,
        output=folder,
        save_every=0,
    )
    return trainer, result


def _verdict(missed: list[str], console: Console, seconds: float) -> int:
    if missed:
        console.print(f"FAILED in {seconds:.0f} s: {'; '.join(missed)}", style="bold red")
        return 1
    console.print(
        f"PASSED in {seconds:.0f} s: the reward rose by at least {GAIN_IN_SEMS:g} standard errors "
        f"with KL below its ceiling of {KL_CEILING:g} nats per sequence",
        style="bold green",
    )
    return 0


def failures(comparison: Comparison) -> list[str]:
    """The conditions that were missed, each as a clause; a NaN misses its condition."""
    missed = []
    if not comparison.gain_in_sems >= GAIN_IN_SEMS:
        missed.append(
            f"the reward rose by {comparison.gain_in_sems:.1f} standard errors, "
            f"not by {GAIN_IN_SEMS:g}"
        )
    if not comparison.kl <= KL_CEILING:
        missed.append(f"KL is {comparison.kl:.2f}, above its ceiling of {KL_CEILING:g} nats")
    return missed


def text_statistics(before: Evaluation, after: Evaluation) -> dict[str, float]:
    """Mean :func:`polarity` of texts (it is not the reward), and counts of distinct completions."""
    return {
        "rule_polarity_before": _mean_polarity(before),
        "rule_polarity_after": _mean_polarity(after),
        "distinct_before": len(set(before.completions)),
        "distinct_after": len(set(after.completions)),
    }


def _mean_polarity(evaluation: Evaluation) -> float:
    texts = [p + c for p, c in zip(evaluation.prompts, evaluation.completions, strict=True)]
    return sum(map(polarity, texts)) / len(texts)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Runs the block on one thread: a second one helps small models little, and hurts much when
    cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
