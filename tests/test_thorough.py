"""Which tests are run: what `make test` and the parts of `make thorough` have together is all."""

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests import part, thorough

A, B, C = object(), object(), object()


@dataclass(eq=False)
class Item:
    nodeid: str
    callspec: Any


def items(test: str, *sizes: int) -> list[Any]:
    """A test's settings: every combination of parameters with so many values."""
    return [
        Item(f"tests/{test}[{at}]", SimpleNamespace(params=dict(at)))
        for at in (tuple(enumerate(x)) for x in product(*map(range, sizes)))
    ]


def values(some: list[Any]) -> set[tuple[int, int]]:
    return {value for item in some for value in item.callspec.params.items()}


def test_four_of_many_settings_show_four_values_of_each_parameter() -> None:
    all_of_them = items("kernels/test_x.py::test_y", 2, 3, 4)
    few = list(thorough.quick_ones(all_of_them))
    assert len(few) == 4
    assert values(few) == values(all_of_them)
    assert few == list(thorough.quick_ones(all_of_them[::-1]))


def test_another_test_of_the_same_table_shows_others() -> None:
    names = (f"kernels/test_x.py::test_{i}" for i in range(20))
    assert len(values([x for name in names for x in thorough.quick_ones(items(name, 12))])) == 12


@pytest.mark.parametrize("one", [A, B])
@pytest.mark.parametrize("other", [B, C])
def test_settings_with_a_value_of_one_parameter_share_it(
    request: pytest.FixtureRequest, one: object, other: object
) -> None:
    """pytest's own numbers of values differ in each setting, so that each would show new ones."""
    assert thorough._values(request.node) == {("one", id(one)), ("other", id(other))}


def test_oracles_keep_all_settings_and_losses_every_value() -> None:
    assert len(list(thorough.quick_ones(items("ppo/test_golden.py::test_x", 5, 5)))) == 25
    loss = "trl/test_policy_loss.py::test_losses_are_trls"
    assert len(list(thorough.quick_ones(items(loss, 9, 3)))) == 9


@pytest.mark.parametrize("alone", [False, True])
def test_the_parts_are_all_that_make_test_leaves_out(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr(thorough, "ALONE", alone)
    config: Any = SimpleNamespace(
        args=["one/file.py"] if alone else ["tests"],
        getini=lambda _: ["tests"],
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    monkeypatch.setattr(thorough, "_check", lambda _: None)
    every = items("kernels/test_x.py::test_y", 10, 30)
    found = set()
    for word in map(str, range(40)):
        monkeypatch.setenv("PART", word)
        chosen = list(every)
        thorough.choose(config, chosen)
        assert len(chosen) < 100
        found |= {item.nodeid for item in chosen}
    assert len(found) == (296 if alone else 4)


def test_a_word_draws_one_and_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PART", raising=False)
    assert part.drawn("abc", "x") == "abc"
    monkeypatch.setenv("PART", "a commit")
    assert len(part.drawn("abc", "x")) == 1
    assert part.drawn("abc", "x") == part.drawn("abc", "x")
