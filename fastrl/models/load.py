"""Models from a folder, a run's folder, a Hub id or the folder of an adapter.

Every model that the library loads comes through here: weights are read from safetensors only, into
storage of their own; an adapter is put on the base model that it names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.utils import logging

from fastrl.models.checkpoints import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG_NAME, find_file

Model = TypeVar("Model", bound=nn.Module)

_HEADS = ("score", "classifier")  # modules that PEFT saves with a SEQ_CLS adapter
_OF_AN_ADAPTERS_REPOSITORY = ("revision", "subfolder")
_QUANTISED = ("quantized", "loaded_in_8bit", "loaded_in_4bit")

_MEND_BASE = (
    f"write the base's place into {ADAPTER_CONFIG} (base_model_name_or_path; relative to the "
    "working directory)"
)
_MERGE = "merge it into its base first (peft: merge_and_unload(), then save_pretrained())"


# ---------------------------------------------------------------------- where a model lies


def model_folder(path: str | os.PathLike, subfolder: str | None = None) -> str:
    """The folder of a checkpoint or of an adapter; a run's folder stands for the ``model/`` in it.

    Hub ids are returned as they are.

    Raises:
        FileNotFoundError: a folder without a model, or a local path that leads nowhere.
        ValueError: an empty name.
    """
    name = os.fspath(path)
    if not name.strip():
        raise ValueError("the model's name is empty: name a folder or a Hub id")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise FileNotFoundError(f"{name} is a file: name the folder of the model")
        if _is_local(name):
            raise FileNotFoundError(f"there is no folder {name}, where a model was looked for")
        return name
    if subfolder or _holds_a_model(folder):
        return str(folder)
    inner = folder / "model"
    if _holds_a_model(inner):
        return str(inner)
    raise FileNotFoundError(
        f"{name} holds no model: there is no {CONFIG_NAME} and no {ADAPTER_CONFIG} in it, nor in "
        f"{inner}"
    )


def base_folder(path: str | os.PathLike) -> str:
    """The folder or Hub id of a whole model: of an adapter, of the base that it names.

    Raises:
        FileNotFoundError: as :func:`model_folder`, also of the base.
        ValueError: an adapter that names no base, or one that is an adapter itself.
    """
    folder = model_folder(path)
    return _base_of(_adapter_config(folder, {}), folder) if is_adapter(folder) else folder


def is_adapter(path: str | os.PathLike, **options: Any) -> bool:
    """Whether a folder or a Hub id holds a PEFT adapter; ``options`` are from_pretrained's."""
    folder = model_folder(path, options.get("subfolder"))
    return find_file(folder, ADAPTER_CONFIG, options) is not None


# ---------------------------------------------------------------------- loading


def load_language_model(
    path: str | os.PathLike,
    loader: Any = AutoModelForCausalLM,
    *model_args: Any,
    trainable: bool = False,
    **options: Any,
) -> Any:
    """A language model; a PEFT model on its base where the path holds an adapter.

    Args:
        loader: transformers' class for the model's kind, which has ``from_pretrained``.
        trainable: whether an adapter that is loaded is trained on; a whole model always can be.
        options: of ``from_pretrained``. ``dtype`` is float32 unless given; that of an adapter's
            weights is at least float32 (PEFT).

    Raises:
        FileNotFoundError: no model at the path, or no base at the place that the adapter names.
        ValueError: the adapter of a reward model, of another base, or without safetensors; an
            encoder whose attention is bidirectional; a checkpoint without a head for its words.
    """
    options = {"dtype": torch.float32, "use_safetensors": True, **_named_anew(options)}
    folder = model_folder(path, options.get("subfolder"))
    if not is_adapter(folder, **options):
        options["output_loading_info"] = True
        model, loading = loader.from_pretrained(folder, *model_args, **options)
        check_causal(model)
        if loading["missing_keys"]:  # transformers draws what a checkpoint lacks
            raise ValueError(
                f"{folder} is not a trained language model: it has no weights for "
                f"{', '.join(sorted(loading['missing_keys']))}"
            )
        return own_storage(model)
    config = _adapter_config(folder, options)
    if config.task_type == "SEQ_CLS":
        raise ValueError(
            f"the adapter in {folder} is a reward model's (task_type SEQ_CLS), not a language "
            "model's: name the folder of a language model"
        )
    base = _load_base(loader, config, folder, *model_args, **options)
    check_causal(base)
    return _with_saved_adapter(base, config, folder, trainable, options)


