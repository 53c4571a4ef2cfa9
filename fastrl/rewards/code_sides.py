"""The two programs by which the reward ``code`` tests functions, each in a sandbox of its own.

``serve`` has the response's code and runs what it is asked to; ``judge`` has the tests, and asks.
Between them go names, arguments and plain values, so that the code sees no expected value and no
verdict; what it says is taken for the answer of a function, whatever it is.

This file is run as ``python -c`` and needs the standard library alone.
"""

from __future__ import annotations

import ast
import builtins
import collections
import decimal
import fractions
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

LONGEST = 1 << 23  # bytes of a question or an answer
_LISTS: dict[str, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)
}
_BY_TEXT: dict[str, Any] = {
    kind.__name__: kind for kind in (decimal.Decimal, fractions.Fraction, complex)
}


def encode(value: Any, of_object: Callable[[Any], int]) -> Any:
    """A value for JSON: plain ones as what they hold, others as numbers from ``of_object``."""
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    for name, kind in _LISTS.items():
        if isinstance(value, kind):
            return [name, [encode(x, of_object) for x in value]]
    if isinstance(value, dict):
        pairs = value.items()
        return ["dict", [[encode(x, of_object), encode(y, of_object)] for x, y in pairs]]
    for name, kind in _BY_TEXT.items():
        if isinstance(value, kind):
            return [name, str(value)]
    return ["object", of_object(value)]


def decode(value: Any, object_of: Callable[[int], Any]) -> Any:
    """The value that :func:`encode` wrote."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind in _LISTS:
        return _LISTS[kind](decode(x, object_of) for x in content)
    if kind == "dict":
        return {decode(x, object_of): decode(y, object_of) for x, y in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    return _BY_TEXT[kind](content) if kind in _BY_TEXT else object_of(content)


def serve(code: int, questions: int, answers: int) -> None:
    """Runs a response's code, and answers questions about its names and objects."""
    with open(code, "rb") as file:
        source = file.read()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(source, "solution.py", "exec"), module.__dict__)
    objects: list[Any] = []

    def number(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    asked: dict[str, Callable[..., Any]] = {
        "names": lambda: list(module.__dict__),
        "global": lambda name: module.__dict__[name],
        "get": getattr,
        "item": lambda x, key: x[key],
        "call": lambda function, *arguments, **named: function(*arguments, **named),
        "iter": iter,
        "next": next,
        "len": len,
        "bool": bool,
        "str": str,
        "repr": repr,
    }
    with open(questions, "rb") as asks, open(answers, "wb", buffering=0) as says:
        for line in asks:
            kind, arguments, named = json.loads(line)
            try:
                arguments = [decode(x, objects.__getitem__) for x in arguments]
                named = {name: decode(x, objects.__getitem__) for name, x in named.items()}
                result = encode(asked[kind](*arguments, **named), number)
                after = [encode(x, number) if isinstance(x, _CHANGED) else None for x in arguments]
                reply = json.dumps([True, result, after])
            except Exception as error:
                kinds = [x.__name__ for x in type(error).__mro__]
                reply = json.dumps([False, kinds, str(error)[:1000]])
            says.write(reply.encode() + b"\n")


_CHANGED = (list, dict, set, collections.deque)  # arguments that a function may change


class Unanswered(BaseException):
    """There is no answer that can be judged; no test's ``except Exception`` passes over it."""


class Remote:
    """The judge's end: asks about the code's names and objects."""

    def __init__(self, questions: int, answers: int):
        self._asks, self._hears = os.fdopen(questions, "wb", buffering=0), os.fdopen(answers, "rb")

    def ask(self, kind: str, *arguments: Any, **named: Any) -> Any:
        """What the code answers; raises what it raises."""
        try:
            question = [
                kind,
                [encode(x, _number_of) for x in arguments],
                {name: encode(x, _number_of) for name, x in named.items()},
            ]
            self._asks.write(json.dumps(question).encode() + b"\n")
            fine, result, more = json.loads(self._hears.readline(LONGEST))
            if fine:
                for mine, after in zip(arguments, more, strict=True):
                    if after is not None:
                        _change(mine, decode(after, self._thing))
                return decode(result, self._thing)
            error = _error(result, str(more))
        except Exception as wrong:
            raise Unanswered from wrong
        raise error

    def _thing(self, number: int) -> Thing:
        return Thing(self, int(number))


class Thing:
    """An object of the code's, for tests: what is asked of it, the code answers. It is not compared
    with anything: the code would say the verdict."""

    def __init__(self, remote: Remote, number: int):
        self.__remote, self.__number = remote, number

    def _ask(self, kind: str, *arguments: Any, **named: Any) -> Any:
        return self.__remote.ask(kind, self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", *arguments, **named)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __iter__(self) -> Iterator[Any]:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return self._ask("len")

    def __bool__(self) -> bool:
        return self._ask("bool")

    def __str__(self) -> str:
        return self._ask("str")

    def __repr__(self) -> str:
        return self._ask("repr")

    def __eq__(self, other: object) -> bool:
        raise Unanswered("objects of the code are not compared: compare what they hold")

    __ne__ = __eq__
    __hash__ = object.__hash__


def _number_of(value: Any) -> int:
    if isinstance(value, Thing):
        return value._Thing__number  # type: ignore[attr-defined]
    raise TypeError(f"the code gets plain values and objects of its own, not {value!r:.80}")


def _change(mine: Any, after: Any) -> None:
    """Makes ``mine``, an argument, equal to what the function has made of it."""
    mine.clear()
    mine.update(after) if isinstance(mine, dict | set) else mine.extend(after)


def _error(kinds: list[str], message: str) -> Exception:
    """A builtin exception with this message, the first possible of ``kinds``; else RuntimeError."""
    for name in kinds:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(message)
            except TypeError:  # the exception takes other arguments
                continue
    return RuntimeError(message)


def judge(tests: int, questions: int, answers: int) -> None:
    """Runs tests, one after the other, and writes 1 or 0 for each to stdout."""
    with open(tests, "rb") as file:
        job = json.load(file)
    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what tests print
    remote = Remote(questions, answers)
    theirs = set(remote.ask("names"))
    namespace: dict[str, Any] = {"__name__": "tests"}
    for name in sorted(set().union(*map(_names, job["tests"]))):
        ours = hasattr(builtins, name) or name in sys.stdlib_module_names
        if name in theirs and (name in job["entry_point"] if job["entry_point"] else not ours):
            namespace[name] = remote.ask("global", name)
        elif name in sys.stdlib_module_names and not hasattr(builtins, name):
            namespace[name] = __import__(name)
    for test in job["tests"]:
        try:
            exec(compile(test, "tests.py", "exec"), namespace)
            passed = True
        except BaseException:
            passed = False
        os.write(verdicts, b"01"[passed : passed + 1])


def _names(test: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}


if __name__ == "__main__":
    {"serve": serve, "judge": judge}[sys.argv[1]](*map(int, sys.argv[2:]))
