"""How many processes the tests start, and what commands are given."""

import pytest

from tests.commands.conftest import world  # noqa: F401 - a fixture
from tests.faults.conftest import data  # noqa: F401 - a fixture
from tests.processes.launch import COUNTS


@pytest.fixture(scope="module", params=COUNTS)
def count(request):
    """A number of processes."""
    return request.param
