"""Settings of other versions of TRL and transformers: what became of each.

:data:`ERAS` is the one table: configurations take its settings in their constructor, command lines
take them as flags, `fastrl migrate` and the documents list them.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

SAID_TWICE = "FASTRL_TRUST_REMOTE_CODE"  # the variable that must confirm trust_remote_code
RENAMED, KEPT, IDLE, REFUSED = "renamed", "kept", "changes nothing", "refused"


def _as_it_is(value: Any, settings: Mapping[str, Any]) -> Any:
    return value


class Era(NamedTuple):
    """A setting, or values of one, that today's configurations do not have.

    Attributes:
        kind: RENAMED: ``today`` gets the setting's value; KEPT: the setting is honoured under its
            old name; IDLE: it changes nothing; REFUSED: a value other than ``default`` and None is
            an error.
        today: the setting of today; or in words what to use, or why there is nothing to set.
        default: the setting's default in other versions.
        value: maps the old value and today's settings to today's value, None to set nothing; for a
            KEPT setting it checks the value, or puts it into effect.
    """

    kind: str
    today: str
    default: Any = None
    value: Callable[[Any, Mapping[str, Any]], Any] = _as_it_is

    @property
    def is_plain(self) -> bool:
        """Whether today's setting has the same value."""
        return self.value is _as_it_is


def _renamed(today: str, default: Any = None, value: Any = None) -> Era:
    return Era(RENAMED, today, default, value) if value else Era(RENAMED, today, default)


def _warmup(ratio: float, settings: Mapping[str, Any]) -> Any:
    return None if settings.get("warmup_steps") else ratio  # warmup_steps has precedence


def _tensorboard(folder: str, settings: Mapping[str, Any]) -> None:
    os.environ["TENSORBOARD_LOGGING_DIR"] = folder


def _liger(wanted: bool, settings: Mapping[str, Any]) -> bool:
    """Whether Liger's layers are wanted and installed. Losses need none of Liger's kernels."""
    return bool(wanted) and importlib.util.find_spec("liger_kernel") is not None


def _trusted_twice(trusted: bool, settings: Mapping[str, Any]) -> None:
    if trusted and os.environ.get(SAID_TWICE) != "1":
        raise ValueError(
            f"runs Python code that comes with the model: read it, and set {SAID_TWICE}=1 in the "
            "environment, too"
        )


def _at_least_one(count: Any, settings: Mapping[str, Any]) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError("must be a whole number of at least 1")


_NOTHING_TO_CLEAR = "a run puts what an earlier one has left in its folder aside, and removes none"
_KEYWORDS = "_given"  # where a configuration, or its pickle, keeps other versions' keywords
_DEVICE = "accelerate chooses the device; use_cpu=True takes the CPU"
_ONE_FORMAT = "weights are saved as safetensors"
_PRECISION = "bf16 and fp16 say it all"
_HEAD = "losses and log-probs come out of the LM head in chunks, without logits"
_ENGINE = "fastrl's rollout engine generates in this process, on the trained weights"
_PACKING = "packing=True fills rows of max_length tokens"
_PADS = "padding is never learned from"
_OPTIMIZERS = {"adamw_hf": "adamw_torch"}

_CUT = Era(KEPT, "cut prompts in the data set", None, _at_least_one)

