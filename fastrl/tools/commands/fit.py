"""The shared part of ``fastrl sft``, ``reward``, ``align`` and ``distill``: flags, data, run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import TrainingArguments

from fastrl.data.tables import MOST_HELD_OUT, held_out_count, load_table, numbered
from fastrl.models.load import load_tokenizer
from fastrl.run.checkpoints import KEEP_LAST, SAVE_EVERY, Checkpoints
from fastrl.run.folder import RunFolder
from fastrl.run.launcher import is_main_process, process_count
from fastrl.run.metrics import check_trackers, split_trackers
from fastrl.run.transformers_files import find_trainer_checkpoint
from fastrl.run.transformers_settings import check_measured
from fastrl.settings import setting
from fastrl.tools.commands.job import TrainingJob, folder_claimed, resume_setting, say_none_held_out
from fastrl.tools.commands.memory import RunMemory

if TYPE_CHECKING:
    from datasets import Dataset


def essential_flags(what: str, data: str) -> dict[str, str]:
    """The flags that ``--help`` shows, in groups, see :func:`fastrl.tools.commands.flags.parse`.

    Args:
        what, data: further flags of a command's first two groups.
    """
    return {
        "what to train": f"model dataset output {what}",
        "data": f"eval_dataset eval_examples {data}",
        "training": "num_train_epochs max_steps per_device_train_batch_size "
        "gradient_accumulation_steps learning_rate lr_scheduler_type warmup_steps bf16",
        "model and run": "save_steps resume_from_checkpoint overwrite lora_r dtype seed "
        "logging_steps report_to",
    }


@dataclass(kw_only=True)
class FitJob(TrainingJob):
    """A job of a command on transformers' Trainer."""

    eval_dataset: str | None = setting(
        "Data set to evaluate on; by default examples are held out from --dataset.", None
    )
    eval_examples: int | None = setting(
        "Examples held out for evaluation, 0 for none; by default a tenth, 256 at most. With "
        "--eval-dataset: how many of its examples; by default all, 256 at most.",
        None,
        within="[0, inf)",
    )

    def load(self, seed: int) -> tuple[Dataset, Dataset | None]:
        """Examples to train on, and to evaluate on or None; disjoint parts of one data set unless
        there is an ``eval_dataset``. Errors about examples name their rows in the files.

        Raises:
            ValueError: no example is left to train on.
        """
        table = numbered(load_table(self.dataset, self.dataset_split))
        if self.eval_examples == 0:
            return table, None
        if self.eval_dataset is not None:
            held_out = numbered(load_table(self.eval_dataset, self.dataset_split))
            most = MOST_HELD_OUT if self.eval_examples is None else self.eval_examples
            count = min(most, len(held_out))
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

    def loading(self, flags: Any) -> dict[str, Any]:
        """``from_pretrained``'s options for the model; those of ``--model-init-kwargs`` win."""
        trust = {"trust_remote_code": flags.trust_remote_code}  # else transformers would ask
        return {**self.model_options(), **trust, **(flags.model_init_kwargs or {})}

    @contextmanager
    def claimed(self, flags: Any) -> Iterator[RunFolder]:
        """Context that yields the run's folder, claimed for this run; checks ``flags`` before."""
        flags.check()
        folder = RunFolder(self.output, {"command": self.command})
        resume = flags.resume_from_checkpoint
        with folder_claimed(folder, resume, self.overwrite):
            if resume and process_count() == 1:  # several processes share the check later
                find_trainer_checkpoint(resume, Checkpoints(folder.checkpoints))
            yield folder

    def begin(self, flags: Any) -> tuple[Dataset, Dataset | None, Any]:
        """Loads data and tokenizer; sets the flags that follow from the job: the folder of
        checkpoints, the trackers that transformers serves, and no evaluation without held-out
        examples.

        Returns:
            data to train on, data to evaluate on or None, the tokenizer.
        """
        from transformers import set_seed

        model = self.check_model()  # before the data, which take longer
        set_seed(flags.seed)
        flags.output_dir = str(RunFolder(self.output).checkpoints)
        flags.trackers, flags.report_to = split_trackers(flags.report_to)
        if flags.save_steps == 0:
            flags.save_strategy = type(flags.save_strategy)("no")
        train, held_out = self.load(flags.seed)
        if held_out is None:
            flags.eval_strategy = type(flags.eval_strategy)("no")
        tokenizer = load_tokenizer(
            model,
            trust_remote_code=flags.trust_remote_code,
            revision=(flags.model_init_kwargs or {}).get("revision"),
        )
        return train, held_out, tokenizer


def _help_of(name: str, text: str) -> Any:
    """A field of transformers' TrainingArguments with its default and our help."""
    return setting(text, TrainingArguments.__dataclass_fields__[name].default)


