"""TrainingJob: the settings and checks that the training commands share."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fastrl.run.checkpoints import LATEST
from fastrl.run.folder import STARTED_IN, RunFolder
from fastrl.run.launcher import is_main_process
from fastrl.settings import check_ranges, check_types, setting
from fastrl.tools.recipes import recipes


def resume_setting(aliases: Sequence[str]) -> Any:
    """The field of ``--resume``, which may stand without a value."""
    field = setting(
        "Continue the run in --output from its newest good checkpoint; or from a checkpoint's "
        "folder, given by its path.",
        None,
        aliases=aliases,
    )
    metadata = {**field.metadata, "nargs": "?", "const": LATEST}
    return dataclasses.field(default=None, metadata=metadata)


def folder_claimed(
    folder: RunFolder, resume: Any, overwrite: bool
) -> contextlib.AbstractContextManager[None]:
    """Context of :meth:`RunFolder.claim` in the main process; in others nothing is claimed."""
    if not is_main_process():
        return contextlib.nullcontext()
    return folder.claim(resume=resume, overwrite=overwrite)


def say_none_held_out(count: int, what: str) -> None:
    """Prints that there are too few examples to hold out any by default."""
    if is_main_process():
        print(
            f"{count} {what} are too few to hold any out, so nothing is evaluated: set a number "
            f"with --eval-{what}, or name an --eval-dataset",
            file=sys.stderr,
        )


def _quant_types() -> tuple[str, ...]:
    from fastrl.models.quantised import QUANT_TYPES  # loads torch, which --help does not need

    return QUANT_TYPES


DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")


@dataclass(kw_only=True)
class TrainingJob:
    """What to train, on which data, and where the results go.

    Raises:
        TypeError, ValueError: a wrong setting, such as a dropout without a new adapter.
    """

    command: ClassVar[str]
    _argument_group_name: ClassVar[str] = "the job"

    model: str = setting(
        "The model to start from: a Hub id, or a directory (a run's, or an adapter's, whose "
        "training goes on)."
    )
    dataset: str = setting(
        "The data: a JSON, CSV, Parquet or text file, a folder, or a Hub id. Files end in .jsonl, "
        ".json, .csv, .tsv, .parquet or .txt."
    )
    recipe: str | None = setting(
        "A recipe by its name, see fastrl recipes: settings of a whole run. Those of a YAML file "
        "and flags beside it win.",
        None,
        choices=recipes,
    )
    output: str = setting("Folder for the model, the metrics and the report.", "runs/fit")
    dataset_split: str = setting("Split of a Hub data set.", "train")
    lora_r: int = setting(
        "Train a LoRA adapter of this rank; 0 trains all weights.", 0, within="[0, inf)"
    )
    lora_alpha: int = setting("LoRA's scaling numerator.", 32, within="[1, inf)")
    lora_dropout: float = setting("LoRA's dropout in training.", 0.0, within="[0, 1)")
    load_in_4bit: bool | None = setting(
        "Keep the base model's weights in four bits (bitsandbytes), under a LoRA adapter; by "
        "default as a saved adapter was trained, else not.",
        None,
    )
    bnb_4bit_quant_type: str = setting(
        "Codes of the four bits: nf4 or fp4.", "nf4", choices=_quant_types
    )
    use_bnb_nested_quant: bool = setting(
        "With load_in_4bit: quantise the scales, too, for 0.4 bits less per weight.", False
    )
    overwrite: bool = setting(
        "Remove an earlier run in --output with all files in model/ and checkpoints/.", False
    )
    dtype: str = setting(
        "Type of the model's weights, such as float32 or bfloat16.", "float32", choices=DTYPES
    )
    plan: bool | None = setting(
        "Print the memory that the run needs before it begins, and what it took; by default on a "
        "GPU.",
        None,
    )

    def __post_init__(self) -> None:
        check_types(self, type(self))
        check_ranges(self, type(self))
        check_weights(self)
        if self.lora_dropout and not self.lora_r:
            raise ValueError(
                f"lora_dropout={self.lora_dropout:g} is for a new adapter: set lora_r, too, or "
                "leave it out (a saved adapter keeps its own)"
            )

    def record(self) -> dict[str, Any]:
        """The record for ``run.json``: all settings but resume, overwrite and plan, and the working
        directory, on which relative paths depend."""
        fields = dataclasses.asdict(self)
        job = {k: v for k, v in fields.items() if k not in ("resume", "overwrite", "plan")}
        return {"job": job, STARTED_IN: os.getcwd()}

    def model_options(self) -> dict[str, Any]:
        """``from_pretrained``'s options for the model; raises ImportError, or as check_adapter."""
        if self.load_in_4bit is None:  # a saved adapter decides
            return {"dtype": self.dtype}
        if not self.load_in_4bit:
            return {"dtype": self.dtype, "quantization_config": None}
        from fastrl.models.quantised import four_bit_config

        check_adapter(self)
        config = four_bit_config(
            self.dtype, self.bnb_4bit_quant_type, nested=self.use_bnb_nested_quant
        )
        return {"dtype": self.dtype, "quantization_config": config}

    def check_model(self) -> str:
        """Checks that the model can be trained, and returns its folder or Hub id.

        Raises:
            FileNotFoundError: a folder without a model.
            ImportError: bitsandbytes is needed, and not installed.
            ValueError: the run would save an adapter in place of its base model; four-bit weights
                without an adapter, which could not be trained.
        """
        from fastrl.models.load import base_folder
        from fastrl.models.model_files import is_adapter, model_folder

        folder, target = model_folder(self.model), RunFolder(self.output).model
        self.model_options()
        if not target.is_dir() or not (self.lora_r or is_adapter(self.model)):
            return folder
        if Path(base_folder(self.model)).resolve() == target.resolve():
            raise ValueError(
                f"output {self.output}: {target} is the base of the adapter, which would be saved "
                "in its place: name another output"
            )
        return folder

    def lora_config(self, task_type: str) -> Any:
        """A new adapter's settings, None for lora_r=0; raises ImportError, or as check_adapter."""
        if self.lora_r == 0:
            return None
        from fastrl.models.utils import need_peft

        need_peft(f"lora_r={self.lora_r}")
        from peft import LoraConfig

        check_adapter(self)
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            task_type=task_type,
        )


