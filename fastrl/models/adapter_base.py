"""The base under an adapter: what is saved must load as what was trained.

An adapter's folder names its base, and whoever loads or merges it starts from there. So the base in
memory must be the one in the files, and an adapter that changes one of two tied matrices needs both
apart: merged into the weight that they share, its change would act in both places.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastrl.models.model_files import weights_in
from fastrl.models.multimodal import CLASSIFIER_HEADS

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_WRAPPERS = (".base_layer", ".original_module", ".token_adapter")  # PEFT's, in names of weights
# Beginnings of the values of init_lora_weights that subtract the adapter's first product from the
# base's weights; then of those that PEFT cannot repeat as it loads an adapter, since they draw a
# projection, or want data.
_MOVE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_NOT_REPEATED = ("pissa_niter", "corda", "lora_ga")


def task_of(model: Any) -> str | None:
    """PEFT's task type for a model of transformers; None for another kind."""
    config = getattr(model, "config", None)
    if type(model).__name__.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    if config is None or not hasattr(model, "get_output_embeddings"):
        return None
    if model.get_output_embeddings() is None:
        heads = (hasattr(model, name) for name in CLASSIFIER_HEADS)
        return "SEQ_CLS" if any(heads) else None
    return "SEQ_2_SEQ_LM" if getattr(config, "is_encoder_decoder", False) else "CAUSAL_LM"


def with_task(model: Any, peft_config: Any) -> Any:
    """A new adapter's configuration with the model's task type, by which PEFT trains and saves a
    classifier's head with the adapter, and a loader knows its kind. Warns where it had another."""
    task, named = task_of(model), getattr(peft_config, "task_type", None)
    if task is None or named == task:
        return peft_config
    if named is not None:
        head = ": the layer that computes the reward is trained with the adapter"
        warnings.warn(
            f"peft_config.task_type={getattr(named, 'value', named)} is taken as {task}, the "
            f"model's{head * (task == 'SEQ_CLS')}",
            stacklevel=5,
        )
    config = copy.copy(peft_config)
    config.task_type = task
    return config


def resize_as_saved(base: Any, adapter_file: str) -> None:
    """Gives a base as many embeddings as the adapter's model had, by the adapter's file: where
    embeddings were resized, PEFT saves them there.

    Raises:
        ValueError: the file has the new rows of only one of embedding and head.
    """
    layers = base.get_input_embeddings(), base.get_output_embeddings()
    names = [f"base_model.model.{name}" for name in _names_of(layers, base)]
    saved = {plain_name(k): part.get_shape()[0] for k, part in weights_in([adapter_file])}
    rows = [saved[name] for name in names if name in saved]
    if not rows or max(rows) == layers[0].weight.shape[0]:
        return
    if len(rows) < len(names) and not _share_weight(*layers):
        raise ValueError(
            f"{adapter_file} is of a model whose embeddings were resized, and has the new rows of "
            f"only one of {' and '.join(names)}: what the other ones were is not saved"
        )
    base.resize_token_embeddings(max(rows), mean_resizing=False)


def settle_adapters(model: Any) -> None:
    """Makes a PEFT model's adapters load, once saved, as what was trained, see
    :func:`untie_adapted`; other models stay as they are.

    Raises:
        ValueError: a classifier's head is new, and its adapter does not save it; embedding and head
            were resized, and the adapter saves one of them, or have LoRA with
            ``ensure_weight_tying``; trained tokens of a head with a bias; embedding and head have
            to be apart, and the model cannot be saved so.
    """
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        _settle_task(model)
        _refuse_half_resized(model)
        _refuse_tied_lora(model)
        refuse_biased_tokens(model)
        if untie_adapted(model):
            warnings.warn(
                "the adapter changes the LM head and the embedding that it is tied to in different "
                "ways: they are apart from here on, which takes one matrix more. The saved adapter "
                "is right on its base; merge it with `fastrl merge`, which unties them as well: "
                "PEFT alone would merge each change into both",
                stacklevel=4,
            )


def _settle_task(peft_model: Any) -> None:
    """Names the task of a classifier's adapters that name none, so that they are loaded as such.

    Raises:
        ValueError: the classifier's head is new, and the adapter does not save it.
    """
    base = peft_model.get_base_model()
    if task_of(base) != "SEQ_CLS":
        return
    for config in peft_model.peft_config.values():
        config.task_type = config.task_type or "SEQ_CLS"
    for name in CLASSIFIER_HEADS:
        head = getattr(base, name, None)
        if head is None or hasattr(head, "modules_to_save"):
            continue
        files = _files(_name_of(peft_model), base)
        if files and not any(key.startswith(f"{name}.") for key, _ in weights_in(files)):
            raise ValueError(
                f"the model's {name} layer, which computes the reward, is new, and its adapter "
                "neither trains nor saves it: pass the plain model with peft_config "
                "(task_type='SEQ_CLS'), or make the adapter with that task_type"
            )