@dataclass
class CommandFlags:
    """Defaults for a command in place of those of transformers' TrainingArguments."""

    of_command: ClassVar[bool] = True

    output_dir: str | None = dataclasses.field(default=None, init=False)
    num_train_epochs: float = _help_of("num_train_epochs", "Passes over the data.")
    max_steps: int = _help_of(
        "max_steps", "Number of optimizer steps; -1 is num_train_epochs' passes."
    )
    per_device_train_batch_size: int = _help_of(
        "per_device_train_batch_size", "Examples per forward and backward pass, per device."
    )
    per_device_eval_batch_size: int = _help_of(
        "per_device_eval_batch_size", "Examples per forward pass of an evaluation, per device."
    )
    gradient_accumulation_steps: int = _help_of(
        "gradient_accumulation_steps", "Forward and backward passes per optimizer step."
    )
    learning_rate: float = _help_of("learning_rate", "AdamW's learning rate, at its highest.")
    warmup_steps: float = _help_of(
        "warmup_steps", "Steps in which the learning rate rises; below 1 a share of all steps."
    )
    seed: int = _help_of(
        "seed", "Seed of the data's order, of held-out examples and of new weights."
    )
    report_to: None | str | list[str] = setting(  # noqa: RUF036 - as transformers has it
        "Tracker, such as wandb or tensorboard: any that accelerate or transformers knows.",
        "none",
        aliases=["--log-with"],
    )
    logging_steps: float = setting("Optimizer steps between two logs.", 10)
    eval_strategy: str = setting("When to evaluate: no, steps or epoch.", "epoch")
    save_strategy: str = setting(
        "When to save checkpoints: steps, epoch, or no, which is only where the run fails or is "
        "stopped.",
        "steps",
    )
    save_steps: float = setting(
        "Optimizer steps between two checkpoints; 0 saves one only if the run fails or is stopped.",
        SAVE_EVERY,
        aliases=["--save-every"],
    )
    save_total_limit: int | None = setting(
        "Checkpoints to keep; 0 keeps all.", KEEP_LAST, aliases=["--keep-last"]
    )
    resume_from_checkpoint: str | None = resume_setting(aliases=["--resume"])

    def check(self) -> None:
        """Raises ValueError for a number out of range or an unknown tracker, and ImportError for a
        tracker that is not installed."""
        args: Any = self
        if args.save_total_limit is not None and args.save_total_limit < 0:
            raise ValueError(f"save_total_limit must be 0 or more, got {args.save_total_limit}")
        if args.max_steps == 0 or args.max_steps < -1:
            raise ValueError(
                f"max_steps must be positive, or -1 for whole epochs, got {args.max_steps}"
            )
        if args.max_steps < 0 and not 0 < args.num_train_epochs < math.inf:
            raise ValueError(f"num_train_epochs must be positive, got {args.num_train_epochs}")
        check_trackers("report_to", args.report_to, of_transformers=True)


def fit(
    trainer: Any,
    folder: RunFolder,
    job: FitJob,
    flags: Any,
    *,
    description: str,
    title: str,
    results: Callable[[dict[str, float]], dict[str, float]],
    evaluations: Sequence[Any] = (),
    show: int = 0,
    lengths: Callable[[], tuple[int, ...]],
) -> dict[str, Any]:
    """Trains, evaluates before and after, saves and reports; returns what ``summary.json`` holds,
    but {} in other processes than the main one.

    Args:
        folder: the folder that :meth:`FitJob.claimed` yields.
        description: the text of the progress bar.
        title: the title of the report.
        results: picks from an evaluation's metrics what ``summary.json`` records.
        evaluations: a list to which the trainer adds the samples of each evaluation.
        show: how many samples to print.
        lengths: gives a plan the longest text's tokens, or the longest prompt's and response's.
    """
    from fastrl.run.transformers_callbacks import recording
    from fastrl.tools.reports.report import finish_run, pair_samples

    settings = {**flags.to_dict(), "report_to": [*flags.trackers, *flags.report_to]}
    resume = settings.pop("resume_from_checkpoint")
    folder.config |= {"title": title, **job.record(), "settings": settings}
    folder.config["code"] = trainer.own_code()
    checkpoint = None
    if resume:
        checkpoint = find_trainer_checkpoint(resume, trainer.checkpoints, trainer.processes)
    held_out = trainer.eval_dataset is not None
    trainer.run_folder, trainer.saves_when_it_fails = folder, True
    is_open = flags.micro_batch_tokens is None
    memory = RunMemory(job.plan, trainer.args.device, trainer, lengths, is_open)
    with recording(trainer, folder, description, flags.trackers, evaluations):
        if checkpoint is None:
            if is_main_process():
                folder.resume(None) if resume else folder.begin()
            if held_out:
                measured = trainer.evaluate()
                check_measured(trainer.args, measured)
                trainer.kept["before"] = results(measured)
        outcome = trainer.train(resume_from_checkpoint=checkpoint)
        before = trainer.kept.get("before", {})
        after = results(trainer.evaluate()) if held_out else {}

    memory.end()

    def save(model: Path) -> None:
        trainer.save_model(str(model))

    return finish_run(
        folder,
        save,
        {
            **{f"{name}_before": value for name, value in before.items()},
            **{f"{name}_after": value for name, value in after.items()},
            "train_examples": len(trainer.train_dataset),
            "eval_examples": len(trainer.eval_dataset) if held_out else 0,
            "steps": trainer.state.global_step,
            "seconds": outcome.metrics["train_runtime"],
        },
        lines=[
            f"{name.replace('_', ' ')}: {before[name]:.4f} → {value:.4f}"
            for name, value in after.items()
            if name in before  # empty where a run resumed a checkpoint of transformers' own
        ],
        samples=pair_samples(evaluations[0], evaluations[-1]) if len(evaluations) > 1 else (),
        show=show,
    )


def held_out_accuracy(accuracy: float, count: int) -> dict[str, float]:
    """A share of ``count`` examples, and its standard error."""
    return {
        "held_out_accuracy": accuracy,
        "held_out_accuracy_sem": math.sqrt(accuracy * (1 - accuracy) / max(count, 1)),
    }
