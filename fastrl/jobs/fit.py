"""What ``fastrl sft`` and ``fastrl reward`` share: data in, a fitted model and a report out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastrl.jobs.lora import check_dropout
from fastrl.jobs.progress import show
from fastrl.prompt_data import load_table

if TYPE_CHECKING:
    from datasets import Dataset


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
        "The data: a .jsonl, .json, .parquet, .csv, .tsv or .txt file, a folder, or a Hub id."
    )
    output: str = flag("Folder for the model, the metrics and the report.", "runs/fit")
    dataset_split: str = flag("Split of a Hub data set.", "train")
    eval_dataset: str | None = flag(
        "Data set to evaluate on; by default examples are held out from --dataset.", None
    )
    eval_examples: int = flag("Number of held-out examples; 0 turns evaluation off.", 256)
    lora_r: int = flag("Train a LoRA adapter of this rank; 0 trains all weights.", 0)
    lora_alpha: int = flag("LoRA's scaling numerator.", 32)
    lora_dropout: float = flag("LoRA's dropout in training.", 0.0)
    dtype: str = flag("Type of the model's weights, such as float32 or bfloat16.", "float32")

    def __post_init__(self) -> None:
        for name in ("eval_examples", "lora_r"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
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
            count = min(self.eval_examples, len(held_out))
            return table, held_out.shuffle(seed=seed).select(range(count))
        if len(table) <= self.eval_examples:
            raise ValueError(
                f"{self.eval_examples} held-out examples leave none of {len(table)} to train on: "
                "lower eval_examples, or name an eval_dataset"
            )
        shuffled = table.shuffle(seed=seed)
        return (
            shuffled.select(range(self.eval_examples, len(table))),
            shuffled.select(range(self.eval_examples)),
        )

    def begin(self, flags: Any) -> tuple[Dataset, Dataset | None, Any]:
        """Data to train on and to evaluate on, and the tokenizer; the flags know what is known
        now."""
        from transformers import AutoTokenizer, set_seed

        from fastrl.models.load import tokenizer_folder

        tokens = tokenizer_folder(self.model)  # a model that is not there is said at once
        set_seed(flags.seed)
        flags.output_dir = f"{self.output}/checkpoints"
        train, held_out = self.load(flags.seed)
        if held_out is None:
            flags.eval_strategy = type(flags.eval_strategy)("no")
        tokenizer = AutoTokenizer.from_pretrained(tokens)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return train, held_out, tokenizer


@dataclass
class CommandFlags:
    """Defaults that serve a command, where transformers' own are made for programs."""

    output_dir: str | None = dataclasses.field(default=None, init=False)
    logging_steps: float = flag("Steps between two logs.", 10)
    eval_strategy: str = flag("When to evaluate: no, steps or epoch.", "epoch")
    save_strategy: str = flag(
        "When to save checkpoints beside the final model: no, steps or epoch.", "no"
    )


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
    from fastrl.figure import draw_fit
    from fastrl.report import read_metrics, run_console

    started = time.perf_counter()
    output = Path(job.output)
    held_out = trainer.eval_dataset is not None
    show(trainer, description, output / "metrics.jsonl")
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


def standard_error(share: float, count: int) -> float:
    """Of a share of ``count`` examples."""
    return math.sqrt(share * (1 - share) / max(count, 1))
