"""All that is counted."""

from tests.counts import (
    of_decode,
    of_device,
    of_heads,
    of_instructions,
    of_launches,
    of_processes,
    of_python,
)

COUNTS = (
    *of_launches.COUNTS, *of_decode.COUNTS, *of_heads.COUNTS, *of_instructions.COUNTS,
    *of_python.COUNTS, *of_device.COUNTS, *of_processes.COUNTS,
)  # fmt: skip
