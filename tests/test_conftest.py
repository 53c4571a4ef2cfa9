"""What every test may rely on: seeded draws, and the number of threads that was asked for."""

from __future__ import annotations

import os
import random
import runpy
import zlib

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from tests import conftest
from tests.conftest import forget_device, seed_draws

Draws = tuple[float, float, float]


def draws() -> Draws:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def draws_of(seed: int) -> Draws:
    seed_draws(seed)
    return draws()


@pytest.fixture(scope="module")
def drawn_for_the_module() -> Draws:
    return draws()


@pytest.mark.parametrize("again", [False, True])
def test_a_test_draws_the_same_wherever_it_stands(again: bool) -> None:
    found = draws()
    assert found == draws_of(0)


def test_a_fixture_of_a_module_draws_by_its_name(
    drawn_for_the_module: Draws, request: pytest.FixtureRequest
) -> None:
    found = draws()
    assert found == draws_of(0)
    assert drawn_for_the_module == draws_of(zlib.crc32(b"drawn_for_the_module"))


def test_a_fixture_that_is_asked_for_late_moves_no_generator_of_the_test(
    request: pytest.FixtureRequest,
) -> None:
    first = draws()
    request.getfixturevalue("drawn_late")
    assert (first, draws()) == (draws_of(0), draws())


def test_an_accelerators_device_is_not_that_of_another_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget_device()
    Accelerator(cpu=True)
    # As it would be with a GPU.
    monkeypatch.setitem(PartialState._shared_state, "device", torch.device("cuda"))
    monkeypatch.setitem(AcceleratorState._shared_state, "device", torch.device("cuda"))
    with pytest.raises(ValueError, match="AcceleratorState has already been initialized"):
        Accelerator(cpu=True)
    forget_device()
    assert Accelerator(cpu=True).device.type == "cpu"


@pytest.fixture(scope="module")
def drawn_late() -> Draws:
    return draws()


@pytest.mark.parametrize(("given", "threads"), [(None, 1), ("3,2", 3)])
def test_a_number_of_threads_that_is_given_is_kept(
    given: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")  # and restored afterwards
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    try:
        runpy.run_path(conftest.__file__)
        found = torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]
    finally:
        torch.set_num_threads(before)
    assert found == (threads, given or "1")
