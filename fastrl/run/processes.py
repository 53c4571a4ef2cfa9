"""The number of processes of a run."""

from __future__ import annotations

import os

# Variables set by launchers (torchrun, accelerate launch, mpirun); accelerate reads the same.
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def check_one_process(what: str, known: int = 1) -> None:
    """Checks that a run is one process: several would each train a model on the same prompts.

    Args:
        what: the name of the run, for the message.
        known: the number that accelerate has. On a CPU it is 1, whatever the launcher's environment
            variables say.

    Raises:
        ValueError: more than one process, by either number.
    """
    count = max(known, *(int(os.environ.get(name) or 1) for name in _COUNTS))
    if count > 1:
        raise ValueError(
            f"{what} runs as one process, and was started as {count}: each would do the same work "
            "and save its own model. Start it without torchrun or accelerate launch (or with "
            "--nproc-per-node 1)"
        )
