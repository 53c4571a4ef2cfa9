"""Runs of the trainers on transformers', as one process and as several."""

import contextlib
import functools
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from fastrl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from fastrl.alignment import AlignmentConfig, make_loss
from fastrl.alignment import Trainer as AlignmentTrainer
from fastrl.data.columns import ANSWERS, FEEDBACK, PAIRS, PROMPTS
from fastrl.rollout import SamplingParams
from fastrl.run.launcher import process_count
from tests import tiny_models
from tests.alignment.conftest import LikesHigh, examples, make_factory
from tests.golden import tiny
from tests.patience import LONG
from tests.processes.launch import keep
from tests.trainers.conftest import pairs, texts
from tests.trainers.conftest import reward_model as tiny_reward_model

_SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
_FIT = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
# Of all processes; each has its part.
BATCH = 8


class _Judge(LikesHigh):
    """An annotator that also counts what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.scored: list[float] = []

    def score(self, prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        scores = super().score(prompts, responses, **columns)
        self.scored += scores
        return scores

    def statistics(self) -> dict[str, float]:
        count, self.scored = len(self.scored), []
        return {"annotator/calls": float(count)}


def _by_likelihood(batch: Any, policy: Any) -> None:
    """A reweighter."""
    for i, side in enumerate(policy.logprobs(batch), start=1):
        batch.weigh(i, (side.sums / side.sums.mean()).detach().cpu())


def aligned(
    folder: str,
    name: str,
    task: str,
    kind: str,
    count: int = 26,
    loss: dict[str, Any] | None = None,
    reweighter: Any = None,
    held_out: int = 3,
    callbacks: Any = None,
    **settings: Any,
) -> AlignmentTrainer:
    given: dict[str, Any] = {"batch_size": BATCH // process_count(), "shuffle": True}
    if kind == PROMPTS:
        params = SamplingParams(max_new_tokens=7)
        given |= {"annotator": _Judge(), "params": params}
    torch.manual_seed(0)
    made = make_loss(name, **(loss or {}))
    values = made.learns == "policy with values"
    epochs = settings.pop("num_train_epochs", 1)
    return AlignmentTrainer(
        tiny_models.policy("gpt2") if values else tiny_models.language_model(),
        AlignmentConfig(**{**_FIT, **_SGD, "logging_steps": 1, "output_dir": folder, **settings}),
        make_factory(task, examples(kind, count), epochs=epochs, **given),
        made,
        eval_factory=make_factory(task, examples(kind, held_out, seed=1), **given),
        reweighter=reweighter,
        callbacks=callbacks,
    )


def supervised(
    folder: str, count: int = 17, held_out: int = 1, callbacks: Any = None, **settings: Any
) -> SFTTrainer:
    return SFTTrainer(
        tiny_models.language_model(),
        SFTConfig(**_sizes(folder, settings)),
        train_dataset=texts(count, high=30),
        eval_dataset=texts(held_out, seed=1),
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
    )


def rewarding(
    folder: str, count: int = 17, held_out: int = 3, callbacks: Any = None, **settings: Any
) -> RewardTrainer:
    return RewardTrainer(
        tiny_reward_model("gpt2"),
        RewardConfig(**_sizes(folder, {"num_print_samples": -1, **settings})),
        train_dataset=pairs(count),
        eval_dataset=pairs(held_out, seed=1),
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
    )


def preferring(folder: str, trainer: Any, config: Any, rows: Dataset, **settings: Any) -> Any:
    """Of 17 rows, and evaluated on the last 3."""
    torch.manual_seed(0)
    return trainer(
        tiny_models.language_model(),
        ref_model=tiny_models.language_model(perturbation=0.05),
        args=config(**_sizes(folder, settings)),
        train_dataset=rows,
        eval_dataset=rows.select(range(14, 17)),
        processing_class=tiny.tokenizer(),
    )


def low_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [sum(token % 7 for token in ids) / 7 for ids in completion_ids]


def flat_here_and_there(
    prompts: list[str], completion_ids: list[list[int]], **_: Any
) -> list[float]:
    """Equal rewards of all responses to every third prompt."""
    flat = [int(prompt.split()[0][1:]) % 3 == 0 for prompt in prompts]
    rewards = low_tokens(completion_ids)
    return [0.5 if same else reward for same, reward in zip(flat, rewards, strict=True)]


class OtherEngine:
    """A ``rollout_func`` whose log-probs lie apart from the policy's; responses, and what lies
    between, are those of the prompt's number, whichever process has it."""

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        group, first = trainer.num_generations, trainer.processes.index * len(prompts)
        found: dict[str, list] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        }
        for i, prompt in enumerate(prompts):
            number, k = int(prompt.split()[0][1:]), (first + i) % group
            start = trainer.processing_class(prompt)["input_ids"]
            response = [
                3 + (11 * number + 7 * k + 5 * t) % 90 for t in range(1 + (number + 3 * k) % 6)
            ]
            ids = torch.tensor([start + response])
            with torch.no_grad():
                logits = model(ids).logits[0, len(start) - 1 : -1].log_softmax(-1)
            own = logits.gather(1, torch.tensor(response)[:, None])[:, 0]
            apart = (
                torch.tensor([(number + 5 * k + 3 * t) % 13 - 6 for t in range(len(response))]) / 8
            )
            logprobs = (own - apart).tolist()
            if k == 0 and number % 3 == 0:
                logprobs[0] = None
            mask = [int(t != 2) for t in range(len(response))]
            for name, x in zip(found, (start, response, logprobs, mask), strict=True):
                found[name].append(x)
        return found