def check_causal(model: Any) -> None:
    """Refuses an encoder (BERT and its kin) that was loaded as a language model: attention is
    bidirectional unless the configuration says is_decoder, so that the logits before a token
    depend on that token and on those after it.

    Raises:
        ValueError: such a model.
    """
    config: Any = getattr(model, "config", None)
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        return
    names = ("is_encoder_decoder", "is_decoder", "causal")  # the last is XLM's
    if any(getattr(config, name, False) for name in names):
        return
    raise ValueError(
        f"{type(model).__name__} ({config.model_type}) reads both ways, so that its log-probs are "
        "of tokens that it has seen: choose a causal language model, or load one that was trained "
        "as a decoder with is_decoder=True"
    )


def load_reward_model(path: str | os.PathLike, **options: Any) -> Any:
    """A sequence classifier with one label, to be trained: a reward model, whole or as an adapter
    that is trained on, or a language model that gets a new head.

    Args:
        options: of ``from_pretrained``. ``dtype`` is float32 unless given.

    Raises:
        FileNotFoundError: as :func:`load_language_model`.
        ValueError: a classifier with more labels; the adapter of a language model, of another base,
            or without safetensors.
    """
    options = {"dtype": torch.float32, "num_labels": 1, **_named_anew(options)}
    labels = options["num_labels"]
    try:
        model, missing = _load_classifier(path, True, options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"{os.fspath(path)} is a classifier whose number of labels is not {labels}: start a "
            "reward model from a language model, or from a reward model"
        ) from error
    if missing and is_adapter(path, **options):
        _refuse_headless(path, missing)
    return model


def load_classifier(path: str | os.PathLike, **options: Any) -> Any:
    """A trained sequence classifier with as many labels as it was trained with, whole or as an
    adapter on its base.

    Args:
        options: of ``from_pretrained``. ``dtype`` is the checkpoint's unless given; the base of an
            adapter is float32, as the adapter's weights are: in the bfloat16 in which most bases
            are saved its scores would not be those that it was trained to.

    Raises:
        FileNotFoundError: as :func:`load_language_model`.
        ValueError: a checkpoint or an adapter without a classification head; an adapter of another
            base, or without safetensors.
    """
    options = _named_anew(options)
    if is_adapter(path, **options):
        options = {"dtype": torch.float32, **options}
    model, missing = _load_classifier(path, False, options)
    if missing:
        _refuse_headless(path, missing)
    return model


def _refuse_headless(path: str | os.PathLike, missing: list[str]) -> NoReturn:
    raise ValueError(
        f"{os.fspath(path)} is not a trained sequence classifier: it has no weights for "
        f"{', '.join(missing)}"
    )


