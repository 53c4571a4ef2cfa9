"""The table of the instructions that are known: a row for each family."""

from collections.abc import Callable
from typing import NamedTuple

from tests.ptx.faults import UnknownInstruction
from tests.ptx.lanes import Lanes
from tests.ptx.program import Statement

Execute = Callable[[Lanes, Statement], None]


class Family(NamedTuple):
    execute: Execute
    words: frozenset[str]  # modifiers and types that it knows


_FAMILIES: dict[str, Family] = {}


def instruction(name: str, words: str) -> Callable[[Execute], Execute]:
    """Enters a function into the table, with the modifiers and types that may follow the name."""

    def enter(execute: Execute) -> Execute:
        assert name not in _FAMILIES, name
        _FAMILIES[name] = Family(execute, frozenset(words.split()))
        return execute

    return enter


def known(statement: Statement) -> Execute:
    """What executes a statement.

    Raises:
        UnknownInstruction: there is no such instruction in the table, or not with these modifiers.
    """
    name, *words = statement.words
    family = _FAMILIES.get(name)
    if family is None:
        raise UnknownInstruction(f"{statement.text}: tests/ptx knows no {name}")
    if unknown := [word for word in words if word not in family.words]:
        raise UnknownInstruction(f"{statement.text}: tests/ptx knows no .{unknown[0]} of {name}")
    return family.execute