def check_weights(job: Any) -> None:
    """Checks that a job has settings of four-bit weights only with ``load_in_4bit``.

    Args:
        job: a :class:`TrainingJob`, or another dataclass with these settings.

    Raises:
        ValueError: a setting of four-bit weights without load_in_4bit.
    """
    for name in () if job.load_in_4bit else ("bnb_4bit_quant_type", "use_bnb_nested_quant"):
        value = getattr(job, name)
        if value != type(job).__dataclass_fields__[name].default:
            raise ValueError(
                f"{name}={value} is for weights that are quantised: set load_in_4bit, too, or "
                "leave it out (a saved adapter's base is quantised as it was when that was trained)"
            )


def check_adapter(job: Any) -> None:
    """Checks that a job's model can have a new adapter, and weights of four bits, if set.

    Args:
        job: see :func:`check_weights`.

    Raises:
        FileNotFoundError: a folder without a model.
        ValueError: ``lora_r`` for a model that is an adapter; four-bit weights without one.
    """
    from fastrl.models.load import MERGE_ADAPTER
    from fastrl.models.model_files import is_adapter
    from fastrl.models.quantised import NEEDS_AN_ADAPTER

    if job.lora_r and is_adapter(job.model):
        raise ValueError(
            f"lora_r={job.lora_r} asks for a new adapter, but {job.model} is one: leave out lora_r "
            f"to continue training it, or {MERGE_ADAPTER}"
        )
    if job.load_in_4bit and not job.lora_r and not is_adapter(job.model):
        raise ValueError(f"load_in_4bit without lora_r: {NEEDS_AN_ADAPTER}")


def check_call(
    name: str, function: Callable[..., Any], arguments: Sequence[str], columns: Sequence[str]
) -> None:
    """Checks that a user's function can be called with these arguments.

    Args:
        arguments, columns: the names of the arguments that the function is called with.

    Raises:
        ValueError: a function that does not take these arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(**dict.fromkeys([*arguments, *columns]))
    except TypeError as error:
        passed = f"{', '.join(arguments)}" + (
            f" and the data set's other columns ({', '.join(columns)})" if columns else ""
        )
        raise ValueError(
            f"{name} cannot be called: {error}; it is given {passed} by name: let it take those it "
            "needs, and **columns"
        ) from None


def check_label(name: str, label: str | None, rewards: Iterable[Any]) -> None:
    """Raises ValueError where setting ``name`` has a label, and no reward is a classifier."""
    from fastrl.rewards.classifier import ClassifierReward

    if label is not None and not any(isinstance(each, ClassifierReward) for each in rewards):
        raise ValueError(
            f"{name}={label!r} is a label of a classifier, and none is named: leave it out"
        )
