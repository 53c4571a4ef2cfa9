"""A device that is not there, for tests of what would run on one."""

from collections.abc import Iterator

import pytest
import torch

from tests.device.pretended import PretendedDevice, pretended_device


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    with pretended_device() as found:
        yield found
