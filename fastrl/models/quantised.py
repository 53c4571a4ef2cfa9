"""Base models in four bits (bitsandbytes, through transformers), under adapters that are trained.

A linear layer's weight is kept as W ≈ absmax[block]·code[index], with indices of four bits and a
scale for each block of 64; the layer multiplies by it in its compute dtype (QLoRA,
arXiv:2305.14314). Such weights are never trained, spread over processes or moved layer by layer.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# The file of an adapter's folder that says how its base was quantised.
BASE_FILE = "base_quantization.json"
QUANT_TYPES = ("nf4", "fp4")
_CONFIG, _DTYPE = "quantization_config", "dtype"

NEEDS_AN_ADAPTER = (
    "four-bit weights cannot be trained: train an adapter on them (peft_config; commands: "
    "--lora-r 16), or load the model without load_in_4bit"
)
WITHOUT_FSDP = "start without FSDP (DDP has whole weights in each process), or load a whole model"


def four_bit_config(
    dtype: Any = torch.float32, quant_type: str = "nf4", nested: bool = False
) -> Any:
    """``from_pretrained``'s ``quantization_config`` of a base model in four bits.

    Args:
        dtype: the dtype in which layers compute, or its name; "auto" is float32.
        quant_type: "nf4", whose 16 codes are quantiles of a normal distribution, or "fp4".
        nested: quantise the scales too, which saves 0.4 bits per weight.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: another quant_type.
    """
    from transformers import BitsAndBytesConfig

    if quant_type not in QUANT_TYPES:
        raise ValueError(
            f"unknown bnb_4bit_quant_type {quant_type!r}: choose one of {', '.join(QUANT_TYPES)}"
        )
    _need_bitsandbytes("load_in_4bit")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32 if dtype == "auto" else dtype,
    )


def is_quantised(model: Any) -> bool:
    """Whether some of the model's weights have four bits, or would have where they are loaded."""
    config = getattr(model, "config", None)
    return _asks_for_four_bits(getattr(config, _CONFIG, None)) or any(True for _ in _layers(model))