TRAINING: dict[str, Era] = {
    "evaluation_strategy": _renamed("eval_strategy"),
    "warmup_ratio": _renamed("warmup_steps", 0.0, _warmup),
    "group_by_length": _renamed(
        "train_sampling_strategy", False, lambda on, _: "group_by_length" if on else None
    ),
    "logging_dir": Era(KEPT, "the environment's TENSORBOARD_LOGGING_DIR", None, _tensorboard),
    "no_cuda": _renamed("use_cpu", False),
    "per_gpu_train_batch_size": _renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _renamed("per_device_eval_batch_size"),
    "optim": _renamed("optim", None, lambda name, _: _OPTIMIZERS.get(str(name), name)),
    "adafactor": _renamed("optim", False, lambda on, _: "adafactor" if on else None),
    "push_to_hub_token": _renamed("hub_token"),
    "push_to_hub_model_id": _renamed("hub_model_id"),
    "include_inputs_for_metrics": _renamed(
        "include_for_metrics", False, lambda on, _: ["inputs"] if on else None
    ),
    "overwrite_output_dir": Era(IDLE, _NOTHING_TO_CLEAR, False),
    "use_mps_device": Era(IDLE, _DEVICE, False),
    "use_ipex": Era(IDLE, _DEVICE, False),
    "jit_mode_eval": Era(IDLE, _DEVICE, False),
    "save_safetensors": Era(REFUSED, _ONE_FORMAT, True),
    "half_precision_backend": Era(IDLE, _PRECISION, "auto"),
    "fp16_backend": Era(IDLE, _PRECISION, "auto"),
    "fp16_opt_level": Era(IDLE, _PRECISION, "O1"),
    "tpu_num_cores": Era(REFUSED, "fastrl does not train on TPUs"),
    "past_index": Era(REFUSED, "models keep no state from batch to batch", -1),
    "torchdynamo": _renamed("torch_compile_backend"),
    "use_liger": _renamed("use_liger_kernel", False, _liger),
    "use_liger_kernel": _renamed("use_liger_kernel", False, _liger),
}
SFT: dict[str, Era] = {
    **TRAINING,
    "max_seq_length": _renamed("max_length"),
    "dataset_batch_size": Era(IDLE, "rows are encoded in batches of datasets' own size", 1000),
    "infinite": Era(IDLE, "max_steps and num_train_epochs say how long", False),
    "num_of_sequences": Era(IDLE, _PACKING, 1024),
    "chars_per_token": Era(IDLE, _PACKING, 3.6),
}
PREFERENCE: dict[str, Era] = {
    **TRAINING,
    "use_liger_kernel": Era(IDLE, _HEAD, False),
    "max_prompt_length": _CUT,
    "max_completion_length": Era(
        KEPT, "cut completions in the data set, or set max_length", None, _at_least_one
    ),
    "max_target_length": Era(IDLE, "it is of models that have an encoder"),
    "is_encoder_decoder": Era(REFUSED, "models that have an encoder are not trained here"),
    "label_pad_token_id": Era(IDLE, _PADS, -100),
    "padding_value": Era(IDLE, _PADS),
    "generate_during_eval": Era(REFUSED, "pass LogCompletionsCallback(trainer)", False),
    "ref_model_init_kwargs": Era(REFUSED, "load the reference, and pass it as ref_model"),
    "model_adapter_name": Era(REFUSED, "make it the active adapter by model.set_adapter(name)"),
    "ref_adapter_name": Era(REFUSED, "load the reference, and pass it as ref_model"),
    "force_use_ref_model": Era(IDLE, "a ref_model that is passed is used", False),
    "reference_free": Era(REFUSED, "take a loss without a reference, such as simpo", False),
    "use_num_logits_to_keep": Era(IDLE, _HEAD, False),
    "use_logits_to_keep": Era(IDLE, _HEAD, False),
    "use_liger_loss": Era(IDLE, _HEAD, False),
    "base_model_attribute_name": Era(IDLE, _HEAD, "model"),
    "tools": Era(REFUSED, "a column tools of the data set has them"),
}
DPO: dict[str, Era] = {**PREFERENCE}
KTO: dict[str, Era] = {
    **PREFERENCE,
    "truncation_mode": Era(REFUSED, "what is longer than max_length loses its end", "keep_start"),
}
ONLINE: dict[str, Era] = {
    **TRAINING,
    "use_liger_kernel": Era(IDLE, _HEAD, False),
    "max_prompt_length": _CUT,
    "top_k": _renamed("top_k", 0, lambda k, _: 0 if k in (-1, None) else k),
    "wandb_log_unique_prompts": _renamed("log_unique_prompts", False),
    "use_liger_loss": Era(IDLE, _HEAD, False),
    "vllm_guided_decoding_regex": _renamed("vllm_structured_outputs_regex"),
    **dict.fromkeys(("vllm_device", "vllm_dtype"), Era(IDLE, _ENGINE, "auto")),
    "vllm_max_model_len": _renamed("vllm_max_model_length"),
    "vllm_enable_prefix_caching": Era(IDLE, _ENGINE, False),
}
RLOO: dict[str, Era] = {
    **ONLINE,
    "rloo_k": _renamed("num_generations"),
    "cliprange": _renamed("epsilon"),
    "kl_coef": _renamed("beta"),
    "exp_name": _renamed("run_name"),
    "normalize_reward": _renamed("normalize_advantages"),
    "num_ppo_epochs": _renamed("num_iterations"),
    "num_mini_batches": _renamed("steps_per_generation"),
    "response_length": _renamed("max_completion_length"),
    "token_level_kl": Era(REFUSED, "the KL is a response's", False),
}
MODEL: dict[str, Era] = {
    "torch_dtype": _renamed("dtype"),
    "trust_remote_code": Era(
        KEPT, f"set {SAID_TWICE}=1 in the environment, too", False, _trusted_twice
    ),
}


