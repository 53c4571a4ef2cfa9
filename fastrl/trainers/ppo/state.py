"""A PPOTrainer's state: all that a later step depends on, as a tree for a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fastrl.config import PPOConfig
from fastrl.data.prompts import PromptStream
from fastrl.learn.kl_penalty import AdaptiveKLController, FixedKLController
from fastrl.learn.memory import MicroBatches
from fastrl.learn.ref_model import RefModel
from fastrl.learn.score_scaling import RunningMoments
from fastrl.learn.scorer import Scorer
from fastrl.learn.update import Update
from fastrl.models import PreTrainedModelWrapper
from fastrl.models.optimizer_state import (
    copy_weights,
    load_optimizer_state,
    optimizer_groups,
    optimizer_state,
    trained_weights,
)
from fastrl.models.optimizers import set_learning_rate
from fastrl.models.sharding import spread
from fastrl.models.utils import checksum, model_identity
from fastrl.registry import own_functions
from fastrl.rewards.identity import identities_of
from fastrl.run.checkpoints import (
    BadCheckpoint,
    check_identity,
    check_weights,
    describe_weights,
    warn_of_changed_settings,
)
from fastrl.run.processes import Processes
from fastrl.run.random_state import (
    numpy_state,
    random_state,
    restore_random_state,
    set_numpy_state,
)
from fastrl.trainers.ppo.critic import CriticLearner, check_states_critic
from fastrl.trainers.ppo.rollouts import Rollouts
from fastrl.trainers.teachers import TeacherModels

# Settings that do not change what a resumed run computes, or not more than its last bits.
_FREE = frozenset(
    {
        "exp_name", "log_with", "task_name", "model_name", "query_dataset", "reward_model",
        "tracker_kwargs", "project_kwargs", "tracker_project_name", "push_to_hub_if_best_kwargs",
        "compare_steps", "steps", "total_ppo_epochs", "optimize_device_cache", "dataset_num_proc",
        "rollout_slots", "rollout_kv_cache_gib", "ddp_timeout", "offload_optimizer",
        "activation_offloading", "critic", "teacher_model",
    }
)  # fmt: skip


class TrainerState:
    """Reads and restores all that a later step of a ``PPOTrainer`` depends on.

    Frozen weights and a reference that does not follow the policy are not in the state, but their
    checksums are: a run resumes with a trainer that is made from the same model.

    Args:
        policy: the policy before accelerate wrapped it.

    Attributes:
        step: the number of complete steps.
        streams: the orders of prompts, by the prompts' fingerprint.
        best_mean_score: the best mean score of the steps whose model was sent to the Hub.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        processes: Processes,
        *,
        policy: PreTrainedModelWrapper,
        optimizer: Any,
        lr_scheduler: Any,
        reference: RefModel,
        teachers: TeacherModels | None,
        critic: CriticLearner | None,
        kl_ctl: AdaptiveKLController | FixedKLController,
        running: RunningMoments,
        scorer: Scorer,
        rollouts: Rollouts,
        update: Update,
    ):
        self.config, self.tokenizer, self.processes = config, tokenizer, processes
        self.policy, self.optimizer, self.lr_scheduler = policy, optimizer, lr_scheduler
        self.reference, self.critic, self.kl_ctl = reference, critic, kl_ctl
        self.teachers = teachers
        self.running, self.scorer, self.rollouts, self.update = running, scorer, rollouts, update
        self.step = 0
        self.streams: dict[str, PromptStream] = {}
        self.best_mean_score = -math.inf

    def tree(self, random: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """See :meth:`fastrl.PPOTrainer.state_dict`."""
        spread(self.policy)
        scheduler, best = self.lr_scheduler, self.best_mean_score
        critic = {} if self.critic is None else {"critic": self.critic.state_dict()}
        return {
            **critic,
            "identity": self.identity,
            "config": self.settings,
            "step": self.step,
            "optimizer_steps": self.update.gradient.engine.steps,
            "policy": trained_weights(self.policy),
            "optimizer": optimizer_state(self.optimizer, self.policy),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "kl_coef": self.kl_ctl.value,
            "score_moments": dataclasses.asdict(self.running),
            "best_mean_score": best if math.isfinite(best) else None,
            "shuffle": numpy_state(self.update.epochs.shuffle),
            "prompts": {name: stream.state_dict() for name, stream in self.streams.items()},
            "reference": self.reference.own_weights() if self._reference_moves else {},
            **({} if self.teachers is None else {"teacher": self.teachers.follow.weights()}),
            "micro_batches": [each.size for each in self._micro_batches],
            "rollouts": self.rollouts.state_dict(),
            "processes": self.processes.count,
            "random": self.processes.objects(random_state()) if random is None else [*random],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """See :meth:`fastrl.PPOTrainer.load_state_dict`."""
        spread(self.policy)
        self._check_state(state)
        copy_weights(trained_weights(self.policy), state["policy"])
        if self._reference_moves:
            copy_weights(self.reference.own_weights(), state["reference"])
        if self.teachers is not None:
            copy_weights(self.teachers.follow.weights(), state["teacher"])
        load_optimizer_state(self.optimizer, self.policy, state["optimizer"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(dict(state["scheduler"]))
        self.kl_ctl.value = state["kl_coef"]
        self.running.become(RunningMoments(**state["score_moments"]))
        best = state["best_mean_score"]
        self.best_mean_score = -math.inf if best is None else best
        set_numpy_state(self.update.epochs.shuffle, state["shuffle"])
        self.streams.clear()
        for name, position in state["prompts"].items():
            stream = PromptStream(position["count"], position["seed"])
            stream.load_state_dict(position)
            self.streams[name] = stream
        for each, size in zip(self._micro_batches, state["micro_batches"], strict=True):
            each.size = size
        self.rollouts.load_state_dict(state["rollouts"])
        self.step = state["step"]
        self.update.gradient.engine.steps = state["optimizer_steps"]
        self._restore_random_state(_processes_of(state), state["random"])
        _apply_changed_settings(self, state["config"])

    @cached_property
    def own_code(self) -> dict[str, str]:
        """Hashes of users' losses and advantages, as they were when this was first read."""
        return identities_of(own_functions(self.config.policy_loss, self.config.advantage))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings, and hashes of users' code; a run that resumes with others gets a warning."""
        return {**deciding(self.config.to_dict()), **self.own_code}

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Facts that must be the same in the run that resumes."""
        reference = {} if self._reference_moves else self.reference.own_weights()
        following = [self.reference] if self._reference_moves else []
        following += [] if self.teachers is None else self.teachers.follow.moving
        # Adapters on the policy's own weights; other models are none of the policy's.
        moving = {name for x in following if x.model is None for name in x.own_weights()}
        critic = {} if self.critic is None else {"critic": self.critic.identity()}
        return {
            **critic,
            "method": self.config.method,
            **model_identity(self.policy, self.tokenizer, moving),
            "reference": f"{self.reference.mode} {checksum(reference)}",
            **({} if self.teachers is None else {"teachers": self.teachers.identity()}),
        }

    def _check_processes(self, count: int, batch_size: int) -> None:
        """Raises BadCheckpoint where a checkpoint's run had another number of processes, ``count``,
        and another number of samples in a step of all of them, ``batch_size``."""
        count_now = self.processes.count
        now = self.config.batch_size * count_now
        if count_now != count and now != batch_size:
            raise BadCheckpoint(
                f"resume: a step of the checkpoint's run has {batch_size} samples, and {count_now} "
                f"process(es) with batch_size={self.config.batch_size} have {now}: start "
                f"as many processes as before ({count}), or a number that divides {batch_size}, "
                "and set batch_size to the quotient"
            )

    def _restore_random_state(self, count: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores this process's random state, from which reward functions may draw; the main
        process's where the number of processes has changed, or not all states are known.

        Args:
            count: the number of processes of the checkpoint's run.
            states: the states of its first processes.
        """
        processes = self.processes
        if count != processes.count or len(states) < count:
            cause = f"{count} process(es)" + (
                f", of which {len(states)} is known" if len(states) < count else ""
            )
            warnings.warn(
                f"resume: the run had {cause}, and has {processes.count}: samples are the same, "
                "what reward functions draw at random need not be",
                stacklevel=6,
            )
            states = [states[0]] * processes.count
        restore_random_state(states[processes.index])

    @property
    def _micro_batches(self) -> list[MicroBatches]:
        """The sizes of micro-batches, which are halved where memory runs out."""
        gradients = [learner.gradient for learner in self.update.learners]
        return [self.scorer.slices, *(each.micro_batches for each in gradients)]

    @property
    def _reference_moves(self) -> bool:
        return self.config.sync_ref_every > 0

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raises BadCheckpoint for a state from which this trainer cannot go on."""
        missing = [x for x in ("identity", "policy", "optimizer", "random") if x not in state]
        if missing:
            raise BadCheckpoint(
                f"resume: this is no checkpoint of PPOTrainer: it lacks {', '.join(missing)}"
            )
        check_states_critic(self.critic, state)
        check_identity(state["identity"], self.identity)
        self._check_processes(_processes_of(state), state["config"]["batch_size"])
        policy = trained_weights(self.policy)
        check_weights(describe_weights(state["policy"]), describe_weights(policy))
        if (self.lr_scheduler is None) != (state["scheduler"] is None):
            had = "no" if state["scheduler"] is None else "a"
            raise BadCheckpoint(
                f"resume: the checkpoint's run had {had} lr_scheduler: make the trainer alike"
            )
        # Some of an optimizer's arguments are not in its state.
        current = {"optim": self.config.optim, "optim_args": self.config.optim_args}
        for name, now in current.items():
            before = state["config"].get(name, PPOConfig.__dataclass_fields__[name].default)
            if before != now:
                raise BadCheckpoint(
                    f"resume: the checkpoint's run had {name}={before!r}, this one has {now!r}: "
                    "resume with the optimizer that the run began with"
                )
        names, own_names = (
            [name for group in groups for name in group["params"]]
            for groups in (
                state["optimizer"]["groups"],
                optimizer_groups(self.optimizer, self.policy),
            )
        )
        if names != own_names:
            raise BadCheckpoint(
                "resume: the checkpoint's optimizer trains other weights: make the trainer with "
                "the optimizer that the run began with"
            )


def _processes_of(state: Mapping[str, Any]) -> int:
    """The number of processes of a checkpoint's run."""
    return state.get("processes", len(state["random"]))


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ``PPOConfig.to_dict`` that decide what is computed, as JSON values."""
    kept = {k: v for k, v in settings.items() if k.split("/")[0] not in _FREE}
    for name in ("batch_size", "mini_batch_size", "backward_batch_size"):  # over all processes
        kept[name] = settings[name] * (kept["world_size"] or 1)
    for name in ("world_size", "global_batch_size", "global_backward_batch_size"):
        del kept[name]
    if settings["loss_aggregate"] != "seq-mean-token-sum-norm":
        del kept["loss_norm_length"]  # is not used
    return json.loads(json.dumps(kept, default=str))


def _apply_changed_settings(state: TrainerState, before: Mapping[str, Any]) -> None:
    """Warns of settings that differ from the checkpoint's, and sets a new learning rate."""
    changed = warn_of_changed_settings(before, state.settings)
    if "learning_rate" in changed and state.lr_scheduler is None:
        set_learning_rate(state.optimizer, state.config.learning_rate)
    if state.critic is not None and {"learning_rate", "critic_learning_rate"} & {*changed}:
        state.critic.follow_settings()
