"""Contexts that set attributes and context variables."""

from contextvars import ContextVar
from types import SimpleNamespace

import pytest

from fastrl.run.contexts import attributes_set, variable_set


class Owner:
    of_class = 1


def test_attributes_are_as_before_after_an_error():
    owner, other = Owner(), SimpleNamespace(x=1)
    context = attributes_set((owner, "of_class", 2), (other, "x", 3), (other, "x", 4))
    context.__enter__()
    assert (owner.of_class, other.x) == (2, 4)
    with pytest.raises(KeyError):
        context.__exit__(KeyError, KeyError(), None)
    assert vars(owner) == {}
    assert owner.of_class == other.x == 1


def test_a_variable_is_as_before_after_an_error():
    variable = ContextVar("test", default=0)
    context = variable_set(variable, 1)
    context.__enter__()
    assert variable.get() == 1
    with pytest.raises(KeyError):
        context.__exit__(KeyError, KeyError(), None)
    assert variable.get() == 0