ERAS: dict[str, dict[str, Era]] = {  # by configuration, then by setting
    "TrainingArguments": TRAINING,  # transformers', under `fastrl run-trl`
    "SFTConfig": SFT,
    "GKDConfig": SFT,  # TRL's derives from that
    "RewardConfig": TRAINING,
    "DPOConfig": DPO,
    "KTOConfig": KTO,
    "GRPOConfig": ONLINE,
    "RLOOConfig": RLOO,
    "PPOv2Config": {**TRAINING, "use_liger_kernel": Era(IDLE, _HEAD, False)},
    "ModelConfig": MODEL,
}

# TRL 1.16's defaults, where ours differ, by configuration.
DEFAULTS: dict[str, dict[str, Any]] = {
    "SFTConfig": {"learning_rate": 2e-5, "logging_steps": 10, "gradient_checkpointing": True},
    "RewardConfig": {
        "learning_rate": 1e-4,
        "max_length": 1024,
        "disable_dropout": True,
        "logging_steps": 10,
        "gradient_checkpointing": True,
    },
}
MASTERS = (
    "master_weights=True (TRL 1.16: none): of bfloat16 and float16 weights, float32 masters and "
    "moments are kept, with AdamW 12 bytes a weight in place of 4; False loses small steps"
)
_THEIRS: dict[type, dict[str, Any]] = {}  # TRL's defaults, where a program for TRL runs
_OURS = ("fastrl", "transformers")


def other_defaults(config: Any) -> str:
    """A line about settings with fastrl's default where TRL 1.16's differs; "" without any."""
    kind = base_of(type(config))
    if kind is None or kind in _THEIRS or kind.__name__ not in DEFAULTS:
        return ""
    theirs, fields = DEFAULTS[kind.__name__], kind.__dataclass_fields__  # type: ignore[attr-defined]
    ours = {
        name: getattr(config, name)
        for name in theirs
        if type(config).__dataclass_fields__[name] is fields[name]
        and getattr(config, name) == (fields[name].default or False)
    }
    if not ours:
        return ""
    differences = ", ".join(f"{k}={v} ({theirs[k]})" for k, v in ours.items())
    return f"{kind.__name__} has defaults of its own, TRL 1.16's in brackets: {differences}"


@contextmanager
def with_defaults_of_trl(configs: Sequence[type]) -> Iterator[None]:
    """Context in which configurations, and flags and subclasses made in it, have TRL's defaults."""
    with ExitStack() as back:
        for config in configs:
            fields: dict[str, Any] = config.__dataclass_fields__  # type: ignore[attr-defined]
            for name, value in DEFAULTS[config.__name__].items():
                # A class and its bases share a field's object. HfArgumentParser fails where the
                # metadata of a flag whose default is True have nargs.
                mine = copy.copy(fields[name])
                mine.default, mine.metadata = value, {"help": mine.metadata["help"]}
                back.callback(fields.__setitem__, name, fields[name])
                fields[name] = mine
            _THEIRS[config] = DEFAULTS[config.__name__]
            back.callback(_THEIRS.pop, config)
        back.callback(_PARSED.clear)
        yield


def serves_a_program() -> bool:
    """Whether a program for TRL is being run, see :func:`with_defaults_of_trl`."""
    return bool(_THEIRS)