def corrected(mode: str, **settings: Any) -> dict[str, Any]:
    """Steps on another engine's responses."""
    return done(
        online,
        GRPOTrainer,
        GRPOConfig,
        rollout_func=OtherEngine(),
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.5,
        **settings,
    )


def online(
    folder: str,
    trainer: type,
    config: type,
    rollout_func: Any = None,
    reward: Any = low_tokens,
    teacher: Any = None,
    **settings: Any,
) -> Any:
    data = Dataset.from_dict({"prompt": [f"w{3 + i} w4 w{5 + i}" for i in range(8)]})
    # Groups of four on one of four processes: parts of groups would have other draws.
    part = 2 * BATCH // process_count()
    sizes = {"per_device_train_batch_size": part, "per_device_eval_batch_size": part}
    given = {"num_generations": 4, "max_completion_length": 6, "logging_steps": 1, "max_steps": 3}
    return trainer(
        tiny_models.language_model(),
        reward,
        config(output_dir=folder, **{**_FIT, **_SGD, **sizes, **given, **settings}),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tiny.tokenizer(),
        **({} if rollout_func is None else {"rollout_func": rollout_func}),
        **({} if teacher is None else {"teacher_model": teacher}),
    )


def distilled(folder: str, teacher: Any = None, **settings: Any) -> Any:
    """Behind hints, and by one of two teachers, unless another is given."""
    rows = {"prompt": [f"w{3 + i} w4 w{5 + i}" for i in range(8)]}
    rows |= {"privileged_context": [f"w{20 + i}" for i in range(8)]}
    if teacher is None:
        rows["of"] = [*"aaaaaaab"]  # a batch has one sample of the second, in one process
        settings["teacher_column"] = "of"
        teacher = {
            name: tiny_models.language_model("gpt2", n_embd=width)
            for name, width in (("a", 24), ("b", 32))
        }
    data, count = Dataset.from_dict(rows), process_count()
    # Held-out rows in whole batches of all processes: others would be repeated, with other draws.
    sizes = {
        "per_device_train_batch_size": BATCH // count,
        "per_device_eval_batch_size": 4 // count,
    }
    given = {"max_completion_length": 6, "logging_steps": 1, "max_steps": 3}
    return DistillationTrainer(
        tiny_models.language_model(),
        None if teacher == "own" else teacher,
        DistillationConfig(output_dir=folder, **{**_FIT, **_SGD, **sizes, **given, **settings}),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tiny.tokenizer(),
    )


