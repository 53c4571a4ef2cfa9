"""Contexts that set attributes and context variables."""

from contextlib import ExitStack
from contextvars import ContextVar
from types import SimpleNamespace

from fastrl.run.contexts import attributes_set, variable_set


class Owner:
    of_class = 1


def test_attributes_are_as_before_behind_the_context():
    owner, other = Owner(), SimpleNamespace(x=1)
    with attributes_set((owner, "of_class", 2), (other, "x", 3), (other, "x", 4)):
        assert (owner.of_class, other.x) == (2, 4)
    assert vars(owner) == {}
    assert owner.of_class == other.x == 1


def test_they_are_after_an_error():
    variable, other = ContextVar("test", default=0), SimpleNamespace(x=1)
    with ExitStack() as stack:
        stack.push(lambda kind, *_: kind is KeyError)
        stack.enter_context(variable_set(variable, 1))
        stack.enter_context(attributes_set((other, "x", variable)))
        assert other.x.get() == 1
        raise KeyError
    assert (variable.get(), other.x) == (0, 1)
