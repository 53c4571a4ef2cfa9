"""Model cards: how a model was trained, its base model, and code that loads it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEMPLATE = """\
---
library_name: {library}
{base_line}tags:
{tags}
---

# {name}

{what}, trained with fastrl.

- **Method:** {method}
- **Base model:** {base}
- **Weights:** {weights}
- **Value head:** {value_head}

```python
{snippet}
```
{note}"""
_NOTE = """
`transformers.AutoModelFor{auto}.from_pretrained` loads the language model alone.
"""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_KINDS = {
    "causal": ("A causal language model", "CausalLM"),
    "seq2seq": ("An encoder–decoder", "Seq2SeqLM"),
    "reward": ("A reward model (a sequence classifier)", "SequenceClassification"),
}


@dataclass(frozen=True)
class Method:
    """The training method in a model card.

    Attributes:
        title: in words.
        tags: for the Hub.
    """

    title: str
    tags: tuple[str, ...]

    @classmethod
    def aligned(cls, task: str, loss: str) -> Method:
        """The method of a run of the alignment framework."""
        return cls(f"the loss {loss} on the task {task}", ("alignment", loss.lower()))


SFT = Method("supervised fine-tuning (SFT)", ("sft",))
REWARD = Method("reward modelling on preference pairs", ("reward-model",))
DPO = Method("direct preference optimisation (DPO)", ("trl", "dpo"))
KTO = Method("Kahneman–Tversky optimisation (KTO)", ("trl", "kto"))
_POLICY_GRADIENTS = {
    "PPO": Method("proximal policy optimisation (PPO)", ("ppo", "reinforcement-learning")),
    "GRPO": Method("group relative policy optimisation (GRPO)", ("grpo", "reinforcement-learning")),
    "Dr. GRPO": Method(
        "group relative policy optimisation without its biases (Dr. GRPO)",
        ("dr-grpo", "reinforcement-learning"),
    ),
    "REINFORCE++": Method("REINFORCE++", ("reinforce-plus-plus", "reinforcement-learning")),
    "RLOO": Method("REINFORCE leave-one-out (RLOO)", ("rloo", "reinforcement-learning")),
}


def policy_gradient(name: str) -> Method:
    """The method named in ``PPOConfig.method``; one of a user's is a policy gradient by its name,
    which for a function in a file is the function's."""
    own = name.rpartition(":")[2]
    return _POLICY_GRADIENTS.get(name) or Method(
        f"policy gradients with the advantage {own}", ("reinforcement-learning",)
    )


def model_card(name: str, model: Any, method: Method | None = None, base: str | None = None) -> str:
    """The text of a README.md.

    Args:
        name: of the repository or folder, which the card's code loads.
        model: of transformers or PEFT, or a fastrl model with its value head, as it is saved.
        method: of training; None: not recorded.
        base: the model that training began with, if the model itself does not name it.
    """
    inner = getattr(model, "pretrained_model", model)
    adapters = _adapters(model, inner)
    four_bits = _four_bits(inner, adapters)
    values = getattr(model, "v_head", None) is not None
    kind = _kind(inner)
    own = _base_of(inner, adapters)
    base = own or base
    what, auto = _KINDS[kind]
    tags = ("fastrl", *(method.tags if method else ()))
    return _TEMPLATE.format(
        library="peft" if adapters else "transformers",
        base_line=f"base_model: {base}\n" if _is_hub_id(base) else "",
        tags="\n".join(f"- {tag}" for tag in tags),
        name=name,
        what=f"{what}, as a {_adapter_name(adapters)}" if adapters else what,
        method=method.title if method else "not recorded",
        base=f"`{base}`" if base else "not recorded",
        weights=_weights(adapters, four_bits),
        value_head=_value_head(model, values),
        snippet=_snippet(
            name, model, auto, adapters, own, values, four_bits, _quantised_from(inner)
        ),
        note=_NOTE.format(auto=auto) if values and not adapters else "",
    )