def _load_classifier(
    path: str | os.PathLike, trainable: bool, options: dict[str, Any]
) -> tuple[Any, list[str]]:
    """The model, and the names of weights that neither a checkpoint nor an adapter has."""
    options = {"use_safetensors": True, **options, "output_loading_info": True}
    loader = AutoModelForSequenceClassification
    folder = model_folder(path, options.get("subfolder"))
    if not is_adapter(folder, **options):
        model, loading = loader.from_pretrained(folder, **options)
        return own_storage(model), sorted(loading["missing_keys"])
    config = _adapter_config(folder, options)
    if config.task_type != "SEQ_CLS":
        kind = f"of task_type {config.task_type}" if config.task_type else "without a task_type"
        raise ValueError(
            f"{folder} is not a trained sequence classifier but an adapter {kind}: that of a "
            "reward model has task_type='SEQ_CLS' (fastrl reward --lora-r); to train one from a "
            f"language model's adapter, {_MERGE}"
        )
    head = _head_of(_adapter_file(folder, options), config)
    labels = min((shape[0] for shape in head.values() if len(shape) == 2), default=None)
    if labels is not None:
        if options.get("num_labels", labels) != labels:
            raise ValueError(
                f"the adapter in {folder} has {labels} labels, a reward model has "
                f"{options['num_labels']}: train a new one"
            )
        # The head is the adapter's; what the base has in its place is replaced.
        options |= {"num_labels": labels, "ignore_mismatched_sizes": True}
    with _quiet() if head else contextlib.nullcontext():
        base, loading = _load_base(loader, config, folder, **options)
    missing = sorted(set(loading["missing_keys"]) - set(head))
    if missing:
        return base, missing
    return _with_saved_adapter(base, config, folder, trainable, options), []


def _load_base(loader: Any, config: Any, folder: str, *model_args: Any, **options: Any) -> Any:
    base = _base_of(config, folder)
    options = {k: v for k, v in options.items() if k not in _OF_AN_ADAPTERS_REPOSITORY}
    if config.revision:
        options["revision"] = config.revision
    try:
        return loader.from_pretrained(base, *model_args, **options)
    except OSError as error:
        raise OSError(
            f"the adapter in {folder} was trained on {base}, which cannot be loaded ({error}): "
            f"{_MEND_BASE}"
        ) from error


def _base_of(config: Any, folder: str) -> str:
    """The folder or Hub id of the model that an adapter was trained on."""
    name = config.base_model_name_or_path
    if not name:
        raise ValueError(
            f"the adapter in {folder} names no base model: load that yourself, put the adapter on "
            "it with peft.PeftModel.from_pretrained, and pass or wrap the result"
        )
    try:
        base = model_folder(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the adapter in {folder} was trained on {name}, but {error}: {_MEND_BASE}"
        ) from error
    if os.path.isdir(base) and is_adapter(base):
        raise ValueError(
            f"the adapter in {folder} was trained on {base}, which is an adapter itself: {_MERGE}"
        )
    return base


def _adapter_config(folder: str, options: dict[str, Any]) -> Any:
    from peft import PeftConfig

    return PeftConfig.from_pretrained(folder, **_hub(options))


def _adapter_file(folder: str, options: dict[str, Any]) -> str:
    file = find_file(folder, ADAPTER_WEIGHTS, options)
    if file is None:
        raise ValueError(
            f"the adapter in {folder} holds no {ADAPTER_WEIGHTS}: save it with safetensors, no "
            "other format is read"
        )
    return file


def _with_saved_adapter(
    base: Any, config: Any, folder: str, trainable: bool, options: dict[str, Any]
) -> Any:
    from peft import PeftModel

    _adapter_file(folder, options)
    hub = _hub(options)
    try:
        model = PeftModel.from_pretrained(base, folder, is_trainable=trainable, **hub)
    except (RuntimeError, KeyError) as error:  # weights of other shapes or names
        raise ValueError(
            f"the adapter in {folder} does not fit {config.base_model_name_or_path}, the base that "
            f"it names: {error}"
        ) from error
    return own_storage(model)


