"""Samples of a run's past, drawn again: from a checkpoint, its updates are walked by the ledger."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastrl.collect.ledger import NOT_JSON
from fastrl.collect.replayed import (
    Replayed,
    ReplayedSample,
    compared,
    difference,
    recorded_rollout,
    warn_of_another_machine,
    warn_of_other_code,
)
from fastrl.ppo.setup import precision_of
from fastrl.ppo.state import deciding
from fastrl.run.checkpoints import CODE_DIFFERS, Checkpoints, step_of
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import no_step, read_facts, read_ledger
from fastrl.run.machine import differences
from fastrl.samples import Samples

if TYPE_CHECKING:
    from fastrl.ppo.trainer import PPOTrainer

_WALKED = (
    *("prompt_ids", "completion_ids", "written", "finish_reason", "score", "token_scores"),
    *("logprobs", "values"),
)
_CHECKED = ("weights_version", "advantages")


def replay(
    trainer: PPOTrainer,
    output: str | Path | RunFolder,
    step: int,
    *,
    generation_kwargs: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Replayed:
    """Draws the samples of a step of a run again.

    Loads the newest good checkpoint from before the step, or begins with the trainer's own weights;
    does the updates from there on as the ledger has their samples and scores, without rollouts and
    rewards; and draws the step's samples by what keyed their draws. On the machine, threads and
    versions of the run they are the recorded ones bit for bit; a warning says what differs. Of a
    run of several processes one process does the updates of all, but for the rounding of sums:
    log-probs and values are the recorded ones within √ε of their dtype, or bit for bit where no
    update lies between checkpoint and step. Afterwards the trainer is as it was when the run drew
    them. Nothing is pushed to the Hub.

    Args:
        trainer: made as for the run, from the same model, in one process; ``batch_size`` and
            ``mini_batch_size`` are those of all processes of the run together.
        output: the run's folder.
        step: from 1.
        generation_kwargs: in place of the recorded ones; needed where these hold what JSON cannot.
        progress: show a progress bar of the updates.

    Raises:
        ValueError: a step that the ledger does not have, or one between it and the checkpoint;
            a trainer of other settings or of several processes; a damaged file of the ledger.
        BadCheckpoint: a ValueError: a checkpoint of another model.
    """
    if trainer.processes.count > 1:
        raise ValueError("a replay runs as one process: start it without a launcher")
    run = output if isinstance(output, RunFolder) else RunFolder(output)
    ledger = run.ledger
    facts = read_facts(ledger, step, step)
    if not facts:
        raise ValueError(no_step(ledger, step))
    if read_ledger(ledger, ["seed"], step, step)["seed"].null_count:
        raise ValueError(
            f"the samples of step {step} came from a rollout_func, tools or an environment, which "
            "may say something else each time, and cannot be drawn again; what they were is in "
            "the ledger (fastrl samples)"
        )
    _check_settings(trainer, facts[-1], ledger)
    kwargs = _generation_kwargs(facts[-1], generation_kwargs)
    trainer.config.push_to_hub_if_best_kwargs = {}
    begun_at = _load_checkpoint(trainer, run, step)
    recorded = read_facts(ledger, begun_at + 1, step)
    _warn_of_other_settings(recorded)
    warn_of_other_code(recorded, trainer.own_code)
    walked = read_facts(ledger, begun_at + 1, step - 1) if begun_at + 1 < step else []
    shared = any(process_count_of(facts) > 1 for facts in walked)
    tolerance = _rounding(trainer) if shared else 0.0
    strayed = None
    with trainer.computing():
        trainer.products.adopt(recorded[-1]["machine"])
        warn_of_another_machine(recorded)
        for past in _steps(begun_at + 1, step, progress):
            found = _walk(trainer, ledger, past, tolerance)
            strayed = strayed or found
        count = process_count_of(recorded[-1])
        samples = _draw(trainer, ledger, step, kwargs, count, tolerance)
    return Replayed(step, begun_at, samples, strayed, samples[0].tolerance, step - 1 - begun_at)


def _rounding(trainer: PPOTrainer) -> float:
    """Within which log-probs and values are the same that batches of other sizes computed."""
    return math.sqrt(torch.finfo(precision_of(trainer.model, trainer.accelerator)).eps)


def process_count_of(facts: Mapping[str, Any]) -> int:
    """How many processes did the steps of a file of the ledger."""
    return facts["settings"].get("world_size") or 1


def _load_checkpoint(trainer: PPOTrainer, run: RunFolder, step: int) -> int:
    """Loads the newest good checkpoint from before a step, if there is one; returns its number of
    steps.

    Raises:
        ValueError: there is none, and the trainer is no new one or the ledger begins later.
    """
    checkpoint = Checkpoints(run.checkpoints).newest_good(before=step)
    if checkpoint is not None:
        with warnings.catch_warnings():
            # What is random in reward functions does not matter: they are not called.
            warnings.filterwarnings("ignore", r"resume: the run had \d+ process")
            warnings.filterwarnings("ignore", CODE_DIFFERS)  # the ledger says it of each step
            trainer.load_checkpoint(checkpoint)
        return step_of(checkpoint)
    if trainer.current_step:
        raise ValueError(
            f"{run.checkpoints} has no checkpoint from before step {step}, and the trainer has "
            f"done {trainer.current_step} steps: pass a new one, made as for the run"
        )
    if step > 1 and not read_facts(run.ledger, 1, 1):
        raise ValueError(
            f"{run.checkpoints} has no checkpoint from before step {step}, and "
            f"{no_step(run.ledger, 1)}; the run's earlier steps are in another folder"
        )
    return 0


def _walk(trainer: PPOTrainer, ledger: Path, step: int, tolerance: float) -> str | None:
    """Does the update of a step; returns how it differed from the run's, None if it did not."""
    table = read_ledger(ledger, [*_WALKED, *_CHECKED], step, step)
    if table.num_rows == 0:
        raise ValueError(no_step(ledger, step))
    rows = table.to_pylist()
    version, now = rows[0]["weights_version"], trainer.weights_version
    rollout = recorded_rollout(rows, trainer.config.temperature)
    queries = [torch.tensor(row["prompt_ids"]) for row in rows]
    given = "score" if rows[0]["token_scores"] is None else "token_scores"
    scores = [torch.tensor(row[given], dtype=torch.float32) for row in rows]
    masks = None
    if any(row["written"] is not None for row in rows):
        masks = [torch.tensor(row["written"], dtype=torch.bool) for row in rows]
    trainer.step(queries, rollout.sequences, scores, masks, rollout)
    if version != now:
        return f"step {step}: {now} optimizer steps were taken before it, {version} in the run"
    assert trainer.experience is not None
    recorded = np.array([x for row in rows for x in row["advantages"]], dtype=np.float32)
    own = trainer.experience.advantages()[0]
    found = difference("advantages", recorded, own, tolerance=tolerance)
    return f"step {step}: {found[0]}" if found else None


