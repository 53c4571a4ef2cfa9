"""``fastrl align``: any task and loss of the alignment framework."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fastrl.alignment.arguments import AlignmentConfig
from fastrl.alignment.losses import LOSSES, Loss, make_loss
from fastrl.alignment.tasks import TASKS, Task, find_task
from fastrl.config import parse_json
from fastrl.data.tables import errors_name
from fastrl.settings import setting, setting_like
from fastrl.tools.commands.fit import CommandFlags, FitJob, essential_flags, fit
from fastrl.tools.commands.job import check_label
from fastrl.tools.commands.memory import most_in_a_pass
from fastrl.trainers.supervised import length_limit

if TYPE_CHECKING:
    from fastrl.alignment import Annotator, BatchFactory, Trainer

# Settings, each with the setting without which nothing reads it.
_READ_WITH = {
    "annotator_label": "annotator",
    "judge_unparsed": "judge",
    "reweighter_args": "reweighter",
}
_COEFFICIENTS = "; ".join(
    f"{name} ({', '.join(f'{f.name}={f.default}' for f in dataclasses.fields(loss))})"
    for name, loss in LOSSES.items()
).replace(" ()", "")


@dataclass(kw_only=True)
class AlignJob(FitJob):
    """What to learn from which data, how, and where the results go.

    Raises:
        ValueError: an unknown task or loss, a loss that does not fit the task, options that are not
            JSON, an online task without an annotator or judge, a sampling setting out of range.
        TypeError: options that are not a JSON object.
    """

    command: ClassVar[str] = "align"
    essentials: ClassVar[dict[str, str]] = essential_flags(
        "task loss loss_args reference", "max_length annotator judge max_new_tokens temperature"
    )

    task: str | None = setting(
        f"Learning task: {', '.join(TASKS)}. By default the loss's first that learns from the data "
        "alone, else its first; without a loss offline-pairwise.",
        None,
    )
    loss: str | None = setting(
        f"Loss, by default the task's first: {', '.join(LOSSES)}, or one of yours as "
        f"file.py:name. Coefficients: {_COEFFICIENTS}.",
        None,
    )
    loss_args: str | None = setting(
        'The loss\'s coefficients as JSON, such as {"beta": 0.2}.', None
    )
    output: str = setting_like(FitJob, "output", "runs/align")

    annotator: str | None = setting(
        "Online: sequence classifier, function (file.py:function) or ready reward that judges "
        "responses. "
        "A directory (a run's too) or a Hub id; or module:function or path/to/file.py:function, "
        "called with (prompts, completions, **columns).",
        None,
    )
    annotator_label: str | None = setting(
        "Label of the classifier whose logit is the reward, by name or index; by default the last.",
        None,
    )
    judge: str | None = setting(
        "Online, instead of --annotator: a language model that picks the better response. "
        "A directory or a Hub id; or a function that answers a list of questions.",
        None,
    )
    judge_unparsed: str = setting(
        "How to treat a judge's answer that cannot be parsed: refuse, skip or tie.", "skip"
    )
    reweighter: str | None = setting(
        "Weights of the samples: uniform, length, margin, importance, or a function of the batch, "
        "as module:function.",
        None,
    )
    reweighter_args: str | None = setting(
        'The reweighter\'s options as JSON, such as {"power": 0.5}.', None
    )

    max_prompt_length: int | None = setting(
        "Longest prompt, in tokens; longer ones are cut.", None, within="[1, inf)"
    )
    truncation: str = setting(
        "Which end of a long prompt to keep: keep_end or keep_start.", "keep_end"
    )
    max_new_tokens: int = setting("Online: longest response, in tokens.", 64, within="[1, inf)")
    temperature: float = setting("Online: sampling temperature.", 1.0, within="[0, inf)")
    top_k: int = setting(
        "Online: sample among the k likeliest tokens; 0 is all of them.", 0, within="[0, inf)"
    )
    top_p: float = setting(
        "Online: sample among the likeliest tokens that make up this probability.",
        1.0,
        within="(0, 1]",
    )
    samples: int = setting(
        "Online: how many responses to show before and after training.", 8, within="[0, inf)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task is None:
            self.task = self._usual_task()
        loss = self.make_loss()
        loss.check(self.learning_task, 2 * loss.minibatches_per_batch)  # batch size: checked later
        parse_json("reweighter_args", self.reweighter_args)
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, reader in _READ_WITH.items():
            if getattr(self, reader) is None and getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} is read with {reader} alone: set that, or leave it out")
        if self.learning_task.online and (self.annotator is None) == (self.judge is None):
            raise ValueError(
                f"the task {self.learning_task.name} needs a judgement of the policy's responses: "
                "pass --annotator or --judge, one of the two"
            )
        if not self.learning_task.online and (self.annotator or self.judge):
            raise ValueError(
                f"the task {self.learning_task.name} takes its responses and labels from the data: "
                "leave out --annotator and --judge"
            )
        if self.learning_task.online:
            self.sampling()

    @property
    def learning_task(self) -> Task:
        assert self.task is not None  # the constructor sets it
        return find_task(self.task)

    def _usual_task(self) -> str:
        """The loss's first offline task, else its first; without a loss offline-pairwise."""
        if self.loss is None:
            return "offline-pairwise"
        tasks = self._loss_named(self.loss).tasks
        return next((name for name in tasks if not find_task(name).online), tasks[0])

    def make_loss(self) -> Loss:
        if self.loss is not None:
            return self._loss_named(self.loss)
        task = self.learning_task.name
        return self._loss_named(next(name for name, x in LOSSES.items() if task in x.tasks))

    def _loss_named(self, name: str) -> Loss:
        options = parse_json("loss_args", self.loss_args)
        if name == "ppo":  # PPO trains the policy at the temperature that it samples at
            options.setdefault("temperature", self.temperature)
        return make_loss(name, **options)

    def sampling(self) -> Any:
        from fastrl.rollout import SamplingParams

        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )

    def make_annotator(self, tokenizer: Any, device: Any) -> Annotator | None:
        """The annotator of an online task on ``device``, or None; the tokenizer is the policy's."""
        from fastrl.alignment import JudgeAnnotator, ModelJudge, load_annotator
        from fastrl.rewards.functions import load_function

        if self.judge is not None:
            judge = (
                load_function(self.judge)
                if ":" in self.judge
                else ModelJudge.from_pretrained(self.judge, device=device)
            )
            return JudgeAnnotator(judge, unparsed=self.judge_unparsed)
        if self.annotator is None:
            return None
        annotator: Any = load_annotator(
            self.annotator, label=self.annotator_label, tokenizer=tokenizer
        )
        check_label("annotator_label", self.annotator_label, [annotator.reward])
        if hasattr(annotator.reward, "to"):
            annotator.reward.to(device)
        return annotator


