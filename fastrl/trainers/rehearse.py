"""What a trainer will need of memory: two optimizer steps, of PPO one, rehearsed at full length.

How a class of trainers is rehearsed is a :class:`Surface`, which it names. The surface of the
alignment framework, which needs the framework's factory, is in :mod:`fastrl.alignment.rehearse`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForSequenceClassification, PrinterCallback, ProgressCallback

from fastrl.config import FULL, SAMPLED, PPOConfig, json_object, parse_json
from fastrl.learn.ref_model import OwnAdapterRefModel
from fastrl.models import AutoModelForCausalLMWithValueHead, CausalLMPolicy
from fastrl.models.model_files import is_adapter
from fastrl.rollout import SamplingParams
from fastrl.rollout.backends import EngineBackend
from fastrl.rollout.rehearsed_engine import RehearsedEngine
from fastrl.rollout.scheduler import POLL_STEPS
from fastrl.rollout.self_check import UnsupportedModel
from fastrl.trainers.plan.memory import ACTIVATIONS
from fastrl.trainers.plan.passes import PassSize
from fastrl.trainers.plan.rehearsal import (
    CHOICES_LEFT_OUT,
    LOADING,
    OPTIMIZER_STEPS,
    SUPPORTS_LEFT_OUT,
    UPDATE,
    Rehearsal,
    rehearsal,
)
from fastrl.trainers.plan.report import Plan
from fastrl.trainers.plan.skeleton import Skeleton, blank_tokenizer, tokens, words

# Settings of a rehearsal, which saves, evaluates and reports nothing, and runs on a CPU.
_NOT_REHEARSED: dict[str, Any] = {
    **{"use_cpu": True, "max_steps": OPTIMIZER_STEPS, "report_to": "none", "disable_tqdm": True},
    **dict.fromkeys(("save_strategy", "eval_strategy", "logging_strategy"), "no"),
    **dict.fromkeys(("push_to_hub", "load_best_model_at_end", "dataloader_pin_memory"), False),
    **{"dataloader_num_workers": 0, "warmup_steps": 0, "torch_compile": False},
    **dict.fromkeys(("resume_from_checkpoint", "dataset_num_proc", "evaluation_strategy")),
    "teacher_model_init_kwargs": None,  # teachers are built, not loaded
    **dict.fromkeys(("eos_token", "pad_token", "chat_template_path")),  # of the run's tokenizer
    **dict.fromkeys(f"teacher_model_{x}" for x in ("name_or_path", "revision", "init_kwargs")),
}
# Of responses that a rehearsal does not draw, with a tokenizer of its own and without tools.
_ANY_TEXT: dict[str, Any] = {
    **{"policy_support": FULL, "tool_choice": "auto"},
    **dict.fromkeys(("response_format", "vllm_structured_outputs_regex")),
}
# Settings of a rehearsal of PPO: nothing acts outside of this process, a critic is built, not read,
# and learns from the first step on with the policy, and nothing is taken over from rollouts.
_NOT_OF_PPO: dict[str, Any] = {
    **dict.fromkeys(("log_with", "critic", "forward_batch_size", "optimize_cuda_cache")),
    **dict.fromkeys(("teacher_model", "teacher_model_init_kwargs")),
    **{"push_to_hub_if_best_kwargs": {}, "optimize_device_cache": False},
    **{"old_logprobs": "recompute", "sampler_correction": "off"},
    **{"critic_warmup_steps": 0, "replay_routing": False},
    **{"policy_support": FULL, "response_format": None},
}
# For samples that are not rehearsed: a position's ids, masks, log-probs, advantages and so on.
_BYTES_PER_POSITION = 60
_ASKED = ("prompt", "completion")  # columns of the rows of online trainers
PASSES = 2  # passes of a mini-batch: gradients and the next pass's activations then exist at once


@dataclass
class Stage:
    """A rehearsal of a trainer, which is made and run without memory.

    Attributes:
        trainer_class: the class of the trainer that is rehearsed.
        skeleton: the skeleton of its model.
        settings: the settings of the run.
        tokens: the lengths of its texts in tokens, by the names of the arguments of ``plan``.
        memory: the log of the rehearsal's memory, and notes of what it leaves out.
        of_teachers: the rows of teachers' heads.
    """

    trainer_class: Any
    skeleton: Skeleton
    settings: Any
    tokens: Mapping[str, int]
    memory: Rehearsal
    of_teachers: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return sum(self.tokens.values())

    @property
    def vocabulary(self) -> int:
        """The number of tokens, as many as the smallest head has rows."""
        return min([_rows(self.skeleton), *self.of_teachers])

    def blank(self) -> Any:
        """A blank tokenizer, with all tokens where heads that differ are compared over them."""
        differ = bool({*self.of_teachers} - {_rows(self.skeleton)})
        return blank_tokenizer(self.vocabulary if differ else 0)

    @property
    def size(self) -> int:
        """Examples of a batch."""
        return self.settings.per_device_train_batch_size

    @property
    def accumulated(self) -> int:
        """The batches of a rehearsed optimizer step: two at most, the second beside gradients."""
        return min(self.settings.gradient_accumulation_steps, 2)

    @property
    def count(self) -> int:
        """Examples of a rehearsal."""
        return OPTIMIZER_STEPS * self.size * self.accumulated

    def arguments(self, **changed: Any) -> Any:
        """Settings of a trainer on transformers' Trainer: the run's, changed for a rehearsal."""
        kind = getattr(self.trainer_class, self.trainer_class.rehearsed_as.arguments)
        names = {f.name for f in dataclasses.fields(kind) if f.init}
        settings = {x: getattr(self.settings, x) for x in names if hasattr(self.settings, x)}
        settings |= {**_NOT_REHEARSED, "gradient_accumulation_steps": self.accumulated, **changed}
        settings["output_dir"] = str(self.memory.folder)
        return kind(**{name: x for name, x in settings.items() if name in names})

    def made(
        self,
        model: Any,
        rows: Mapping[str, list],
        others: Mapping[str, Any] = MappingProxyType({}),
        **changed: Any,
    ) -> Any:
        """Makes a trainer on transformers' Trainer for a model and columns of rows.

        Args:
            others: further arguments of its constructor.
            changed: settings in place of the run's.
        """
        from datasets import Dataset

        return self.trainer_class(
            model,
            **others,
            args=self.arguments(**changed),
            train_dataset=Dataset.from_dict(dict(rows)),
            processing_class=self.blank(),
        )

    def train(self, trainer: Any, *references: Any) -> None:
        """Runs the steps of a trainer on transformers' Trainer."""
        self.memory.notes += self.skeleton.guesses
        for kind in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(kind)
        trainer.create_optimizer()
        self.memory.follow(trainer.model, trainer.optimizer)
        self.memory.loaded(trainer.model, *references)
        with self.memory.log.phase(UPDATE):
            trainer.train()

    def engine(self, model: Any, tokenizer: Any, **options: Any) -> RehearsedEngine | None:
        """The rollout engine of a policy; None, with a note, for a model that it cannot run."""
        try:
            engine = RehearsedEngine(model, tokenizer, **options)
        except UnsupportedModel as error:
            self.memory.notes.append(f"the KV cache, left out: {error.cause}")
            return None
        engine.keeps = self.memory.keeps
        return engine


