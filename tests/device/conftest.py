"""A device that is not there, for tests of what would run on one."""

from collections.abc import Iterator

import pytest

from tests.device.pretended import PretendedDevice, absent, pretended_device


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    reason = absent()
    if reason is not None:
        pytest.skip(reason)
    with pretended_device() as found:
        yield found
