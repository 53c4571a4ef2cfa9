"""Chooses a model's engine: the rollout engine if it runs the model, else ``model.generate``."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from fastrl.models.utils import base_of
from fastrl.rollout.engine import RolloutEngine
from fastrl.rollout.generate_engine import GenerateEngine
from fastrl.rollout.model_runner import Autocast
from fastrl.rollout.self_check import UnsupportedModel


def choose_engine(
    model: Any,
    tokenizer: Any,
    *,
    autocast: Autocast = contextlib.nullcontext,
    max_slots: int = 64,
    max_length: int | None = None,
    kv_cache_bytes: int | None = None,
    cuda_graphs: bool = True,
    keep_experts: bool = False,
) -> RolloutEngine | GenerateEngine:
    """Makes a :class:`RolloutEngine` if its results are those of plain forwards, else, with a
    warning that says why, a :class:`GenerateEngine` that returns the same kinds of outputs.

    An encoder–decoder always has :class:`GenerateEngine`, without a warning.

    Args:
        model: a language model, or a value-head model around one.
        autocast: makes the context in which the model runs.
        max_slots: samples that run at a time, in either engine.
        max_length, kv_cache_bytes, cuda_graphs, keep_experts: see :class:`RolloutEngine`.

    Raises:
        ValueError: a number below 1; a model on several devices; with ``keep_experts`` a model
            that the rollout engine does not run, or routers whose choices cannot be kept; an
            encoder–decoder that names no start token.
    """
    if not getattr(model.config, "is_encoder_decoder", False):
        try:
            return RolloutEngine(
                model,
                tokenizer,
                max_slots,
                max_length,
                autocast=autocast,
                kv_cache_bytes=kv_cache_bytes,
                cuda_graphs=cuda_graphs,
                keep_experts=keep_experts,
            )
        except UnsupportedModel as unsupported:
            if keep_experts:
                raise ValueError(
                    "replay_routing needs the rollout engine, which cannot run "
                    f"{type(base_of(model)).__name__}, because {unsupported.cause}: leave it out"
                ) from unsupported
            warnings.warn(
                f"{type(base_of(model)).__name__}: rollouts go through model.generate, because "
                f"{unsupported.cause}",
                stacklevel=2,
            )
    elif keep_experts:
        raise ValueError(
            "replay_routing keeps no choices of an encoder–decoder's experts: leave it out"
        )
    return GenerateEngine(model, tokenizer, max_slots, autocast, scores=True)
