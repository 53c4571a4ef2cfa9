"""What processes tell each other of samples: its bytes are the same on every machine, as tokens are
counted, not seconds."""

import tempfile
from functools import cache
from pathlib import Path

from tests.counts.record import Count
from tests.processes.launch import fork, kept
from tests.processes.traffic import SAMPLES, exchange

# Of P processes each gets (P-1)/P of 4 bytes for each of a token's id, its log-probs by policy and
# reference, its value, and 3 to 5 for its text; the main one twice the first three, for the ledger.
PROCESSES, MOST = 2, 20.0


@cache
def received() -> float:
    """By the main process in a step, for each token of the responses of all."""
    with tempfile.TemporaryDirectory() as folder:
        ended = fork(exchange, Path(folder), processes=PROCESSES)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return max(x["per_token"] for x in kept(Path(folder), "traffic", PROCESSES)[0]["steps"])


COUNTS = (
    Count(f"exchanged for a token, PPO on {PROCESSES} × {SAMPLES // PROCESSES} samples", "bytes",
     MOST, received),
)  # fmt: skip
