"""Contexts that set attributes and context variables."""

from contextvars import ContextVar
from types import SimpleNamespace

import pytest

from fastrl.run.contexts import attributes_set, variable_set


class Owner:
    of_class = 1


def test_attributes_are_as_before_after_an_error():
    owner, other = Owner(), SimpleNamespace(x=1)
    with (
        pytest.raises(KeyError),
        attributes_set((owner, "of_class", 2), (other, "x", 3), (other, "x", 4)),
    ):
        assert (owner.of_class, other.x) == (2, 4)
        raise KeyError
    assert vars(owner) == {}
    assert owner.of_class == other.x == 1


def test_a_variable_is_as_before_after_an_error():
    variable = ContextVar("test", default=0)
    with pytest.raises(KeyError), variable_set(variable, 1):
        assert variable.get() == 1
        raise KeyError
    assert variable.get() == 0
