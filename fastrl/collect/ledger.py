"""The ledger's rows of responses that were learned from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastrl.learn.samples import learned_counts
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import PER_FUNCTION, Ledger, Lists
from fastrl.samples import Samples
from fastrl_kernels import TokenSets

CODE = "code"  # in ``Ledger.facts``: hashes of users' functions, by their names
NOT_JSON = "generation_kwargs that are not JSON"  # in ``Ledger.facts``: these arguments' names


class GenerationLedger:
    """Rows in the folder ``ledger`` of a run, a step for each generation, kept by the main process.

    Args:
        folder: the run's folder.
        temperature: the temperature of the log-probs in the rows.
        settings, generation_kwargs, code: see :func:`note_settings`.
    """

    def __init__(
        self,
        folder: RunFolder,
        temperature: float,
        settings: Mapping[str, Any],
        generation_kwargs: Mapping[str, Any],
        code: Mapping[str, str],
    ):
        self.ledger, self.temperature = Ledger(folder.ledger), temperature
        note_settings(self.ledger, settings, generation_kwargs, code)

    def begin(self, generations: int) -> None:
        """Goes on behind the first ``generations`` generations; later rows are put aside."""
        self.ledger.supersede(generations)

    def add(
        self,
        generation: int,
        samples: Samples,
        weights_version: int,
        advantages: Tensor | None = None,
        of_teachers: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Adds the responses of a generation, counted from 1.

        Args:
            samples: samples of all processes; tokens may have advantages of their own.
            weights_version: optimizer steps before the samples were drawn.
            advantages: each sample's, which its tokens that are learned have, [B].
            of_teachers: see :func:`teacher_columns`.
        """
        of_tokens = None
        if advantages is not None:
            counts = learned_counts(samples)
            each = np.repeat(advantages.float().numpy(), counts)
            if samples.token_advantages is not None:
                pairs = zip(samples.token_advantages, samples.learned, strict=True)
                each = each + torch.cat([x[mask] for x, mask in pairs]).float().numpy()
            of_tokens = Lists(each, counts)
        columns = ledger_columns(samples, weights_version, of_tokens, self.temperature)
        del columns["prompt_row"]  # a loader yields rows without their number
        self.ledger.add(generation, {**columns, **of_teachers})

    def flush(self) -> None:
        """Writes all rows to the disk."""
        self.ledger.flush(sync=True)


def note_settings(
    ledger: Ledger,
    settings: Mapping[str, Any],
    generation_kwargs: Mapping[str, Any],
    code: Mapping[str, str],
) -> None:
    """Records in a ledger what its samples depend on.

    Args:
        settings, generation_kwargs: recorded as far as JSON can hold their values.
        code: hashes of users' functions by which the run learns.
    """
    recorded = recordable(generation_kwargs)
    ledger.facts |= {
        "settings": recordable(settings),
        "generation_kwargs": recorded,
        NOT_JSON: sorted(generation_kwargs.keys() - recorded.keys()),
        CODE: dict(code),
    }


def ledger_columns(
    samples: Samples, weights_version: int, advantages: Lists | None, temperature: float
) -> dict[str, Any]:
    """Returns a step's columns of :func:`fastrl.run.ledger.fields`, and one per reward function.

    Args:
        samples: samples of all processes.
        weights_version: optimizer steps before the samples were drawn.
        advantages: advantages of the tokens that are learned; None: there are none.
        temperature: the temperature of the log-probs in the rows.
    """
    count, supports = len(samples), samples.supports
    return {
        "prompt_row": samples.prompt_rows,
        "prompt": samples.prompt_texts,
        "prompt_ids": _lists(samples.prompt_ids, np.int32),
        "completion": samples.texts,
        "completion_ids": _lists(samples.sequences, np.int32),
        "written": _lists(samples.masks, np.bool_),
        "finish_reason": samples.finish_reasons,
        "seed": _repeated(samples.seed, count),
        "sample_id": samples.sample_ids,
        "number": samples.numbers,
        "slots": [room.slots for room in samples.rooms],
        "slot_length": [room.length for room in samples.rooms],
        "weights_version": _repeated(weights_version, count),
        "logprobs": _lists(samples.logprobs_at(temperature), np.float32),
        "values": _lists(samples.values, np.float32),
        "advantages": advantages,
        "reward": samples.rewards.numpy(),
        "score": samples.scores.numpy(),
        "token_scores": _lists(samples.token_scores, np.float32),
        **({} if supports is None else {"support": list(map(hash_of, supports))}),
        **{f"{PER_FUNCTION}{name}": x.numpy() for name, x in samples.rewards_by_function.items()},
    }


def hash_of(sets: TokenSets) -> str:
    """A hash of sets of tokens, 16 bytes in hexadecimal."""
    hashed = hashlib.blake2b(digest_size=16)
    for x in (sets.kinds, sets.offsets, sets.data):
        hashed.update(x.cpu().numpy().tobytes())
    return hashed.hexdigest()


def teacher_columns(
    names: Sequence[str],
    numbers: Sequence[int] | None,
    prompt_ids: Sequence[Tensor] | None,
    logprobs: Lists | Sequence[Any] | None,
) -> dict[str, Any]:
    """Returns a step's columns of :func:`fastrl.run.ledger.teacher_fields`.

    Args:
        names: the names of the teachers.
        numbers: the number of each sample's teacher; None: all have the same one.
        prompt_ids: what teachers read in place of the prompts; None: the prompts.
        logprobs: the teachers', of the tokens that are learned; None, or None in a list of arrays:
            they are not known.
    """
    return {
        "teacher": None if numbers is None else [names[i] for i in numbers],
        "teacher_prompt_ids": _lists(prompt_ids, np.int32),
        "teacher_logprobs": logprobs,
    }


def recordable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that JSON can hold."""
    return {name: value for name, value in settings.items() if _is_json(value)}


def _lists(tensors: Sequence[Tensor] | None, dtype: Any) -> Lists | None:
    """A list per 1-D tensor; None where there are none."""
    if tensors is None:
        return None
    values = torch.cat(list(tensors)).cpu().numpy()
    return Lists(values.astype(dtype, copy=False), [len(x) for x in tensors])


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _repeated(value: int | None, count: int) -> np.ndarray | None:
    return None if value is None else np.full(count, value)
