"""What was run in a process, to be told to another."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

# The file that pytest's plugin writes a record to, if any.
RECORD_VARIABLE = "PTX_RECORD"


@dataclass
class Record:
    """What was run in a process.

    Attributes:
        launches: by the kernel, ``"kl._kl_penalty_fwd_kernel"``.
        faults: messages, races among them.
        compiling, running: seconds.
    """

    launches: Counter[str] = field(default_factory=Counter)
    specialisations: int = 0
    faults: list[str] = field(default_factory=list)
    compiling: float = 0.0
    running: float = 0.0

    def add(self, other: Record) -> None:
        self.launches += other.launches
        self.specialisations += other.specialisations
        self.faults += other.faults
        self.compiling += other.compiling
        self.running += other.running

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Record:
        read = json.loads(text)
        return cls(**{**read, "launches": Counter(read["launches"])})
