"""What transformers, PEFT and datasets have taken away since programs for TRL were written, served
to those programs alone: most of it with one warning that says what stands in its place."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from fastrl.eras import (
    OfEveryEra,
    base_of,
    fields_added_to,
    flags_taken,
    of_another_era,
    of_every_era,
    settings_taken,
)

_GONE: set[str] = set()  # names of which a warning was shown, and warnings without such a name
_TEMPORARY = "nothing: a temporary folder is always used"
_SAFE = "nothing: weights are saved as safetensors"
_ALL_SCORES = "top_k=None, which sorts by score: pick what is meant by its label, not by its place"


class Served(NamedTuple):
    """An attribute that is gone, or has changed, and is served as it was.

    Attributes:
        owner: what has the attribute: a module, or "module:Class".
        attribute: the attribute's name.
        made: makes what was there then from what is there now, or from None.
    """

    owner: str
    attribute: str
    made: Callable[[Any], Any]


def _say(old: str, new: str) -> None:
    _say_once(old, f"{old} is gone: use {new}")


def _say_once(about: str, text: str) -> None:
    if about not in _GONE:
        _GONE.add(about)
        warnings.warn(text, stacklevel=5)


def _wrapped(change: Callable[[dict[str, Any]], None]) -> Callable[[Any], Any]:
    """Makes a wrapper of functions, which applies ``change`` to the keywords of each call."""

    def made(now: Any) -> Any:
        @functools.wraps(now)
        def then(*args: Any, **keywords: Any) -> Any:
            change(keywords)
            return now(*args, **keywords)

        return then

    return made


def _all_scores(now: Any) -> Any:
    """``TextClassificationPipeline._sanitize_parameters`` with ``return_all_scores``, whose scores
    are in the order of the labels; those of ``top_k=None`` are sorted."""

    @functools.wraps(now)
    def then(self: Any, *args: Any, return_all_scores: bool | None = None, **keywords: Any) -> Any:
        before, forward, after = now(self, *args, **keywords)
        if return_all_scores is not None:
            _say("return_all_scores", _ALL_SCORES)
            after["top_k"] = None if return_all_scores else 1
        return before, forward, after

    return then


def _chat_template(now: Any) -> Any:
    """``apply_chat_template`` as it was: it returns token ids, no dict, and takes empty chats."""

    @functools.wraps(now)
    def then(self: Any, conversation: Any, *args: Any, **keywords: Any) -> Any:
        ids = keywords.get("tokenize", True)
        if isinstance(conversation, list) and not conversation:
            return [] if ids else ""
        if ids and "return_dict" not in keywords:
            keywords["return_dict"] = False
        return now(self, conversation, *args, **keywords)

    return then


def _token(keywords: dict[str, Any]) -> None:
    if "use_auth_token" in keywords:
        _say("use_auth_token", "token")
        keywords.setdefault("token", keywords.pop("use_auth_token"))


def _upload(keywords: dict[str, Any]) -> None:
    _token(keywords)
    for name, today in (("use_temp_dir", _TEMPORARY), ("safe_serialization", _SAFE)):
        if keywords.pop(name, None) is not None:
            _say(f"push_to_hub({name}=)", today)


def _data(keywords: dict[str, Any]) -> None:
    _token(keywords)
    if keywords.pop("trust_remote_code", None):
        _say("load_dataset(trust_remote_code=)", "nothing: datasets runs no code of a data set")


def _encode(name: str) -> Callable[[Any], Any]:
    """Makes a method of tokenizers that is gone; it calls the tokenizer."""

    def then(self: Any, *args: Any, **keywords: Any) -> Any:
        _say(f"tokenizer.{name}", "tokenizer(...)")
        return self(*args, **keywords)

    return lambda _: then


def _trainer(now: Any) -> Any:
    """``Trainer.__init__`` with ``tokenizer=``, and ``compute_loss`` without num_items_in_batch."""

    @functools.wraps(now)
    def then(self: Any, *args: Any, **keywords: Any) -> None:
        if "tokenizer" in keywords:
            _say("Trainer(tokenizer=)", "processing_class=")
            keywords["processing_class"] = keywords.pop("tokenizer")
        compute_loss = self.compute_loss
        takes = inspect.signature(compute_loss).parameters
        if "num_items_in_batch" not in takes and "kwargs" not in takes:
            _say("compute_loss without num_items_in_batch", "compute_loss(..., **kwargs)")
            self.compute_loss = lambda *x, num_items_in_batch=None, **y: compute_loss(*x, **y)
        now(self, *args, **keywords)

    return then


def _bits(keywords: dict[str, Any]) -> None:
    """Translates ``use_auth_token``, ``use_flash_attention_2``, ``load_in_8bit`` and
    ``load_in_4bit`` of from_pretrained; a ``quantization_config`` beside the last two wins."""
    _token(keywords)
    if keywords.pop("use_flash_attention_2", None):
        _say("from_pretrained(use_flash_attention_2=)", "attn_implementation='flash_attention_2'")
        keywords.setdefault("attn_implementation", "flash_attention_2")
    named = [name for name in ("load_in_8bit", "load_in_4bit") if name in keywords]
    bits = {name: True for name in named if keywords.pop(name)}
    if bits:
        from transformers import BitsAndBytesConfig

        flags = ", ".join(f"{name}=True" for name in bits)
        _say(f"from_pretrained({flags})", f"quantization_config=BitsAndBytesConfig({flags})")
        if keywords.get("quantization_config") is None:
            keywords["quantization_config"] = BitsAndBytesConfig(**bits)


def _from_pretrained(now: Any) -> Any:
    """The class method ``from_pretrained`` with the keywords of :func:`_bits`."""
    change = _wrapped(_bits)(now.__func__)
    return classmethod(change)


def _init(name: str, now: Any) -> Any:
    """An ``__init__`` of transformers' arguments, with the settings of other versions."""
    return of_every_era(getattr(importlib.import_module("transformers"), name), now)


