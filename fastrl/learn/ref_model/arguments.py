"""Settings of a trainer's reference model, by TRL's names and ours."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fastrl.config import PPOConfig
from fastrl.learn.ref_model.choose import ReferenceSettings
from fastrl.settings import setting, setting_like

REFERENCES = ("auto", "copy", "adapter", "trunk", "offload")


@dataclass
class ReferenceArguments:
    """How the reference model is kept, and whether it follows the policy."""

    reference: str = setting(
        "Reference model: copy (a frozen copy), adapter (a PEFT model's base), trunk (a copy that "
        "shares the bottom layers, which stay as they are), offload (a copy in host memory); auto: "
        "adapter for PEFT models, trunk with num_shared_layers, else copy.",
        "auto",
        choices=REFERENCES,
    )
    num_shared_layers: int | None = setting_like(PPOConfig, "num_shared_layers")
    reference_dtype: str = setting_like(PPOConfig, "reference_dtype")
    sync_ref_model: bool = setting("Move the reference model towards the policy.", False)
    ref_model_mixup_alpha: float = setting(
        "Weight of the policy in an update of the reference; 1 copies it.", 0.6, within="(0, 1]"
    )
    ref_model_sync_steps: int = setting(
        "Optimizer steps between two updates of the reference.", 512, within="[1, inf)"
    )

    def refuse_reference(self, cause: str) -> None:
        """Raises ValueError for a reference's setting where ``cause`` means there is none."""
        refused = ("reference", "num_shared_layers", "reference_dtype", "sync_ref_model")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in refused and value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} is of a reference model, and with {cause} there is "
                    f"none: leave {field.name} out"
                )

    def reference_settings(self, **others: Any) -> ReferenceSettings:
        """The settings for :func:`fastrl.learn.ref_model.choose_ref_model`; ``others`` prevail."""
        settings: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("reference", "num_shared_layers", "reference_dtype")
        }
        if self.sync_ref_model:
            settings["sync_ref_every"] = self.ref_model_sync_steps
            settings["ref_ema"] = self.ref_model_mixup_alpha
        return ReferenceSettings(**{**settings, **others})