class Surface(NamedTuple):
    """How a class of trainers is rehearsed.

    Attributes:
        run: makes the trainer of a :class:`Stage` and runs it; returns the plan's title, and what
            the plan depends on beside lengths.
        samples: gets a trainer; returns the number of texts in a mini-batch, and how many of these
            texts a pass has at least.
        parts: returns a trainer's further arguments of ``run``, by name.
        settings: the name of the trainer's attribute that holds its settings.
        arguments: the name of the class's attribute that holds the class of its settings.
    """

    run: Callable[..., tuple[str, dict[str, Any]]]
    samples: Callable[[Any], tuple[int, int]]
    parts: Callable[[Any], dict[str, Any]] = lambda trainer: {}
    settings: str = "args"
    arguments: str = "args_class"


def plan_memory(
    trainer_class: Any,
    skeleton: Skeleton,
    settings: Any,
    *lengths: int,
    device: str = "cpu",
    **parts: Any,
) -> Plan:
    """The memory of a trainer whose texts all have their greatest length, rollouts included.

    Args:
        lengths: tokens of prompt and response, or of a text.
        device: "cpu" or "cuda", for which the memory is counted.
        parts: what the trainer has beside its settings: of PPO the critic's skeleton, of the
            alignment framework the loss and the task.

    Raises:
        ValueError: settings that the trainer refuses; lengths beyond the model's context.
        FileNotFoundError: a critic without a configuration.
    """
    names = ("prompt_tokens", "response_tokens") if len(lengths) > 1 else ("tokens",)
    by_name = dict(zip(names, lengths, strict=True))
    skeleton.check_tokens(**by_name)
    with rehearsal(device) as memory:
        stage = Stage(trainer_class, skeleton, settings, by_name, memory)
        title, sizes = trainer_class.rehearsed_as.run(stage, **parts)
        return Plan.of(f"{skeleton.name}: {title}", device, memory, {**by_name, **sizes})