def _sizes(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    parts = process_count() * settings.get("gradient_accumulation_steps", 1)
    sizes = {"per_device_train_batch_size": BATCH // parts, "per_device_eval_batch_size": 4}
    return {
        **{"output_dir": folder, "logging_steps": 1, "num_train_epochs": 1},
        **{**_FIT, **_SGD, **sizes, **settings},
    }


def done(make: Callable[..., Any], *given: Any, resume: bool = False, **settings: Any) -> Any:
    """What a run did; in a folder of its own unless one is named."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(settings.pop("folder", folder), *given, **settings)
        before = trainer.evaluate() if not resume else {}
        trainer.train(resume_from_checkpoint=resume)
        after = trainer.evaluate()
    judged = getattr(getattr(trainer, "evaluation", None), "judged", ())
    logs = trainer.state.log_history
    return {
        "weights": _weights(trainer),
        "logs": [{k: v for k, v in x.items() if not _of_speed(k)} for x in logs],
        "judged": [[x.prompts, x.completions, x.rewards] for x in judged],
        "evaluations": [
            {k: v for k, v in each.items() if not _of_speed(k)} for each in (before, after)
        ],
    }


def _weights(trainer: Any) -> dict[str, Any]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _of_speed(name: str) -> bool:
    return (
        name.startswith(("time/", "perf/", "train_", "total_flos"))
        or "_per_" in name
        or "runtime" in name
        or "step_time" in name
    )


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "ppo": lambda: done(aligned, "ppo", "reinforcement-learning", PROMPTS,
     loss={"epochs": 2, "mini_batches": 2, "early_stopping": True, "target_kl": 0.02}, max_steps=6),
    "ppo, weights by likelihood": lambda: done(aligned, "ppo", "reinforcement-learning", PROMPTS,
     loss={"epochs": 1, "mini_batches": 2}, reweighter=_by_likelihood,
     gradient_accumulation_steps=2, max_steps=3),
    "dpo, online": lambda: done(aligned, "dpo", "online-pairwise", PROMPTS, max_steps=3),
    "kto, online": lambda: done(aligned, "kto", "online-pointwise", PROMPTS, max_steps=3),
    # Their last batch has one to three examples.
    "kto": lambda: done(aligned, "kto", "offline-pointwise", FEEDBACK, 17),
    "sft, aligned": lambda: done(aligned, "sft", "sft", ANSWERS, 17, held_out=1),
    "dpo, weights by likelihood": lambda: done(aligned, "dpo", "offline-pairwise", PAIRS, 18,
     reweighter=_by_likelihood),
    "dpo, trainer": lambda: done(preferring, DPOTrainer, DPOConfig, pairs(17)),
    "kto, trainer": lambda: done(
        preferring,
        KTOTrainer,
        KTOConfig,
        Dataset.from_list(
            [
                {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 3 > 0}
                for i, row in enumerate(pairs(17))
            ]
        ),
        loss_type="apo_zero_unpaired",
    ),
    "grpo": lambda: done(online, GRPOTrainer, GRPOConfig, beta=0.1, num_iterations=2,
     learning_rate=0.01),
    "grpo, over the sets of its draws": lambda: done(online, GRPOTrainer, GRPOConfig, beta=0.1,
     num_iterations=2, learning_rate=0.01, policy_support="sampled", top_p=0.8, top_k=30),
    # In some steps one process alone draws others.
    "grpo, other groups for those without spread": lambda: done(online, GRPOTrainer, GRPOConfig,
     reward=flat_here_and_there, dynamic_sampling_rounds=2, learning_rate=0.01),
    # Some processes have no token to learn.
    "grpo, without those that are cut": lambda: done(online, GRPOTrainer, GRPOConfig,
     mask_truncated_completions=True, top_entropy_quantile=0.5, learning_rate=0.01),
    # dapo's loss and weights of whole responses are the defaults.
    "grpo, responses masked by another engine's": lambda: corrected("sequence_mask"),
    "grpo, responses weighed by another engine's": lambda: corrected("sequence_truncate",
     loss_type="grpo", num_iterations=2, off_policy_mask_threshold=0.2, learning_rate=0.01),
    "grpo, tokens weighed by another engine's": lambda: corrected("token_truncate",
     vllm_importance_sampling_clip_min=0.5, top_entropy_quantile=0.5, beta=0.1),
    "vespo, tokens masked by another engine's": lambda: corrected("token_mask", loss_type="vespo"),
    "distillation": lambda: done(distilled, beta=0.3, learning_rate=0.1),
    "distillation, from an average": lambda: done(distilled, "own", teacher_model_kind="ema",
     teacher_update_rate=0.5, learning_rate=0.1),
    "grpo, a teacher in the reward": lambda: done(online, GRPOTrainer, GRPOConfig,
     teacher=tiny_models.language_model("gpt2", n_embd=24), teacher_kl_coef=0.2,
     teacher_kl_in="reward", learning_rate=0.01),
    "rloo": lambda: done(online, RLOOTrainer, RLOOConfig, learning_rate=0.01),
    "sft": lambda: done(supervised),
    "sft, packed": lambda: done(supervised, packing=True, max_length=24),
    "sft, fewer texts than processes": lambda: done(supervised, 1),
    "sft, by length": lambda: done(supervised, 50, train_sampling_strategy="group_by_length",
     gradient_accumulation_steps=2, max_steps=3),
    "reward": lambda: done(rewarding, 19),
    # Some batches have more passes in one process.
    "sft, in passes": lambda: done(supervised, micro_batch_tokens=40),
    "reward, in passes": lambda: done(rewarding, 19, micro_batch_tokens=28),
    "dpo, in passes": lambda: done(aligned, "dpo", "offline-pairwise", PAIRS, 18,
     micro_batch_tokens=14),
}  # fmt: skip
# Runs that are interrupted in their second epoch, between two checkpoints.
SAVED = {
    "logging_steps": 3, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4,
    "save_total_limit": 1,
}  # fmt: skip
RESUMED: dict[str, Callable[..., dict[str, Any]]] = {
    "reward": lambda **given: done(rewarding, **given),
    "dpo": lambda **given: done(aligned, "dpo", "offline-pairwise", PAIRS, 18, **given),
    "dpo, online": lambda **given: done(
        aligned, "dpo", "online-pairwise", PROMPTS, **{**given, "max_steps": 6}
    ),
    # With one process in two parts.
    "sft": lambda **given: done(
        supervised, gradient_accumulation_steps=2 if process_count() == 1 else 1, **given
    ),
}


class _Gone(BaseException):
    pass


class _Ends(TrainerCallback):
    """Ends a run as its fifth step is done."""

    def __init__(self, by: Callable[[], object]):
        self.by = by

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 5:
            self.by()


def _leave() -> None:
    raise _Gone


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def straight(folder: Path) -> None:
    for name, job in RESUMED.items():
        keep(job(**SAVED), f"{name}, straight", folder)


def begin(folder: Path) -> None:
    """Begins all runs that are to be resumed; in the last one several processes are killed."""
    for name, job in RESUMED.items():
        killed = process_count() > 1 and name == [*RESUMED][-1]
        ends = _Ends(_die if killed else _leave)
        with contextlib.suppress(_Gone):
            begun = folder / f"begun-{process_count()}" / name
            job(folder=str(begun), callbacks=[ends], **SAVED)


class _InProcess1:
    """A function, whose third call does something else before in process 1, and waits in the
    other."""

    def __init__(self, function: Callable[..., Any], act: Callable[[], object], waits: bool):
        self.function, self.act, self.waits, self.calls = function, act, waits, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 3 and os.environ.get("RANK") == "1":
            self.act()
        elif self.calls == 3 and self.waits:
            time.sleep(LONG)
        return self.function(*args, **kwargs)


def _raise() -> None:
    raise LookupError("there is no such thing")


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _failing(
    make: Callable[..., Any],
    *given: Any,
    at: str,
    act: Callable[[], object] = _raise,
    waits: bool = False,
) -> Callable[..., None]:
    """A run in which something goes wrong in one process, in a method or function ``at`` a place
    of the trainer's."""

    def job(**settings: Any) -> None:
        trainer = make(settings.pop("folder"), *given, **settings)
        *path, name = at.split(".")
        owner = functools.reduce(getattr, path, trainer)
        setattr(owner, name, _InProcess1(getattr(owner, name), act, waits))
        trainer.train()

    return job


FAILING: dict[str, Callable[..., None]] = {
    "the collator raises": _failing(supervised, at="data_collator"),
    "the loss raises": _failing(rewarding, at="compute_loss"),
    "a process is killed": _failing(supervised, at="compute_loss", act=_die),
    "a process is stopped": _failing(rewarding, at="compute_loss", act=_terminate),
    "the annotator raises": _failing(aligned, "dpo", "online-pairwise", PROMPTS,
     at="factory.annotator.compare", waits=True),
    "the annotator is stopped": _failing(aligned, "dpo", "online-pairwise", PROMPTS,
     at="factory.annotator.compare", act=_terminate, waits=True),
}  # fmt: skip


def resume(folder: Path) -> None:
    """Resumes what another number of processes has begun."""
    own = f"begun-{process_count()}"
    (others,) = [path for path in folder.glob("begun-*") if path.name != own]
    for name, job in RESUMED.items():
        begun = others / name
        keep(job(folder=str(begun), resume=True, **SAVED), f"{name}, resumed", folder)


def differ(folder: Path) -> None:
    """Writes what each process says of settings and data that do not fit together."""
    rank, said = int(os.environ["RANK"]), []
    for given in (
        {"learning_rate": 0.1 + 0.1 * rank},
        {"save_strategy": "steps", "save_steps": 4 + rank},
        {"count": 17 + rank},
        {"held_out": 1 + rank},
    ):
        try:
            supervised(str(folder), **given).train()
        except ValueError as error:
            said.append(str(error))
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


def fail(name: str, folder: Path) -> None:
    FAILING[name](folder=str(folder), **{**SAVED, "save_steps": 100})


def run(folder: Path, *names: str) -> None:
    """Does jobs, by their names, or what else has one."""
    for name in names:
        if name in JOBS:
            keep(JOBS[name](), name, folder)
        elif name in FAILING:
            fail(name, folder)
        else:
            {"begin": begin, "resume": resume, "differ": differ}[name](folder)
