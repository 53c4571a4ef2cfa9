"""Model cards: how a model was trained, its base model, and code that loads it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fastrl.run.files import write_file
from fastrl.run.value_head_file import HEAD_NAME
from fastrl.settings import idle_settings

_TEMPLATE = Path(__file__).with_suffix(".md")  # of Jinja
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_KINDS = {  # in words, transformers' class, the Hub's task
    "causal": ("A causal language model", "CausalLM", "text-generation"),
    "multimodal": (
        "A model of images and texts, trained on texts",
        "ImageTextToText",
        "image-text-to-text",
    ),
    "seq2seq": ("An encoder–decoder", "Seq2SeqLM", "text-generation"),
    "reward": (
        "A reward model (a sequence classifier)",
        "SequenceClassification",
        "text-classification",
    ),
}
# Settings that decide what was trained; a card shows them at their defaults, too.
_DECIDE = (
    "loss_type", "beta", "num_generations", "learning_rate", "per_device_train_batch_size",
    "gradient_accumulation_steps", "num_train_epochs", "advantage", "policy_loss", "init_kl_coef",
    "batch_size", "ppo_epochs",
)  # fmt: skip
# Prefixes of settings that say nothing of the model: of folders, accounts, logs, memory.
_NOT_SHOWN = (
    "output_dir", "model_name", "exp_name", "task_name", "run_name", "tracker_", "project",
    "accelerator_kwargs", "push_to_hub", "hub_", "report_to", "log", "disable_tqdm", "save_",
    "resume_from", "dataloader_", "trackio", "use_cpu", "do_train", "do_eval", "activation_",
    "gradient_checkpointing", "remove_unused",
)  # fmt: skip
_NO_RESULT = re.compile("seconds|runtime|per_second|epoch|step|examples|dropped|prompts")


@dataclass(frozen=True)
class Method:
    """The training method in a model card.

    Attributes:
        title: the method's name in words.
        tags: tags of the model on the Hub.
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
    """The method named in ``PPOConfig.method``. A user's advantage, under its name or as
    "FILE:FUNCTION", becomes "policy gradients with the advantage NAME"."""
    short = name.rpartition(":")[2]
    return _POLICY_GRADIENTS.get(name) or Method(
        f"policy gradients with the advantage {short}", ("reinforcement-learning",)
    )


@dataclass(frozen=True)
class Training:
    """What a model card tells beside the model itself.

    Attributes:
        method: the training method; None: it is not recorded.
        base: the model that training began with, if the model itself does not name it.
        settings: the settings that :func:`card_settings` returns.
        results: metrics by name, such as those of the last evaluation.
        license: the license's id; None: what the base model's card or configuration names.
        language: the texts' language, as the Hub names it.
        tags: the model's tags on the Hub, beside the method's.
        datasets: the data sets' ids on the Hub.
    """

    method: Method | None = None
    base: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    results: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    license: str | None = None
    language: str | None = None
    tags: Sequence[str] = ()
    datasets: Sequence[str] = ()


