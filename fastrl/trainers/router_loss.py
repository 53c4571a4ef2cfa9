"""The load-balancing loss of mixtures of experts."""

from __future__ import annotations

import sys
from typing import Any

from fastrl.models.utils import base_of


def router_loss(model: Any, asked: float | None, as_configured: bool = False) -> tuple[bool, float]:
    """Whether the routers of a mixture of experts learn by a load-balancing loss, and its weight, 0
    where they do not.

    Args:
        asked: the settings' ``router_aux_loss_coef``; None: the model's own.
        as_configured: without ``asked``, there is a loss only if the model's
            ``output_router_logits`` is on.

    Raises:
        ValueError: a weight for a model without such a loss.
    """
    config = model.config.get_text_config()
    # Llama 4 and DeepSeek V3 have the setting, and no such loss.
    home = sys.modules[type(base_of(model)).__module__]
    has_loss = hasattr(home, "load_balancing_loss_func")
    has_loss = has_loss and getattr(config, "is_moe", True)  # a Doge may be dense
    if not hasattr(config, "output_router_logits") or not has_loss:
        if asked:
            raise ValueError(
                f"router_aux_loss_coef={asked}, but {type(model).__name__} is no mixture of "
                "experts with a router's loss: leave it out"
            )
        return False, 0.0
    weight = asked
    if weight is None:
        off = as_configured and not config.output_router_logits
        weight = 0.0 if off else getattr(config, "router_aux_loss_coef", 0.0) or 0.0
    return weight != 0, weight