def _head_of(file: str, config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a classification head's weights by their names in the base model; {} where the
    adapter has none."""
    modules = {*_HEADS, *(config.modules_to_save or ())}
    found = {}
    with safe_open(file, framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a dict
            name = key.removeprefix("base_model.model.")
            if "lora_" not in name and modules & set(name.split(".")):
                found[name] = tuple(tensors.get_slice(key).get_shape())
    return found


# ---------------------------------------------------------------------- adapters, and training


def with_adapter(model: Any, peft_config: Any, args: Any = None) -> Any:
    """The model with a new adapter where a configuration is given; quantised weights are made ready
    for training first.

    Args:
        args: transformers' training arguments, whose gradient checkpointing quantised models need
            to know of; without them there is none.

    Raises:
        ImportError: peft is not installed.
        ValueError: the model has an adapter already.
    """
    if peft_config is None:
        return model
    try:
        from peft import get_peft_model, prepare_model_for_kbit_training
    except ImportError as error:
        raise ImportError("peft_config needs peft: pip install 'fastrl-lm[peft]'") from error
    if hasattr(model, "peft_config"):
        raise ValueError(
            "the model has an adapter already: leave out peft_config to train that one"
        )
    if any(getattr(model, f"is_{kind}", False) for kind in _QUANTISED):
        checkpointing = args is not None and bool(args.gradient_checkpointing)
        options: dict[str, Any] = {"use_gradient_checkpointing": checkpointing}
        if args is not None and args.gradient_checkpointing_kwargs is not None:
            options["gradient_checkpointing_kwargs"] = args.gradient_checkpointing_kwargs
        model = prepare_model_for_kbit_training(model, **options)
    return get_peft_model(model, peft_config)


def check_trainable(model: nn.Module, but: str = "") -> None:
    """Refuses a model without a trainable weight.

    Args:
        but: what else there is to train, for the message.

    Raises:
        ValueError: no weight of the model can be trained.
    """
    if any(p.requires_grad for p in model.parameters()):
        return
    remedy = (
        "load its adapter with is_trainable=True (peft.PeftModel.from_pretrained has the same "
        "argument), or put a new one on the base model with peft_config"
        if hasattr(model, "peft_config")
        else "set requires_grad of what is to be trained, or pass peft_config for an adapter"
    )
    raise ValueError(
        f"nothing of the model can be trained{but}: all its weights are frozen; {remedy}"
    )


def adapter_dropout(model: Any) -> float:
    """The largest dropout of the adapters that are active; 0 without one."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return 0.0
    # A property of PEFT's models, a method of transformers' own.
    active = model.active_adapters() if callable(model.active_adapters) else model.active_adapters
    return max((getattr(configs[name], "lora_dropout", 0.0) for name in active), default=0.0)


def own_storage(model: Model) -> Model:
    """Copies every parameter and buffer into memory that belongs to it alone; returns the model.

    ``from_pretrained`` leaves weights where the safetensors file is mapped, at whatever offset its
    header's length makes. Vectorised kernels split sums by a pointer's alignment: there the same
    weights give other last bits than in memory that torch allocates, which is aligned to 64 bytes.

    Tensors that were one memory (tied embeddings) are one afterwards; parameters stay the same
    objects, with their ``requires_grad``. Left alone: what is not in host memory (device
    allocators align, and nothing is mapped there; meta tensors have no memory), and tensors that
    manage their own storage (quantised, sharded).
    """
    copies: dict[tuple, Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        ours = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not ours or is_traceable_wrapper_subclass(tensor):
            continue
        data = tensor.data
        place = (data.data_ptr(), data.dtype, tuple(data.shape), data.stride())
        if data.numel() == 0:
            continue  # all of them may have one address
        if place not in copies:
            copies[place] = data.clone()
        tensor.data = copies[place]
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No report that the base lacks the head: the adapter brings it."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _named_anew(options: dict[str, Any]) -> dict[str, Any]:
    """With ``dtype`` under that name, and not the older ``torch_dtype``."""
    return {"dtype" if name == "torch_dtype" else name: x for name, x in options.items()}


def _hub(options: dict[str, Any]) -> dict[str, Any]:
    names = ("revision", "token", "cache_dir", "subfolder")
    return {name: options[name] for name in names if options.get(name) is not None}


def _holds_a_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG_NAME, ADAPTER_CONFIG))


def _is_local(name: str) -> bool:
    """Whether a name can only be meant as a path: Hub ids have one slash at most."""
    path = Path(name)
    return path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2