def model_card(
    name: str, model: Any, training: Training | None = None, folder: Path | None = None
) -> Any:
    """The README.md of a model, as a ``huggingface_hub.ModelCard``.

    Args:
        name: the name of the repository or folder, which the card's code loads.
        model: a transformers or PEFT model, or a fastrl model with its value head, as it is saved.
        training: how the model was trained; None: that is not known.
        folder: where the model is saved; the card's code loads a tokenizer that is there.
    """
    import jinja2

    training = training or Training()
    method = training.method
    inner = getattr(model, "pretrained_model", model)
    adapters = _adapters(model, inner)
    four_bits = _four_bits(inner, adapters)
    values = getattr(model, "v_head", None) is not None
    named_base = _base_of(inner, adapters)
    base = named_base or training.base
    what, kind, task = _KINDS[_kind(inner)]
    auto, (tokenizes, chats) = f"AutoModelFor{kind}", _tokenizer_in(folder)
    imports = {
        auto: named_base or not adapters,
        "AutoTokenizer": tokenizes,
        "BitsAndBytesConfig": four_bits and named_base,
    }
    template = jinja2.Environment(trim_blocks=True).from_string(_TEMPLATE.read_text("utf-8"))
    text = template.render(
        name=name,
        what=f"{what}, as a {_adapter_name(adapters)}" if adapters else what,
        method=method.title if method else "not recorded",
        base=base,
        named=named_base,
        is_hub_id=_is_hub_id(named_base),
        adapted=bool(adapters),
        weights=_weights(adapters, four_bits),
        value_head=_value_head(model, values),
        versions=_versions(bool(adapters)),
        auto=auto,
        imports=[name for name, needed in imports.items() if needed],
        labels=", num_labels=1" if kind == "SequenceClassification" else "",
        four_bits={option: repr(value) for option, value in four_bits.items()},
        dtype=_quantised_from(inner),
        tokenizes=tokenizes,
        chats=chats,
        wrapper=type(model).__name__ if values else "",
        head_file=HEAD_NAME,
    )
    settings = {**training.settings, **_lora_settings(adapters)}
    text += _table("Settings", ("setting", "value"), settings)
    text += _results(training.results)
    return _card(
        text,
        library_name="peft" if adapters else "transformers",
        base_model=base if _is_hub_id(base) else None,
        pipeline_tag=task,
        language=training.language,
        datasets=list(training.datasets) or None,
        tags=["fastrl", *(method.tags if method else ()), *training.tags],
        **({"license": training.license} if training.license else license_of(base)),
    )


def write_model_card(
    folder: str | Path, name: str, model: Any, training: Training | None = None
) -> None:
    """Writes :func:`model_card` to ``README.md`` in the folder, which is made if there is none."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, model_card(name, model, training, folder))


@contextlib.contextmanager
def card_beside(folder: str | Path, write: Callable[[], None]) -> Iterator[None]:
    """Context in which a model is saved to a folder, where PEFT writes a card of its own: at its
    end the folder's earlier card is restored, and where there was none ``write`` writes one."""
    card = Path(folder) / "README.md"
    before = card.read_bytes() if card.exists() else None
    yield
    if before is None:
        write()
    else:
        card.write_bytes(before)


def complete_card(folder: Path, dataset: Any, results: Mapping[str, Any]) -> None:
    """Adds to the card in a folder the run's data set, where it is on the Hub, and its results."""
    with contextlib.suppress(FileNotFoundError):
        card = read_card(folder)
        if dataset_id := on_the_hub(dataset):
            card.data.datasets = dataset_id
        if "## Results" not in card.text:
            card.text = card.text.rstrip() + "\n" + _results(results)
        _write(folder, _card(card.text, **card.data.to_dict()))


def recorded_training(folder: str | Path) -> Training:
    """How the model in a folder was trained, as its card tells; nothing where there is no card."""
    try:
        card = read_card(folder)
    except FileNotFoundError:
        return Training()
    data = card.data.to_dict()
    method = re.search(r"^- \*\*Method:\*\* (.+)$", card.text, re.MULTILINE)
    tags = [tag for tag in data.get("tags") or () if tag != "fastrl"]
    return Training(
        method=Method(method[1], tuple(tags)) if method else None,
        settings=_rows(card.text, "Settings"),
        results={k: float(x) for k, x in _rows(card.text, "Results").items()},
        license=data.get("license"),
        language=data.get("language"),
        datasets=data.get("datasets") or (),
    )


def card_for_repository(folder: str | Path, repo_id: str, license: str | None = None) -> Any:
    """The card in a folder, None where there is none; a card of fastrl's gets the repository's id
    as its title and in its code. ``license`` replaces the card's license unless it is None."""
    try:
        card = read_card(folder)
    except FileNotFoundError:
        return None
    text, data = card.text, card.data.to_dict()
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    if title and "fastrl" in (data.get("tags") or ()):
        text = text.replace(title[0], f"# {repo_id}", 1).replace(f'"{title[1]}"', f'"{repo_id}"')
    if license is not None:
        data = {k: x for k, x in data.items() if not k.startswith("license")}
        data["license"] = license
    return _card(text, **data)


def read_card(folder: str | Path) -> Any:
    """The ``huggingface_hub.ModelCard`` in a folder.

    Raises:
        FileNotFoundError: the folder has no ``README.md``.
    """
    from huggingface_hub import ModelCard

    text = (Path(folder) / "README.md").read_text(encoding="utf-8")
    return ModelCard(text, ignore_metadata_errors=True)


