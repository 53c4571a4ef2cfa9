"""What every test may rely on: seeded draws, nothing of users or of other tests, and the number of
threads that was asked for."""

import logging
import os
import random
import runpy
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from fastrl.rewards.functions import load_function
from tests import conftest, variables
from tests.isolation import forget_device, seed_draws

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


@pytest.mark.parametrize("again", [False, True])
def test_a_test_leaves_nothing_behind(again: bool, tmp_path: Path) -> None:
    def found() -> tuple[Any, ...]:
        here = os.getcwd() == str(tmp_path), "here" in sys.path, "of_a_test" in sys.modules
        return (*here, "FASTRL_DEBUG" in os.environ, logging.getLogger("transformers").level == 50)

    assert not any(found())
    assert torch.get_num_threads() != 7
    assert Accelerator().mixed_precision == "no"
    os.environ["FASTRL_DEBUG"] = "1"
    sys.path.append("here")
    os.chdir(tmp_path)
    (tmp_path / "of_a_test.py").write_text("def reward(**columns): ...")
    load_function("of_a_test.py:reward")
    logging.getLogger("transformers").setLevel(50)
    assert all(found())
    torch.set_num_threads(7)
    forget_device()
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"


@pytest.fixture(scope="module")
def in_bf16() -> Accelerator:
    return Accelerator(mixed_precision="bf16")


@pytest.fixture(scope="module")
def on_it(in_bf16: Accelerator) -> AcceleratorState:
    return AcceleratorState()


@pytest.mark.parametrize("again", [False, True])
def test_accelerate_is_as_the_fixtures_of_a_test_have_it(
    in_bf16: Accelerator, on_it: AcceleratorState, again: bool
) -> None:
    assert AcceleratorState().mixed_precision == on_it.mixed_precision == "bf16"
    assert in_bf16.state.mixed_precision == "bf16"
    AcceleratorState._shared_state["_mixed_precision"] = "fp16"


def test_variables_of_users_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    users = ("ACCELERATE_USE_CPU", "WORLD_SIZE", "COLUMNS", "PYTHONWARNINGS", "LC_ALL")
    runs = ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "TRITON_INTERPRET", "PYTHONPATH")
    for name in (*users, *runs):
        monkeypatch.setenv(name, "1")
    variables.leave_out_users()
    assert not os.environ.keys() & set(users)
    assert os.environ.keys() >= set(runs)


def test_an_accelerators_device_is_not_that_of_another_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
