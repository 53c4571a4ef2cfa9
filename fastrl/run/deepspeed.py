"""Refuses DeepSpeed's ZeRO-3, and shows a configuration of FSDP2 that does the same."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ON = ("1", "true", "yes")
_FSDP2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
machine_rank: 0
num_processes: {processes}
mixed_precision: '{precision}'
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_offload_params: {offload}
"""


def refuse_zero3(asked: Mapping[str, Any] | str | None, precision: str = "no") -> None:
    """Refuses ZeRO-3, whose weights no process has whole, so that responses and losses would be
    computed of shares. ZeRO-1 and ZeRO-2 run.

    Args:
        asked: DeepSpeed's configuration, or its file; None: what `accelerate launch` says.
        precision: mixed precision: no, bf16 or fp16.

    Raises:
        ValueError: ZeRO-3; the message has the file for FSDP2 that does the same.
    """
    config = _launched() if asked is None else _read(asked)
    zero = config.get("zero_optimization", {})
    if zero.get("stage") != 3:
        return
    for name in ("bf16", "fp16"):
        precision = name if config.get(name, {}).get("enabled") is True else precision
    offload = any(
        zero.get(name, {}).get("device", "none") not in ("none", None)
        for name in ("offload_param", "offload_optimizer")
    )
    file = _FSDP2.format(
        processes=os.environ.get("WORLD_SIZE", "1"),
        precision=precision,
        offload=str(offload).lower(),
    )
    raise ValueError(
        "DeepSpeed's ZeRO-3 is not supported: take ZeRO-2, or FSDP2, which spreads weights too. "
        "Leave deepspeed out, save this as fsdp2.yaml, and start by accelerate launch "
        f"--config_file fsdp2.yaml:\n\n{file}"
    )


def _launched() -> dict[str, Any]:
    """What accelerate's launcher has put into the environment, as DeepSpeed's configuration."""
    settings = {
        name.removeprefix("ACCELERATE_DEEPSPEED_").lower(): value
        for name, value in os.environ.items()
        if name.startswith("ACCELERATE_DEEPSPEED_")
    }
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() not in _ON:
        return {}
    if settings.get("config_file"):
        return _read(settings["config_file"])
    zero = {
        "stage": int(settings.get("zero_stage", 2)),
        "offload_param": {"device": settings.get("offload_param_device")},
        "offload_optimizer": {"device": settings.get("offload_optimizer_device")},
    }
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return {"zero_optimization": zero, precision: {"enabled": True}}


def _read(config: Mapping[str, Any] | str) -> dict[str, Any]:
    """A configuration as a dict; {} for all but a mapping, a file of a JSON object, or its text,
    plain or in base64."""
    if isinstance(config, Mapping):
        return dict(config)
    try:
        if os.path.isfile(config):
            config = Path(config).read_text(encoding="utf-8")
        elif not config.lstrip().startswith("{"):
            config = base64.urlsafe_b64decode(config).decode()
        parsed = json.loads(config)
    except (OSError, ValueError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