@dataclass
class AlignFlags(CommandFlags, AlignmentConfig):
    """AlignmentConfig with defaults for a command."""

    _argument_group_name: ClassVar[str] = "alignment, and transformers' training arguments"

    reference_adapter: str = setting_like(AlignmentConfig, "reference_adapter", "auto")
    num_train_epochs: float = setting("Epochs, a whole number.", 1)
    learning_rate: float = setting("AdamW's learning rate.", 1e-5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_train_epochs < 1 or self.num_train_epochs % 1:
            raise ValueError(
                f"num_train_epochs must be a whole number of 1 or more, got "
                f"{self.num_train_epochs}: for part of an epoch, set max_steps"
            )


def run_align(job: AlignJob, flags: AlignFlags) -> dict[str, Any]:
    """Trains, saves and reports; returns what :func:`fit` does."""
    with job.claimed(flags) as folder:
        trainer = make_trainer(job, flags)
        loss = trainer.loss.name
        return fit(
            trainer,
            folder,
            job,
            flags,
            description=loss,
            title=f"{job.model}: {job.learning_task.name} by {loss} on {job.dataset}",
            results=_results,
            evaluations=getattr(trainer.evaluation, "judged", ()),
            show=job.samples,
            lengths=lambda: _longest(job, flags),
        )


def make_trainer(job: AlignJob, flags: AlignFlags, annotator: Annotator | None = None) -> Trainer:
    """The trainer of a job.

    Args:
        flags: the trainer's settings; this sets those of them that follow from the job.
        annotator: an annotator to use in place of the job's.
    """
    from fastrl.alignment import Trainer, make_reweighter
    from fastrl.models.load import load_language_model, load_reward_model

    loss = job.make_loss()
    peft_config = job.lora_config("SEQ_CLS" if loss.learns == "reward model" else "CAUSAL_LM")
    _check_dropout(job, flags, loss)
    train, held_out, tokenizer = job.begin(flags)
    model = (
        load_reward_model(job.model, **job.loading(flags))
        if loss.learns == "reward model"
        else load_language_model(job.model, **job.loading(flags), trainable=True)
    )
    flags.max_length = length_limit(flags, model, tokenizer)
    annotator = annotator or job.make_annotator(tokenizer, flags.device)
    factory, eval_factory = _factories(job, flags, train, held_out, tokenizer, annotator)
    return Trainer(
        model,
        flags,
        factory,
        loss,
        eval_factory=eval_factory,
        reweighter=None
        if job.reweighter is None
        else make_reweighter(job.reweighter, **parse_json("reweighter_args", job.reweighter_args)),
        peft_config=peft_config,
    )


def _longest(job: AlignJob, flags: AlignFlags) -> tuple[int, int]:
    """The most tokens of a prompt and of a response, for a plan: responses have max_new_tokens
    online, else what max_prompt_length, by default half, leaves of max_length or a smaller pass."""
    task = job.learning_task
    texts = task.generations if job.make_loss().learns == "reward model" else 1
    most = most_in_a_pass(flags.max_length or 1024, flags.micro_batch_tokens, texts)
    response = min(job.max_new_tokens if task.online else most // 2, most - 2)
    room = most - (response if task.online else 2)
    prompt = min(job.max_prompt_length or most - response, room)
    return max(2, prompt), max(2, response if task.online else most - prompt)


def _check_dropout(job: AlignJob, flags: AlignFlags, loss: Loss) -> None:
    """Raises ValueError for dropout that the loss does not allow, or that would not act."""
    if not job.lora_dropout:
        return
    if loss.learns == "policy with values":
        raise ValueError(
            f"lora_dropout must be 0 with the loss {loss.name}, got {job.lora_dropout}: with "
            "dropout the probability ratio would differ from 1 where nothing was learned"
        )
    if flags.disable_dropout:
        raise ValueError(
            f"lora_dropout={job.lora_dropout:g} would not act: pass --disable-dropout false to "
            "train with dropout, or leave lora_dropout at 0"
        )


def _factories(
    job: AlignJob,
    flags: AlignFlags,
    train: Any,
    held_out: Any,
    tokenizer: Any,
    annotator: Annotator | None,
) -> tuple[BatchFactory, BatchFactory | None]:
    from fastrl.alignment import BatchFactory, DatasLoader

    def of(rows: Any, batch_size: int) -> BatchFactory:
        loader = DatasLoader(
            rows,
            tokenizer,
            max_length=flags.max_length,
            max_prompt_length=job.max_prompt_length,
            truncation=job.truncation,
        )
        return BatchFactory(
            job.learning_task,
            loader,
            batch_size=batch_size,
            epochs=int(flags.num_train_epochs),
            annotator=annotator,
            params=job.sampling() if job.learning_task.online else None,
            seed=flags.seed,
        )

    training = of(train, flags.per_device_train_batch_size)
    if held_out is None:
        return training, None
    with errors_name("eval_dataset"):
        return training, of(held_out, flags.per_device_eval_batch_size)


# What summary.json records of an evaluation, and the metric's name without "eval_".
_RESULTS = {
    "held_out_loss": "loss",
    "held_out_reward": "reward",
    "held_out_reward_sem": "reward_sem",
    "win_rate_against_the_start": "win_rate",
    "win_rate_sem": "win_rate_sem",
    "held_out_accuracy": "rewards/accuracies",
    "held_out_accuracy_sem": "rewards/accuracies_sem",
}


def _results(metrics: dict[str, float]) -> dict[str, float]:
    names = {title: f"eval_{name}" for title, name in _RESULTS.items()}
    return {title: metrics[name] for title, name in names.items() if name in metrics}
