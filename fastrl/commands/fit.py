"""What ``fastrl sft``, ``reward`` and ``align`` share: data in, a fitted model and a report out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import TrainingArguments

from fastrl.commands.checks import (
    check_dtype,
    check_output,
    check_seed,
    check_trackers,
)
from fastrl.commands.lora import check_dropout
from fastrl.commands.progress import showing
from fastrl.data.tables import MOST_HELD_OUT, held_out_count, load_table
from fastrl.models.load import load_tokenizer

if TYPE_CHECKING:
    from datasets import Dataset


# Groups of flags that --help shows, see fastrl.commands.flags.parse.
WHAT = ("model", "dataset", "output")
HELD_OUT = ("eval_dataset", "eval_examples")
TRAINING = (
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "bf16",
)
RUN = ("lora_r", "lora_alpha", "dtype", "seed", "logging_steps", "report_to")


def flag(text: str, default: Any = dataclasses.MISSING) -> Any:
    """A field whose sentence shows up in ``--help``."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass
class FitJob:
    """What to fit, to which data, and where the results go."""

    _argument_group_name: ClassVar[str] = "the job"

    model: str = flag(
        "The model to start from: a directory (a run's, or of an adapter to train on) or a Hub id."
    )
    dataset: str = flag(
        "The data: a JSON, CSV, Parquet or text file, a folder, or a Hub id. Files end in .jsonl, "
        ".json, .csv, .tsv, .parquet or .txt."
    )
    output: str = flag("Folder for the model, the metrics and the report.", "runs/fit")
    dataset_split: str = flag("Split of a Hub data set.", "train")
    eval_dataset: str | None = flag(
        "Data set to evaluate on; by default examples are held out from --dataset.", None
    )
    eval_examples: int | None = flag(
        "Examples held out for evaluation, 0 for none; by default a tenth, 256 at most. With "
        "--eval-dataset: how many of its examples; by default all, 256 at most.",
        None,
    )
    lora_r: int = flag("Train a LoRA adapter of this rank; 0 trains all weights.", 0)
    lora_alpha: int = flag("LoRA's scaling numerator.", 32)
    lora_dropout: float = flag("LoRA's dropout in training.", 0.0)
    dtype: str = flag("Type of the model's weights, such as float32 or bfloat16.", "float32")

    def __post_init__(self) -> None:
        for name in ("eval_examples", "lora_r"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        check_dtype(self.dtype)
        check_dropout(self)

    def load(self, seed: int) -> tuple[Dataset, Dataset | None]:
        """Examples to train on and to evaluate on, disjoint where they come from one data set.

        Raises:
            ValueError: no example is left to train on.
        """
        table = load_table(self.dataset, self.dataset_split)
        if self.eval_examples == 0:
            return table, None
        if self.eval_dataset is not None:
            held_out = load_table(self.eval_dataset, self.dataset_split)
            asked = MOST_HELD_OUT if self.eval_examples is None else self.eval_examples
            count = min(asked, len(held_out))
            return table, held_out.shuffle(seed=seed).select(range(count))
        count = held_out_count(self.eval_examples, len(table))
        if count == 0:
            say_none_held_out(len(table), "examples")
            return table, None
        if len(table) <= count:
            raise ValueError(
                f"{count} held-out examples leave none of {len(table)} to train on: "
                "lower eval_examples, or name an eval_dataset"
            )
        shuffled = table.shuffle(seed=seed)
        return (shuffled.select(range(count, len(table))), shuffled.select(range(count)))

    def begin(self, flags: Any) -> tuple[Dataset, Dataset | None, Any]:
        """Data to train on and to evaluate on, and the tokenizer, once everything is checked that
        needs no model; sets the flags that follow from the job: the folder of checkpoints, and no
        evaluation without held-out examples.

        Raises:
            FileNotFoundError: no model or data where they are named.
            ValueError: flags, data or files that cannot be used.
        """
        from transformers import set_seed

        from fastrl.models.load import model_folder

        check_output(self.output)
        flags.check()
        model = model_folder(self.model)  # one that is not there is said at once
        set_seed(flags.seed)
        flags.output_dir = f"{self.output}/checkpoints"
        train, held_out = self.load(flags.seed)
        if held_out is None:
            flags.eval_strategy = type(flags.eval_strategy)("no")
        return train, held_out, load_tokenizer(model)


def _said(name: str, text: str) -> Any:
    """A field of transformers' TrainingArguments with its default, and help of our own."""
    return flag(text, TrainingArguments.__dataclass_fields__[name].default)


@dataclass
class CommandFlags:
    """Defaults that serve a command, where transformers' own are made for programs."""

    output_dir: str | None = dataclasses.field(default=None, init=False)
    num_train_epochs: float = _said("num_train_epochs", "Passes over the data.")
    max_steps: int = _said(
        "max_steps", "Number of optimizer steps; -1 is num_train_epochs' passes."
    )
    per_device_train_batch_size: int = _said(
        "per_device_train_batch_size", "Examples per forward and backward pass, per device."
    )
    per_device_eval_batch_size: int = _said(
        "per_device_eval_batch_size", "Examples per forward pass of an evaluation, per device."
    )
    gradient_accumulation_steps: int = _said(
        "gradient_accumulation_steps", "Such passes per optimizer step."
    )
    learning_rate: float = _said("learning_rate", "AdamW's learning rate, at its highest.")
    warmup_steps: float = _said(
        "warmup_steps", "Steps in which the learning rate rises; below 1 a share of all steps."
    )
    bf16: bool = _said("bf16", "Compute in bfloat16; weights keep their dtype.")
    seed: int = _said("seed", "Seed of the data's order, of held-out examples and of new weights.")
    logging_steps: float = flag("Steps between two logs.", 10)
    eval_strategy: str = flag("When to evaluate: no, steps or epoch.", "epoch")
    save_strategy: str = flag(
        "When to save checkpoints beside the final model: no, steps or epoch.", "no"
    )

    def check(self) -> None:
        """Refuses settings that no run could have.

        Raises:
            ValueError: a size, a rate or a seed out of range; an unknown tracker; what the commands
                do not do.
            ImportError: a tracker that is not installed.
        """
        given: Any = self
        for name in (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
        ):
            if getattr(given, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(given, name)}")
        for name in ("learning_rate", "weight_decay", "logging_steps"):
            if not 0 <= getattr(given, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more and finite, got {getattr(given, name)}")
        if given.max_steps == 0 or given.max_steps < -1:
            raise ValueError(
                f"max_steps must be positive, or -1 for whole epochs, got {given.max_steps}"
            )
        if given.max_steps < 0 and not 0 < given.num_train_epochs < math.inf:
            raise ValueError(f"num_train_epochs must be positive, got {given.num_train_epochs}")
        if given.resume_from_checkpoint is not None:
            raise ValueError(
                "a command starts anew: leave out resume_from_checkpoint, or resume by the trainer "
                "in Python (trainer.train(resume_from_checkpoint=...))"
            )
        check_seed(given.seed)
        check_trackers("report_to", given.report_to)


def fit(
    trainer: Any,
    job: FitJob,
    flags: Any,
    *,
    description: str,
    title: str,
    judge: Callable[[dict[str, float]], dict[str, float]],
) -> dict[str, Any]:
    """Trains, evaluates before and after, saves and reports; returns what ``summary.json`` says.

    Args:
        description: of the progress bar.
        judge: what to say of an evaluation's metrics.
    """
    from fastrl.run.figures import draw_fit
    from fastrl.run.report import read_metrics, run_console

    started = time.perf_counter()
    output = Path(job.output)
    held_out = trainer.eval_dataset is not None
    with showing(trainer, description, output / "metrics.jsonl"):
        before = judge(trainer.evaluate()) if held_out else {}
        trainer.train()
        after = judge(trainer.evaluate()) if held_out else {}
    trainer.save_model(str(output / "model"))
    trainer.processing_class.save_pretrained(output / "model")
    if trainer.accelerator.is_main_process:
        trainer.write_card(str(output / "model"))
    with contextlib.suppress(OSError):  # it holds checkpoints
        Path(trainer.args.output_dir).rmdir()
    summary = {
        **{f"{name}_before": value for name, value in before.items()},
        **{f"{name}_after": value for name, value in after.items()},
        "train_examples": len(trainer.train_dataset),
        "eval_examples": len(trainer.eval_dataset) if held_out else 0,
        "steps": trainer.state.global_step,
        "job": dataclasses.asdict(job),
        "settings": flags.to_dict(),
        "seconds": time.perf_counter() - started,
    }
    if not trainer.accelerator.is_main_process:
        return summary
    draw_fit(read_metrics(output / "metrics.jsonl"), title=title).savefig(output / "report.png")
    text = json.dumps(summary, indent=2, default=str)
    (output / "summary.json").write_text(text + "\n", encoding="utf-8")
    console = run_console()
    for name, value in after.items():
        console.print(f"{name.replace('_', ' ')}: {before[name]:.4f} → {value:.4f}")
    console.print(f"saved: {output}/model, metrics.jsonl, report.png, summary.json")
    return summary


def say_none_held_out(count: int, what: str) -> None:
    """One line, where nothing was asked for and there is too little to take anything from."""
    print(
        f"{count} {what} are too few to hold any out, so that nothing is evaluated: ask for a "
        f"number with --eval-{what}, or name an --eval-dataset",
        file=sys.stderr,
    )


def standard_error(share: float, count: int) -> float:
    """Of a share of ``count`` examples."""
    return math.sqrt(share * (1 - share) / max(count, 1))
