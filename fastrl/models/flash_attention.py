"""flash-attn: the package, or the Hub's build of it where that is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from torch import nn
from transformers.utils import import_utils

from fastrl.models.attention import implementations

PACKAGE = "flash_attention_2"  # transformers' name of the package
HUB = "kernels-community/flash-attn2"
_VERSION = 4  # version of the Hub's build, for torch from 2.10 on, where transformers names none


def need_flash_attention(asked: str | Mapping[str, Any] | None) -> None:
    """Gets flash-attn where a model is to be loaded with it, so that an error comes before the
    weights are read. transformers takes the package, else the Hub's build through ``kernels``.

    Args:
        asked: ``attn_implementation`` of ``from_pretrained``: a name, or one for each part.

    Raises:
        ImportError: flash-attn is missing, or the Hub's build is named, and cannot be had.
    """
    names = asked.values() if isinstance(asked, Mapping) else (asked,)
    for name in names:
        wanted = isinstance(name, str) and name.removeprefix("paged|")
        from_hub = wanted and wanted.partition("@")[0].partition(":")[0].strip() == HUB
        if from_hub or (wanted == PACKAGE and not package_installed()):
            hub_kernel(f"attn_implementation={name!r}")


def asks_for_flash_attention(model: nn.Module) -> bool:
    """Whether a model, or a part of it, attends by flash-attn, from the package or the Hub."""
    names = [name or "" for _, name in implementations(model)]
    return any(name == PACKAGE or name.startswith(HUB) for name in names)


def flash_attn_with_kvcache(from_hub: bool) -> Callable[..., Any] | None:
    """flash-attn's function for decoding; None where flash-attn lacks it, or is not installed.

    Args:
        from_hub: take the Hub's build where the package is not installed.

    Raises:
        ImportError: ``from_hub``, and neither package nor build can be had.
    """
    try:
        from flash_attn import flash_attn_with_kvcache as of_package
    except ImportError:  # not installed, or built for another torch
        if not from_hub:
            return None
        kernel = hub_kernel("decoding as the model attends, by flash-attn,")
        return getattr(kernel, "flash_attn_with_kvcache", None)
    return of_package


def package_installed() -> bool:
    """Whether transformers would take the package."""
    return bool(import_utils.is_flash_attn_2_available())


def hub_kernel(what: str) -> ModuleType:
    """The Hub's build of flash-attn, downloaded at the first use.

    Args:
        what: what needs flash-attn, in words.

    Raises:
        ImportError: ``kernels`` is not installed in a version that transformers takes, or cannot
            get a build for this machine.
    """
    lacking = f"{what} needs flash-attn, which is not installed"
    if not import_utils.is_kernels_available():
        raise ImportError(
            f"{lacking}, nor is a version of kernels that transformers takes: {_remedies()}"
        )
    try:
        return _hub_kernel()
    except Exception as error:  # the network, the Hub or the build may fail
        raise ImportError(
            f"{lacking}, and kernels did not get it from {HUB} ({type(error).__name__}: {error}): "
            + _remedies()
        ) from error


def _remedies() -> str:
    bounds = f">={import_utils.KERNELS_MIN_VERSION},<{import_utils.KERNELS_MAX_VERSION}"
    return (
        "install flash-attn (pip install flash-attn), or Hugging Face's kernels, which gets a "
        f"build of it from {HUB} (pip install 'kernels{bounds}'), or load the model with "
        "attn_implementation='sdpa'"
    )


@cache
def _hub_kernel() -> ModuleType:
    from transformers import modeling_flash_attention_utils

    kernels = importlib.import_module("kernels")  # Hugging Face's, not our repository's folder

    versions = getattr(modeling_flash_attention_utils, "FLASH_ATTN_KERNEL_VERSIONS", {})
    return kernels.get_kernel(HUB, version=versions.get(HUB, _VERSION))