def base_of(config: type) -> type | None:
    """The first class among a configuration's class and its bases that is fastrl's or transformers'
    and has an entry in :data:`ERAS`; None without one."""
    mine = (x for x in config.__mro__ if x.__module__.partition(".")[0] in _OURS)
    return next((x for x in mine if x.__name__ in ERAS), None)


def _name_of(config: type) -> str:
    """The name by which users know a class of configurations: a command's flags are one of its
    trainer's settings."""
    ours = (x for x in config.__mro__ if x.__module__.partition(".")[0] in _OURS)
    return next((x.__name__ for x in ours if x.__name__.endswith("Config")), config.__name__)


def eras_of(config: type) -> dict[str, Era]:
    """The settings of other versions that a class of configurations takes beside its fields."""
    base = base_of(config)
    return {} if base is None else ERAS[base.__name__]


def fields_added_to(config: type) -> set[str]:
    """The settings that a class of configurations declares beside, or in place of, those of its
    :func:`base_of`; all settings without such a base."""
    base = base_of(config)
    base_fields = {} if base is None else base.__dataclass_fields__  # type: ignore[attr-defined]
    fields = dataclasses.fields(config)
    return {x.name for x in fields if x.init and x is not base_fields.get(x.name)}


class OfEveryEra(type):
    """The metaclass of configurations that take settings by other versions' names. They are
    keywords: a field would be a flag, and a program may have its own flag of that name."""

    def __setattr__(cls, name: str, value: Any) -> None:
        # dataclass() sets the __init__ that it writes; one in a class's body does not come here.
        super().__setattr__(name, of_every_era(cls, value) if name == "__init__" else value)


def of_every_era(config: type, init: Callable[..., None]) -> Callable[..., None]:
    """Wraps the ``__init__`` that dataclass() wrote for a class of configurations, so that it takes
    other versions' settings, also where a subclass's ``__init__`` calls it by ``super()``."""
    taken = inspect.signature(init).parameters

    @functools.wraps(init)
    def then(self: Any, *args: Any, **keywords: Any) -> None:
        kind = type(self)
        settings = {x.name for x in dataclasses.fields(kind) if x.init}
        parsed = _PARSED.get(kind, {}) if settings <= keywords.keys() else {}
        keywords = {**_THEIRS.get(config, {}), **parsed, **_FLAGS.get(kind, {}), **keywords}
        _check_names(kind, taken, keywords)
        all_eras = eras_of(kind)
        fields = {
            name: kind.__dataclass_fields__[name]
            for name in fields_added_to(kind)
            if name in all_eras and all_eras[name].today != name
        }
        # A subclass's own field keeps its value; named as a RENAMED or KEPT setting it acts as one.
        own_fields = {
            name: keywords.get(name, field.default)
            for name, field in fields.items()
            if name in taken and (name in keywords or field.default is not dataclasses.MISSING)
        }
        eras = {
            name: era
            for name, era in all_eras.items()
            if name not in own_fields or era.kind in (RENAMED, KEPT)
        }
        now, kept = todays(kind, {**own_fields, **keywords}, eras)
        vars(self).update(kept, **{_KEYWORDS: {k: v for k, v in keywords.items() if k in eras}})
        init(self, *args, **{**now, **own_fields})

    return then


