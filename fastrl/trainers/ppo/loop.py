"""The whole PPO loop: prompts, rollouts, rewards, steps, evaluations."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastrl.collect.collector import Collector, tool_statistics
from fastrl.collect.interaction import Interaction
from fastrl.collect.ledger import recordable
from fastrl.collect.respond import Asked, Respond, RolloutFunction, Sampled
from fastrl.data.chat import templates_of
from fastrl.data.columns import REWARD_ARGUMENTS
from fastrl.data.prompts import Prompts, PromptStream, read_eval_prompts
from fastrl.data.tables import LONG_PROMPTS
from fastrl.data.vocabulary import check_vocabulary
from fastrl.learn.dynamic_sampling import DynamicSampling
from fastrl.learn.nonfinite import check_a_sample_is_left
from fastrl.learn.penalties import Penalties
from fastrl.learn.scorer import check_tokens
from fastrl.models.layout import EncoderDecoder
from fastrl.models.utils import NO_LIMIT, context_length
from fastrl.rewards.identity import identities_of
from fastrl.rewards.weighted import RewardFunctions, Rewards, reward_statistics
from fastrl.rollout.sampling_params import end_tokens
from fastrl.run.callbacks import (
    Evaluation,
    ShownSamples,
    TrainCallback,
    TrainResult,
    checked_callbacks,
    closing_callbacks,
)
from fastrl.run.checkpoints import OF_CODE, BadCheckpoint, warn_of_changed_settings
from fastrl.run.ledger import Ledger
from fastrl.run.metrics import TrackerCallback, scalars
from fastrl.run.progress import ProgressCallback
from fastrl.run.random_state import random_state_kept, seed_at
from fastrl.run.stopping import Stopped, stop_at_a_steps_end
from fastrl.samples import Samples
from fastrl.settings import check_ranges, check_types, setting
from fastrl.trainers.driver import Driver
from fastrl.trainers.policy_support import check_form
from fastrl.trainers.ppo.guards import check_divergence
from fastrl.trainers.ppo.ledger import open_ledger
from fastrl.trainers.ppo.roles import Stepping
from fastrl.trainers.ppo.saving import Saving, evaluations_as_tree, evaluations_from_tree
from fastrl.trainers.teachers import TEACHER_COLUMNS, TeacherModels, TeacherPrompts
from fastrl.user_code import exits_are_errors


@dataclass
class Numbers:
    """Arguments of :meth:`fastrl.PPOTrainer.train`, checked: its numbers, and ``overwrite``.

    Raises:
        TypeError, ValueError: as :func:`fastrl.settings.check_types` and ``check_ranges``.
    """

    steps: int = setting("", within="[1, inf)")
    eval_every: int = setting("", within="[0, inf)")
    missing_eos_penalty: float | None = setting("", within="(-inf, inf)")
    save_every: int = setting("", within="[0, inf)")
    keep_last: int = setting("", within="[0, inf)")
    overwrite: bool = setting("")
    max_tool_calling_iterations: int | None = setting("", within="[0, inf)")

    def __post_init__(self) -> None:
        check_types(self, Numbers)
        check_ranges(self, Numbers)


class Loop:
    """One run of :meth:`fastrl.PPOTrainer.train`; arguments and errors are those of that method."""

    resumes_by = "resume=True"

    def __init__(
        self,
        trainer: Stepping,
        reward_fn: RewardFunctions | None,
        numbers: Numbers,
        *,
        reward_weights: Sequence[float] | None,
        reward_timeout: float | None,
        reward_retries: int,
        reward_batch_size: int | None,
        prompts: Any,
        dataset: Any,
        prompt_column: str | None,
        tools: Sequence[Callable[..., Any]],
        environment_factory: Any,
        rollout_func: Callable[..., dict[str, Any]] | None,
        generation_kwargs: dict[str, Any],
        eval_prompts: Any,
        long_prompts: str,
        callbacks: Iterable[TrainCallback],
        progress: bool,
        saving: Saving,
        ledger: bool | str | Path | Ledger,
    ):
        config, tokenizer, rollouts = trainer.config, trainer.tokenizer, trainer.rollouts
        self.processes = trainer.processes
        if prompts is not None and dataset is not None:
            raise ValueError("pass prompts or dataset, not both")
        if long_prompts not in LONG_PROMPTS:
            raise ValueError(
                f"unknown long_prompts {long_prompts!r}: choose one of {', '.join(LONG_PROMPTS)}"
            )
        dataset = trainer.dataset if dataset is None else dataset
        if prompts is None and dataset is None:
            raise ValueError("nothing to train on: pass prompts or dataset")
        callbacks = checked_callbacks(callbacks)
        self.trainer = trainer
        interaction = Interaction(tools, environment_factory)
        interaction.refuse_beside(rollout_func)
        if interaction and isinstance(rollouts.layout, EncoderDecoder):
            raise ValueError("tools and environments need a causal language model")
        interaction.read_by(tokenizer, {})
        self.rewards = Rewards(
            () if reward_fn is None else reward_fn,
            reward_weights,
            further=interaction.rewards,
            reward_timeout=reward_timeout,
            reward_retries=reward_retries,
            reward_batch_size=reward_batch_size,
            on_nonfinite=config.on_nonfinite,
            shared=self.processes.count > 1,
        )
        functions: list[tuple[str, Any]]
        functions = list(zip(self.rewards.names, self.rewards.functions, strict=True))
        functions += [(f"tool {tool.__name__}", tool) for tool in interaction.tools]
        functions += [] if rollout_func is None else [("rollout_func", rollout_func)]
        self._code_of_users = identities_of(functions)
        rounds = config.dynamic_sampling_rounds
        self.resampling = DynamicSampling(config.group_size, rounds, self.processes)
        steps, self.eval_every = numbers.steps, numbers.eval_every
        self.steps = steps
        self.generation_kwargs = rollouts.arguments.of_training(generation_kwargs)
        check_form(self.generation_kwargs, rollouts.arguments.model, trainer.tokenizer)
        self.penalties = Penalties.of(
            numbers.missing_eos_penalty,
            config.overlong_buffer,
            config.overlong_penalty,
            self.generation_kwargs.get("max_new_tokens"),
        )
        self.collector = Collector(
            self._respond_by(rollout_func, interaction, numbers.max_tool_calling_iterations),
            self.rewards,
            self.penalties,
            self.processes,
            rollouts.ready if rollout_func is None else contextlib.nullcontext,
            trainer.nonfinite,
        )
        # With max_length instead, which counts the prompt, too, a response needs room for a token.
        new_tokens = self.generation_kwargs.get("max_new_tokens") or 1
        room = (rollouts.layout, new_tokens, long_prompts)
        closed = isinstance(rollouts.layout, EncoderDecoder)
        with self.processes.one_first():
            all_prompts = (
                Prompts.from_dataset(dataset, prompt_column, tokenizer, closed=closed)
                if prompts is None
                else Prompts.from_list(prompts, tokenizer, closed=closed)
            )
        policy = trainer.accelerator.unwrap_model(trainer.model)
        check_vocabulary(policy, tokenizer, [[all_prompts.largest_id]])
        interaction.check(all_prompts)
        self.prompts = all_prompts.fitting(*room)
        self._check_tokens(self.prompts, new_tokens)
        self.taught = None if trainer.teaching is None else self._taught_by(trainer.teaching.models)
        self.prompts_per_step = config.prompts_per_step * self.processes.count
        if len(self.prompts) < self.prompts_per_step:
            wanted = f"batch_size={config.batch_size}"
            wanted += "" if config.group_size == 1 else f" / group_size={config.group_size}"
            wanted += "" if self.processes.count == 1 else f" × {self.processes.count} processes"
            held_out = "" if eval_prompts is None else " beside eval_prompts"
            raise ValueError(
                f"{len(self.prompts)} prompts{held_out} are fewer than {wanted}: lower batch_size "
                "or bring more prompts"
            )
        self.result = TrainResult(dropped_prompts=len(all_prompts) - len(self.prompts))
        self._name_of = self.prompts.name_of  # names a prompt that is being answered
        self.eval_prompts: Prompts | None = None
        if eval_prompts is not None:
            all_prompts = read_eval_prompts(eval_prompts, prompt_column, tokenizer, closed=closed)
            check_vocabulary(policy, tokenizer, [[all_prompts.largest_id]])
            interaction.check(all_prompts)
            self.eval_prompts = all_prompts.fitting(*room)
            self._check_tokens(self.eval_prompts, new_tokens)
            if len(self.eval_prompts) < self.processes.count:
                raise ValueError(
                    f"{len(self.eval_prompts)} eval_prompts are fewer than "
                    f"{self.processes.count} processes: bring more, or start fewer"
                )
            self.result.dropped_eval_prompts = len(all_prompts) - len(self.eval_prompts)
        lengths = [*self.prompts.lengths, *(self.eval_prompts.lengths if self.eval_prompts else ())]
        rollouts.expect(max(lengths) + new_tokens)
        self.saving = saving
        self.ledger = open_ledger(
            ledger if self.processes.is_main else False,
            saving.ledger_folder,
            config,
            self.generation_kwargs,
            trainer.own_code,
            () if trainer.teaching is None else list(trainer.teaching.models.references),
        )
        if trainer.teaching is not None:
            trainer.teaching.noted = self.processes.any(self.ledger is not None)
        self.begun_at = trainer.current_step  # steps are counted over all of the trainer's runs
        if config.critic_warmup_steps >= self.begun_at + steps:
            warnings.warn(
                f"the policy does not learn in {steps} step(s): critic_warmup_steps="
                f"{config.critic_warmup_steps} is for the critic alone, lower it or train longer",
                stacklevel=4,
            )
        self._began = time.perf_counter()  # after a resume less the run's seconds before that
        self.callbacks: list[TrainCallback] = [
            *([ProgressCallback(config.title)] if progress and self.processes.is_main else []),
            *([] if config.log_with is None else [TrackerCallback()]),
            *callbacks,
        ]

    def _taught_by(self, models: TeacherModels) -> TeacherPrompts:
        """What teachers read in place of the prompts, which are checked.

        Raises:
            ValueError: names the prompt whose teacher's prompt is absent or leaves no room, or
                whose teacher is not known; the teacher is the policy itself.
        """
        samples = self.prompts.samples
        if not {*samples.columns} & {*TEACHER_COLUMNS}:
            models.refuse_itself(live_alone=True)
        most = self.generation_kwargs.get("max_new_tokens")
        taught = TeacherPrompts(models, {}, most, "max_new_tokens")
        names = list(map(self.prompts.name_of, samples.prompt_rows))
        if not taught.of(samples, names).get("teacher_prompt_ids"):
            taught.check_own(samples.prompt_ids, names)
        return taught

    def _respond_by(
        self, function: Any, interaction: Interaction, most_turns: int | None
    ) -> Respond:
        """Returns what answers prompts: a ``rollout_func``, or the policy."""
        trainer, rollouts = self.trainer, self.trainer.rollouts
        config, tokenizer, kwargs = trainer.config, trainer.tokenizer, self.generation_kwargs
        policy = trainer.accelerator.unwrap_model(trainer.model)
        ends = end_tokens(policy, tokenizer, kwargs.get("eos_token_id")).tolist()
        if function is not None:
            return RolloutFunction(
                function,
                trainer,
                policy,
                tokenizer,
                rollouts.decode,
                ends,
                kwargs.get("stop") or (),
                REWARD_ARGUMENTS,
                config.temperature,
                config.policy_support,
            )
        return interaction.respond(
            Sampled(
                rollouts.run,
                kwargs,
                rollouts.decode,
                None if interaction.environments is None else self._encoded,
                config.batch_size,
            ),
            tokenizer,
            {},
            ends,
            self.rewards.event_loop,
            most_turns,
            kwargs.get("max_new_tokens") or NO_LIMIT,
            context_length(policy),
            config.temperature,
        )

    def _encoded(self, prompts: Samples) -> Samples:
        """Encodes prompts to which environments have added messages."""
        chats, rows = prompts.prompts, prompts.prompt_rows
        templates = templates_of(chats, prompts.columns, rows, {})
        encoded = Prompts.from_list(chats, self.trainer.tokenizer, self._name_of, rows, templates)
        ids = encoded.samples.prompt_ids
        return replace(prompts, prompt_texts=encoded.samples.prompt_texts, prompt_ids=ids)

    def _check_tokens(self, prompts: Prompts, new_tokens: int) -> None:
        """Raises ValueError where a prompt and its new tokens do not fit into a forward pass."""
        check_tokens(
            self.trainer.config.micro_batch_tokens,
            prompts.lengths,
            [new_tokens] * len(prompts),
            lambda i: (
                f"{prompts.name_of(prompts.samples.prompt_rows[i])} and {new_tokens} new tokens"
            ),
        )

    @property
    def last_step(self) -> int:
        return self.begun_at + self.steps

    @closing_callbacks
    def run(self) -> TrainResult:
        """Runs the steps and evaluations, and calls the callbacks."""
        self.processes.check_same("train()", self._shared_settings())
        with (
            stop_at_a_steps_end(),
            exits_are_errors(),
            self.saving.opened(self) as resumed,
            self._ledger_opened(),
        ):
            done, last, driver = self.trainer.current_step, self.last_step, Driver(self)
            self._call("on_train_begin", max(last - done, 0))
            if not resumed:
                self._evaluate(done)
            elif self._lacks_evaluation(done):
                self._evaluate(done)
                self.saving.save_if_due(done, last=done == last, stops=False)
            with driver.guarded():
                driver.drive(range(done + 1, last + 1))
            self.result.seconds = self._seconds()
            self._call("on_train_end", self.result)
        return self.result

    # The steps of a run, see fastrl.trainers.driver.Driven.

    def learn(self, batch: int) -> bool:
        """Takes step number ``batch`` on the next prompts."""
        self.saving.mark()
        weights_version = self.trainer.weights_version
        metrics, samples = self._next_step()
        if self.ledger is not None:
            experience = self.trainer.experience
            assert experience is not None
            metrics |= self.ledger.add(batch, samples, weights_version, experience)
        self._latest = metrics, samples
        return True

    def conclude(self, *, stops: bool) -> bool:
        step, (metrics, samples) = self.trainer.current_step, self._latest
        self.result.add_step(metrics)
        shown = samples.prompt_texts, samples.texts, samples.rewards.tolist()
        told = self._call_each(
            ("on_samples", step, ShownSamples(*shown)), ("on_step", step, metrics)
        )
        ends = True in told
        if self.processes.any(ends):
            self.steps = step - self.begun_at
        check_divergence(self.trainer.config, step, metrics)
        evaluates = self._is_evaluated(step)
        if evaluates:
            self._evaluate(step)
        return self.saving.save_if_due(step, last=self.is_over(), stops=stops) or evaluates

    def can_rest(self) -> bool:
        return True

    def is_over(self) -> bool:
        return self.trainer.current_step >= self.last_step

    def save_to_stop(self) -> None:
        self.saving.save_to_stop()

    def stopped(self) -> Stopped:
        return self.saving.stopped()

    def save_before(self, error: BaseException) -> Path | None:
        return self.saving.save_before(error)

    def _ledger_opened(self) -> AbstractContextManager[None]:
        if self.ledger is None:
            return contextlib.nullcontext()
        return self.ledger.opened(self.trainer.current_step + 1)

    def _is_evaluated(self, step: int) -> bool:
        every = self.eval_every
        return step == self.last_step or (every > 0 and step % every == 0)

    def _lacks_evaluation(self, step: int) -> bool:
        """Whether the evaluation after this step is missing: the run was interrupted in it, or has
        none that later ones can be compared with (see :meth:`load_state_dict`)."""
        if self.eval_prompts is None:
            return False
        done = self.result.evaluations
        return not done or (self._is_evaluated(step) and done[-1].step < step)

    def state_dict(self) -> dict[str, Any]:
        """The state of the run beside the trainer's: its first step, prompts, settings, evaluations
        and seconds."""
        return {
            "begun_at": self.begun_at,
            "prompts": self.prompts.fingerprint,
            "settings": self._settings(),
            "evaluations": evaluations_as_tree(self.result.evaluations),
            "seconds": self._seconds(),
        }

    def _shared_settings(self) -> dict[str, Any]:
        """What must be the same in all processes."""
        return {
            "steps": self.steps,
            "eval_every": self.eval_every,
            "prompts": self.prompts.fingerprint,
            **self._settings(),
            **self.saving.settings(),
        }

    @property
    def code(self) -> dict[str, str]:
        """Hashes of users' functions."""
        return {**self._code_of_users, **self.trainer.own_code}

    def _settings(self) -> dict[str, Any]:
        """The run's settings that may differ when it is resumed, as JSON."""
        held_out = None if self.eval_prompts is None else self.eval_prompts.fingerprint
        return {
            "reward": self.rewards.weights,
            "missing_eos_penalty": self.penalties.missing_eos,
            **recordable(self.generation_kwargs),
            "held-out prompts": held_out,
            **self._code_of_users,
        }

    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises BadCheckpoint for the state of a run on other prompts, or of a trainer alone."""
        if "loop" not in state:
            raise BadCheckpoint(
                "resume: the checkpoint was not written by train(): load it with load_checkpoint()"
            )
        if state["loop"]["prompts"] != self.prompts.fingerprint:
            raise BadCheckpoint(
                "resume: the checkpoint's run learned from other prompts: resume with the data set "
                "that it began with (and its tokenizer, prompt and length settings, and seed and "
                "number of held-out prompts), or begin a new run with its model"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from another loop's state, and warns of settings that differ. Where these are
        names or weights of rewards, held-out prompts or arguments of generation, the state's
        evaluations are dropped, because later ones cannot be compared with them."""
        self.begun_at = state["begun_at"]
        self._began -= state["seconds"]
        both = state["settings"], self._settings()
        # The trainer itself warns of another temperature.
        before, now = ({k: v for k, v in x.items() if k != "temperature"} for x in both)
        temperatures = {x.get("temperature", 1.0) for x in both}
        changed = warn_of_changed_settings(before, now)
        changed = [k for k in changed if not k.startswith(OF_CODE)]  # mended code is fine
        if set(changed) - {"missing_eos_penalty"} or len(temperatures) > 1:
            return
        prompts = [] if self.eval_prompts is None else self.eval_prompts.samples.prompt_texts
        for evaluation in evaluations_from_tree(state["evaluations"], prompts):
            self.result.add_evaluation(evaluation)

    def _next_step(self) -> tuple[dict[str, float], Samples]:
        """Takes a step on the next prompts of the trainer's stream; see :meth:`_step`."""
        streams, prompts = self.trainer.streams, self.prompts
        new = PromptStream(len(prompts), self.trainer.config.seed)
        stream = streams.setdefault(prompts.fingerprint, new)
        with stream.kept_on_error():
            return self._step(stream.take(self.prompts_per_step), stream)

    def _step(self, chosen: list[int], stream: PromptStream) -> tuple[dict[str, float], Samples]:
        """Takes a step on the prompts of all processes, each of which samples and rewards its
        share; returns metrics, and the samples of all.

        Args:
            chosen: the numbers of the prompts.
            stream: gives the numbers of further prompts.
        """
        size = self.trainer.config.group_size
        seed = seed_at(self.trainer.config.seed, "responses", self.trainer.current_step)
        share, replaced, resampled = self.collector.resampled(
            self._sampled(self.prompts, chosen, size, seed),
            self.resampling,
            len(chosen),
            stream.take,
            lambda more: self.prompts.samples.select(more).repeated(size),
            seed,
        )
        share = replace(share, token_scores=self._scores_of_tokens(share))
        stats = self.trainer.step(
            list(share.prompt_ids),
            share.sequences,
            share.token_scores or list(share.scores),
            rollout=share,
            **({} if share.masks is None else {"response_masks": share.masks}),
            **({} if self.taught is None else self.taught.arguments(share)),
        )
        chosen = [replaced.get(i, prompt) for i, prompt in enumerate(chosen)]
        prompts = self.prompts.samples.select(chosen).repeated(size)
        samples = self._of_all(share.recorded(), prompts)
        collected = samples.stats
        seconds = collected["time/rollout"] + collected["time/reward"] + stats["time/ppo/total"]
        metrics = {
            **scalars(stats),
            **collected,
            **tool_statistics(samples),
            **reward_statistics(samples.rewards, samples.rewards_by_function),
            **resampled,
            "time/step": seconds,
        }
        return metrics, samples

    def _scores_of_tokens(self, samples: Samples) -> list[Tensor] | None:
        """The scores of each response's tokens; None where no process has rewards of tokens, or the
        advantage does not tell tokens apart."""
        if not self.trainer.advantages.per_token:
            return None
        dense = self.processes.any(any(x is not None for x in samples.token_rewards))
        return samples.scores_of_tokens() if dense else None

    def _sampled(self, prompts: Prompts, chosen: Sequence[int], size: int, seed: int) -> Samples:
        """This process's share of a batch of prompts, each with ``size`` responses, rewarded.

        Args:
            chosen: the indices in ``prompts`` of the batch's prompts.
        """
        self._name_of = prompts.name_of
        share = self.processes.shares(range(len(chosen)))[self.processes.index]
        asked = prompts.samples.select([chosen[i] for i in share]).repeated(size)
        samples = self.collector(Asked(asked, size, share, seed))
        assert samples is not None
        return samples

    def _of_all(self, share: Samples, prompts: Samples, *, tokens: bool = False) -> Samples:
        """The samples of all processes, joined from each process's share; their prompts are
        ``prompts``, unless responding changes prompts. Columns for rewards are not exchanged."""
        known = prompts if self.collector.respond.keeps_prompts else None
        exchanged = share.without("columns", "completions", "noted")
        return exchanged.gathered(self.processes, known, tokens=tokens)

    def _evaluate(self, step: int) -> None:
        """Evaluates with the same seed each time; the run's own random numbers do not change."""
        if self.eval_prompts is None:
            return
        with random_state_kept():
            torch.manual_seed(self.trainer.config.seed)  # for rewards that draw
            seed = seed_at(self.trainer.config.seed, "evaluation")
            share = self._sampled(self.eval_prompts, range(len(self.eval_prompts)), 1, seed)
        shown = share.recorded().without("logprobs", "logprobs_t1", "values")
        samples = self._of_all(shown, self.eval_prompts.samples, tokens=True)
        rewards, masks, nan = samples.rewards, samples.masks, sum(samples.left_out)
        judged = (~rewards.isnan()).nonzero()[:, 0].tolist()
        check_a_sample_is_left(nan, len(samples), samples.finish_reasons)
        if not judged:
            raise ValueError(
                "no reward of the evaluation is finite: mend what computes them (reward functions, "
                "or prompts for which they have no answer)"
            )
        known = rewards[judged]
        evaluation = Evaluation(
            step=step,
            mean=float(known.mean()),
            sem=float(known.std()) / math.sqrt(len(known)) if len(known) > 1 else 0.0,
            kl=self.trainer.sequence_kl(
                [samples.prompt_ids[i] for i in judged],
                [samples.sequences[i] for i in judged],
                None if masks is None else [masks[i] for i in judged],
            ),
            rewards=rewards.tolist(),
            prompts=samples.prompt_texts,
            completions=samples.texts,
            nan_samples=nan,
            nonfinite_rewards=int(samples.stats["reward/nonfinite"]),
            by_function={name: x.tolist() for name, x in samples.rewards_by_function.items()},
        )
        self.result.add_evaluation(evaluation)
        self._call("on_eval", step, evaluation)

    def _call(self, event: str, *args: Any) -> list[Any]:
        return self._call_each((event, *args))

    def _call_each(self, *events: tuple[Any, ...]) -> list[Any]:
        """Tells all callbacks of all events, even if one callback fails, because one of them writes
        the metrics; the first exception is raised then. Returns what they return for the last
        event."""
        answers, errors = list[Any](), list[Exception]()
        for event, *args in events:
            answers = []
            for callback in self.callbacks:
                try:
                    answers.append(getattr(callback, event)(self.trainer, *args))
                except Exception as error:
                    errors.append(error)
        for further in errors[1:]:
            warnings.warn(f"another callback failed, too: {further!r}", stacklevel=3)
        if errors:
            raise errors[0]
        return answers
