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
        lines = []
        for attribute in cls.attributes.values():
            sentence, default = _field(attribute)
            if sentence:
                lines.append(f"    {attribute.name}: {sentence}")
                if attribute.name in cls.parameters:
                    cls.parameters[attribute.name].default = default
        if lines and cls.docstring:
            cls.docstring.value += "\n".join(["\n\nAttributes:", *lines])

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            text = _SHARED.sub(lambda m: f"{m[1]}{' '.join(m[2].split())}: ", text)
            obj.docstring.value = text.replace("][,", "]\\[,")  # or Markdown sees a link


def _field(attribute: griffe.Attribute) -> tuple[str, str | None]:
    """The sentence and the default of a field that has them in its helper."""
    made_by = ast.parse(str(attribute.value or "None"), mode="eval").body
    if attribute.docstring or not isinstance(made_by, ast.Call) or not made_by.args:
        return "", None
    sentence, *default = made_by.args
    if not isinstance(sentence, ast.Constant) or not isinstance(sentence.value, str):
        return "", None
    if not default:
        return sentence.value, None
    # A name is that of a function which makes the default.
    called = "()" if isinstance(default[0], ast.Name) else ""
    return sentence.value, ast.unparse(default[0]) + called