def _check_names(config: type, taken: Collection[str], settings: Mapping[str, Any]) -> None:
    """Raises TypeError for a setting that no version has, and ValueError where a setting has two
    values, by its old name and today's; ``taken`` are the names of ``__init__``'s arguments."""
    eras, shown = eras_of(config), _name_of(config)
    for name, value in settings.items():
        era = eras.get(name)
        if name not in taken and era is None:
            near = difflib.get_close_matches(name, [*taken, *eras], n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{shown} has no setting {name!r}{hint}")
        if era is None or not era.is_plain or era.kind != RENAMED or value is None:
            continue
        now = settings.get(era.today)  # parsers of command lines give defaults, too
        if now not in (None, value, getattr(config, era.today, None)):
            raise ValueError(
                f"{shown} has {name}={value!r} and {era.today}={now!r}, which are one setting: "
                f"leave {name} out"
            )


def todays(
    config: type, settings: Mapping[str, Any], eras: Mapping[str, Era] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings by today's names, and those kept under old names; warns of other versions' settings.

    Args:
        eras: the settings of other versions; by default those of ``config``.

    Raises:
        ValueError: a setting that is refused, or the wrong value of a kept one; says what to do.
    """
    eras = eras_of(config) if eras is None else eras
    old = {name: settings[name] for name in settings if name in eras}
    now = {name: value for name, value in settings.items() if name not in old}
    kept: dict[str, Any] = {}
    notes = []
    for name, value in old.items():
        era = eras[name]
        if era.today == name:  # today's setting, maybe with another version's value
            now[name] = era.value(value, now)
            if now[name] == value:
                continue
        elif value is None or value == era.default:
            continue
        elif era.kind == REFUSED:
            raise ValueError(f"{_name_of(config)} has no {name}={value!r}: {era.today}")
        elif era.kind == KEPT:
            try:
                era.value(value, now)
            except ValueError as error:
                raise ValueError(f"{name} {error}, got {value!r}") from error
            kept[name] = value
        elif era.kind == RENAMED:
            translated = era.value(value, now)
            if translated is not None:
                now[era.today] = translated
        notes.append(f"{name}={value!r} ({_note(era, now)})")
    if notes:
        joined_notes = "; ".join(notes)
        text = f"settings of other versions in {_name_of(config)}: {joined_notes}"
        warnings.warn(text, stacklevel=3)
    return now, kept


def of_another_era(config: Any, name: str) -> Any:
    """The value of a configuration's setting by its name in another version.

    Raises:
        AttributeError: no version has that name.
    """
    if (era := eras_of(type(config)).get(name)) is not None and era.today != name:
        if era.kind == RENAMED and era.value is _as_it_is:
            return getattr(config, era.today)
        return vars(config).get(_KEYWORDS, {}).get(name, era.default)
    raise AttributeError(f"{type(config).__name__!r} object has no attribute {name!r}")


def _note(era: Era, now: Mapping[str, Any]) -> str:
    if era.kind == RENAMED:
        return f"now {era.today}={now.get(era.today)!r}"
    return f"{'changes nothing' if era.kind == IDLE else 'today'}: {era.today}"


# Settings of other versions in the command line that is read, by the class that takes them; and the
# KEPT ones of a program's command line: a configuration that is made with all fields is a copy of
# the parsed one, and gets them, too.
_FLAGS: dict[type, dict[str, Any]] = {}
_PARSED: dict[type, dict[str, Any]] = {}


@contextmanager
def settings_taken(configs: Sequence[type], values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Context in which configurations take settings by names of other versions from ``values``;
    yields the rest. A setting that a configuration declares is in the rest."""
    by_kind: dict[type, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for name, value in values.items():
        config = taker_of(configs, name)
        (rest if config is None else by_kind.setdefault(config, {}))[name] = value
    before = {config: _FLAGS.get(config, {}) for config in by_kind}
    for config, settings in by_kind.items():
        _FLAGS[config] = {**before[config], **settings}
        if serves_a_program():
            eras = eras_of(config)
            _PARSED[config] = {k: x for k, x in settings.items() if eras[k].kind == KEPT}
    try:
        yield rest
    finally:
        _FLAGS.update(before)


def taker_of(configs: Sequence[type], name: str) -> type | None:
    """The configuration that takes another version's setting; None if none does, or one declares
    it."""
    if any(x.name == name and x.init for config in configs for x in dataclasses.fields(config)):
        return None
    return next((x for x in configs if name in eras_of(x)), None)


@contextmanager
def flags_taken(configs: Sequence[type], words: Sequence[str]) -> Iterator[list[str]]:
    """:func:`settings_taken` with the flags of a command line; yields the other words."""
    rest: list[str] = []
    taken: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, is_one, value = word.partition("=")
        name = name[2:].replace("-", "_") if name.startswith("--") else ""
        if taker_of(configs, name) is None:
            rest.append(word)
            continue
        if not is_one:
            bare = not waiting or waiting[0].startswith("--")
            value = "True" if bare else waiting.pop(0)
        taken[name] = value_of(value)
    with settings_taken(configs, taken):
        yield rest


def value_of(text: str) -> Any:
    """The Python value that a word of a command line stands for."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
