"""What samples were, collected on the device and brought to the host once."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.rollout.sampling_params import RolloutOutput
from fastrl.rollout.scheduler import Sample
from fastrl.rollout.slots import FIELDS, REASONS, Slots


class Results:
    """Rows [samples, length] of tokens and figures."""

    def __init__(self, samples: int, length: int, device: torch.device):
        self.tokens = torch.zeros(samples, length, dtype=torch.long, device=device)
        self.figures = torch.zeros(len(FIELDS), samples, length, device=device)
        self.counts = torch.zeros(samples, dtype=torch.long, device=device)
        self.reasons = torch.zeros(samples, dtype=torch.long, device=device)

    def take(self, slots: Slots, ended: list[tuple[int, Sample]]) -> None:
        """Copies samples out of their slots."""
        device, length = self.tokens.device, self.tokens.shape[1]
        source = torch.tensor([slot for slot, _ in ended]).to(device)
        target = torch.tensor([sample.index for _, sample in ended]).to(device)
        self.tokens[target] = slots.tokens[source, :length]
        self.figures[:, target] = slots.figures[:, source, :length]
        self.counts[target] = slots.rows.made[source]
        self.reasons[target] = slots.rows.reason[source]

    def output(self, *, truncated: bool, values: bool) -> RolloutOutput:
        counts = self.counts.tolist()
        reasons = [REASONS[code] for code in self.reasons.tolist()]
        real = torch.arange(self.tokens.shape[1]) < self.counts.cpu()[:, None]

        def split(rows: Tensor) -> list[Tensor]:
            return list(rows[real].split(counts))

        output = RolloutOutput(sequences=split(self.tokens.cpu()), finish_reasons=reasons)
        wanted = {"truncated_logprobs": truncated, "cutoffs": truncated, "values": values}
        for field, rows in zip(FIELDS, self.figures.cpu(), strict=True):
            if wanted.get(field, True):
                setattr(output, field, split(rows))
        return output
