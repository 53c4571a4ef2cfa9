"""What commands refuse before they load anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastrl.run.folder import RunFolder

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
_SEEDS = 2**32  # NumPy's limit


def check_dtype(name: str) -> None:
    """Refuses an unknown dtype.

    Raises:
        ValueError: a dtype that weights cannot have.
    """
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}")


def check_seed(seed: int) -> None:
    """Refuses a seed out of range.

    Raises:
        ValueError: a seed that NumPy does not take.
    """
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed must lie between 0 and {_SEEDS - 1}, got {seed}")


def check_base(job: Any) -> None:
    """Refuses a run that would save an adapter in the place of its base.

    Args:
        job: with ``model``, ``lora_r`` and ``output``.

    Raises:
        ValueError: the base is the model in the output folder.
    """
    from fastrl.models.load import base_folder, is_adapter

    there = RunFolder(job.output).model
    if not there.is_dir() or not (job.lora_r or is_adapter(job.model)):
        return
    if Path(base_folder(job.model)).resolve() == there.resolve():
        raise ValueError(
            f"output {job.output}: {there} is the base of the adapter, which would be saved in its "
            "place: name another output"
        )


def check_causal(path: str, command: str, remedy: str) -> None:
    """Refuses what is not a causal language model, by its configuration alone.

    Args:
        path: of a model, or of an adapter, whose base counts.
        remedy: what to use for an encoder–decoder.

    Raises:
        FileNotFoundError: no model at the path, or no base at the place that an adapter names.
        ValueError: a configuration that cannot be read, or a model that is not a causal language
            model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from fastrl.models.load import base_folder

    model = base_folder(path)
    try:
        config = AutoConfig.from_pretrained(model)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(f"the configuration of {model} cannot be loaded: {said}") from error
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):  # of some, such as BART, half is a causal LM
        raise ValueError(
            f"{model} is an encoder–decoder ({kind}), and fastrl {command} trains causal language "
            f"models: {remedy}"
        )
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None):
        return
    raise ValueError(f"{model} ({kind}) is not a causal language model, which {command} trains")


def check_weights(model: str) -> None:
    """Refuses a folder whose weights are damaged, by their headers alone.

    Raises:
        ValueError: a file of weights in a model's folder that is cut short or is something else.
    """
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(model).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):  # reads the header, and the length that it tells
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error


def check_call(
    name: str, function: Callable[..., Any], arguments: Sequence[str], columns: Sequence[str]
) -> None:
    """Refuses a function that cannot be called with these names.

    Args:
        arguments, columns: what the function is called with, by name.

    Raises:
        ValueError: a function that cannot be called so.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(**dict.fromkeys([*arguments, *columns]))
    except TypeError as error:
        given = f"{', '.join(arguments)}" + (
            f" and the data set's other columns ({', '.join(columns)})" if columns else ""
        )
        raise ValueError(
            f"{name} cannot be called: {error}; it is given {given} by name: take those that it "
            "needs, and **columns"
        ) from None
