"""What the commands are given."""

from tests.commands.conftest import world  # noqa: F401 - a fixture
