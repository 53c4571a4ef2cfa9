"""Loads models and tokenizers from a folder, a run's folder, a Hub id, or an adapter's folder.

Every command and trainer loads through this file. Weights are read from safetensors only, into
memory of their own; an adapter is put on the base model that it names.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)
from transformers.utils import logging

from fastrl.models import quantised
from fastrl.models.adapter_base import (
    check_start,
    refuse_biased_tokens,
    resize_as_saved,
    settle_adapters,
    untie_adapted,
    warn_of_other_base,
    with_task,
)
from fastrl.models.adapter_targets import with_targets
from fastrl.models.fast_tokenizer import as_fast
from fastrl.models.flash_attention import need_flash_attention
from fastrl.models.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_weights,
    find_file,
    holds_a_tokenizer,
    hub_options,
    is_adapter,
    model_folder,
    weights_in,
)
from fastrl.models.multimodal import CLASSIFIER_HEADS, freeze_unread, is_multimodal, loader_for
from fastrl.models.utils import base_of, need_peft
from fastrl.nearest import did_you_mean_path
from fastrl.run.files import NO_PICKLE
from fastrl.run.launcher import is_main_process
from fastrl.run.model_card import names_a_folder
from fastrl.run.processor_files import PROCESSOR_FILES, keep_processor

MERGE_ADAPTER = "merge it into its base first (fastrl merge FOLDER OUT)"

Model = TypeVar("Model", bound=nn.Module)

_OF_THE_ADAPTER = ("revision", "subfolder")  # options that do not hold for its base
_OF_EMPTY = {"dtype", "attn_implementation", "use_safetensors", "revision", "token", "cache_dir"}
_QUANTISED = ("quantized", "loaded_in_8bit", "loaded_in_4bit")

_MEND_BASE = (
    f"write the base's place into {ADAPTER_CONFIG} (base_model_name_or_path; relative to the "
    "working directory)"
)
_CHOOSE_A_DECODER = "choose a decoder, such as GPT-2, Llama or Qwen"


def load_language_model(
    path: str | os.PathLike,
    loader: Any = AutoModelForCausalLM,
    *model_args: Any,
    trainable: bool = False,
    whole: bool = False,
    **options: Any,
) -> Any:
    """Loads a language model; where the path holds an adapter, a PEFT model on its base.

    Where FSDP2 gets all weights from process 0 (``--fsdp_cpu_ram_efficient_loading true``), other
    processes have a whole model's weights on the meta device, unless ``options`` has one that is
    not in ``_OF_EMPTY``, the options that a model without weights can be made with.

    Args:
        loader: transformers' class for the model's kind, which has ``from_pretrained``.
        trainable: whether a loaded adapter is trained further; a whole model always can be.
        whole: whether this process loads the weights, whatever FSDP2 does.
        options: options of ``from_pretrained``, such as ``dtype`` (float32 unless given; that of an
            adapter's weights is at least float32), ``attn_implementation`` and
            ``quantization_config``. The base of an adapter that was trained on four-bit weights is
            quantised as it was then, unless ``quantization_config=None``.

    Raises:
        FileNotFoundError: no model at the path, or no base at the place that the adapter names.
        OSError: a Hub id that cannot be loaded, or weights in pickles alone.
        ImportError: ``attn_implementation`` names flash-attn, and neither the package nor a build
            of it from the Hub is there.
        ValueError: another kind of model, an encoder whose attention is bidirectional, the adapter
            of a reward model; weights that are damaged or incomplete; an adapter of another base,
            or without safetensors.
    """
    checkpoint = _Checkpoint(path, {"dtype": torch.float32} | _renamed(options))
    if checkpoint.adapter is not None and checkpoint.classifies():
        raise ValueError(
            f"the adapter in {checkpoint.folder} is a reward model's (task_type SEQ_CLS, or a "
            "head for it), not a language model's: name the folder of a language model"
        )
    plain = checkpoint.adapter is None and set(checkpoint.options) <= _OF_EMPTY
    if plain and not whole and loads_once():
        return checkpoint.empty(loader)
    model, missing = checkpoint.load(loader, *model_args, trainable=trainable)
    check_causal(model)
    if missing:  # transformers initialises them at random
        raise ValueError(
            f"{checkpoint.folder} is not a trained language model: it has no weights for "
            f"{', '.join(missing)}"
        )
    saved = (getattr(model.config, "architectures", None) or [""])[0]
    if checkpoint.adapter is None and saved.endswith("ForSequenceClassification"):
        raise ValueError(
            f"{checkpoint.folder} is a classifier or reward model ({saved}), not a language model: "
            "name the folder of a language model"
        )
    return model


def loads_once() -> bool:
    """Whether FSDP2 is to get all weights from the main process, and this is another process."""
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    wanted = all(os.environ.get(name, "").lower() in ("1", "true", "yes") for name in names)
    fsdp2 = os.environ.get("FSDP_VERSION") == "2"
    return wanted and fsdp2 and not is_main_process()


def load_reward_model(path: str | os.PathLike, **options: Any) -> Any:
    """Loads a reward model for training, a sequence classifier with one label: whole or as an
    adapter, or a language model that gets a new head.

    Args:
        options: keywords of ``from_pretrained``. ``dtype`` is float32 unless given.

    Raises:
        FileNotFoundError, OSError: see :func:`load_language_model`.
        ValueError: a classifier with another number of labels; a kind of model without classifiers;
            the adapter of a language model, of another base, without a head or safetensors.
    """
    options = {"dtype": torch.float32, "num_labels": 1} | _renamed(options)
    checkpoint = _Checkpoint(path, options)
    try:
        model, missing = checkpoint.load_classifier(trainable=True)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"{os.fspath(path)} is a classifier whose number of labels is not "
            f"{options['num_labels']}: start a reward model from a language model, or from a "
            "reward model"
        ) from error
    if missing and checkpoint.adapter is not None:
        _refuse_headless(path, missing)
    return model


def load_classifier(path: str | os.PathLike, **options: Any) -> Any:
    """Loads a trained sequence classifier with as many labels as it was trained with, whole or as
    an adapter on its base.

    Args:
        options: keywords of ``from_pretrained``. Unless given, ``dtype`` is the checkpoint's, but
            of an adapter's base float32, as the adapter's weights are: in the bfloat16 in which
            most bases are saved its scores would not be those that it was trained to give.

    Raises:
        FileNotFoundError, OSError: see :func:`load_language_model`.
        ValueError: a checkpoint or an adapter without a classification head; an adapter of another
            base, or without safetensors.
    """
    checkpoint = _Checkpoint(path, _renamed(options))
    if checkpoint.adapter is not None:
        checkpoint.options.setdefault("dtype", torch.float32)
    model, missing = checkpoint.load_classifier(trainable=False)
    if missing:
        _refuse_headless(path, missing)
    return model


def load_saved(path: str | os.PathLike, **options: Any) -> Any:
    """Loads a saved model as what it is, whole or as an adapter on its base: a sequence
    classifier, an encoder–decoder or a causal language model.

    Args:
        options: see :func:`load_language_model` and :func:`load_classifier`. ``dtype`` is float32
            unless given.

    Raises:
        FileNotFoundError, OSError, ValueError: see these two functions.
    """
    checkpoint = _Checkpoint(path, {"dtype": torch.float32} | _renamed(options))
    base = checkpoint.folder if checkpoint.adapter is None else checkpoint.base()
    config = _config_of(base, {})
    architecture = (getattr(config, "architectures", None) or [""])[0]
    if checkpoint.adapter is None:
        classifies = architecture.endswith("ForSequenceClassification")
    else:
        classifies = checkpoint.classifies()
    if classifies:
        return load_classifier(path, **{"dtype": torch.float32} | options)
    decoder = not getattr(config, "is_encoder_decoder", False)
    return load_language_model(
        path, AutoModelForCausalLM if decoder else AutoModelForSeq2SeqLM, whole=True, **options
    )


def load_tokenizer(
    path: str | os.PathLike, *, trust_remote_code: bool = False, revision: str | None = None
) -> Any:
    """Loads the tokenizer of a model's folder, a run's folder or a Hub id. A tokenizer without a
    pad token pads with its EOS. An adapter without a tokenizer gets its base's.

    Args:
        trust_remote_code: run the Python code that the folder or id brings.
        revision: the branch, tag or commit of a Hub id; None: the newest.

    Raises:
        FileNotFoundError: a folder without a model or without a tokenizer.
        ValueError: a tokenizer that cannot be read, or an unknown id.
    """
    options = {} if revision is None else {"revision": revision}
    checkpoint = _Checkpoint(path, options)
    model = checkpoint.folder
    if checkpoint.adapter is not None and not holds_a_tokenizer(model):
        model, options = checkpoint.base(), {}
    folder = Path(model)
    missing = (
        f"{model} has no tokenizer: save one there with tokenizer.save_pretrained({model!r}), or "
        "copy tokenizer.json and tokenizer_config.json from the model that it was made of"
    )
    if folder.is_dir() and not holds_a_tokenizer(model):
        raise FileNotFoundError(missing)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model, trust_remote_code=trust_remote_code, **options
        )
    except Exception as error:  # tokenizers raises bare Exceptions for files that it cannot read
        is_local = folder.is_dir()
        what = model if is_local else f"{model!r}, which is no folder here,"
        near = "" if is_local else did_you_mean_path(folder)
        raise ValueError(
            f"the tokenizer of {what} cannot be loaded{near}: {_line(error)}"
        ) from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # made from a configuration alone
        raise FileNotFoundError(missing)
    tokenizer = as_fast(tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_weights(model: Any, folder: str | os.PathLike) -> None:
    """Loads into a model the weights that ``model.save_pretrained(folder)`` wrote, to resume a run.

    Raises:
        ValueError: an adapter's weights that are not those of the model's adapter.
    """
    adapter = Path(folder) / ADAPTER_WEIGHTS
    if adapter.exists():
        misfit = _set_adapter(model, str(adapter))
        if misfit:
            raise ValueError(f"{adapter} {misfit}: it is another model's")
        return
    with quiet():  # checkpoints of earlier versions have a value head among the weights
        saved = type(model).from_pretrained(folder, use_safetensors=True, dtype="auto")
    model.load_state_dict(saved.state_dict())


def base_folder(path: str | os.PathLike) -> str:
    """The folder or Hub id of a whole model; for an adapter, that of the base that it names.

    Raises:
        FileNotFoundError: see :func:`model_folder`; also for the base.
        ValueError: an adapter that names no base, or a base that is an adapter itself.
    """
    checkpoint = _Checkpoint(path, {})
    return checkpoint.folder if checkpoint.adapter is None else checkpoint.base()


def _warn_of_other_dtype(dtype: Any, saved: torch.dtype) -> None:
    """Warns of a dtype, other than the commands' default, that a four-bit base does not get."""
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto", torch.float32, saved):
        warnings.warn(
            f"dtype={dtype} is ignored: the adapter's four-bit base is loaded in {saved}, as "
            "the adapter was trained; to quantise the base anew pass quantization_config "
            "(commands: --load-in-4bit true)",
            stacklevel=6,
        )


class _Checkpoint:
    """A whole model, or an adapter and the base that it names.

    Attributes:
        folder: its path, or a Hub id.
        adapter: the adapter's PEFT configuration; None for a whole model.
        options: keywords of ``from_pretrained``.
    """

    def __init__(self, path: str | os.PathLike, options: dict[str, Any]):
        need_flash_attention(options.get("attn_implementation"))
        self.options: dict[str, Any] = options | {"use_safetensors": True}
        self.folder = model_folder(path, options.get("subfolder"))
        if not options.get("use_safetensors", True):
            warnings.warn(
                f"use_safetensors=False is not followed: {self.folder} is read from safetensors; "
                f"{NO_PICKLE}",
                stacklevel=4,
            )
        self.adapter: Any = None
        if find_file(self.folder, ADAPTER_CONFIG, options) is not None:
            need_peft(f"the adapter in {self.folder}")
            from peft import PeftConfig

            self.adapter = PeftConfig.from_pretrained(self.folder, **hub_options(options))

    def base(self) -> str:
        """The folder or Hub id of the model that the adapter was trained on."""
        name = self.adapter.base_model_name_or_path
        if not name:
            raise ValueError(
                f"the adapter in {self.folder} names no base model: load that yourself, put the "
                "adapter on it with peft.PeftModel.from_pretrained, and pass or wrap the result"
            )
        try:
            base = model_folder(name)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"the adapter in {self.folder} was trained on {name}, but {error}: {_MEND_BASE}"
            ) from error
        if not os.path.isdir(base) and names_a_folder(self.folder, name):
            raise FileNotFoundError(
                f"the adapter in {self.folder} was trained on the folder {name}, which is not "
                f"here: {_MEND_BASE}"
            )
        if os.path.isdir(base) and is_adapter(base):
            raise ValueError(
                f"the adapter in {self.folder} was trained on {base}, which is an adapter itself: "
                f"{MERGE_ADAPTER}"
            )
        return base

    def load(
        self, loader: Any, *model_args: Any, trainable: bool, **more: Any
    ) -> tuple[Any, list[str]]:
        """The model, and names of weights that no file has, neither an adapter's nor its base's."""
        name, options = self.folder, dict(self.options)
        saved: dict[str, Any] = {}
        if self.adapter is not None:
            name = self.base()
            options = self._of_base(options)
        if quantised.quantises(options):
            if loader is AutoModelForSequenceClassification:
                options = quantised.with_whole_heads(options, CLASSIFIER_HEADS)
            options.setdefault("device_map", quantised.device_map())
        try:
            # Weights that the base lacks may be the adapter's: that is checked below.
            with contextlib.nullcontext() if self.adapter is None else quiet():
                if loader is AutoModelForCausalLM:
                    config = _check_decoder(name, options)
                elif loader is AutoModelForSequenceClassification:
                    _check_classifier(name, options)
                check_weights(name, options.get("subfolder"))
                if self.adapter is not None:
                    saved = self._saved_whole()
                if loader is AutoModelForCausalLM:
                    loader = self._loader_of(config)
                options |= {**more, "output_loading_info": True}
                model, loading = loader.from_pretrained(name, *model_args, **options)
        except OSError as error:
            if self.adapter is None:
                raise
            raise OSError(
                f"the adapter in {self.folder} was trained on "
                f"{self.adapter.base_model_name_or_path}, which cannot be loaded ({error}): "
                f"{_MEND_BASE}"
            ) from error
        missing = sorted(set(loading["missing_keys"]) - set(saved))
        quantised.settle(model)
        freeze_unread(model)
        keep_processor(model, _processor_files(name, options))
        if self.adapter is not None and not missing:
            file = find_file(self.folder, ADAPTER_WEIGHTS, self.options)
            if file is not None and loader is not AutoModelForSequenceClassification:
                resize_as_saved(model, file)
            model = self._with_adapter(model, trainable)
        return own_storage(model), missing

    def _of_base(self, options: dict[str, Any]) -> dict[str, Any]:
        """``from_pretrained``'s options as the adapter's base needs them."""
        of_base = {k: v for k, v in options.items() if k not in _OF_THE_ADAPTER}
        if self.adapter.revision:
            of_base["revision"] = self.adapter.revision
        if "quantization_config" not in options:
            file = find_file(self.folder, quantised.BASE_FILE, options)
            if file is not None:
                saved = quantised.read_beside_adapter(file)
                _warn_of_other_dtype(options.get("dtype"), saved["dtype"])
                of_base |= saved
        return of_base

    def _loader_of(self, config: Any) -> Any:
        """transformers' class for a language model of this configuration; AutoModelForCausalLM,
        which loads the text model alone, for an adapter that was trained on that."""
        loader = loader_for(config, AutoModelForCausalLM)
        if self.adapter is None or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return loader
        file = find_file(self.folder, ADAPTER_WEIGHTS, self.options)
        assert file is not None
        of_whole = any(".language_model." in key for key, _ in weights_in([file]))
        return loader if of_whole else AutoModelForCausalLM

    def empty(self, loader: Any) -> Any:
        """The model with its buffers, but without memory for its weights."""
        from accelerate import init_empty_weights

        options = {k: v for k, v in self.options.items() if k in ("dtype", "attn_implementation")}
        config = AutoConfig.from_pretrained(self.folder, **hub_options(self.options))
        if loader is AutoModelForCausalLM:
            loader = loader_for(_check_decoder(self.folder, dict(self.options)), loader)
        with init_empty_weights(include_buffers=False):
            model = loader.from_config(config, **options)
        model.tie_weights()
        with contextlib.suppress(OSError):  # a model need not have generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(
                self.folder, **hub_options(self.options)
            )
        model.name_or_path = self.folder
        freeze_unread(model)
        return model.eval()

    def load_classifier(self, trainable: bool) -> tuple[Any, list[str]]:
        """The sequence classifier, and the names of weights that no file has."""
        more: dict[str, Any] = {}
        if self.adapter is not None:
            kind = self.adapter.task_type
            if not self.classifies():
                of = f"of task_type {kind}" if kind else "without a task_type"
                raise ValueError(
                    f"{self.folder} is not a trained sequence classifier but an adapter {of}: that "
                    "of a reward model has task_type='SEQ_CLS' (fastrl reward --lora-r); to train "
                    f"one from a language model's adapter, {MERGE_ADAPTER}"
                )
            matrices = [shape for shape in self._saved_whole().values() if len(shape) == 2]
            if matrices:
                labels = min(shape[0] for shape in matrices)
                if self.options.setdefault("num_labels", labels) != labels:
                    raise ValueError(
                        f"the adapter in {self.folder} has {labels} labels, a reward model has "
                        f"{self.options['num_labels']}: train a new one"
                    )
                more["ignore_mismatched_sizes"] = True  # the base's head is replaced
        return self.load(AutoModelForSequenceClassification, trainable=trainable, **more)

    def classifies(self) -> bool:
        """Whether the adapter is a sequence classifier's: by its task type or, where it has none,
        by the head that is saved with it."""
        if self.adapter.task_type:
            return self.adapter.task_type == "SEQ_CLS"
        heads = {*CLASSIFIER_HEADS} & {*(getattr(self.adapter, "modules_to_save", None) or ())}
        return bool(heads)

    def _saved_whole(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights that the adapter has whole (a classification head, and
        what ``modules_to_save`` names) by their names in the base model."""
        file = find_file(self.folder, ADAPTER_WEIGHTS, self.options)
        if file is None:
            raise ValueError(
                f"the adapter in {self.folder} holds no {ADAPTER_WEIGHTS}: save it with "
                "safetensors, no other format is read"
            )
        check_weights(self.folder, self.options.get("subfolder"))
        modules = {*CLASSIFIER_HEADS, *(getattr(self.adapter, "modules_to_save", None) or ())}
        shapes = {}
        for key, part in weights_in([file]):
            # With prompt learning only "base_model." stands in front of the base's names.
            name = key.removeprefix("base_model.").removeprefix("model.")
            if "lora_" not in name and modules & set(name.split(".")):
                shapes[name] = tuple(part.get_shape())
        return shapes

    def _with_adapter(self, base: Any, trainable: bool) -> Any:
        from peft import PeftModel

        hub = hub_options(self.options)
        if quantised.is_quantised(base):
            base = quantised.prepared_for_adapters(base)
        named = f"{self.adapter.base_model_name_or_path}, the base that it names"
        unfit = f"the adapter in {self.folder} does not fit {named}: "
        try:
            with quantised.peft_hushed():
                # Weights that the file lacks would be those of a new adapter.
                warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
                model = PeftModel.from_pretrained(base, self.folder, is_trainable=trainable, **hub)
        except (RuntimeError, KeyError, UserWarning) as error:  # weights of other shapes or names
            reason = textwrap.shorten(_line(error), 300, placeholder=" …")
            raise ValueError(f"{unfit}{reason}") from error
        file = find_file(self.folder, ADAPTER_WEIGHTS, self.options)
        misfit = None if file is None else _set_adapter(model, file)
        if misfit:
            raise ValueError(f"{unfit}it {misfit}")
        refuse_biased_tokens(model)
        untie_adapted(model)
        return model


def _set_adapter(model: Any, file: str) -> str | None:
    """Sets the weights of a PEFT model's adapter to those in a file. Returns in words which LoRA
    weights do not fit, which PEFT passes over without an error; None where all fit."""
    from peft import set_peft_model_state_dict

    name = model.active_adapter
    loaded: Any = set_peft_model_state_dict(model, load_file(file), name)
    missing = [key for key in loaded.missing_keys if f".{name}." in key]
    for what, names in (("lacks", missing), ("holds", loaded.unexpected_keys)):
        keys = [key for key in names if ".lora_" in key]
        if keys:
            return f"{what} {keys[0]}" + (f" and {len(keys) - 1} more" if keys[1:] else "")
    return None


def check_causal(model: Any) -> None:
    """Raises ValueError for an encoder such as BERT that was loaded as a language model: its
    attention is bidirectional unless the configuration says is_decoder, so that the logits before
    a token depend on that token and on those after it."""
    model = base_of(model)
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


def with_adapter(model: Any, peft_config: Any, args: Any = None) -> Any:
    """Returns the model, with a new adapter where ``peft_config`` is not None; quantised weights
    are prepared for training first.

    Args:
        args: transformers' training arguments, whose gradient checkpointing quantised models need
            to know of; without them there is none.

    Raises:
        ImportError: peft is not installed.
        ValueError: a new adapter for a model that has one; four-bit weights in a layout without a
            gradient; a classifier with a new head that its adapter does not save; an adapter on one
            of several tied weights, or one that cannot be loaded as it was trained, see
            :func:`fastrl.models.adapter_base.check_start`.
    """
    quantised.settle(model)
    for config in (getattr(model, "peft_config", None) or {}).values():
        check_start(config, made=True)
    if peft_config is not None:
        check_start(peft_config, made=False)
        need_peft("peft_config")
        quantised.refuse_compressed(model)
        if hasattr(model, "peft_config"):
            raise ValueError(
                "the model has an adapter already, and a new one beside it (peft_config) would be "
                "saved without it: leave out peft_config to train the one that is there, or "
                f"{MERGE_ADAPTER} and pass peft_config with the merged model"
            )
    elif not hasattr(model, "peft_config"):
        return model
    warn_of_other_base(model)
    if peft_config is not None:
        from peft import get_peft_model

        if any(getattr(model, f"is_{kind}", False) for kind in _QUANTISED):
            model = quantised.prepared_for_adapters(model, args)
        with quantised.peft_hushed():
            model = get_peft_model(model, with_targets(model, with_task(model, peft_config)))
    settle_adapters(model)
    return model


def own_storage(model: Model) -> Model:
    """Copies every parameter and buffer into memory that belongs to it alone; returns the model.

    ``from_pretrained`` leaves weights where the safetensors file is mapped, at whatever offset its
    header's length makes. Vectorised kernels split sums by a pointer's alignment: there the same
    weights give other last bits than in memory that torch allocates, which is aligned to 64 bytes.

    Tensors that shared memory (tied embeddings) still do; parameters stay the same objects, with
    their ``requires_grad``. Not copied: tensors outside of host memory (device allocators align,
    and nothing is mapped there; meta tensors have no memory), and tensors that manage their own
    storage (quantised, sharded).
    """
    copies: dict[tuple, Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        on_host = tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not on_host or is_traceable_wrapper_subclass(tensor):
            continue
        data = tensor.data
        place = (data.data_ptr(), data.dtype, tuple(data.shape), data.stride())
        if data.numel() == 0:
            continue  # all empty tensors may have one address
        if place not in copies:
            copies[place] = data.clone()
        tensor.data = copies[place]
    return model


def _refuse_headless(path: str | os.PathLike, missing: list[str]) -> NoReturn:
    raise ValueError(
        f"{os.fspath(path)} is not a trained sequence classifier: it has no weights for "
        f"{', '.join(missing)}"
    )


def _check_decoder(name: str, options: dict[str, Any]) -> Any:
    """The configuration of a causal language model; raises ValueError for another model, such as
    BART, whose decoder alone AutoModelForCausalLM would load."""
    config = _config_of(name, options)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder–decoder ({config.model_type}), not a causal language model: "
            f"{_CHOOSE_A_DECODER}, or train it by PPO in Python (fastrl.PPOTrainer with "
            "fastrl.AutoModelForSeq2SeqLMWithValueHead.from_pretrained)"
        )
    is_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or is_multimodal(config)
    if not is_decoder and not getattr(config, "auto_map", None):
        raise ValueError(
            f"{name} ({config.model_type}) is not a causal language model: {_CHOOSE_A_DECODER}"
        )
    return config


def _check_classifier(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for a model of a kind of which transformers has no sequence classifier."""
    config = _config_of(name, options)
    is_classifier = type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if not is_classifier and not getattr(config, "auto_map", None):
        raise ValueError(
            f"{name} ({config.model_type}) cannot be a reward model or a classifier: transformers "
            f"has no sequence classifier of that kind; {_CHOOSE_A_DECODER}"
        )


def _config_of(name: str, options: dict[str, Any]) -> Any:
    config = options.get("config")
    if config is not None and not isinstance(config, (str, os.PathLike)):
        return config
    rest = {key: x for key, x in options.items() if key not in ("config", "num_labels")}
    try:
        return AutoConfig.from_pretrained(config or name, **rest)
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"the configuration of {name} cannot be loaded: {_line(error)}") from error


def _processor_files(name: str, options: dict[str, Any]) -> dict[str, bytes]:
    """The contents of a checkpoint's processor files by their names."""
    files = ((each, find_file(name, each, options)) for each in PROCESSOR_FILES)
    return {each: Path(file).read_bytes() for each, file in files if file is not None}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context in which transformers reports errors alone, not missing or unknown weights."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """Options by transformers' names of today: ``dtype``, and ``quantization_config`` for
    ``load_in_4bit`` and ``load_in_8bit``.

    Raises:
        ValueError: a dtype that PyTorch has not.
    """
    renamed = {"dtype" if name == "torch_dtype" else name: x for name, x in options.items()}
    dtype = renamed.get("dtype")
    if isinstance(dtype, str) and dtype != "auto":
        known = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(known, torch.dtype):
            raise ValueError(f"dtype={dtype!r} is none of PyTorch's, such as 'bfloat16'")
    four, eight = renamed.pop("load_in_4bit", None), renamed.pop("load_in_8bit", None)
    if four:
        renamed["quantization_config"] = quantised.four_bit_config(
            renamed.get("dtype", torch.float32)
        )
    elif eight:
        renamed["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    return renamed


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