def settle(model: nn.Module) -> None:
    """Has four-bit layers compute as they are, forward and backward, and leave their weights alone.

    In evaluation mode on a CPU with AVX512-BF16, bitsandbytes would rearrange a layer's weight and
    round its scales to bfloat16 for good, and multiply without a gradient from then on; on every
    device a layer casts its bias for good as it first runs. The bias is cast here, so that nothing
    changes later.

    Raises:
        ValueError: weights that are rearranged already.
    """
    for name, layer in _layers(model):
        state = getattr(layer.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError(
                f"the four-bit weight of {name} is in bitsandbytes' layout for inference on a CPU, "
                "which has no gradient, and whose scales are rounded, because the model has run "
                "before: load it again, by fastrl's from_pretrained or load_language_model, or "
                "give it to fastrl before it runs"
            )
        layer.support_avx512bf16_for_cpu = False
        if layer.bias is not None and layer.compute_dtype is not None:
            layer.bias.data = layer.bias.data.to(layer.compute_dtype)


@contextlib.contextmanager
def peft_hushed() -> Iterator[None]:
    """Context that hides two kinds of warnings: of PEFT's use of names that newer versions of
    transformers have renamed, which users cannot change, and of adapters on tied weights, which
    fastrl unties."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
        for name in ("is_gradient_checkpointing", "gradient_checkpointing_enable"):
            warnings.filterwarnings("ignore", f".?{name}", FutureWarning)
        yield


def prepared_for_adapters(model: Any, args: Any = None) -> Any:
    """A quantised model with all weights frozen, of which those without four bits are float32.

    Args:
        args: transformers' training arguments, whose gradient checkpointing is prepared for;
            None: without gradient checkpointing.
    """
    from peft import prepare_model_for_kbit_training

    options: dict[str, Any] = {
        "use_gradient_checkpointing": args is not None and bool(args.gradient_checkpointing)
    }
    if args is not None and args.gradient_checkpointing_kwargs is not None:
        options["gradient_checkpointing_kwargs"] = args.gradient_checkpointing_kwargs
    with peft_hushed():
        model = prepare_model_for_kbit_training(model, **options)
    settle(model)
    return model


def compute_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The dtypes in which four-bit layers multiply."""
    return {layer.compute_dtype for _, layer in _layers(model) if layer.compute_dtype is not None}


def dtype_before(model: nn.Module) -> str:
    """The dtype of weights before they were quantised, by torch's name; their bits depend on it."""
    states = (getattr(layer.weight, "quant_state", None) for _, layer in _layers(model))
    dtype = next((state.dtype for state in states if state is not None), torch.float32)
    return str(dtype).removeprefix("torch.")


def scales(model: nn.Module) -> dict[str, Tensor]:
    """What four-bit weights consist of beside their indices: scales and codes, by name."""
    return {
        f"{name}.weight.{part}": x
        for name, layer in _layers(model)
        if getattr(layer.weight, "quant_state", None) is not None
        for part, x in layer.weight.quant_state.as_dict(packed=True).items()
    }


def refuse_quantised(model: Any, what: str, remedy: str) -> None:
    """Raises ValueError where the model has four-bit weights, which ``what`` cannot have."""
    if is_quantised(model):
        raise ValueError(f"{what} cannot have four-bit weights: {remedy}")


def refuse_compressed(model: nn.Module) -> None:
    """Raises ValueError for linear layers with packed weights (compressed-tensors), through which
    neither fastrl nor PEFT can train."""
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and not isinstance(getattr(layer, "weight", None), Tensor):
            raise ValueError(
                f"{name} has a compressed weight (quantised by compressed-tensors), which cannot "
                "be trained, nor an adapter on it: train the checkpoint that it was made from, or "
                "an adapter on four bits of that (load_in_4bit)"
            )


def device_map() -> dict[str, Any] | None:
    """The ``device_map`` that puts a quantised model on this process's GPU; None without GPUs.

    By itself, transformers would take the first GPU in each process.
    """
    if not torch.cuda.is_available():
        return None
    index = int(os.environ.get("LOCAL_RANK") or 0)
    return {"": index % torch.cuda.device_count()}


def quantises(options: dict[str, Any]) -> bool:
    """Whether options of ``from_pretrained`` ask for four bits.

    Raises:
        ImportError: they do, and bitsandbytes is not installed.
    """
    four_bits = _asks_for_four_bits(options.get(_CONFIG))
    if four_bits:
        _need_bitsandbytes(_CONFIG)
    return four_bits


def with_whole_heads(options: dict[str, Any], heads: tuple[str, ...]) -> dict[str, Any]:
    """Options whose ``quantization_config`` leaves modules of these names whole, besides those that
    it names itself. transformers does so by itself with the heads of language models alone."""
    config, name = copy.deepcopy(options[_CONFIG]), "llm_int8_skip_modules"
    if isinstance(config, dict):
        config[name] = list(dict.fromkeys([*(config.get(name) or ()), *heads]))
    else:
        config.llm_int8_skip_modules = list(dict.fromkeys([*(getattr(config, name) or ()), *heads]))
    return {**options, _CONFIG: config}


def save_beside_adapter(model: Any, folder: str | os.PathLike) -> None:
    """Writes to an adapter's folder how its base was quantised. Of a whole base, and of one whose
    own files have four bits, it writes nothing, and removes what the folder says of an earlier
    base."""
    file = Path(folder, BASE_FILE)
    if not hasattr(model, "peft_config") or not is_quantised(model):
        file.unlink(missing_ok=True)
        return
    base = model.get_base_model()
    if getattr(getattr(base, "hf_quantizer", None), "pre_quantized", False):
        file.unlink(missing_ok=True)
        return
    config = base.config.quantization_config
    content = {
        _CONFIG: config if isinstance(config, dict) else config.to_dict(),
        _DTYPE: dtype_before(base),
    }
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_beside_adapter(file: str | os.PathLike) -> dict[str, Any]:
    """``from_pretrained``'s options for the base of an adapter, from what
    :func:`save_beside_adapter` wrote.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: a file that cannot be read.
    """
    from transformers import BitsAndBytesConfig

    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        config = BitsAndBytesConfig.from_dict(content[_CONFIG])
        dtype = getattr(torch, content[_DTYPE])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{content[_DTYPE]} is no dtype")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}): it says how the adapter's base was quantised; save "
            "the adapter again, or pass quantization_config"
        ) from error
    _need_bitsandbytes(
        f"the adapter in {Path(file).parent} was trained on a four-bit base, which",
        "; or pass quantization_config=None (commands: --load-in-4bit false) for the whole base, "
        "with which its log-probs are others",
    )
    return {_CONFIG: config, _DTYPE: dtype}


def _need_bitsandbytes(what: str, otherwise: str = "") -> None:
    if not is_installed():
        raise ImportError(
            f"{what} needs bitsandbytes: pip install 'bitsandbytes>=0.50' 'peft>=0.21.2'{otherwise}"
        )


def is_installed() -> bool:
    """Whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


def _asks_for_four_bits(config: Any) -> bool:
    if isinstance(config, dict):
        return bool(config.get("load_in_4bit"))
    return bool(getattr(config, "load_in_4bit", False))


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The four-bit linear layers, by name."""
    bitsandbytes = sys.modules.get("bitsandbytes")  # without bitsandbytes no layer has four bits
    if bitsandbytes is None or not isinstance(model, nn.Module):
        return
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            yield name, module
