"""Tells griffe, which reads the API's docstrings, what it cannot know by itself.

A dataclass's field may have its sentence in the helper that makes it, as in
``gamma: float = _help("Discount γ.", 1.0)``; a name may stand in Sphinx's form,
:class:`fastrl.PPOConfig`; several arguments may share a description, over more than one line.
"""

import ast
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`~?([^`]+)`")
_SHARED = re.compile(r"^( +)((?:\w+,\s+)+\w+): ", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        made_by = getattr(node, "value", None)
        if attr.docstring or not isinstance(made_by, ast.Call) or not made_by.args:
            return
        sentence, *default = made_by.args
        if isinstance(sentence, ast.Constant) and isinstance(sentence.value, str):
            attr.docstring = griffe.Docstring(sentence.value, parent=attr)
            attr.value = ast.unparse(default[0]) if default else None

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = _SHARED.sub(lambda m: f"{m[1]}{' '.join(m[2].split())}: ", text)
            obj.docstring.value = text.replace("][,", "]\\[,")  # or Markdown sees a link