def _dataclass(now: Any) -> Any:
    """``dataclasses.dataclass``, whose subclasses of transformers' TrainingArguments take the
    settings of other versions as well."""

    @functools.wraps(now)
    def then(kind: Any = None, /, **options: Any) -> Any:
        def made(kind: type) -> type:
            writes = "__init__" not in vars(kind)
            kind = now(kind, **options)
            if writes and base_of(kind) is not None and not isinstance(kind, OfEveryEra):
                kind.__init__ = of_every_era(kind, kind.__init__)  # type: ignore[misc]
            return kind

        return made if kind is None else made(kind)

    return then


class _Shown:
    """A dataclass as a parser of flags sees it: without the settings ``but``."""

    def __init__(self, kind: type, but: set[str]):
        self.kind = kind
        fields = kind.__dataclass_fields__.items()  # type: ignore[attr-defined]
        self.__dataclass_fields__ = {name: x for name, x in fields if name not in but}

    def __call__(self, **keywords: Any) -> Any:
        return self.kind(**keywords)


def _shown(kinds: Sequence[type]) -> list[Any]:
    """The dataclasses, each without settings that another dataclass, of the program's own,
    declares: when the program was written, nothing else had these names."""
    programs = {kind: fields_added_to(kind) for kind in kinds if not _is_ours(kind)}
    shown: list[Any] = []
    for kind in kinds:
        declared = {x for other, names in programs.items() if other is not kind for x in names}
        fields = {x.name for x in dataclasses.fields(kind) if x.init}
        shadowed = declared & (fields - programs.get(kind, set()))
        for name in sorted(shadowed):
            warning = f"--{name} is the program's own: {kind.__name__}.{name} keeps its default"
            _say_once(warning, warning)
        shown.append(_Shown(kind, shadowed) if shadowed else kind)
    return shown


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("fastrl", "transformers")


def _add_flags(now: Any) -> Any:
    """``HfArgumentParser._add_dataclass_arguments`` without what :func:`_shown` leaves out."""

    @functools.wraps(now)
    def then(self: Any, kind: Any) -> Any:
        kinds = list(self.dataclass_types)
        (shown,) = (x for x, k in zip(_shown(kinds), kinds, strict=True) if k is kind)
        if shown is kind:
            return now(self, kind)
        fields = kind.__dataclass_fields__
        kind.__dataclass_fields__ = shown.__dataclass_fields__
        try:
            return now(self, kind)
        finally:
            kind.__dataclass_fields__ = fields

    return then


def _parse(now: Any, taken: Any, default: Callable[[], Any]) -> Any:
    """A parser's method that reads flags or settings, with those of other versions."""

    @functools.wraps(now)
    def then(self: Any, args: Any = None, *rest: Any, **keywords: Any) -> Any:
        kinds = list(self.dataclass_types)
        with taken(kinds, default() if args is None else args) as todays:
            self.dataclass_types = _shown(kinds)
            try:
                return now(self, todays, *rest, **keywords)
            finally:
                self.dataclass_types = kinds

    return then


