"""The ledger of a trainer's responses: a row for each, a step of it for each generation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fastrl.collect.ledger import ledger_columns, note_settings
from fastrl.collect.responses import Collected
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import Ledger, Lists


class GenerationLedger:
    """Rows in the folder ``ledger`` of a run, kept by its main process.

    Args:
        folder: of the run.
        args: an :class:`fastrl.trl.online_config.OnlineConfig`.
    """

    def __init__(self, folder: Path, args: Any):
        self.ledger, self.temperature = Ledger(RunFolder(folder).ledger), args.temperature
        note_settings(self.ledger, args.to_dict(), args.generation_arguments)

    def begin(self, generations: int) -> None:
        """Goes on behind so many generations; what lies behind them is put aside."""
        self.ledger.supersede(generations)

    def add(
        self,
        generation: int,
        collected: Collected,
        weights_version: int,
        masks: Sequence[Tensor],
        advantages: Tensor,
    ) -> None:
        """Adds the responses of a generation, from 1.

        Args:
            collected: of all processes, as all that follows.
            weights_version: steps of the optimizer before they were drawn.
            masks: bool, the tokens that are learned.
            advantages: [B].
        """
        counts = [int(mask.sum()) for mask in masks]
        of_tokens = Lists(np.repeat(advantages.float().numpy(), counts), counts)
        columns = ledger_columns(collected, weights_version, of_tokens, self.temperature)
        del columns["prompt_row"]  # rows come from a loader, without their number
        self.ledger.add(generation, columns)

    def flush(self) -> None:
        """Has the disk hold all rows."""
        self.ledger.flush(sync=True)
