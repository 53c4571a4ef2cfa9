"""TrlParser: dataclasses from a command line and a YAML file."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from fastrl.eras import flags_taken, settings_taken


class TrlParser(HfArgumentParser):
    """transformers' HfArgumentParser, with ``--config FILE.yaml``, whose settings replace defaults;
    flags win over the file. ``env`` in the file sets environment variables. Settings of other
    versions of TRL are translated, see :mod:`fastrl.eras`.

    Args:
        dataclass_types: one dataclass, or several.
        ignore_extra_args: the same as ``fail_with_unknown_args=False`` in
            :meth:`parse_args_and_config`.
    """

    def __init__(
        self, dataclass_types: Any = None, ignore_extra_args: bool = False, **options: Any
    ):
        self.ignore_extra_args = ignore_extra_args
        if dataclass_types is None:
            dataclass_types = []
        elif not isinstance(dataclass_types, Iterable):
            dataclass_types = [dataclass_types]
        super().__init__(dataclass_types=list(dataclass_types), **options)

    def parse_args_and_config(
        self,
        args: Sequence[str] | bool | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Returns instances of the dataclasses.

        Args:
            args: the command line's words; None: the program's.
            return_remaining_strings: return a list, too, of words that no dataclass reads, and of
                the file's settings that none reads, as flags.
            fail_with_unknown_args: refuse settings of the file that no dataclass has.
            separate_remaining_strings: return the remaining strings as two lists, the file's first.

        Raises:
            FileNotFoundError: there is no file at the path of ``--config``.
            ValueError: the file or ``env`` in it is no mapping; a setting or flag is unknown.
        """
        if isinstance(args, bool):  # TRL 0.11 took return_remaining_strings first
            return_remaining_strings, args = args, None
        words = list(sys.argv[1:] if args is None else args)
        config = _taken_from(words)
        kinds = list(self.dataclass_types)
        with settings_taken(kinds, config) as config, flags_taken(kinds, words) as rest:
            unread = self.set_defaults_with_config(**config)
            rest = _required(kinds, config) + rest
            instances = self.parse_args_into_dataclasses(
                args=rest, return_remaining_strings=return_remaining_strings
            )
        if return_remaining_strings:
            last = instances[-1]
            remaining = (unread, last) if separate_remaining_strings else (unread + last,)
            return (*instances[:-1], *remaining)
        if unread and fail_with_unknown_args and not self.ignore_extra_args:
            raise ValueError(
                f"the configuration file has settings that nothing reads: {' '.join(unread)}; "
                "leave them out"
            )
        return instances

    def parse_dict(self, args: dict[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Instances of the dataclasses from a mapping of settings, such as HfArgumentParser reads
        from YAML and JSON files; raises ValueError for other keys unless ``allow_extra_keys``."""
        with settings_taken(list(self.dataclass_types), args) as rest:
            return super().parse_dict(rest, allow_extra_keys=allow_extra_keys)

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        """Replaces defaults by values; returns settings that no dataclass has, as flags."""
        names = {x.name for kind in self.dataclass_types for x in dataclasses.fields(kind)}
        self.set_defaults(**{name: x for name, x in config.items() if name in names})
        return [x for k, v in config.items() if k not in names for x in (f"--{k}", str(v))]


def _required(kinds: Sequence[Any], config: dict[str, Any]) -> list[str]:
    """The file's settings without a default in a dataclass, as flags: the parser requires them."""
    needed = [
        x.name
        for kind in kinds
        for x in dataclasses.fields(kind)
        if x.default is x.default_factory is dataclasses.MISSING
    ]
    flags = []
    for name in needed:
        if name in config:
            value = config[name]
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def _taken_from(words: list[str]) -> dict[str, Any]:
    """Removes ``--config FILE`` from the words; returns the file's settings."""
    for i, word in enumerate(words):
        flag, joined, path = word.partition("=")
        if flag == "--config":
            end = i + 1 if joined else i + 2
            path = path if joined else "".join(words[i + 1 : end])
            del words[i:end]
            return _read(path)
    return {}


def _read(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config: there is no file {path!r}")
    config = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    if not isinstance(config, dict):
        raise ValueError(f"--config: {path} holds no mapping of settings to values")
    variables = config.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ValueError("`env` field should be a dict in the YAML file.")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    return config


def init_zero_verbose() -> None:
    """Makes ``logging`` show only errors, by rich, and sends Python's warnings to it."""
    from rich.logging import RichHandler

    logging.basicConfig(
        format="%(message)s", datefmt="[%X]", handlers=[RichHandler()], level=logging.ERROR
    )

    def log(message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        logging.warning("%s:%s: %s: %s", filename, lineno, category.__name__, message)

    warnings.showwarning = log  # type: ignore[assignment]
