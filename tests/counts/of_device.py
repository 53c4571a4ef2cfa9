"""How often the host waits for a device, or the device for the host, on a pretended one. Gates are
in tests/device/test_host_reads.py."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.counts.record import Count

_GOALS = {
    "reads per optimizer step": 1, "reads per mini-batch": 0, "blocking uploads per mini-batch": 0,
    "blocking uploads per iteration": 0, "reads per rollout": 2,
    "blocking uploads per refilled slot": 0,
    "captures where greedy and sampled calls alternate": 0,
}  # fmt: skip


@cache
def _counts() -> dict[str, float]:
    """In a process of its own, whose kernels are PyTorch's."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.device.counts"],
        env=environment | {"FASTRL_KERNELS_BACKEND": "torch"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout[done.stdout.index("{") :])


COUNTS = tuple(
    Count(what, "", goal, lambda what=what: _counts()[what], exact=False)
    for what, goal in _GOALS.items()
)
