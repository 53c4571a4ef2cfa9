"""Tells griffe, which reads the API's docstrings, what it cannot know by itself.

A dataclass's field may have its sentence in the helper that makes it, as in
``gamma: float = _help("Discount γ.", 1.0)``: such fields become the class's attributes. A name may
stand in Sphinx's form, :class:`fastrl.PPOConfig`. Several arguments may share a description, over
more than one line.
"""

import ast
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`~?([^`]+)`")
_SHARED = re.compile(r"^( +)((?:\w+,\s+)+\w+): ", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        fields = [line for each in cls.attributes.values() for line in _field(each)]
        if fields and cls.docstring:
            cls.docstring.value += "\n".join(["\n\nAttributes:", *fields])

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = _SHARED.sub(lambda m: f"{m[1]}{' '.join(m[2].split())}: ", text)
            obj.docstring.value = text.replace("][,", "]\\[,")  # or Markdown sees a link


def _field(attribute: griffe.Attribute) -> list[str]:
    """The line of a field with a sentence in its helper; else nothing."""
    made_by = ast.parse(str(attribute.value or "None"), mode="eval").body
    if attribute.docstring or not isinstance(made_by, ast.Call) or not made_by.args:
        return []
    sentence, *default = made_by.args
    if not isinstance(sentence, ast.Constant) or not isinstance(sentence.value, str):
        return []
    # A name is that of a function which makes the default.
    known = default and not isinstance(default[0], ast.Name)
    ending = f" Default: `{ast.unparse(default[0])}`." if known else ""
    return [f"    {attribute.name}: {sentence.value}{ending}"]
