"""How a new LoRA adapter begins, where that changes the weights below it."""

from __future__ import annotations

import warnings
from typing import Any

# Values of init_lora_weights that subtract the adapter's first product from the base's weights;
# then those that PEFT cannot repeat as it loads an adapter, since it draws a projection, or wants
# data.
_MOVE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_NOT_REPEATED = ("pissa_niter", "corda", "lora_ga")


def moves_base(config: Any) -> bool:
    """Whether an adapter begins by changing the base's weights, so that the model without it is not
    the one that it was put on."""
    return _start(config).startswith(_MOVE_BASE)


def check_start(config: Any, made: bool) -> None:
    """Refuses an adapter that would load as another model than was trained, because the base's
    weights are changed as it begins and cannot be changed alike as it is loaded; where it is
    ``made`` already, warns.

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
