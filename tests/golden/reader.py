"""Reads a folder of golden cases: `cases` beside this file, or another of the same layout.

A case is `<name>.json` (settings, and every scalar statistic of each step) and
`<name>.safetensors` (token ids and scores by step, the first step's per-token figures, the
parameters after the last step). Its models are built by the rule in `tiny.py`, or, where the folder
has `models/<arch>/`, read from that checkpoint, with the reference's weights under `ref.*`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fastrl import AutoModelForCausalLMWithValueHead
from tests.golden import tiny

CASES = Path(__file__).parent / "cases"
FIGURES = ("values", "rewards", "non_score", "kls", "advantages", "returns")


@dataclass(frozen=True)
class Batch:
    """What one `step` is given."""

    queries: list[torch.Tensor]
    responses: list[torch.Tensor]
    scores: list[torch.Tensor]


@dataclass(frozen=True)
class GoldenCase:
    """What TRL was given and what it computed."""

    folder: Path
    name: str
    description: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def config(self) -> dict[str, Any]:
        """The PPOConfig fields that differ from the defaults."""
        return self.description["config"]

    @property
    def statistics(self) -> list[dict[str, float]]:
        """Every scalar statistic, step by step."""
        return self.description["stats"]

    @property
    def batches(self) -> list[Batch]:
        """The inputs, step by step."""
        return [self._batch(step) for step in range(self.description["steps"])]

    @property
    def mask(self) -> torch.Tensor:
        """[B, T-1]: True where a position of the first step predicts a response token."""
        return self.tensors["step0.mask"].bool()

    @property
    def figures(self) -> dict[str, torch.Tensor]:
        """The first step's per-token figures, each [B, T-1], padded on the right."""
        return {name: self.tensors[f"step0.{name}"] for name in FIGURES}

    @property
    def final(self) -> dict[str, torch.Tensor]:
        """The policy's parameters after the last step."""
        return self._with_prefix("final.")

    def models(self) -> tuple[AutoModelForCausalLMWithValueHead, AutoModelForCausalLMWithValueHead]:
        """A policy and a reference with the weights that TRL started from."""
        policy, reference = self._model(), self._model()
        if self._checkpoint.exists():
            parameters = tiny.named_parameters(reference)
            with torch.no_grad():
                for name, weights in self._with_prefix("ref.").items():
                    parameters[name].copy_(weights)
        else:
            tiny.fill_by_rule(policy)
            tiny.fill_by_rule(reference, self.description["reference_perturbation"])
        return policy, reference

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "models" / self.description["arch"]

    def _model(self) -> AutoModelForCausalLMWithValueHead:
        if self._checkpoint.exists():
            source = str(self._checkpoint)
        else:
            source = tiny.language_model(self.description["arch"])
        return AutoModelForCausalLMWithValueHead.from_pretrained(source, summary_dropout_prob=0.0)

    def _batch(self, step: int) -> Batch:
        scores = self.tensors[f"step{step}.scores"]
        return Batch(
            queries=[self.tensors[f"step{step}.query{i}"] for i in range(len(scores))],
            responses=[self.tensors[f"step{step}.response{i}"] for i in range(len(scores))],
            scores=list(scores),
        )

    def _with_prefix(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            key.removeprefix(prefix): tensor
            for key, tensor in self.tensors.items()
            if key.startswith(prefix)
        }


def case_paths(folder: Path) -> list[Path]:
    """What `read_case` takes, for every case in `folder`."""
    return sorted(folder.glob("*.json"))


def read_case(path: Path) -> GoldenCase:
    """The case described in `path`."""
    return GoldenCase(
        folder=path.parent,
        name=path.stem,
        description=json.loads(path.read_text()),
        tensors=load_file(path.with_suffix(".safetensors")),
    )