def plan_of(
    trainer: Any, lengths: Sequence[int], passes: PassSize | None, device: str | None
) -> Plan:
    """The plan of a trainer, see :meth:`fastrl.trainers.base.BaseTrainer.plan`.

    Args:
        lengths: tokens of prompt and response, or of a text.
    """
    surface: Surface = trainer.rehearsed_as
    settings = getattr(trainer, surface.settings)
    return plan_memory(
        type(trainer),
        Skeleton.of(trainer.accelerator.unwrap_model(trainer.model)),
        settings if passes is None else passes.of(settings),
        *lengths,
        device=device or trainer.accelerator.device.type,
        **surface.parts(trainer),
    )


def tokens_of(trainer: Any, lengths: Sequence[int]) -> tuple[int, int]:
    """Tokens of a mini-batch, and of its smallest pass, of texts of ``sum(lengths)`` tokens."""
    whole, unsplit = trainer.rehearsed_as.samples(trainer)
    return whole * sum(lengths), unsplit * sum(lengths)


def reward_model(skeleton: Skeleton) -> Any:
    """Builds a classifier with one label; to be called within a rehearsal."""
    skeleton = copy.copy(skeleton)
    skeleton.config = copy.deepcopy(skeleton.config)
    skeleton.config.num_labels, skeleton.config.get_text_config().pad_token_id = 1, 0
    if skeleton.adapter is not None:
        skeleton.adapter = copy.deepcopy(skeleton.adapter)
        skeleton.adapter.task_type = "SEQ_CLS"
    return skeleton.build(AutoModelForSequenceClassification)


def _sft(stage: Stage) -> tuple[str, dict[str, Any]]:
    rows = {"input_ids": [[2] * stage.length] * stage.count}
    stage.train(stage.made(stage.skeleton.build(), rows, max_length=stage.length))
    return "SFT", {"batch_size": stage.size}


def _reward(stage: Stage) -> tuple[str, dict[str, Any]]:
    sides = enumerate(("chosen", "rejected"))
    rows = {side: [words(stage.length - 1, i)] * stage.count for i, side in sides}
    model = reward_model(stage.skeleton)
    stage.train(stage.made(model, rows, max_length=stage.length, append_eos=True))
    return "reward model", {"batch_size": stage.size}


def _preferences(stage: Stage) -> tuple[str, dict[str, Any]]:
    prompt, response = stage.tokens.values()
    # Prompts differ, because equal prompts would be run once.
    starts = (2 + i % 7 for i in range(stage.count))
    rows: dict[str, list] = {
        "prompt_ids": [[t % stage.vocabulary for t in range(i, i + prompt)] for i in starts],
        "label": [bool(i % 2) for i in range(stage.count)],
    }
    for k, side in enumerate(("chosen", "rejected", "completion", "KL_completion")):
        rows[f"{side}_ids"] = [[2 + k] * response] * stage.count
    changed: Any = {"max_length": stage.length, "precompute_ref_log_probs": False}
    trainer = stage.made(stage.skeleton.build(), rows, **changed)
    if getattr(stage.settings, "precompute_ref_log_probs", False):
        stage.memory.notes.append("the reference stays, as without precompute_ref_log_probs")
    stage.train(trainer, trainer._reference)
    return trainer.short_name, {"batch_size": stage.size}


def alternating(completions: Sequence[Any], **_: Any) -> list[float]:
    """Rewards of 0 and 1 in turn."""
    return [float(i % 2) for i in range(len(completions))]


ADAPTER = "adapter"