def _draw(
    trainer: PPOTrainer,
    ledger: Path,
    step: int,
    generation_kwargs: dict[str, Any],
    processes: int,
    tolerance: float,
) -> list[ReplayedSample]:
    """Draws the samples of a step, the share of each of the run's processes as it did."""
    rows, outputs = read_ledger(ledger, None, step, step).to_pylist(), []
    share, size = len(rows) // processes, trainer.config.group_size
    resampled = [row["sample_id"] for row in rows[::size]] != list(range(len(rows) // size))
    if resampled:
        # What dynamic sampling replaced is not there to be drawn beside the others.
        tolerance = max(tolerance, _rounding(trainer))
    for process in range(processes):
        own = rows[process * share : (process + 1) * share]
        room = {"slots": own[0]["slots"], "length": own[0]["slot_length"]}
        trainer.rollouts.load_state_dict({"rooms": {"policy": room} if room["slots"] else {}})
        prompts = [torch.tensor(row["prompt_ids"]) for row in own[::size]]
        ids = [row["sample_id"] for row in own[::size]]
        if resampled and not room["slots"]:
            raise ValueError(
                f"step {step} was drawn by model.generate, whose draws hang on all samples of a "
                "batch, and dynamic sampling replaced some: it cannot be drawn again"
            )
        # As GenerateBackend has it, which does not key the draws by the sample.
        seed = own[0]["seed"] if room["slots"] else own[0]["seed"] ^ process
        outputs.append(trainer.rollouts.sample(prompts, generation_kwargs, size, seed, ids))
    return compared(rows, Samples.joined(outputs), trainer.config.temperature, tolerance)


def _check_settings(trainer: PPOTrainer, facts: Mapping[str, Any], ledger: Path) -> None:
    """
    Raises:
        ValueError: settings that decide what a step is are not the run's.
    """
    recorded = {name: facts["settings"][name] for name in ("temperature", "group_size")}
    count = process_count_of(facts)
    recorded["batch_size"] = facts["settings"]["batch_size"] * count
    for name, value in recorded.items():
        own = getattr(trainer.config, name)
        if value != own:
            of_all = f" (of {count} processes together)" if count > 1 else ""
            raise ValueError(
                f"the trainer has {name}={own}, the ledger {ledger} {value}{of_all}: make it as "
                "for the run"
            )


def _generation_kwargs(facts: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """
    Raises:
        ValueError: some were not recorded, and none are given.
    """
    if given is not None:
        return dict(given)
    if facts[NOT_JSON]:
        raise ValueError(
            f"the run's generation_kwargs hold what JSON cannot ({', '.join(facts[NOT_JSON])}): "
            "pass generation_kwargs as in the run"
        )
    return dict(facts["generation_kwargs"])


def _warn_of_other_settings(recorded: list[dict[str, Any]]) -> None:
    *earlier, last = (deciding(facts["settings"]) for facts in recorded)
    found = dict.fromkeys(line for settings in earlier for line in differences(settings, last))
    if found:
        warnings.warn(
            f"the run was resumed with other settings ({'; '.join(found)}) after the checkpoint "
            "that the replay begins with: updates before that are done with the new ones, and are "
            "not the run's; of a run that keeps its checkpoints (--keep-last 0) all steps can be "
            "replayed",
            stacklevel=3,
        )


def _steps(first: int, end: int, progress: bool) -> Any:
    from tqdm.auto import tqdm

    return tqdm(range(first, end), desc="updates", unit="step", disable=not progress)