def names_a_folder(folder: str | Path, base: str) -> bool:
    """Whether the card beside an adapter says that its base was a folder, not an id of the Hub."""
    try:
        card = read_card(folder)
    except FileNotFoundError:
        return False
    data = card.data.to_dict()
    by_fastrl = "fastrl" in (data.get("tags") or ())
    return by_fastrl and "base_model" not in data and f"**Base model:** `{base}`" in card.text


def card_settings(config: Any) -> dict[str, Any]:
    """The settings of a dataclass that a card shows: those that decide what was trained, and all
    that differ from their defaults. Left out are settings of folders, accounts, logs and memory,
    settings without effect, values that are not plain, and absolute paths."""
    always = set(_DECIDE)
    if getattr(config, "max_steps", 0) > 0:
        always.remove("num_train_epochs")
    idle = idle_settings(config)
    shown = {}
    for f in dataclasses.fields(config):
        hidden = f.name.startswith(_NOT_SHOWN) or f.name.endswith("token") or f.name in idle
        if hidden or not f.init:
            continue
        value, default = getattr(config, f.name), f.default
        if f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        value, default = (y.value if isinstance(y, enum.Enum) else y for y in (value, default))
        plain = isinstance(value, (str, bool, int, float, list, tuple))
        # A setting that is None by default may have become False or an empty list.
        changed = value != default and (value or default)
        if plain and (changed or f.name in always) and not os.path.isabs(str(value)):
            shown[f.name] = value
    return shown


def license_of(base: str | None) -> dict[str, str]:
    """The entries license, license_name and license_link of a base model's card, or else of its
    configuration, in its folder or the Hub's cache; {} where neither names a license."""
    if not base:
        return {}
    from huggingface_hub import try_to_load_from_cache

    def place(name: str) -> Path | None:
        if os.path.isdir(base):
            return Path(base, name)
        cached = try_to_load_from_cache(base, name) if _is_hub_id(base) else None
        return Path(cached) if isinstance(cached, str) else None

    card, config = place("README.md"), place("config.json")
    entries: dict[str, Any] = {}
    if card is not None and card.is_file():
        entries = read_card(card.parent).data.to_dict()
    if "license" not in entries and config is not None and config.is_file():
        entries = json.loads(config.read_text(encoding="utf-8"))
    keys = ("license", "license_name", "license_link")
    return {k: entries[k] for k in keys if isinstance(entries.get(k), str)}


def warn_of_unread(**arguments: Any) -> None:
    """Warns of arguments that are not None: transformers' cards show them, and ours do not."""
    if names := [name for name, value in arguments.items() if value is not None]:
        warnings.warn(
            f"fastrl's model card does not show {' and '.join(names)}: name data sets on the "
            "Hub by dataset_tags, and write the rest into README.md",
            stacklevel=3,
        )


def card_of_trainer(
    folder: str,
    name: str | None,
    model: Any,
    history: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
) -> None:
    """Writes the card of a model that transformers' Trainer has trained.

    Args:
        name: the model's name; by default the folder's.
        history: the trainer's logs, whose last results the card shows.
        facts: keyword arguments of :class:`Training`.
    """
    name = name or Path(folder).absolute().name
    write_model_card(folder, name, model, Training(**{"results": _last_results(history), **facts}))


