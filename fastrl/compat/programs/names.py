"""A table of where fastrl has what TRL programs import, by TRL's modules and names."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import re
import tokenize
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastrl.compat.programs.calls import calls_of, only_named

API = "1.16.0"  # what trl.__version__ says; names mean what they mean in that version
_FASTRL: list[str] = importlib.import_module("fastrl").__all__
# fastrl's module for each of TRL's names, which TRL's modules re-export from each other.
HOMES: dict[str, str] = {
    **{name: "fastrl" for name in _FASTRL if name not in ("__version__", "patch")},
    **dict.fromkeys(
        (
            *("logprobs_from_logits", "entropy_from_logits", "masked_mean", "masked_var"),
            *("masked_whiten", "whiten", "clip_by_value", "top_k_top_p_filtering"),
            *("respond_to_batch", "flatten_dict", "stack_dicts", "stats_to_np"),
            *("convert_to_scalar", "PPODecorators", "randn_tensor"),
        ),
        "fastrl.core",
    ),
    **dict.fromkeys(("AdaptiveKLController", "FixedKLController"), "fastrl.learn.kl_penalty"),
    **dict.fromkeys(
        (
            *("selective_log_softmax", "pad", "listify_batch", "disable_dropout_in_model"),
            *("unwrap_model_for_generation", "profiling_decorator", "profiling_context"),
        ),
        "fastrl.compat.scripts.helpers",
    ),
}
# What to use in place of TRL's trainers that fastrl lacks, by their methods.
INSTEAD = {
    "ORPO": "fastrl align --loss orpo",
    "CPO": "fastrl align --loss simpo or orpo, which know no reference either",
    "BCO": "DPOTrainer with loss_type='bco_pair', or KTOTrainer",
    "OnlineDPO": "fastrl align --loss dpo --task online-pairwise",
    "NashMD": "fastrl align --task online-pairwise, with another loss",
    "XPO": "fastrl align --task online-pairwise, with another loss",
    "PRM": "nothing yet; RewardTrainer judges whole responses",
    "Iterative": "SFTTrainer, or PPOTrainer.step for rewards",
}
MODULES = (
    *("trl", "trl.chat_template_utils", "trl.commands", "trl.commands.cli_utils", "trl.core"),
    *("trl.data_utils", "trl.environment", "trl.environment.base_environment"),
    *("trl.experimental", "trl.experimental.distillation", "trl.experimental.gkd"),
    *("trl.experimental.ppo", "trl.experimental.sdft"),
    *("trl.extras", "trl.extras.best_of_n_sampler"),
    *("trl.extras.dataset_formatting", "trl.extras.profiling", "trl.import_utils", "trl.models"),
    *("trl.models.modeling_base", "trl.models.modeling_value_head", "trl.models.utils"),
    *("trl.rewards", "trl.scripts", "trl.scripts.utils", "trl.trainer", "trl.trainer.callbacks"),
    *("trl.trainer.model_config", "trl.trainer.utils"),
    *(
        f"trl.trainer.{method}_{kind}"
        for method in (
            "distillation",
            "dpo",
            "gkd",
            "grpo",
            "kto",
            "ppo",
            "ppov2",
            "reward",
            "rloo",
            "sft",
        )
        for kind in ("trainer", "config")
    ),
    # Modules of trainers that fastrl lacks, for programs that only name these trainers.
    *(f"trl.trainer.{x.lower()}_{kind}" for x in INSTEAD for kind in ("trainer", "config")),
)
# What names meant in other versions of TRL: PPO's from 0.12 on, RLOO's until 0.21. A program that
# passes one of the keywords in _TOLD_BY to a trainer means these.
SECOND_PPO = {"PPOConfig": "PPOv2Config", "PPOTrainer": "PPOv2Trainer"}
FIRST_RLOO = {"RLOOConfig": "RLOOv1Config", "RLOOTrainer": "RLOOv1Trainer"}
_TOLD_BY: dict[str, tuple[set[str], dict[str, str]]] = {
    "PPOTrainer": ({"args", "processing_class", "value_model", "reward_model"}, SECOND_PPO),
    "RLOOTrainer": ({"policy", "ref_policy", "reward_model"}, FIRST_RLOO),
}
_NEAREST = ": the nearest is "
_NEAR = 0.75  # closeness below which letters in common mean little
_AVAILABLE = re.compile(r"is_(\w+)_available")


def of_its_time(source: str) -> dict[str, str]:
    """Maps names whose meaning has changed to what a program means by them, which is told from the
    keywords that it passes to trainers."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # the program raises it when it runs
        return {}
    origins: dict[str, str] = {}
    names = {**dict(zip(_TOLD_BY, _TOLD_BY, strict=True)), **imported_names(tree)}
    for call in calls_of(tree, names):
        keywords, meant = _TOLD_BY.get(call.name, (set(), {}))
        if keywords & {keyword.arg for keyword in call.keywords}:
            origins |= meant
    return origins


