"""The loop over steps is ours, and does what that of transformers does, whatever is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments

from fastrl.run.transformers_base import OpenTrainer

ROWS = [
    {"x": torch.randn(3, generator=torch.Generator().manual_seed(i)), "labels": torch.ones(1)}
    for i in range(11)
]


class Stream(IterableDataset):
    def __iter__(self):
        yield from ROWS


class Model(nn.Module):
    main_input_name = "x"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, labels):
        return {"loss": (self.drop(self.layer(x)) - labels).square().mean()}

    def floating_point_ops(self, inputs, **_):
        return inputs["x"].numel()


class Recorded(TrainerCallback):
    """The events of a run, with what a callback may read of it."""

    def __init__(self):
        self.events: list[tuple[Any, ...]] = []

    def __getattribute__(self, name):
        if not name.startswith("on_") or name == "on_init_end":
            return super().__getattribute__(name)

        def note(args, state, control, **told):
            self.events.append((name, state.global_step, state.epoch, vars(control).copy()))
            if (name, state.global_step) == self.stops_at:
                control.should_training_stop = True

        return note

    stops_at = ("", -1)


class Ours(OpenTrainer):
    def drive(self, feed):
        for batch in feed:
            if self.learn(batch):
                self.log_evaluate_and_save()
            if self.is_over():
                break

    def end_epoch(self):
        super().end_epoch()
        self.log_evaluate_and_save()

    def save_checkpoint(self):
        transformers.Trainer._save_checkpoint(self, self.model, None)


SETTINGS: dict[str, dict[str, Any]] = {
    "each step is logged": {"logging_steps": 1, "num_train_epochs": 2},
    "a remainder is accumulated": {"gradient_accumulation_steps": 3, "num_train_epochs": 3},
    "by epochs": {
        **{f"{x}_strategy": "epoch" for x in ("logging", "eval", "save")},
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    },
    "the best is saved": {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best",
        "metric_for_best_model": "loss", "lr_scheduler_type": "reduce_lr_on_plateau",
    },
    "unclipped": {"max_grad_norm": 0.0, "logging_steps": 2, "warmup_steps": 3},
    "tokens are counted": {"include_num_input_tokens_seen": "all", "logging_steps": 2},
    "a stream that ends early": {"max_steps": 9, "gradient_accumulation_steps": 4},
    "skipped data": {"ignore_data_skip": True, "num_train_epochs": 2},
}  # fmt: skip


def run(
    kind: Any, folder: Path, settings: dict[str, Any], resume: bool = False, stops_at: Any = None
):
    torch.manual_seed(3)
    settings = {"save_strategy": "steps", "save_steps": 3, "learning_rate": 0.1, **settings}
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        use_cpu=True, remove_unused_columns=False, **settings,
    )  # fmt: skip
    recorded = Recorded()
    recorded.stops_at = stops_at
    stream = "max_steps" in settings
    trainer = kind(
        Model(), args, train_dataset=Stream() if stream else ROWS, eval_dataset=ROWS[:4],
        callbacks=[recorded],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    logs = [
        {k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k}
        for row in trainer.state.log_history
    ]
    files = sorted(str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file())
    return recorded.events, logs, trainer.model.state_dict(), files, torch.rand(1)


def assert_the_same(ours: Any, theirs: Any) -> None:
    for x, y in zip(ours[:2], theirs[:2], strict=True):
        assert x == y
    for name, weight in theirs[2].items():
        assert torch.equal(ours[2][name], weight), name
    assert ours[3:] == theirs[3:]


@pytest.mark.parametrize("name", SETTINGS)
def test_events_logs_weights_and_files_are_those_of_transformers(name, tmp_path):
    made = [
        run(kind, tmp_path / kind.__name__, SETTINGS[name]) for kind in (Ours, transformers.Trainer)
    ]
    assert_the_same(*made)
    assert len(made[0][0]) > 12


@pytest.mark.parametrize(
    "name", ["each step is logged", "a remainder is accumulated", "skipped data"]
)
def test_a_run_goes_on_from_a_checkpoint_as_with_transformers(name, tmp_path):
    for kind in (Ours, transformers.Trainer):
        run(kind, tmp_path / kind.__name__, {**SETTINGS[name], "num_train_epochs": 1})
    made = [
        run(kind, tmp_path / kind.__name__, SETTINGS[name], resume=True)
        for kind in (Ours, transformers.Trainer)
    ]
    assert_the_same(*made)


@pytest.mark.parametrize(
    "place", [("on_substep_end", 1), ("on_train_begin", 0), ("on_epoch_begin", 2)], ids=str
)
def test_a_callback_stops_it_within_a_step_or_between_two(place, tmp_path):
    settings = {"gradient_accumulation_steps": 3, "num_train_epochs": 3}
    made = [
        run(kind, tmp_path / kind.__name__, settings, stops_at=place)
        for kind in (Ours, transformers.Trainer)
    ]
    assert_the_same(*made)
    assert made[0][0][-1][1] < 4
