"""A table of cheap cases in one test, where each would cost more to set up than to run."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def together(names: str | tuple[str, ...], table: Iterable[Any]) -> Callable[[Any], Any]:
    """Takes what ``pytest.mark.parametrize`` does; all rows are one test, which names the row that
    fails. They share its fixtures: each leaves these as they were."""
    names = (names,) if isinstance(names, str) else names

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def of_all(**given: Any) -> None:
            for row in table:
                values = dict(zip(names, row if len(names) > 1 else [row], strict=True))
                try:
                    test(**given, **values)
                except (Exception, pytest.fail.Exception) as error:
                    raise AssertionError(f"of {values}: {error}") from error

        signature = inspect.signature(test)
        left = [p for p in signature.parameters.values() if p.name not in names]
        of_all.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        del of_all.__wrapped__  # type: ignore[attr-defined]
        return of_all

    return decorate
