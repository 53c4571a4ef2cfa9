"""ModelConfig: which model a script loads, and with which adapter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fastrl.core import flatten_dict
from fastrl.eras import OfEveryEra, of_another_era
from fastrl.models.quantised import QUANT_TYPES, device_map, four_bit_config
from fastrl.settings import kept_setting, setting

_DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class ModelConfig(metaclass=OfEveryEra):
    """The model of a training script: names and defaults are of TRL 1.x's ``ModelConfig``; names
    of earlier versions are taken, too, see :mod:`fastrl.eras`.

    Raises:
        ValueError: four and eight bits at once, an unknown dtype or code of four bits, or
            ``trust_remote_code=True`` without ``FASTRL_TRUST_REMOTE_CODE=1`` in the environment.
    """

    model_name_or_path: str | None = setting("Model: a folder, or a name on the Hub.", None)
    model_revision: str = setting("Branch, tag or commit of the model on the Hub.", "main")
    dtype: str | None = setting(
        "dtype of the weights: auto (as they are saved), bfloat16, float16 or float32.", "float32"
    )
    # A setting of TRL until 0.29, which is no flag; the constructor takes it by the metaclass.
    trust_remote_code: bool = kept_setting("Run Python code that comes with the model.", False)
    attn_implementation: str | None = setting("transformers' attention implementation.", None)
    use_peft: bool = setting("Train a LoRA adapter.", False)
    lora_r: int = setting("Rank of the adapter.", 16)
    lora_alpha: int = setting("LoRA's α: the adapter is scaled by α/r.", 32)
    lora_dropout: float = setting("Dropout before the adapter.", 0.05)
    lora_target_modules: list[str] | None = setting("Modules to adapt; None: PEFT's.", None)
    lora_target_parameters: list[str] | None = setting("Parameters to adapt.", None)
    lora_modules_to_save: list[str] | None = setting("Modules that are trained whole.", None)
    lora_task_type: str = setting("CAUSAL_LM, or SEQ_CLS for reward models.", "CAUSAL_LM")
    use_rslora: bool = setting("Scale by α/√r in place of α/r.", False)
    use_dora: bool = setting("Learn magnitudes and directions apart (DoRA).", False)
    load_in_8bit: bool = setting("Load weights in eight bits; for adapters alone.", False)
    load_in_4bit: bool = setting("Load weights in four bits; for adapters alone.", False)
    bnb_4bit_quant_type: str = setting("Codes of four bits: nf4 or fp4.", "nf4")
    use_bnb_nested_quant: bool = setting("Quantise the scales of four bits, too.", False)
    bnb_4bit_quant_storage: str | None = setting("dtype that four-bit codes are kept in.", None)

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit exclude each other: choose one")
        for name, value, choices in (
            ("dtype", self.dtype, (*_DTYPES, None)),
            ("bnb_4bit_quant_type", self.bnb_4bit_quant_type, QUANT_TYPES),
        ):
            if value not in choices:
                choices_named = ", ".join(x for x in choices if x)
                raise ValueError(f"unknown {name} {value!r}: choose one of {choices_named}")
        modules = self.lora_target_modules
        if isinstance(modules, list) and len(modules) == 1:  # a pattern, such as all-linear
            self.lora_target_modules = modules[0]  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return of_another_era(self, name)

    def to_dict(self) -> dict[str, Any]:
        """All settings as one flat dict."""
        return flatten_dict(dataclasses.asdict(self))


def get_peft_config(model_args: Any) -> Any:
    """PEFT's LoraConfig of a :class:`ModelConfig`; None without ``use_peft``."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        task_type=model_args.lora_task_type,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def get_quantization_config(model_args: Any) -> Any:
    """The ``quantization_config`` of from_pretrained for a :class:`ModelConfig`; None without
    quantised weights."""
    if model_args.load_in_4bit:
        config = four_bit_config(
            model_args.dtype or "auto",
            model_args.bnb_4bit_quant_type,
            model_args.use_bnb_nested_quant,
        )
        if model_args.bnb_4bit_quant_storage is not None:
            import torch

            config.bnb_4bit_quant_storage = getattr(torch, model_args.bnb_4bit_quant_storage)
        return config
    if model_args.load_in_8bit:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_8bit=True)
    return None


def get_kbit_device_map() -> dict[str, Any] | None:
    """The ``device_map`` of quantised weights, to this process's GPU; None without a GPU."""
    return device_map()
