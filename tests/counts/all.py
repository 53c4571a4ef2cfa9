"""All that is counted."""

from tests.counts import of_launches

COUNTS = (*of_launches.COUNTS,)
