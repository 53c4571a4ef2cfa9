"""Replay of a PPO run: a step's samples are drawn again, after updates on the ledger's samples."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastrl.collect.compare_replay import (
    Replayed,
    ReplayedSample,
    changes,
    compared,
    difference,
    recorded_masks,
    recorded_rollout,
    rounding,
    warn_of_another_machine,
    warn_of_other_code,
)
from fastrl.collect.ledger import NOT_JSON
from fastrl.config import SAMPLED
from fastrl.run.checkpoints import CODE_DIFFERS, Checkpoints, step_of
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import no_step, read_facts, read_ledger
from fastrl.samples import Samples
from fastrl.trainers.ppo.ledger import learned_advantages
from fastrl.trainers.ppo.setup import precision_of
from fastrl.trainers.ppo.state import deciding
from fastrl.trainers.replay_walk import Walk

if TYPE_CHECKING:
    from fastrl.trainers.ppo.trainer import PPOTrainer

_COLUMNS = (
    *("prompt_ids", "completion_ids", "written", "finish_reason", "score", "token_scores"),
    *("logprobs", "values", "weights_version", "advantages"),
)
_OF_TEACHERS = ("teacher", "teacher_prompt_ids")
_OF_DRAWS = ("support", "seed", "sample_id", "slots", "slot_length")


def replay(
    trainer: PPOTrainer,
    output: str | Path | RunFolder,
    step: int,
    *,
    generation_kwargs: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Replayed:
    """Draws the samples of a run's step again, and compares them with the recorded ones.

    Loads the newest good checkpoint from before the step, or begins with the trainer's own weights;
    does the updates from there on with the samples and scores of the ledger, without rollouts and
    rewards; and draws the step's samples by the seed and ids that keyed their draws. On the
    machine, threads and versions of the run they are the recorded ones bit for bit; a warning says
    what differs. For a run of several processes one process does the updates of all, equal but for
    the rounding of sums: after such updates, or where dynamic sampling replaced samples, log-probs
    and values are the recorded ones within √ε of the model's precision. Afterwards the trainer is
    as the run's trainer was when it drew the samples. Nothing is pushed to the Hub.

    Args:
        trainer: made as for the run, from the same model, in one process; ``batch_size`` and
            ``mini_batch_size`` are those of all processes of the run together.
        output: the run's folder.
        step: the step's number, from 1.
        generation_kwargs: in place of the recorded ones; needed where these hold what JSON cannot.
        progress: show a progress bar of the updates.

    Raises:
        ValueError: the ledger lacks the step, a step between it and the checkpoint, or arguments of
            ``generate``; samples that cannot be drawn again, such as a rollout_func's; a trainer of
            other settings or several processes, or, without a checkpoint, one that has done steps;
            a damaged file of the ledger.
        BadCheckpoint: a ValueError: a checkpoint of another model.
    """
    return _StepWalk(trainer, output, step).replay(generation_kwargs, progress)


class _StepWalk(Walk):
    """The walk of a PPOTrainer, step by step."""

    unit, samples_of = "step", "samples"
    others = "a rollout_func, tools or an environment"

    def __init__(self, trainer: PPOTrainer, output: str | Path | RunFolder, last: int):
        super().__init__(trainer, output, last)
        # The tolerance of numbers that were computed in batches of other sizes.
        self.rounding = rounding(precision_of(trainer.model, trainer.accelerator))
        self.tolerance = 0.0
        settings, count = self.facts["settings"], process_count_of(self.facts)
        for name in ("temperature", "group_size", "batch_size"):
            value, now = settings[name], getattr(trainer.config, name)
            value *= count if name == "batch_size" else 1
            if value != now:
                of_all = f" (of {count} processes together)" if count > 1 else ""
                raise ValueError(
                    f"the trainer has {name}={now}, the ledger {self.ledger} {value}{of_all}: make "
                    "it as for the run"
                )

    @property
    def weights_version(self) -> int:
        return self.trainer.weights_version

    def replay(self, generation_kwargs: Mapping[str, Any] | None, progress: bool) -> Replayed:
        from tqdm.auto import tqdm

        trainer, last = self.trainer, self.last
        kwargs = self._generation_kwargs(generation_kwargs)
        trainer.config.push_to_hub_if_best_kwargs = {}
        begun_at = self._load_checkpoint()
        recorded = read_facts(self.ledger, begun_at + 1, last)
        _warn_of_other_settings(recorded)
        warn_of_other_code(recorded, trainer.own_code)
        walked = read_facts(self.ledger, begun_at + 1, last - 1) if begun_at + 1 < last else []
        if any(process_count_of(facts) > 1 for facts in walked):
            self.tolerance = self.rounding
        with trainer.computing():
            trainer.products.adopt(recorded[-1]["machine"])
            warn_of_another_machine(recorded)
            steps = range(begun_at + 1, last)
            for step in tqdm(steps, desc="updates", unit="step", disable=not progress):
                self._update(step, kwargs)
            samples = self._drawn(process_count_of(recorded[-1]), kwargs)
        return Replayed(last, begun_at, samples, self.strayed, samples[0].tolerance, self.walked)

    def _load_checkpoint(self) -> int:
        """Loads the newest good checkpoint from before step ``last``, if there is one; returns its
        number of steps, else 0.

        Raises:
            ValueError: without a checkpoint, a trainer that has done steps, or a ledger that begins
                after step 1.
        """
        trainer, folder = self.trainer, self.folder.checkpoints
        checkpoint = Checkpoints(folder).newest_good(before=self.last)
        if checkpoint is not None:
            with warnings.catch_warnings():
                # Loading warns that reward functions draw other numbers: none is called here.
                warnings.filterwarnings("ignore", r"resume: the run had \d+ process")
                warnings.filterwarnings("ignore", CODE_DIFFERS)  # the ledger has each step's code
                trainer.load_checkpoint(checkpoint)
            return step_of(checkpoint)
        none = f"{folder} has no checkpoint from before step {self.last}, and"
        if trainer.current_step:
            raise ValueError(
                f"{none} the trainer has done {trainer.current_step} steps: pass a new one, made "
                "as for the run"
            )
        if self.last > 1 and not read_facts(self.ledger, 1, 1):
            raise ValueError(
                f"{none} {no_step(self.ledger, 1)}; the run's earlier steps are in another folder"
            )
        return 0

    def _update(self, step: int, generation_kwargs: dict[str, Any]) -> None:
        """Does a step's update; ``strayed`` says where advantages first differed from the run's."""
        trainer, taught = self.trainer, self.trainer.teaching is not None
        over_sets = trainer.config.policy_support == SAMPLED
        further = (*(_OF_TEACHERS if taught else ()), *(_OF_DRAWS if over_sets else ()))
        rows, again = self.rows(step, (*_COLUMNS, *further)), None
        if over_sets:
            (facts,) = read_facts(self.ledger, step, step)
            again = self._sampled(rows, process_count_of(facts), generation_kwargs)
        rollout = recorded_rollout(rows, trainer.config.temperature, again)
        queries = [torch.tensor(row["prompt_ids"]) for row in rows]
        column = "score" if rows[0]["token_scores"] is None else "token_scores"
        scores = [torch.tensor(row[column], dtype=torch.float32) for row in rows]
        of_teachers: dict[str, Any] = {}
        if taught and rows[0]["teacher_prompt_ids"] is not None:
            read = [torch.tensor(row["teacher_prompt_ids"]) for row in rows]
            of_teachers["teacher_queries"] = read
        if taught and rows[0]["teacher"] is not None:
            of_teachers["teachers"] = [row["teacher"] for row in rows]
        masks = recorded_masks(rows)
        trainer.step(queries, rollout.sequences, scores, masks, rollout, **of_teachers)
        if self.strayed is None:
            assert trainer.experience is not None
            recorded = np.array([x for row in rows for x in row["advantages"]], dtype=np.float32)
            learned = learned_advantages(trainer.experience).values
            strayed = difference("advantages", recorded, learned, tolerance=self.tolerance)
            self.strayed = f"step {step}: {strayed[0]}" if strayed else None

    def _drawn(self, processes: int, generation_kwargs: dict[str, Any]) -> list[ReplayedSample]:
        """Draws the samples of the step, and compares them with the recorded ones."""
        rows = read_ledger(self.ledger, None, self.last, self.last).to_pylist()
        resampled = self.is_resampled(rows, self.trainer.config.group_size)
        tolerance = self.rounding if resampled else self.tolerance
        drawn = self._sampled(rows, processes, generation_kwargs)
        return compared(rows, drawn, self.trainer.config.temperature, tolerance)

    def _sampled(
        self, rows: list[dict[str, Any]], processes: int, generation_kwargs: dict[str, Any]
    ) -> Samples:
        """The samples of rows, drawn again, each process's share as it was drawn in the run."""
        trainer, outputs = self.trainer, []
        share, size = len(rows) // processes, trainer.config.group_size
        for process in range(processes):
            part = rows[process * share : (process + 1) * share]
            seed, slots = part[0]["seed"], part[0]["slots"]
            room = {"policy": {"slots": slots, "length": part[0]["slot_length"]}} if slots else {}
            trainer.rollouts.load_state_dict({"rooms": room})
            prompts = [torch.tensor(row["prompt_ids"]) for row in part[::size]]
            ids = [row["sample_id"] for row in part[::size]]
            # GenerateBackend, whose draws have no keys, thus gives each process another seed.
            seed = seed if slots else seed ^ process
            outputs.append(trainer.rollouts.sample(prompts, generation_kwargs, size, seed, ids))
        return Samples.joined(outputs)

    def _generation_kwargs(self, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
        """``arguments``, else the run's; raises ValueError if some of these were not recorded."""
        if arguments is None and self.facts[NOT_JSON]:
            raise ValueError(
                f"the run's generation_kwargs hold what JSON cannot "
                f"({', '.join(self.facts[NOT_JSON])}): pass generation_kwargs as in the run"
            )
        return dict(self.facts["generation_kwargs"] if arguments is None else arguments)


def process_count_of(facts: Mapping[str, Any]) -> int:
    """How many processes did the steps of a file of the ledger."""
    return facts["settings"].get("world_size") or 1


def _warn_of_other_settings(recorded: list[dict[str, Any]]) -> None:
    *earlier, last = recorded
    now = deciding(last["settings"])
    if changed := changes(earlier, lambda facts: deciding(facts["settings"]), now):
        warnings.warn(
            f"the run was resumed with other settings ({changed}) after the checkpoint that the "
            "replay begins with: updates before that are done with the new ones, and are not the "
            "run's; of a run that keeps its checkpoints (--keep-last 0) all steps can be replayed",
            stacklevel=4,
        )
