"""Checks of models, run once for each kind of model while a run is rehearsed again and again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from fastrl.run.contexts import variable_set

P = ParamSpec("P")
T = TypeVar("T")
_answers: ContextVar[dict[Any, Any] | None] = ContextVar("fastrl_answers", default=None)


def asked_once(check: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Decorates a check of a model: within :func:`answers_kept` one answer stands for all models of
    a kind: the same class, mode and configuration; the same names, shapes and dtypes of weights."""

    @wraps(check)
    def asked(model: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        answers = _answers.get()
        if answers is None:
            return check(model, *args, **kwargs)
        key = check, _kind(model)
        if key not in answers:
            answers[key] = check(model, *args, **kwargs)
        answer: T = answers[key]
        return answer

    return asked


def answers_kept() -> AbstractContextManager[None]:
    """Context in which checks' answers are kept; nested contexts share them. What an answer depends
    on beside the model, such as autocast, has to be the same throughout."""
    before = _answers.get()
    return variable_set(_answers, {} if before is None else before)


def _kind(model: Any) -> tuple[Any, ...]:
    weights = tuple((name, x.shape, x.dtype) for name, x in model.named_parameters())
    return type(model), model.training, model.config.to_json_string(), weights