def _alias(home: str, name: str, old: str, but: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """A function or class in the place of one that is gone; keywords ``but`` are dropped."""

    def then(*args: Any, **keywords: Any) -> Any:
        dropped = {key: keywords.pop(key) for key in but if key in keywords}
        without = f", which has no {', '.join(dropped)}" if dropped else ""
        _say(old, f"{home}.{name}{without}")
        return getattr(importlib.import_module(home), name)(*args, **keywords)

    return lambda _: then


def _now_called(name: str, gone: None) -> Any:
    """A class of transformers that is served in the place of one that is gone."""
    return getattr(importlib.import_module("transformers"), name)


# Classes of transformers by the names that they had.
CLASSES = {
    "BloomTokenizerFast": "PreTrainedTokenizerFast",
    "EvaluationStrategy": "IntervalStrategy",
    "AutoModelForVision2Seq": "AutoModelForImageTextToText",
    "AutoModelWithLMHead": "AutoModelForCausalLM",
}
SERVED = (
    Served("transformers:TextClassificationPipeline", "_sanitize_parameters", _all_scores),
    Served("transformers.modeling_utils:PreTrainedModel", "from_pretrained", _from_pretrained),
    Served(
        "transformers.models.auto.auto_factory:_BaseAutoModelClass",
        "from_pretrained",
        _from_pretrained,
    ),
    Served(
        "transformers.tokenization_utils_base:PreTrainedTokenizerBase",
        "apply_chat_template",
        _chat_template,
    ),
    Served("dataclasses", "dataclass", _dataclass),
    *(
        Served(f"transformers:{name}", "__init__", functools.partial(_init, name))
        for name in ("TrainingArguments", "Seq2SeqTrainingArguments")
    ),
    Served("transformers:TrainingArguments", "__getattr__", lambda _: of_another_era),
    Served("transformers:HfArgumentParser", "_add_dataclass_arguments", _add_flags),
    Served(
        "transformers:HfArgumentParser",
        "parse_args_into_dataclasses",
        functools.partial(_parse, taken=flags_taken, default=lambda: sys.argv[1:]),
    ),
    Served(
        "transformers:HfArgumentParser",
        "parse_dict",
        functools.partial(_parse, taken=settings_taken, default=dict),
    ),
    Served("transformers:Trainer", "__init__", _trainer),
    *(
        Served(owner, "push_to_hub", _wrapped(_upload))  # each class has a copy of its own
        for owner in (
            "transformers.utils.hub:PushToHubMixin",
            "transformers:PreTrainedModel",
            "transformers.tokenization_utils_base:PreTrainedTokenizerBase",
            "transformers:PreTrainedConfig",
            "transformers:ProcessorMixin",
        )
    ),
    *(
        Served("transformers.tokenization_utils_base:PreTrainedTokenizerBase", name, _encode(name))
        for name in ("encode_plus", "batch_encode_plus")
    ),
    Served(
        "transformers.tokenization_utils_base:PreTrainedTokenizerBase",
        "from_pretrained",
        _from_pretrained,
    ),
    Served(
        "transformers.models.auto.tokenization_auto:AutoTokenizer",
        "from_pretrained",
        _from_pretrained,
    ),
    Served("datasets", "load_dataset", _wrapped(_data)),
    Served(
        "peft",
        "prepare_model_for_int8_training",
        _alias(
            *("peft", "prepare_model_for_kbit_training", "prepare_model_for_int8_training"),
            but=("layer_norm_names", "output_embedding_layer_name"),
        ),
    ),
    *(
        Served("transformers", old, functools.partial(_now_called, name))
        for old, name in CLASSES.items()
    ),
    Served("transformers", "AdamW", _alias("torch.optim", "AdamW", "transformers.AdamW")),
)
# Functions and classes that are served, by the module that had them: what stands in their place.
GONE = {
    ("peft", "prepare_model_for_int8_training"): "peft.prepare_model_for_kbit_training",
    ("transformers", "AdamW"): "torch.optim.AdamW",
    **{("transformers", old): f"transformers.{name}" for old, name in CLASSES.items()},
}
# Keywords that are served, by the call that had them: what stands in their place today.
KEYWORDS = {
    ("pipeline", "return_all_scores"): _ALL_SCORES,
    ("from_pretrained", "load_in_8bit"): "quantization_config=BitsAndBytesConfig(...)",
    ("from_pretrained", "load_in_4bit"): "quantization_config=BitsAndBytesConfig(...)",
    ("from_pretrained", "use_auth_token"): "token",
    ("load_dataset", "use_auth_token"): "token",
    ("from_pretrained", "use_flash_attention_2"): "attn_implementation='flash_attention_2'",
    ("load_dataset", "trust_remote_code"): "nothing, datasets runs no code of a data set",
    ("push_to_hub", "use_temp_dir"): _TEMPORARY,
    ("push_to_hub", "safe_serialization"): _SAFE,
    ("Trainer", "tokenizer"): "processing_class",
    **dict.fromkeys(
        (
            ("prepare_model_for_int8_training", "layer_norm_names"),
            ("prepare_model_for_int8_training", "output_embedding_layer_name"),
        ),
        "nothing, each layer norm and the head are float32",
    ),
}


@contextmanager
def served_as_then() -> Iterator[None]:
    """Context in which all of :data:`SERVED` is there."""
    with ExitStack() as back:
        for owner, attribute, made in SERVED:
            module, _, inner = owner.partition(":")
            place = importlib.import_module(module)
            place = getattr(place, inner) if inner else place
            defined_here = attribute in vars(place)
            before = vars(place).get(attribute)
            setattr(place, attribute, made(getattr(place, attribute, None)))
            if defined_here:
                back.callback(setattr, place, attribute, before)
            else:
                back.callback(delattr, place, attribute)
        _GONE.clear()
        yield
