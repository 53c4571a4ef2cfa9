"""``fastrl distill``: a language model learns a teacher's distributions over its own responses."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fastrl.config import parse_json
from fastrl.data.tables import PROMPT, columns_of, find_prompt_column
from fastrl.run.launcher import is_main_process
from fastrl.settings import setting, setting_like
from fastrl.tools.commands.fit import CommandFlags, FitJob, essential_flags, fit
from fastrl.trainers.groups.distillation_config import DistillationConfig

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(kw_only=True)
class DistillJob(FitJob):
    """A job of ``fastrl distill``: which student, on which prompts, and where the results go."""

    command: ClassVar[str] = "distill"
    essentials: ClassVar[dict[str, str]] = essential_flags(
        "teacher_model_name_or_path teacher_model_kind hint_column beta",
        "max_completion_length num_generations temperature",
    )

    output: str = setting_like(FitJob, "output", "runs/distill")
    hint_column: str | None = setting(
        "The data's column with what the teacher knows beside the prompt, such as solution; by "
        "default privileged_context, where there is one.",
        None,
    )
    samples: int = setting(
        "How many responses to held-out prompts to show before and after training.",
        8,
        within="[0, inf)",
    )

    def prompted(self, *tables: Dataset | None) -> list[Any]:
        """The data with the column of prompts by the trainer's name for it, as ``text`` of a file
        of lines; raises ValueError for data without one."""
        columns = [data and find_prompt_column(data, None) for data in tables]
        if columns[0] != PROMPT and is_main_process():
            print(
                f"{self.dataset} has no column {PROMPT!r}: prompts are its column {columns[0]!r}",
                file=sys.stderr,
            )
        return [
            data and data.rename_columns({column: PROMPT} if column != PROMPT else {})
            for data, column in zip(tables, columns, strict=True)
        ]

    def hinted(self, data: Dataset) -> Dataset:
        """The data with the column of hints by the trainer's name for it; raises ValueError for
        data without the column or with both, and for the student's prompts as hints."""
        from fastrl.trainers.teachers import CONTEXT

        has = columns_of(data)
        named = f"hint_column={self.hint_column!r}"
        if self.hint_column not in has or self.hint_column == PROMPT:
            others = ", ".join(name for name in has if name != PROMPT) or "none"
            raise ValueError(
                f"{named}: the data have the columns {', '.join(has)}: name the one that holds "
                f"what the teacher knows beside the prompt, of {others}"
            )
        if self.hint_column == CONTEXT:
            return data
        if CONTEXT in has:
            raise ValueError(
                f"{named}: the data have a column {CONTEXT} too, which is read by itself: leave "
                "hint_column out, or remove that column"
            )
        return data.rename_column(self.hint_column, CONTEXT)


@dataclass
class DistillFlags(CommandFlags, DistillationConfig):
    """DistillationConfig with defaults for a command."""

    _argument_group_name: ClassVar[str] = "distillation, and transformers' training arguments"

    teacher_model_name_or_path: str | None = setting(
        "The teacher: a model or, for a student with LoRA, an adapter on its base; by default the "
        "student's own weights, which read a hint. With --teacher-column: a JSON object of these "
        "by name.",
        None,
        aliases=["--teacher"],
    )
    teacher_model_kind: str = setting(
        "Without a teacher: base (the student as training begins), live (as it is) or ema "
        "(averaged).",
        "base",
        choices=("base", "live", "ema"),
    )
    num_train_epochs: float = setting_like(CommandFlags, "num_train_epochs", 1.0)
    learning_rate: float = setting_like(CommandFlags, "learning_rate", 1e-5)
    num_generations_eval: int | None = setting_like(DistillationConfig, "num_generations_eval", 1)


def run_distill(job: DistillJob, flags: DistillFlags) -> dict[str, Any]:
    """Trains, saves and reports; returns what :func:`fit` does."""
    with job.claimed(flags) as folder:
        trainer = make_trainer(job, flags)
        trainer.shown = []
        teacher = flags.teacher_model_name_or_path or f"itself ({flags.teacher_model_kind})"
        return fit(
            trainer,
            folder,
            job,
            flags,
            description="distillation",
            title=f"{job.model}: distillation from {teacher} on {job.dataset}",
            results=_results,
            evaluations=trainer.shown,
            show=job.samples,
            lengths=lambda: (trainer.longest_prompt(), flags.max_completion_length),
        )


def make_trainer(job: DistillJob, flags: DistillFlags) -> Any:
    """The trainer of a job. A teacher that is loaded has the dtype of the student's weights, unless
    ``teacher_model_init_kwargs`` name another."""
    from fastrl.models.load import load_language_model
    from fastrl.trainers.groups.distillation import DistillationTrainer

    teachers = _by_name(flags)
    peft_config = job.lora_config("CAUSAL_LM")
    given = parse_json("teacher_model_init_kwargs", flags.teacher_model_init_kwargs)
    if flags.teacher_model_name_or_path is not None:
        flags.teacher_model_init_kwargs = {"dtype": job.dtype, **given}
    train, held_out, tokenizer = job.begin(flags)
    train, held_out = job.prompted(train, held_out)
    if job.hint_column is not None:
        train, held_out = (data and job.hinted(data) for data in (train, held_out))
    return DistillationTrainer(
        load_language_model(job.model, **job.loading(flags), trainable=True),
        teachers,
        flags,
        train,
        held_out,
        tokenizer,
        peft_config=peft_config,
    )


def _by_name(flags: DistillFlags) -> dict[str, Any] | None:
    """The teachers of ``--teacher`` by name; None where it names one teacher, or none."""
    given = flags.teacher_model_name_or_path
    listed = given is not None and given.lstrip().startswith("{")
    if listed != (flags.teacher_column is not None):
        raise ValueError(
            f"teacher={given!r} and teacher_column={flags.teacher_column!r}: several teachers are "
            '--teacher \'{"NAME": "PATH", …}\' and --teacher-column COLUMN, the data\'s column '
            "with the names; for one teacher give --teacher PATH alone"
        )
    return parse_json("teacher", given) if listed else None


# What summary.json records of an evaluation, and the metric's name without "eval_".
_RESULTS = {
    "held_out_divergence": "divergence",
    "held_out_entropy": "entropy",
    "held_out_length": "completions/mean_length",
}


def _results(metrics: dict[str, float]) -> dict[str, float]:
    return {title: metrics[f"eval_{name}"] for title, name in _RESULTS.items()}