def is_trl(module: str | None) -> bool:
    """Whether a module is ``trl``, or within it."""
    return module is not None and module.partition(".")[0] == "trl"


def imported_names(tree: ast.Module) -> dict[str, str]:
    """The names that a program imports from TRL, by the names that it uses for them."""
    imports = (x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and is_trl(x.module))
    return {alias.asname or alias.name: alias.name for x in imports for alias in x.names}


def only_named_in(source: str) -> set[str]:
    """Returns the names of TRL that a program has, fastrl lacks, and the program runs without, see
    :func:`fastrl.compat.programs.calls.only_named`; but for names that may be misspelt."""
    tree = ast.parse(source)
    nodes = [*ast.walk(tree)]
    aliases = (alias for x in nodes if isinstance(x, ast.Import) for alias in x.names)
    modules = {alias.asname or alias.name for alias in aliases if is_trl(alias.name)}
    reads = (x for x in nodes if isinstance(x, ast.Attribute) and ast.unparse(x.value) in modules)
    without = only_named(tree, {**{x.attr: x.attr for x in reads}, **imported_names(tree)})
    return {name for name in without if name not in HOMES and _NEAREST not in missing(name)}


@cache
def only_named_by(path: str) -> set[str]:
    """Returns :func:`only_named_in` of a file; nothing for what is no Python file."""
    try:
        return only_named_in(read_source(Path(path)))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return set()


def read_source(path: Path) -> str:
    """A Python file's text, by the encoding that it declares.

    Raises:
        SyntaxError: the file declares an unknown encoding.
        UnicodeDecodeError: the file is not in its encoding.
    """
    with tokenize.open(path) as file:
        return file.read()


def stand_in(name: str) -> type:
    """Warns that fastrl lacks a name, and makes a class for it, whose call raises ImportError."""
    message = missing(name)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ImportError(message, name=name)

    warnings.warn(f"{message}; the program only names it, and goes on", stacklevel=2)
    return type(name, (), {"__new__": refuse})


def find(name: str, renamed: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Returns fastrl's object for a name of TRL's.

    Args:
        renamed: maps a name to the one that is looked up in its place.

    Raises:
        AttributeError: fastrl has no such name; the message has the nearest.
    """
    name = renamed.get(name, name)
    if name == "__version__":
        return API
    if name in HOMES:
        home = HOMES[name]
        module = importlib.import_module(home)
        return module if home == f"fastrl.{name}" else getattr(module, name)
    if availability := _AVAILABLE.fullmatch(name):
        return _availability(availability[1])
    raise AttributeError(missing(name))


def home_of(name: str) -> tuple[str, str] | None:
    """The module with a name of TRL's, and its name there; None: only run-trl or nothing has it."""
    if name in HOMES:
        return HOMES[name], name
    availability = _AVAILABLE.fullmatch(name)
    answer = _transformers_check(availability[1]) if availability else None
    return None if answer is None else ("transformers.utils", answer)


def _transformers_check(package: str) -> str | None:
    """The name of transformers' function that says whether a package is there, or None."""
    from transformers import utils

    names = (f"is_{package}_available", f"is_torch_{package}_available")
    return next((name for name in names if hasattr(utils, name)), None)


def missing(name: str, where: str = "trl") -> str:
    """Says that fastrl lacks a name of TRL's, and what is nearest."""
    method = next(
        (x for x in INSTEAD if name in (f"{x}Trainer", f"{x}Config", f"{x.lower()}_trainer")), None
    )
    if method is not None:
        return f"fastrl has no {name} of {where}: use {INSTEAD[method]}"
    names = [*HOMES, *(module.rpartition(".")[2] for module in MODULES)]
    near = difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
    return f"fastrl has no {name} of {where}" + (f"{_NEAREST}{near[0]}" if near else "")


def _availability(package: str) -> Callable[..., bool]:
    """A function that says whether a package can be imported: transformers' own, if it has one."""
    from transformers import utils

    is_available = _transformers_check(package)
    if is_available is not None:
        return getattr(utils, is_available)
    return lambda *_: importlib.util.find_spec(package) is not None
