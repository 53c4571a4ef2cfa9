"""What transformers and PEFT have taken away since programs for TRL were written, served to those
programs alone: each with one warning that says what stands in its place."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from fastrl.eras import TRAINING, flags_of, flags_taken, of_another_era, todays

_GONE: set[str] = set()  # of which a warning was given
_ALL_SCORES = "top_k=None, which sorts by score: pick what is meant by its label, not by its place"


class Served(NamedTuple):
    """A place where something was.

    Attributes:
        owner: of the attribute: a module, or a class in one, with a colon between.
        attribute: its name.
        made: from what is there now (None where nothing is), what was there then.
    """

    owner: str
    attribute: str
    made: Callable[[Any], Any]


def _say(old: str, new: str) -> None:
    if old not in _GONE:
        _GONE.add(old)
        warnings.warn(f"{old} is gone: use {new}", stacklevel=4)


def _wrapped(change: Callable[[dict[str, Any]], None]) -> Callable[[Any], Any]:
    """A call whose keywords are changed before it."""

    def made(now: Any) -> Any:
        @functools.wraps(now)
        def then(*args: Any, **given: Any) -> Any:
            change(given)
            return now(*args, **given)

        return then

    return made


def _all_scores(now: Any) -> Any:
    """``TextClassificationPipeline._sanitize_parameters`` with ``return_all_scores``, whose scores
    are in the order of the labels; those of ``top_k=None`` are sorted."""

    @functools.wraps(now)
    def then(self: Any, *args: Any, return_all_scores: bool | None = None, **given: Any) -> Any:
        before, forward, after = now(self, *args, **given)
        if return_all_scores is not None:
            _say("return_all_scores", _ALL_SCORES)
            after["top_k"] = None if return_all_scores else 1
        return before, forward, after

    return then


def _chat_template(now: Any) -> Any:
    """``apply_chat_template`` returned token ids, where it now returns a dict of them, and took
    chats without a message."""

    @functools.wraps(now)
    def then(self: Any, conversation: Any, *args: Any, **given: Any) -> Any:
        ids = given.get("tokenize", True)
        if isinstance(conversation, list) and not conversation:
            return [] if ids else ""
        if ids and "return_dict" not in given:
            given["return_dict"] = False
        return now(self, conversation, *args, **given)

    return then


def _token(given: dict[str, Any]) -> None:
    if "use_auth_token" in given:
        _say("use_auth_token", "token")
        given.setdefault("token", given.pop("use_auth_token"))


def _upload(given: dict[str, Any]) -> None:
    _token(given)
    if given.pop("use_temp_dir", None) is not None:
        _say("push_to_hub(use_temp_dir=)", "nothing: a temporary folder is always used")


def _trainer(now: Any) -> Any:
    """``Trainer.__init__`` with ``tokenizer=``, and for losses that know no
    ``num_items_in_batch``."""

    @functools.wraps(now)
    def then(self: Any, *args: Any, **given: Any) -> None:
        if "tokenizer" in given:
            _say("Trainer(tokenizer=)", "processing_class=")
            given["processing_class"] = given.pop("tokenizer")
        own = self.compute_loss
        takes = inspect.signature(own).parameters
        if "num_items_in_batch" not in takes and "kwargs" not in takes:
            _say("compute_loss without num_items_in_batch", "compute_loss(..., **kwargs)")
            self.compute_loss = lambda *x, num_items_in_batch=None, **y: own(*x, **y)
        now(self, *args, **given)

    return then


def _bits(given: dict[str, Any]) -> None:
    """``use_auth_token=``, ``load_in_8bit=`` and ``load_in_4bit=`` of from_pretrained."""
    _token(given)
    asked = [name for name in ("load_in_8bit", "load_in_4bit") if given.pop(name, None)]
    if asked:
        from transformers import BitsAndBytesConfig

        (name,) = asked
        _say(f"from_pretrained({name}=)", f"quantization_config=BitsAndBytesConfig({name}=True)")
        given["quantization_config"] = BitsAndBytesConfig(**{name: True})


def _from_pretrained(now: Any) -> Any:
    """A class method, which is looked up with its class."""
    change = _wrapped(_bits)(now.__func__)
    return classmethod(change)


def _arguments(now: Any) -> Any:
    """``TrainingArguments.__init__`` with the settings of other versions."""

    @functools.wraps(now)
    def then(self: Any, *args: Any, **given: Any) -> None:
        given = {**flags_of(type(self)), **given}
        vars(self)["_given"] = {name: x for name, x in given.items() if name in TRAINING}
        now(self, *args, **todays(type(self), given, TRAINING)[0])

    return then


def _parse(now: Any) -> Any:
    @functools.wraps(now)
    def then(self: Any, args: Any = None, *rest: Any, **given: Any) -> Any:
        words = sys.argv[1:] if args is None else args
        with flags_taken(list(self.dataclass_types), words) as todays_words:
            return now(self, todays_words, *rest, **given)

    return then


def _alias(home: str, name: str, old: str) -> Callable[[Any], Any]:
    """Another thing in the place of one that is gone, where it is."""

    def made(now: Any) -> Any:
        if now is not None:
            return now

        def then(*args: Any, **given: Any) -> Any:
            _say(old, f"{home}.{name}")
            return getattr(importlib.import_module(home), name)(*args, **given)

        return then

    return made


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
    Served("transformers:TrainingArguments", "__init__", _arguments),
    Served("transformers:TrainingArguments", "__getattr__", lambda _: of_another_era),
    Served("transformers:HfArgumentParser", "parse_args_into_dataclasses", _parse),
    Served("transformers:Trainer", "__init__", _trainer),
    Served("transformers.utils.hub:PushToHubMixin", "push_to_hub", _wrapped(_upload)),
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
    Served("datasets", "load_dataset", _wrapped(_token)),
    Served(
        "peft",
        "prepare_model_for_int8_training",
        _alias("peft", "prepare_model_for_kbit_training", "prepare_model_for_int8_training"),
    ),
    Served("transformers", "AdamW", _alias("torch.optim", "AdamW", "transformers.AdamW")),
    Served(
        "transformers",
        "BloomTokenizerFast",
        lambda now: now or importlib.import_module("transformers").PreTrainedTokenizerFast,
    ),
)
# Keywords that are served, by the call that had them.
KEYWORDS = {
    ("pipeline", "return_all_scores"): _ALL_SCORES,
    ("from_pretrained", "load_in_8bit"): "today: quantization_config=BitsAndBytesConfig(...)",
    ("from_pretrained", "load_in_4bit"): "today: quantization_config=BitsAndBytesConfig(...)",
    ("from_pretrained", "use_auth_token"): "today: token",
    ("load_dataset", "use_auth_token"): "today: token",
    ("push_to_hub", "use_temp_dir"): "today: nothing, a temporary folder is always used",
    ("Trainer", "tokenizer"): "today: processing_class",
}


@contextmanager
def served_as_then() -> Iterator[None]:
    """Context in which all of :data:`SERVED` is there."""
    with ExitStack() as back:
        for owner, attribute, made in SERVED:
            module, _, inner = owner.partition(":")
            place = importlib.import_module(module)
            place = getattr(place, inner) if inner else place
            own = attribute in vars(place)
            before = vars(place).get(attribute)
            setattr(place, attribute, made(getattr(place, attribute, None)))
            if own:
                back.callback(setattr, place, attribute, before)
            else:
                back.callback(delattr, place, attribute)
        _GONE.clear()
        yield
