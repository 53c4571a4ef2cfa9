"""What each surface does to a tiny model in a few steps."""

import contextlib
import io
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn

import fastrl
from fastrl.alignment import AlignmentConfig, Trainer, make_loss
from tests import tiny_models
from tests.alignment.conftest import make_factory
from tests.golden import tiny
from tests.resuming import TIMES, with_dropout
from tests.trainers.conftest import pairs, reward_model, text, texts

Figures = dict[str, Any]
_FITTED: dict[str, Any] = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 2,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    "logging_steps": 1,
}  # fmt: skip


def distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) - 0.1 * (ids[0] % 7 if ids else 0) for ids in completion_ids]


def small_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 7 for token in ids) / 7 for ids in completion_ids]


def of_ppo(settings: dict[str, Any], folder: Path) -> Figures:
    """PPOTrainer.train(), then step() with the same batch as anybody may pass it."""
    batch = {"batch_size": 8, "mini_batch_size": 4, "rollout_slots": 8}
    trainer = fastrl.PPOTrainer(
        fastrl.PPOConfig(**{**batch, **settings}),
        with_dropout(tiny_models.policy()),
        None,
        tiny.tokenizer(),
    )
    rows = tiny_models.prompts(*(2 + i % 5 for i in range(24)))
    sampling = {"max_new_tokens": 6, "top_k": 0}
    result = trainer.train(
        [distinct_tokens, small_tokens], prompts=rows, steps=2, eval_prompts=rows[:3],
        generation_kwargs=sampling, progress=False, output=folder / "run",
    )  # fmt: skip
    size = trainer.config.group_size
    queries = [x for i in range(8 // size) for x in [rows[i]] * size]
    given = torch.Generator().manual_seed(1)
    responses = [torch.randint(3, 97, (2 + i % 4,), generator=given) for i in range(8)]
    scores = [float(i % 3) for i in range(8)]
    step = trainer.step(queries, responses, [torch.tensor(x) for x in scores])
    figures = {"weights": _weights(trainer.model), "steps": [*result.history, _plain(step)]}
    figures["evaluations"] = [[x.mean, x.sem, x.kl] for x in result.evaluations]
    return figures


def trainer_and_config(name: str) -> tuple[Any, Any]:
    """Of "SFT" SFTTrainer and SFTConfig."""
    return getattr(fastrl, f"{name}Trainer"), getattr(fastrl, f"{name}Config")


def _online(name: str) -> Callable[[dict[str, Any], Path], Figures]:
    trainer, config = trainer_and_config(name)

    def run(settings: dict[str, Any], folder: Path) -> Figures:
        args = {**_FITTED, "max_completion_length": 6, "num_generations": 4, **settings}
        made = trainer(
            with_dropout(tiny_models.language_model()),
            [distinct_tokens, small_tokens],
            args=config(str(folder), **args),
            train_dataset=Dataset.from_list([{"prompt": x["text"]} for x in texts(8)]),
            eval_dataset=Dataset.from_list([{"prompt": x["text"]} for x in texts(4, seed=1)]),
            processing_class=tiny.tokenizer(),
        )
        return _fitted(made)

    return run


def _learned(
    name: str, model: Callable[[], nn.Module], data: Callable[[int, int], Dataset]
) -> Callable[[dict[str, Any], Path], Figures]:
    trainer, config = trainer_and_config(name)

    def run(settings: dict[str, Any], folder: Path) -> Figures:
        made = trainer(
            with_dropout(model()),
            args=config(str(folder), **{**_FITTED, **settings}),
            train_dataset=data(8, 0),
            eval_dataset=data(4, 1),
            processing_class=tiny.tokenizer(),
        )
        return _fitted(made)

    return run


def of_alignment(settings: dict[str, Any], folder: Path) -> Figures:
    settings = dict(settings)
    loss, online = make_loss(settings.pop("loss", "dpo")), settings.pop("online", False)
    task = loss.tasks[-1 if online else 0]
    if loss.learns == "policy":
        model: Any = with_dropout(tiny_models.language_model())
    elif loss.learns == "reward model":
        model = with_dropout(reward_model("gpt2"))
    else:
        model = with_dropout(tiny_models.policy())
    args = {k: v for k, v in _FITTED.items() if not k.startswith("per_device")}
    made = Trainer(
        model, AlignmentConfig(str(folder), **{**args, **settings}), make_factory(task), loss
    )
    return _fitted(made, evaluates=False)


def prompts_and_completions(count: int, seed: int) -> Dataset:
    rng = random.Random(seed)
    rows = [
        {"prompt": text(rng, 1 + i % 3) + " ", "completion": text(rng, 1 + i % 5)}
        for i in range(count)
    ]
    return Dataset.from_list(rows)


def judged(count: int, seed: int) -> Dataset:
    rows = prompts_and_completions(count, seed)
    return rows.add_column("label", [i % 3 != 0 for i in range(count)])


SURFACES: dict[str, Callable[[dict[str, Any], Path], Figures]] = {
    "PPO": of_ppo,
    "PPO with groups": lambda settings, folder: of_ppo(
        {"advantage": "grpo", "group_size": 4, **settings}, folder
    ),
    "GRPO": _online("GRPO"),
    "RLOO": _online("RLOO"),
    "DPO": _learned("DPO", tiny_models.language_model, pairs),
    "KTO": _learned("KTO", tiny_models.language_model, judged),
    "SFT": _learned("SFT", tiny_models.language_model, prompts_and_completions),
    "reward model": _learned("Reward", lambda: reward_model("gpt2"), pairs),
    "alignment": of_alignment,
}


def run(surface: str, settings: dict[str, Any], folder: Path) -> Figures:
    """Weights, and all that was logged but times.

    Raises:
        ValueError, TypeError: settings that the surface refuses.
    """
    random.seed(0)
    torch.manual_seed(0)
    with quiet():
        return SURFACES[surface](settings, folder)


def _fitted(trainer: Any, evaluates: bool = True) -> Figures:
    trainer.train()
    if evaluates:
        trainer.evaluate()
    return {
        "weights": _weights(trainer.model),
        "steps": [_plain(row) for row in trainer.state.log_history],
    }


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone().float() for name, x in model.named_parameters()}


def _plain(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a log."""
    return {k: float(x) for k, x in row.items() if isinstance(x, int | float)}


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in row.items() if not any(time in k for time in (*TIMES, "time"))}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    sink = io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
