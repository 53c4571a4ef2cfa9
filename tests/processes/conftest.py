"""How many processes the tests start, and what commands are given."""

import pytest
import torch

from tests.commands.conftest import world  # noqa: F401 - a fixture
from tests.faults.conftest import data  # noqa: F401 - a fixture
from tests.processes.launch import COUNTS


@pytest.fixture(autouse=True, scope="module")
def _threads():
    """One, as each of several processes has: with more of them sums are rounded otherwise, and a
    run that goes on says so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=COUNTS)
def count(request):
    """A number of processes."""
    return request.param
