"""The stand-in for a reference model where the KL coefficient is 0."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from fastrl.learn.ref_model.base import RefModel
from fastrl.models.scoring import ScoringRequest, TokenScores


class NoRefModel(RefModel):
    """Stands for no reference: all log-probs are NaN."""

    mode = "none"

    def score(self, inputs: dict[str, Any], request: ScoringRequest) -> TokenScores:
        unknown = torch.full(request.rows.shape, torch.nan, device=request.rows.device)
        return TokenScores(unknown, None, None, None)

    def as_policy(self) -> contextlib.AbstractContextManager[nn.Module]:
        raise ValueError(
            "reference='none': there is no reference to generate with; leave out "
            "generate_ref_response, or choose another reference"
        )