def write_model_card(
    folder: str | Path, name: str, model: Any, method: Method | None = None, base: str | None = None
) -> None:
    """Writes :func:`model_card` to ``README.md`` in the folder, which is made if there is none."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(model_card(name, model, method, base), encoding="utf-8")


class OwnModelCard:
    """Mixin for transformers' Trainer: writes fastrl's model card in place of transformers'."""

    args: Any
    accelerator: Any
    model: Any
    method: Method | None = None

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: Any = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Writes ``README.md`` to the output folder.

        Args:
            model_name: by default the folder's name; ``hub_model_id`` takes precedence.
            finetuned_from: the base model, if the model does not name one.
            language, license, tags: arguments of transformers that are not used here.
        """
        if self.accelerator.is_main_process:
            name = getattr(self, "hub_model_id", None) or model_name
            self.write_card(str(self.args.output_dir), name, finetuned_from)

    def write_card(self, folder: str, name: str | None = None, base: str | None = None) -> None:
        """Writes the model card to a folder."""
        model = self.accelerator.unwrap_model(self.model)
        name = name or Path(folder).absolute().name
        write_model_card(folder, name, model, self.method, base)


def _kind(inner: Any) -> str:
    if getattr(inner.config, "is_encoder_decoder", False):
        return "seq2seq"
    core = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return "reward" if type(core).__name__.endswith("ForSequenceClassification") else "causal"


def _adapters(model: Any, inner: Any) -> dict[str, Any]:
    """The adapters that are saved, without those of a reference or a reward model."""
    held = getattr(inner, "peft_config", {})
    return {name: held[name] for name in getattr(model, "saved_adapters", held)}


def _base_of(inner: Any, adapters: dict[str, Any]) -> str | None:
    """The base model that the model itself names."""
    for config in adapters.values():
        if config.base_model_name_or_path:
            return os.fspath(config.base_model_name_or_path)
    return getattr(inner.config, "name_or_path", None) or None


def _is_hub_id(base: str | None) -> bool:
    return base is not None and bool(_HUB_ID.fullmatch(base)) and not os.path.isdir(base)


def _adapter_name(adapters: dict[str, Any]) -> str:
    kinds = {str(getattr(c.peft_type, "value", c.peft_type)) for c in adapters.values()}
    names = {"LORA": "LoRA"}
    return " and ".join(sorted(names.get(kind, kind) for kind in kinds)) + " adapter"


def _four_bits(inner: Any, adapters: dict[str, Any]) -> dict[str, Any]:
    """How an adapter's base was quantised as it was loaded, as arguments of BitsAndBytesConfig; {}
    of a whole base, and of one whose own files say it."""
    base = inner.get_base_model() if adapters and hasattr(inner, "get_base_model") else None
    config = getattr(getattr(base, "config", None), "quantization_config", None)
    own = getattr(getattr(base, "hf_quantizer", None), "pre_quantized", False)
    if own or not getattr(config, "load_in_4bit", False):
        return {}
    assert config is not None
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": config.bnb_4bit_quant_type,
        "bnb_4bit_use_double_quant": config.bnb_4bit_use_double_quant,
        "bnb_4bit_compute_dtype": str(config.bnb_4bit_compute_dtype).removeprefix("torch."),
    }


def _quantised_from(inner: Any) -> str:
    """The dtype of weights before they had four bits, on which their bits depend."""
    states = (getattr(getattr(m, "weight", None), "quant_state", None) for m in inner.modules())
    dtype = next((state.dtype for state in states if state is not None), "float32")
    return str(dtype).removeprefix("torch.")


def _weights(adapters: dict[str, Any], four_bits: dict[str, Any]) -> str:
    if not adapters:
        return "all of the model's"
    ranks = sorted({c.r for c in adapters.values() if isinstance(getattr(c, "r", None), int)})
    rank = f" of rank {', '.join(map(str, ranks))}" if ranks else ""
    on = f" on a base in four bits ({four_bits['bnb_4bit_quant_type']})" if four_bits else ""
    return f"a {_adapter_name(adapters)}{rank}{on}; the base model's are not among them"


def _value_head(model: Any, values: bool) -> str:
    if not values:
        return "none"
    trained = any(p.requires_grad for p in model.v_head.parameters())
    return "beside the weights, as `v_head.summary.*`" + ("" if trained else "; not trained")


def _snippet(
    name: str,
    model: Any,
    auto: str,
    adapters: dict[str, Any],
    own: str | None,
    values: bool,
    four_bits: dict[str, Any],
    quantised_from: str,
) -> str:
    """Code that loads the model."""
    if values:
        wrapper = type(model).__name__
        if not adapters or own:
            return f'from fastrl import {wrapper}\n\nmodel = {wrapper}.from_pretrained("{name}")'
        return (
            f"from fastrl import {wrapper}\nfrom peft import PeftModel\n\n"
            "# base: the model that the adapter was trained on, which it does not name. The value\n"
            "# head's weights are in model.safetensors: load them into model.v_head.\n"
            f'model = {wrapper}.from_pretrained(PeftModel.from_pretrained(base, "{name}"))'
        )
    options = ", num_labels=1" if auto == "SequenceClassification" else ""
    imported = ""
    if four_bits:
        imported = ", BitsAndBytesConfig"
        options += f', dtype="{quantised_from}", quantization_config=config'
    if not adapters:
        lines: Sequence[str] = (
            f"from transformers import AutoModelFor{auto}",
            "",
            f'model = AutoModelFor{auto}.from_pretrained("{name}")',
        )
    elif own:
        lines = (
            "from peft import PeftModel",
            f"from transformers import AutoModelFor{auto}" + imported,
            "",
            *_config_lines(four_bits),
            f'base = AutoModelFor{auto}.from_pretrained("{own}"{options})',
            f'model = PeftModel.from_pretrained(base, "{name}")',
        )
    else:
        lines = (
            "from peft import PeftModel",
            "",
            "# base: the model that the adapter was trained on, which it does not name.",
            f'model = PeftModel.from_pretrained(base, "{name}")',
        )
    return "\n".join(lines)


def _config_lines(four_bits: dict[str, Any]) -> Sequence[str]:
    """Code that makes a base's quantization_config."""
    if not four_bits:
        return ()
    return (
        "config = BitsAndBytesConfig(",
        *(f"    {name}={value!r}," for name, value in four_bits.items()),
        ")",
    )
