"""Tells griffe, which reads the API's docstrings, what it cannot know by itself.

A configuration, whose fields have their sentences in the helper that makes them, gets a table of
its settings in place of a signature. In a long signature the types of described arguments stand
with the descriptions. A name may stand in Sphinx's form, :class:`fastrl.PPOConfig`. Several
arguments may share a description, over more than one line.
"""

import dataclasses
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from settings import settings, tables  # beside this file

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`~?([^`]+)`")
_SHARED = re.compile(r"^( +)((?:\w+,\s+)+\w+): ", re.MULTILINE)
_LONG = 8  # arguments


class Docstrings(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring and cls.name.endswith(("Config", "Arguments")):
            config = pkgutil.resolve_name(cls.path)
            if dataclasses.is_dataclass(config) and settings(config):
                said, raises = re.split(r"\n*(?=\nRaises:|\Z)", cls.docstring.value, maxsplit=1)
                cls.docstring.value = f"{said}\n\n{tables(config)}\n\n{raises}"
                every = griffe.Parameter("settings", kind=griffe.ParameterKind.var_keyword)
                init = griffe.Function("__init__", parameters=griffe.Parameters(every), parent=cls)
                cls.set_member("__init__", init)
                return
        if cls.docstring and "__init__" in cls.members:
            _move_types(cls.members["__init__"], cls.docstring)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring:
            _move_types(func, func.docstring)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = _SHARED.sub(lambda m: f"{m[1]}{' '.join(m[2].split())}: ", text)
            obj.docstring.value = text.replace("][,", "]\\[,")  # or Markdown sees a link


def _move_types(function: Any, docstring: griffe.Docstring) -> None:
    """Of a long signature, the types of arguments that are described, to their descriptions."""
    if len(function.parameters) <= _LONG:
        return
    for parameter in function.parameters:
        described = re.search(rf"^ +{parameter.name}(?=: )", docstring.value, re.MULTILINE)
        if described and parameter.annotation is not None:
            before, behind = docstring.value[: described.end()], docstring.value[described.end() :]
            docstring.value = f"{before} ({parameter.annotation}){behind}"
            parameter.annotation = None
