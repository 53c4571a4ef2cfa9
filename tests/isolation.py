"""What a test finds is what it would find alone, in a process of its own: what others have left
behind is put back, and what wider fixtures draw and choose does not depend on who asks first."""

import contextlib
import logging
import os
import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _module_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For what fixtures of a module's scope leave behind."""
    with _put_back(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(autouse=True)
def _test_alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """What it draws is the same wherever it stands, and its device that of its fixtures."""
    seed_draws(int(os.environ.get("FASTRL_TEST_SEED", "0")))  # of tests/headroom.py
    _choose_device_as(request.fixturenames)
    with _put_back(tmp_path_factory.getbasetemp()):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Any:
    """A fixture of a wider scope is set up by whichever test comes first. What it draws depends on
    its name alone and moves no generator of that test, and its device is that of those that it
    uses."""
    if fixturedef.scope == "function":
        return (yield)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_draws(zlib.crc32(fixturedef.argname.encode()))
    _choose_device_as(fixturedef.argnames)
    try:
        return (yield)
    finally:
        _chosen[fixturedef.argname] = [(found, dict(found)) for found in _device_states()]
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def pytest_fixture_post_finalizer(fixturedef: Any) -> None:
    _chosen.pop(fixturedef.argname, None)


def seed_draws(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def _put_back(own: Path) -> Iterator[None]:
    """Context whose end finds variables, folder, imports, messages and threads as they were.

    Args:
        own: tests' folder. Its files are modules of the test that imported them alone; packages
            stay, since others may hold them.
    """
    environ, variables = os.environ, dict(os.environ)
    folder, path = os.getcwd(), list(sys.path)
    modules, hook = set(sys.modules), sys.excepthook
    libraries = [(x, x.level) for x in map(logging.getLogger, ("", "transformers", "datasets"))]
    threads = torch.get_num_threads()
    yield
    os.environ = environ  # noqa: B003 - datasets puts a copy in its place
    if os.environ != variables:
        os.environ.clear()
        os.environ.update(variables)
    os.chdir(folder)
    sys.path[:], sys.excepthook = path, hook
    for name in sys.modules.keys() - modules:
        module = sys.modules[name]
        of_a_file = not getattr(module, "__package__", None)
        if of_a_file and str(getattr(module, "__file__", "")).startswith(str(own)):
            del sys.modules[name]
    for library, level in libraries:
        if library.level != level:  # all loggers forget what they keep
            library.setLevel(level)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


# By fixtures of a wider scope, while they are set up: what accelerate found there, and a copy.
_chosen: dict[str, list[tuple[Any, dict[str, Any]]]] = {}


def _device_states() -> list[dict[str, Any]]:
    """What accelerate keeps of a process's first choice of device, precision and processes."""
    return [kind._shared_state for kind in _kinds_of_state()]


def _kinds_of_state() -> list[Any]:
    state = sys.modules.get("accelerate.state")
    return [state.PartialState, state.AcceleratorState, state.GradientState] if state else []


def forget_device() -> None:
    """Has accelerate choose anew. What was made before goes on with what was chosen: accelerate's
    objects hold their states."""
    for kind in _kinds_of_state():
        kind._shared_state = type(kind._shared_state)()


def _choose_device_as(fixtures: Sequence[str]) -> None:
    """Has accelerate choose anew, or go on with what it chose in these fixtures."""
    forget_device()
    for name in fixtures:
        for kind, (found, as_it_was) in zip(_kinds_of_state(), _chosen.get(name, ()), strict=False):
            if as_it_was:
                found.clear()
                found.update(as_it_was)
                kind._shared_state = found
