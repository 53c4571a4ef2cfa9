"""How many processes a run was started as."""

from __future__ import annotations

import os

# Where launchers (torchrun, accelerate launch, mpirun) say it; accelerate reads the same.
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def started_processes() -> int:
    """As the launcher's environment says; 1 without one."""
    return max(int(os.environ.get(name) or 1) for name in _COUNTS)


def check_one_process(what: str, known: int = 1) -> None:
    """Refuses several processes, each of which would draw the same prompts and train a model of its
    own.

    Args:
        what: is run, for the message.
        known: how many accelerate knows of. On a CPU it knows of itself alone, whatever the
            launcher's environment says.

    Raises:
        ValueError: more than one, by either.
    """
    count = max(known, started_processes())
    if count > 1:
        raise ValueError(
            f"{what} runs as one process, and was started as {count}: each would do the same work "
            "and end with a model of its own. Start it by itself, without torchrun or accelerate "
            "launch (or with --nproc-per-node 1)"
        )