def _online(
    stage: Stage,
    teachers: Mapping[str, Any] = MappingProxyType({}),
    teacher_prompt_tokens: int | None = None,
) -> tuple[str, dict[str, Any]]:
    """Rehearses a generation and the steps on it.

    Args:
        teachers: what :func:`_teachers` returns.
        teacher_prompt_tokens: tokens of the prompts that teachers read; None: they read the
            policy's, or as long ones.
    """
    args, memory = stage.settings, stage.memory
    prompt, response = stage.tokens.values()
    group = args.num_generations
    same = args.steps_per_generation == args.gradient_accumulation_steps
    per_generation = stage.accumulated if same else args.steps_per_generation
    if args.replay_routing:
        memory.notes.append(CHOICES_LEFT_OUT)
    _note_supports(stage)
    count = max(stage.size * per_generation // group, 1)
    rows: dict[str, list] = {name: [f"w{i}" for i in range(count)] for name in _ASKED}
    others: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    if stage.trainer_class.needs_rewards:
        others["reward_funcs"] = alternating
    if teachers:
        model, changed = _built(stage, teachers)
        others |= {} if model is None else {"teacher_model": model}
        if args.teacher_column:
            rows[args.teacher_column] = [list(teachers)[i % len(teachers)] for i in range(count)]
        if teacher_prompt_tokens or any(x is None or x == ADAPTER for x in teachers.values()):
            read = teacher_prompt_tokens or prompt
            # Prompts differ, because equal prompts would be run once.
            rows["teacher_prompt"] = [words(read, i % 2, i // 2) for i in range(count)]
    trainer = stage.made(
        stage.skeleton.build(),
        rows,
        others,
        steps_per_generation=per_generation,
        generation_batch_size=None,
        max_completion_length=response,
        replay_routing=False,
        **_ANY_TEXT,
        generation_kwargs=_of_any_text(args.generation_kwargs),
        **changed,
    )
    options = {"autocast": trainer.accelerator.autocast, "max_slots": args.rollout_slots}
    engine = stage.engine(trainer.model, trainer.processing_class, **options)

    def respond(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        ids = [tokens(prompt, stage.vocabulary, start=i // group) for i in range(count)]
        if engine is not None:
            engine.rehearse(ids[::group], SamplingParams(max_new_tokens=response, n=group))
            if args.rollout_sleep:
                engine.sleep()
        written = [[2 + i % 3] * response for i in range(count)]
        return {"prompt_ids": ids, "completion_ids": written, "logprobs": None}

    trainer._collect.respond = trainer.responding_by(respond)
    if stage.trainer_class.needs_rewards:
        memory.notes.append("the reward functions' memory: left out")
    stage.train(trainer, trainer._reference, *_taught_by(trainer))
    sizes = {"batch_size": stage.size}
    if "teacher_prompt" in rows:
        sizes["teacher_prompt_tokens"] = len(rows["teacher_prompt"][0].split())
    return trainer.__class__.__name__.removesuffix("Trainer"), sizes


def _rows(skeleton: Skeleton) -> int:
    """The rows of a model's head."""
    return skeleton.config.get_text_config().vocab_size


def likeliest(_prompts: Any, completion_ids: Sequence[list[int]], **_: Any) -> list[Any]:
    """The vocabulary's first token at each place, as if a teacher were sure of it."""
    return [([[0]] * len(ids), [[0.0]] * len(ids)) for ids in completion_ids]


def _built(stage: Stage, teachers: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The argument ``teacher_model``: functions, and teachers that are built, whose tokenizer is
    not looked at; and settings by which a copy of the policy's adapter stands for another one."""
    notes, changed = stage.memory.notes, {}
    built = dict(teachers)
    for name, skeleton in teachers.items():
        if isinstance(skeleton, Skeleton):
            notes += skeleton.guesses
            stage.of_teachers.append(_rows(skeleton))
            built[name] = skeleton.build()
            built[name].config.name_or_path = ""
        elif skeleton == ADAPTER:  # its copy, which does not follow the policy's
            notes.append("a teacher's adapter: as large as the one that is trained")
            changed = {"teacher_model_kind": "ema", "teacher_sync_steps": 1 << 30}
            built[name] = None
    return built if stage.settings.teacher_column else next(iter(built.values())), changed


def _named_teacher(stage: Stage) -> Skeleton | str | None:
    """The teacher that settings name, see :func:`_teachers`."""
    path = stage.settings.teacher_model
    if path is None:
        return None
    if stage.skeleton.adapter is not None and is_adapter(path):
        return ADAPTER
    options = parse_json("teacher_model_init_kwargs", stage.settings.teacher_model_init_kwargs)
    return Skeleton.read(path, str(options.get("dtype", "float32")))


def _taught_by(trainer: Any) -> list[Any]:
    """The references that a trainer's teachers are."""
    teaching = trainer.teaching
    return [] if teaching is None else list(teaching.models.references.values())


def _teachers(trainer: Any) -> dict[str, Any]:
    """The skeletons of a trainer's teachers, by name; None for one with the policy's weights,
    ADAPTER for one that is another adapter on them, :func:`likeliest` for a function."""

    def planned(reference: Any) -> Skeleton | str | None:
        if isinstance(reference, OwnAdapterRefModel):
            return ADAPTER
        return None if reference.model is None or reference.why else Skeleton.of(reference.model)

    if trainer.teaching is None:
        return {}
    models = trainer.teaching.models
    skeletons = {name: planned(reference) for name, reference in models.references.items()}
    return {**skeletons, **dict.fromkeys(models.functions, likeliest)}


def _of_any_text(generation_kwargs: Any) -> dict[str, Any]:
    """Arguments of ``generate`` without what a rehearsal's tokenizer cannot say."""
    arguments = parse_json("generation_kwargs", generation_kwargs)
    return {name: x for name, x in arguments.items() if name != "response_format"}


def _note_supports(stage: Stage) -> None:
    """Notes the bytes of sets that are recorded."""
    if stage.settings.policy_support == SAMPLED:
        each = 4 * -(-stage.vocabulary // 32)
        ring = each * POLL_STEPS * stage.settings.rollout_slots
        stage.memory.notes.append(SUPPORTS_LEFT_OUT.format(each, ring))


def _ppo(
    stage: Stage,
    critic: Skeleton | None = None,
    teachers: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, dict[str, Any]]:
    """Rehearses one optimizer step on its samples; with a trunk that policy and reference share, on
    all samples of a batch, as the trunk's hidden states of all are kept.

    Args:
        critic: the skeleton of the trainer's critic; None: of the settings' critic, if any.
        teachers: what :func:`_teachers` returns; without any those of the settings.
    """
    config, memory = stage.settings, stage.memory
    if critic is None and config.critic is not None:
        critic = Skeleton.read(config.critic, str(stage.skeleton.dtype))
    shortened = _shortened(config, *stage.tokens.values())
    if config.replay_routing:
        memory.notes.append(CHOICES_LEFT_OUT)
    _note_supports(stage)
    base = stage.skeleton.build()
    has_values = config.needs_values and critic is None
    kind = AutoModelForCausalLMWithValueHead if has_values else CausalLMPolicy
    policy = kind.from_pretrained(base)
    values = None if critic is None else reward_model(critic)
    if not teachers and config.teacher_kl_coef:
        teachers = {"": _named_teacher(stage)}
    of_teachers: dict[str, Any] = {}
    read: dict[str, Any] = {}
    prompt, response = stage.tokens.values()
    size, group = shortened.batch_size, shortened.group_size
    if teachers:
        of_teachers["teacher_model"], changed = _built(stage, teachers)
        shortened = dataclasses.replace(shortened, **changed)
        memory.notes.append("teachers' prompts are planned as long as the policy's")
        start = stage.vocabulary // 2
        read["teacher_queries"] = [
            tokens(prompt, stage.vocabulary, start=start + i // group) for i in range(size)
        ]
        if config.teacher_column:
            read["teachers"] = [list(teachers)[i % len(teachers)] for i in range(size)]
    trainer = stage.trainer_class(
        shortened, policy, tokenizer=stage.blank(), critic=values, **of_teachers
    )
    memory.notes += stage.skeleton.guesses
    memory.follow(policy, trainer.optimizer)
    if trainer.critic is not None:
        memory.notes += [] if critic is None else critic.guesses
        memory.follow(trainer.critic.unwrapped, trainer.critic.optimizer)
    memory.loaded(policy, trainer.reference, *_taught_by(trainer))
    generate_again = _rollouts(stage, trainer, policy)
    for learner in (trainer, trainer.critic):
        if learner is not None:
            memory.give_state(learner.optimizer)
    generate_again()  # beside the optimizers' state
    trainer.step(
        [tokens(prompt, stage.vocabulary, start=i // group) for i in range(size)],
        [tokens(response, stage.vocabulary, start=3 + i) for i in range(size)],
        [torch.tensor(float(i % max(group, 2))) for i in range(size)],
        **read,
    )
    not_rehearsed = (config.batch_size - size) * stage.length * _BYTES_PER_POSITION
    for name, phase in memory.log.peaks.items():
        if name != LOADING:
            phase.total += not_rehearsed
            phase.by_kind[ACTIVATIONS] += not_rehearsed
    return config.method, {
        "batch_size": config.batch_size,
        "mini_batch_size": config.mini_batch_size,
        "reference": trainer.reference.mode,
    }


def _shortened(config: PPOConfig, prompt: int, response: int) -> PPOConfig:
    """The settings of a rehearsal: an optimizer step of whole groups, whose mini-batches have no
    more samples than ``PASSES`` full passes need."""
    size, mini, group = config.batch_size, config.mini_batch_size, config.group_size
    if config.num_shared_layers is None:
        if config.micro_batch_tokens is not None:
            least = prompt // group + response  # a group may have its prompt once
            enough = -(-PASSES * config.micro_batch_tokens // least)
            mini = min(mini, -(-enough // group) * group)
        size = min(size, math.lcm(mini * config.gradient_accumulation_steps, group))
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    changed = {
        "batch_size": size,
        "mini_batch_size": mini,
        "ppo_epochs": min(config.ppo_epochs, 1),
        "accelerator_kwargs": {**json_object(config.accelerator_kwargs), "cpu": True},
    }
    return PPOConfig(**fields | _NOT_OF_PPO | changed)


def _rollouts(stage: Stage, trainer: Any, policy: Any) -> Callable[[], None]:
    """Fills the rollout engine's slots, whose memory stays unless ``rollout_sleep`` frees it;
    returns a function that fills them again. Without an engine nothing is filled: a note says so.
    """
    config, backend = stage.settings, trainer.rollouts.backend
    if not isinstance(backend, EngineBackend):
        stage.memory.notes.append(
            "the KV cache of model.generate (rollout_backend 'generate'): left out"
        )
        return lambda: None
    prompt, response = stage.tokens.values()
    group = config.group_size
    count = min(config.batch_size // group, -(-config.rollout_slots // group))
    prompts = [tokens(prompt, stage.vocabulary, start=i) for i in range(max(1, count))]
    params = SamplingParams(max_new_tokens=response, n=group)
    with trainer.computing():
        engine = stage.engine(policy, trainer.tokenizer, **backend.options)
        if engine is None:
            return lambda: None
        engine.rehearse(prompts, params)
    backend._engines[id(policy), False] = engine  # rollout_sleep frees it before an update

    def again() -> None:
        with trainer.computing():
            engine.rehearse(prompts, params)

    return again


def _samples(trainer: Any, texts: int = 1, together: bool = False) -> tuple[int, int]:
    """``Surface.samples`` of a trainer on transformers' Trainer, with ``texts`` texts in an
    example; ``together``: the loss reads all of a batch, so that passes cannot split it."""
    whole = trainer.args.per_device_train_batch_size * texts
    return whole, whole if together else texts


SFT = Surface(_sft, _samples)
REWARD = Surface(_reward, lambda trainer: _samples(trainer, 2))
PREFERENCES = Surface(
    _preferences,
    lambda trainer: _samples(trainer, trainer.texts_of_an_example, trainer.args.read_together),
    arguments="config_class",
)
ONLINE = Surface(
    _online,
    lambda trainer: _samples(trainer, 1, trainer.has_own_loss),
    lambda trainer: {
        "teachers": _teachers(trainer),
        "teacher_prompt_tokens": trainer.teaching and (trainer.teaching.prompts.longest or None),
    },
    arguments="config",
)
PPO = Surface(
    _ppo,
    lambda trainer: (trainer.config.mini_batch_size, 1),
    lambda trainer: {
        "critic": trainer.critic and Skeleton.of(trainer.critic.unwrapped),
        "teachers": _teachers(trainer),
    },
    settings="config",
)