def warn_of_other_base(model: Any) -> None:
    """Warns where a model's weights are not those in the files that a saved adapter will name as
    its base, because an adapter was merged into them, say, or they were trained.

    Some numbers of each weight are compared that has the same name and shape in the files; nothing
    is downloaded for it.
    """
    adapts = hasattr(model, "peft_config")
    base = model.get_base_model() if adapts else model
    configs = model.peft_config.values() if adapts else ()
    if any(moves_base(config) for config in configs):
        return
    if any(getattr(module, "merged", False) for module in base.modules()):
        return
    name = _name_of(model)
    weights = {plain_name(key): p for key, p in base.named_parameters()}
    for key, part in weights_in(_files(name, base)):
        weight = weights.get(key)
        if weight is None or not _comparable(weight, part):
            continue
        saved, current = part[:1], weight.detach()[:1].cpu()
        # The weights may have been loaded in a lower precision, and raised again, as beside
        # quantised ones.
        readings = (saved.to(dtype).to(current.dtype) for dtype in (current.dtype, *_FLOATS[2:]))
        if not any(torch.equal(reading, current) for reading in readings):
            warnings.warn(
                f"the model's weights are not those in {name} (such as {key}), the base that the "
                "saved adapter names: loaded with that, it is another model than the one that is "
                "trained here; save the model first (model.save_pretrained(FOLDER)), and load it "
                "from that folder",
                stacklevel=4,
            )
            return


def _refuse_half_resized(peft_model: Any) -> None:
    """Raises ValueError where embedding and head have more or fewer rows than in the base's files,
    and the adapter is on one of the two: PEFT saves only that one's rows."""
    base = peft_model.get_base_model()
    layers = base.get_input_embeddings(), base.get_output_embeddings()
    if sum(hasattr(layer, "base_layer") for layer in layers) != 1:
        return
    plain = [_plain(layer) for layer in layers]
    names = _names_of(plain, base)
    saved = {
        key: part.get_shape()[0] for key, part in weights_in(_files(_name_of(peft_model), base))
    }
    rows = {saved[name] for name in names if name in saved}
    if rows and rows != {plain[0].weight.shape[0]} and not _share_weight(*plain):
        raise ValueError(
            "the embeddings were resized, and the adapter is on one of embedding and head: PEFT "
            "saves the new rows of that one alone; save the resized model first "
            "(model.save_pretrained(FOLDER)) and load it from that folder, or put both or neither "
            "into target_modules"
        )


def _refuse_tied_lora(peft_model: Any) -> None:
    """Raises ValueError for an adapter with ``ensure_weight_tying`` on both of two tied matrices:
    PEFT keeps two weights for it that share memory until they are moved or cast, and merges both
    into the weight that the matrices share."""
    base = peft_model.get_base_model()
    layers = base.get_input_embeddings(), base.get_output_embeddings()
    configs = peft_model.peft_config.values()
    stays_tied = any(getattr(config, "ensure_weight_tying", False) for config in configs)
    if stays_tied and all(hasattr(layer, "base_layer") for layer in layers):
        raise ValueError(
            "ensure_weight_tying beside embedding or head in target_modules: PEFT does not keep "
            "the two parts of such an adapter equal; leave ensure_weight_tying out to train them "
            "apart, or train the matrix whole and tied (modules_to_save in place of "
            "target_modules)"
        )


def refuse_biased_tokens(peft_model: Any) -> None:
    """Raises ValueError for ``trainable_token_indices`` of a head with a bias, which PEFT computes
    without it: a new adapter has other logits than its base."""
    for name, module in peft_model.named_modules():
        head = getattr(getattr(module, "token_adapter", None), "base_layer", None)
        if getattr(head, "bias", None) is not None:
            raise ValueError(
                f"trainable_token_indices: PEFT leaves out the bias of {name.rpartition('.')[2]} "
                "where tokens of it are trained, so that the model has other logits from the "
                "start: name the embedding alone, or train the layer whole (modules_to_save)"
            )