def _last_results(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of the last evaluation in a log; without any, the last loss and reward."""
    for entry in reversed(history):
        results = {k: x for k, x in entry.items() if k.startswith("eval_")}
        if results:
            return results
    for entry in reversed(history):
        if "loss" in entry:
            return {k: entry[k] for k in ("loss", "reward") if k in entry}
    return {}


def _card(text: str, **data: Any) -> Any:
    from huggingface_hub import ModelCard, ModelCardData

    yaml = ModelCardData(**data).to_yaml()
    return ModelCard(f"---\n{yaml}\n---\n\n{text.strip()}\n", ignore_metadata_errors=True)


def _write(folder: Path, card: Any) -> None:
    write_file(folder / "README.md", str(card))


def _table(title: str, names: tuple[str, str], rows: Mapping[str, Any]) -> str:
    """A section with a table; "" without rows."""
    if not rows:
        return ""
    lines = [f"| {' | '.join(names)} |", "| --- | --- |"]
    lines += [f"| `{k}` | {_cell(x)} |" for k, x in rows.items()]
    return f"\n## {title}\n\n" + "\n".join(lines) + "\n"


def _results(numbers: Mapping[str, Any]) -> str:
    """The section of numbers that say something of the model, in four digits."""
    numbers = {k: x for k, x in numbers.items() if isinstance(x, (int, float))}
    shown = {k: f"{x:.4g}" for k, x in numbers.items() if not _NO_RESULT.search(k)}
    return _table("Results", ("of", "value"), shown)


def _rows(text: str, title: str) -> dict[str, str]:
    """The rows of a section that :func:`_table` has made."""
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(.+?)` \| (.*) \|$", section, re.MULTILINE))


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _versions(peft: bool) -> str:
    distributions = {"fastrl": "fastrl-lm", "transformers": "transformers", "torch": "torch"}
    versions = []
    for name, distribution in (distributions | ({"peft": "peft"} if peft else {})).items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(distribution)}")
    return ", ".join(versions)


def _kind(inner: Any) -> str:
    if getattr(inner.config, "is_encoder_decoder", False):
        return "seq2seq"
    core = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    kinds = {"SequenceClassification": "reward", "ConditionalGeneration": "multimodal"}
    return kinds.get(type(core).__name__.rpartition("For")[2], "causal")


def _adapters(model: Any, inner: Any) -> dict[str, Any]:
    """The adapters that are saved; of fastrl's wrappers, no reference's and no reward model's."""
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


def on_the_hub(datasets: Any) -> list[str]:
    """The names of a data set, or of several, that are ids of the Hub."""
    named = datasets if isinstance(datasets, (list, tuple)) else [datasets]
    texts = [x for x in named if isinstance(x, str)]
    return [x for x in texts if _is_hub_id(x) and not os.path.exists(x)]


def _adapter_name(adapters: dict[str, Any]) -> str:
    kinds = {str(getattr(c.peft_type, "value", c.peft_type)) for c in adapters.values()}
    names = {"LORA": "LoRA"}
    return " and ".join(sorted(names.get(kind, kind) for kind in kinds)) + " adapter"


def _lora_settings(adapters: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for config in adapters.values():
        if isinstance(getattr(config, "lora_alpha", None), (int, float)):
            targets = config.target_modules or ()
            targets = targets if isinstance(targets, str) else ", ".join(sorted(targets))
            settings |= {"lora_r": config.r, "lora_alpha": config.lora_alpha}
            settings["lora_target_modules"] = targets
    return settings


def _four_bits(inner: Any, adapters: dict[str, Any]) -> dict[str, Any]:
    """How an adapter's base was quantised to four bits as it was loaded, as arguments of
    BitsAndBytesConfig; {} where it was not, or where the base's own files are in four bits."""
    base = inner.get_base_model() if adapters and hasattr(inner, "get_base_model") else None
    config = getattr(getattr(base, "config", None), "quantization_config", None)
    prequantized = getattr(getattr(base, "hf_quantizer", None), "pre_quantized", False)
    if prequantized or not getattr(config, "load_in_4bit", False):
        return {}
    assert config is not None
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": config.bnb_4bit_quant_type,
        "bnb_4bit_use_double_quant": config.bnb_4bit_use_double_quant,
        "bnb_4bit_compute_dtype": str(config.bnb_4bit_compute_dtype).removeprefix("torch."),
    }


def _quantised_from(inner: Any) -> str:
    """The dtype of weights before their quantisation to four bits, whose result depends on it."""
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
    return f"beside the weights, in `{HEAD_NAME}`" + ("" if trained else "; not trained")


def _tokenizer_in(folder: Path | None) -> tuple[bool, bool]:
    """Whether a tokenizer is saved in a folder, and whether it writes chats."""
    if folder is None:
        return False, False
    settings, tekken = folder / "tokenizer_config.json", folder / "tekken.json"
    if (folder / "chat_template.jinja").exists() or tekken.exists():
        return settings.exists() or tekken.exists(), True
    return settings.exists(), settings.exists() and '"chat_template"' in settings.read_text("utf-8")
