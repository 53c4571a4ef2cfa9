"""Contexts that set attributes and context variables."""

from contextlib import ExitStack
from contextvars import ContextVar

from fastrl.run.contexts import attributes_set, variable_set


class Owner:
    of_class = 1


def test_all_is_as_before_behind_an_error():
    owner, variable = Owner(), ContextVar("test", default=0)
    owner.own = 1
    with ExitStack() as stack:
        stack.push(lambda kind, *_: kind is KeyError)
        stack.enter_context(variable_set(variable, 1))
        stack.enter_context(attributes_set((owner, "of_class", 2), (owner, "own", 3)))
        assert (owner.of_class, owner.own, variable.get()) == (2, 3, 1)
        raise KeyError
    assert (vars(owner), owner.of_class, variable.get()) == ({"own": 1}, 1, 0)