def untie_adapted(model: Any) -> bool:
    """Gives the LM head a weight of its own where an adapter changes it and the embedding that it
    is tied to in different ways; returns whether it did. What the model computes stays the same.

    Raises:
        ValueError: a model that cannot be saved with the two apart.
    """
    base = model.get_base_model()
    head = base.get_output_embeddings()
    if head is None:
        return False
    embedding = base.get_input_embeddings()
    inner, outer = _plain(embedding), _plain(head)
    if not _share_weight(inner, outer):
        return False
    weight = inner.weight
    if (inner is embedding and outer is head) or _change_alike(embedding, head):
        return False
    configs = {id(x): x for x in (base.config, base.config.get_text_config())}
    before = {key: x.tie_word_embeddings for key, x in configs.items()}
    tied_keys = base.get_expanded_tied_weights_keys(all_submodels=True)
    for config in configs.values():
        config.tie_word_embeddings = False
    if len(tied_keys) != 1 or base.get_expanded_tied_weights_keys(all_submodels=True):
        for key, config in configs.items():
            config.tie_word_embeddings = before[key]
        raise ValueError(
            f"the adapter changes one of the tied weights {', '.join(tied_keys)} of "
            f"{type(base).__name__}, which has to be saved with them tied: leave embeddings and "
            "head out of target_modules and modules_to_save"
        )
    base.all_tied_weights_keys = {}
    outer.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    return True


def _share_weight(one: Any, other: Any) -> bool:
    return hasattr(one, "weight") and one.weight is getattr(other, "weight", None)


def _change_alike(embedding: Any, head: Any) -> bool:
    """Whether an adapter of trained tokens, or of whole modules, keeps embedding and head tied."""
    inner, outer = (getattr(x, "token_adapter", x) for x in (embedding, head))
    if getattr(outer, "tied_adapter", None) is inner:
        return True
    wholes = [dict(getattr(x, "modules_to_save", None) or {}) for x in (embedding, head)]
    first, second = ({name: x.weight for name, x in whole.items()} for whole in wholes)
    return (
        bool(first)
        and first.keys() == second.keys()
        and all(first[name] is second[name] for name in first)
    )


def _plain(module: Any) -> Any:
    """The base's own module under what PEFT has put around it."""
    while True:
        inner = getattr(module, "base_layer", None)
        inner = getattr(module, "original_module", None) if inner is None else inner
        if inner is None:
            return module
        module = inner


def _names_of(layers: Sequence[Any], base: Any) -> list[str]:
    """The names of layers' weights in a base, as they are without adapters."""
    names = [name for name, x in base.named_modules() if any(x is layer for layer in layers)]
    return [plain_name(f"{name}.weight") for name in names]


def plain_name(key: str) -> str:
    """The name of a base's weight without PEFT's wrappers."""
    for wrapper in _WRAPPERS:
        key = key.replace(wrapper, "")
    return key


def _name_of(model: Any) -> str:
    """What a saved adapter will name as its base."""
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "base_model_name_or_path", None):
            return str(config.base_model_name_or_path)
    return str(getattr(model, "name_or_path", None) or "")


def _files(name: str, base: Any) -> list[str]:
    """The safetensors files of a model's folder, or of a Hub id's copy on this machine."""
    if not name:
        return []
    if os.path.isdir(name):
        return [str(file) for file in sorted(Path(name).glob("model*.safetensors"))]
    revision = getattr(getattr(base, "config", None), "_commit_hash", None)
    try:
        file = try_to_load_from_cache(name, "model.safetensors", revision=revision)
    except ValueError:  # no id of the Hub
        return []
    if isinstance(file, str):
        return [file]
    index = try_to_load_from_cache(name, "model.safetensors.index.json", revision=revision)
    shards = Path(index).parent.glob("model*.safetensors") if isinstance(index, str) else ()
    return sorted(map(str, shards))


def _comparable(weight: Tensor, part: Any) -> bool:
    plain = weight.device.type != "meta" and not is_traceable_wrapper_subclass(weight)
    shape = tuple(part.get_shape())
    floats = part.get_dtype() in ("F64", "F32", "BF16", "F16") and weight.dtype in _FLOATS
    return plain and floats and bool(shape) and shape == tuple(weight.shape)


def moves_base(config: Any) -> bool:
    """Whether an adapter begins by changing the base's weights, so that the model without it is not
    the one that it was put on."""
    return _start(config).startswith(_MOVE_BASE)


def check_start(config: Any, made: bool) -> None:
    """Refuses an adapter that would load as another model than was trained, because it begins by
    changing the base's weights in a way that PEFT does not repeat as it loads; where the adapter
    is ``made`` already, warns.

    Raises:
        ValueError: such an adapter, unless it is made already.
    """
    if not _start(config).startswith(_NOT_REPEATED):
        return
    message = (
        f"init_lora_weights={config.init_lora_weights!r} changes the base's weights in a way that "
        "PEFT does not repeat when it loads the saved adapter, which is then another model"
    )
    if not made:
        raise ValueError(f"{message}: choose 'pissa', 'orthogonal' or True")
    warnings.warn(
        f"{message}: save it by model.save_pretrained(folder, "
        "path_initial_model_for_weight_conversion=…)",
        stacklevel=4,
    )


def _start(config: Any) -> str:
    start = getattr(config, "init_lora_weights", True)
    return start.lower() if isinstance(start, str) else ""
