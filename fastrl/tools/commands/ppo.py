"""``fastrl ppo`` and ``fastrl grpo``: policy gradients on your model, prompts and reward."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fastrl.config import PPOConfig, json_object
from fastrl.data.tables import (
    LONG_PROMPTS,
    MOST_HELD_OUT,
    PROMPT,
    ROW,
    count_prompts,
    drop_prompts,
    errors_name,
    find_prompt_column,
    held_out_count,
    load_table,
    numbered,
    sample_rows,
    take_prompts,
)
from fastrl.run.checkpoints import KEEP_LAST, SAVE_EVERY
from fastrl.run.folder import RunFolder
from fastrl.run.launcher import is_main_process, process_count
from fastrl.run.metrics import check_trackers
from fastrl.settings import setting, setting_like
from fastrl.tools.commands.job import (
    TrainingJob,
    check_call,
    check_label,
    folder_claimed,
    resume_setting,
    say_none_held_out,
)

if TYPE_CHECKING:
    from datasets import Dataset

    from fastrl.tools.reports.report import Comparison
    from fastrl.trainers.ppo import PPOTrainer


# The flags that --help shows, see fastrl.tools.commands.flags.parse.
_WHAT = {
    "what to train": "model dataset reward output",
    "prompts and responses": "prompt_column max_prompt_tokens max_new_tokens temperature "
    "missing_eos_penalty eval_dataset eval_prompts eval_every",
}
_STEPS = "steps batch_size mini_batch_size gradient_accumulation_steps learning_rate ppo_epochs"
_PLANNED_PROMPTS = 256  # prompts that are read to plan memory by their lengths
_RUN = "resume overwrite lora_r dtype seed log_with"


@dataclass(kw_only=True)
class PPOJob(TrainingJob):
    """The settings of a job: what to train, on which prompts, for which reward, and the output.

    Raises:
        ValueError: a setting out of range, no reward, not one weight for each reward, LoRA dropout.
    """

    command: ClassVar[str] = "ppo"
    essentials: ClassVar[dict[str, str]] = {
        **_WHAT,
        "PPO": f"{_STEPS} init_kl_coef target cliprange reference",
        "model and run": _RUN,
    }

    dataset: str = setting(
        "Prompts: a JSON, CSV, Parquet or text file, a folder, or a Hub id. Files end in .jsonl, "
        ".json, .csv, .tsv, .parquet or .txt."
    )
    reward: list[str] | None = setting(
        "Sequence classifier (a directory, a run's too, or a Hub id), a function "
        "(file.py:function), or a ready one: code, format, json_schema, length, math, regex or "
        "soft_overlong, with parameters as in 'length:{\"target\": 200}'; or several. Functions "
        "are named as module:function or path/to/file.py:function, and called with (prompts, "
        "completions, completion_ids, **columns). Of several the reward is the weighted sum. Only "
        "an environment that has a get_reward() needs none.",
        None,
    )
    output: str = setting_like(TrainingJob, "output", "runs/ppo")

    prompt_column: str | None = setting(
        "Column of the prompts; by default the first of prompt, query and text.", None
    )
    prompt_words: int | None = setting(
        "Take only the first words of each text as prompt.", None, within="[1, inf)"
    )
    max_prompt_tokens: int | None = setting(
        "Take only the first tokens of each prompt.", None, within="[1, inf)"
    )
    long_prompts: str = setting(
        "How to treat prompts that with their new tokens exceed the model's context: refuse (an "
        "error) or drop (counted).",
        "refuse",
    )

    eval_dataset: str | None = setting(
        "Data set to evaluate on; by default prompts are held out from --dataset.", None
    )
    eval_prompts: int | None = setting(
        "Prompts held out for evaluation, 0 for none; by default a tenth, 256 at most. With "
        "--eval-dataset: how many of its prompts; by default all, 256 at most.",
        None,
        within="[0, inf)",
    )
    eval_every: int = setting(
        "Steps between evaluations; 0 is before and after only.", 0, within="[0, inf)"
    )

    reward_label: str | None = setting(
        "Label of the classifier whose logit is the reward, by name or index; by default the last.",
        None,
    )
    reward_weights: list[float] | None = setting(
        "With several rewards: a weight for each, in their order; by default 1.", None
    )
    reward_batch_size: int | None = setting(
        "Completions that a reward judges at a time: a classifier per forward pass, by default 64, "
        "a function per call, by default all of a step.",
        None,
    )
    reward_timeout: float | None = setting(
        "Seconds that a call of a reward may take before it is an error; by default any.", None
    )
    reward_retries: int = setting(
        "How often a call of a reward is repeated that raised an exception or took too long.", 0
    )
    missing_eos_penalty: float | None = setting(
        "Subtracted from the reward of completions without an EOS token.",
        None,
        within="(-inf, inf)",
    )

    tools: list[str] | None = setting(
        "Functions that the policy may call (file.py:function), with type hints and docstrings; "
        "prompts are chats then.",
        None,
    )
    environment: str | None = setting(
        "What each completion acts on: a class or function (file.py:Class) that makes an object "
        "with reset(**columns), whose other methods are tools, and whose get_reward() adds to the "
        "reward.",
        None,
    )
    max_tool_calling_iterations: int | None = setting(
        "Most turns of tools in a completion; by default any number.", None, within="[0, inf)"
    )
    rollout_func: str | None = setting(
        "A function (file.py:function) that answers the prompts in place of sampling; called with "
        "(prompts, trainer), it returns prompt_ids, completion_ids and logprobs.",
        None,
    )
    max_new_tokens: int = setting("Longest completion, in tokens.", 32, within="[1, inf)")
    top_k: int = setting(
        "Sample among the k likeliest tokens; 0 is all of them.", 0, within="[0, inf)"
    )
    top_p: float = setting(
        "Sample among the likeliest tokens that make up this probability.", 1.0, within="(0, 1]"
    )
    min_p: float = setting(
        "Sample among tokens with at least this share of the likeliest one's probability; 0 is "
        "all of them.",
        0.0,
        within="[0, 1]",
    )
    lora_dropout: float = setting("Must be 0: a policy that PPO trains has no dropout.", 0.0)
    save_every: int = setting(
        "Steps between two checkpoints; 0 is only where the run fails or is stopped.",
        SAVE_EVERY,
        aliases=["--save-steps"],
        within="[0, inf)",
    )
    keep_last: int = setting(
        "Checkpoints to keep; 0 keeps all.",
        KEEP_LAST,
        aliases=["--save-total-limit"],
        within="[0, inf)",
    )
    ledger: bool = setting(
        "Keep a row for each sample that is trained on: see fastrl samples and replay.", True
    )
    resume: str | None = resume_setting(aliases=["--resume-from-checkpoint"])
    samples: int = setting("Completions to show before and after training.", 8, within="[0, inf)")

    def __post_init__(self) -> None:
        from fastrl.rewards.weighted import check_reward_settings

        if isinstance(self.reward, str):
            self.reward = [self.reward]
        if not self.reward and self.environment is None:
            raise ValueError(
                "reward says what is learned: name a function (file.py:function), a classifier or "
                "math; or an environment that has a get_reward()"
            )
        check_reward_settings(
            len(self.reward or ()),
            self.reward_weights,
            self.reward_timeout,
            self.reward_retries,
            self.reward_batch_size,
        )
        if self.lora_dropout:
            raise ValueError(
                f"lora_dropout must be 0, got {self.lora_dropout}: with dropout the probability "
                "ratio would differ from 1 where nothing was learned, so the policy is trained in "
                "evaluation mode; fastrl sft and reward take it"
            )
        if self.long_prompts not in LONG_PROMPTS:
            raise ValueError(
                f"unknown long_prompts {self.long_prompts!r}: choose one of "
                f"{', '.join(LONG_PROMPTS)}"
            )
        super().__post_init__()

    @property
    def rewards(self) -> str:
        """The names of all rewards, for titles."""
        return " + ".join(self.reward or [str(self.environment)])

    @property
    def generation_kwargs(self) -> dict[str, Any]:
        cuts = {"top_k": self.top_k, "top_p": self.top_p}
        cuts |= {"min_p": self.min_p} if self.min_p else {}
        return {"max_new_tokens": self.max_new_tokens, **cuts}


@dataclass
class PPOFlags(PPOConfig):
    """PPOConfig for a command line, where ``steps`` counts PPO steps, not samples."""

    _argument_group_name: ClassVar[str] = "PPO"

    steps: int = setting("Number of steps, each on batch_size completions.", 100)
    # Unlike the trainer's default: KL is to the saved adapter that a run starts from.
    reference_adapter: str = setting_like(PPOConfig, "reference_adapter", "auto")
    log_with: str | None = setting(
        "Tracker, such as wandb or tensorboard: any that accelerate knows.",
        None,
        aliases=["--report-to"],
    )

    def _warn_of_unread(self) -> None:
        """Warns of nothing: the PPOConfig that is made of these settings warns."""

    def _warn_of_no_difference(self) -> None: ...

    def config_for(self, job: PPOJob) -> PPOConfig:
        """The trainer's settings; names and lengths that have their defaults come from the job."""
        fields = {f.name: f.default for f in dataclasses.fields(self) if f.init}
        settings = {name: getattr(self, name) for name in fields}
        settings["steps"] = self.steps * self.batch_size
        settings["log_with"] = None if self.log_with == "none" else self.log_with
        for name, value in (
            ("model_name", job.model),
            ("query_dataset", job.dataset),
            ("reward_model", job.rewards),
            ("loss_norm_length", job.max_new_tokens),
        ):
            if settings[name] == fields[name]:
                settings[name] = value
        return PPOConfig(**settings)


@dataclass(kw_only=True)
class GRPOJob(PPOJob):
    """A :class:`PPOJob` with another default folder."""

    command: ClassVar[str] = "grpo"
    essentials: ClassVar[dict[str, str]] = {
        **_WHAT,
        "GRPO": f"advantage group_size {_STEPS} init_kl_coef kl_in loss_aggregate cliprange",
        "model and run": _RUN,
    }

    output: str = setting_like(TrainingJob, "output", "runs/grpo")


@dataclass
class GRPOFlags(PPOFlags):
    """PPOFlags with GRPO's defaults: groups and no value function, the KL with a fixed coefficient
    in the loss, one epoch of each batch."""

    _argument_group_name: ClassVar[str] = "GRPO"

    advantage: str = setting_like(PPOConfig, "advantage", "grpo")
    group_size: int = setting_like(PPOConfig, "group_size", 8)
    kl_in: str = setting_like(PPOConfig, "kl_in", "loss")
    init_kl_coef: float = setting_like(PPOConfig, "init_kl_coef", 0.04)  # that of DeepSeekMath
    adap_kl_ctrl: bool = setting_like(PPOConfig, "adap_kl_ctrl", False)
    ppo_epochs: int = setting_like(PPOConfig, "ppo_epochs", 1)
    max_grad_norm: float | None = setting_like(PPOConfig, "max_grad_norm", 1.0)


def run_ppo(job: PPOJob, flags: PPOFlags) -> Comparison | None:
    """Trains, saves and reports; returns the change in held-out reward, None without evaluation."""
    from fastrl.models.optimizers import check_optimizer

    config = flags.config_for(job)
    check_optimizer(config.optim, arguments=config.optim_args)
    folder = RunFolder(
        job.output,
        {
            "command": job.command,
            "title": f"{job.model}: {config.title} for {job.rewards}",
            **job.record(),
            "settings": flags.to_dict(),
        },
    )
    with folder_claimed(folder, job.resume, job.overwrite):
        return _train(job, flags, config, folder)


def _train(job: PPOJob, flags: PPOFlags, config: PPOConfig, folder: RunFolder) -> Comparison | None:
    from fastrl.core import set_seed
    from fastrl.models.load import load_tokenizer
    from fastrl.rewards.classifier import ClassifierReward
    from fastrl.rewards.functions import load_function, load_reward
    from fastrl.tools.commands.memory import RunMemory
    from fastrl.tools.reports.report import finish_training

    if process_count() == 1:  # several processes share the check later
        folder.checkpoint(job.resume)  # raises for a broken checkpoint
    check_trackers("log_with", [flags.log_with] if flags.log_with else [])
    set_seed(flags.seed)
    policy, _ = job.check_model(), job.lora_config("CAUSAL_LM")  # errors before data is read
    batch_size = {} if job.reward_batch_size is None else {"batch_size": job.reward_batch_size}
    rewards = [load_reward(name, label=job.reward_label, **batch_size) for name in job.reward or ()]
    check_label("reward_label", job.reward_label, rewards)
    tokenizer = load_tokenizer(policy)
    train_rows, eval_rows = load_prompts(job, tokenizer, flags.seed)
    columns = [name for name in train_rows.column_names if name not in (PROMPT, ROW, "input_ids")]
    by_keyword = (
        "prompts",
        "completions",
        "completion_ids",
        *(["environments"] if job.environment else ()),
    )
    for name, reward in zip(job.reward or (), rewards, strict=True):
        check_call(name, reward, by_keyword, columns)
    tools = [load_function(name) for name in job.tools or ()]
    environment = None if job.environment is None else load_function(job.environment)
    rollout_func = None if job.rollout_func is None else load_function(job.rollout_func)
    if config.log_with is not None:  # trackers write files there
        json_object(config.project_kwargs).setdefault("logging_dir", str(folder.logs))
    trainer = make_trainer(job, config, tokenizer)
    memory = RunMemory(
        job.plan,
        trainer.current_device,
        trainer,
        lambda: (longest_prompt(job, train_rows, tokenizer), job.max_new_tokens),
        config.micro_batch_tokens is None,
    )
    for reward in rewards:
        if isinstance(reward, ClassifierReward):
            reward.to(trainer.current_device)
    result = trainer.train(
        rewards or None,
        reward_weights=job.reward_weights,
        reward_timeout=job.reward_timeout,
        reward_retries=job.reward_retries,
        reward_batch_size=job.reward_batch_size,
        steps=flags.steps,
        dataset=train_rows,
        prompt_column=PROMPT,
        tools=tools,
        environment_factory=environment,
        max_tool_calling_iterations=job.max_tool_calling_iterations,
        rollout_func=rollout_func,
        generation_kwargs=job.generation_kwargs,
        eval_prompts=eval_rows,
        eval_every=job.eval_every,
        missing_eos_penalty=job.missing_eos_penalty,
        long_prompts=job.long_prompts,
        output=folder,
        save_every=job.save_every,
        keep_last=job.keep_last,
        resume=job.resume or False,
        ledger=job.ledger,
    )
    memory.end()
    eval_prompts = 0 if eval_rows is None else len(eval_rows) - result.dropped_eval_prompts
    comparison = finish_training(
        folder,
        trainer.save_pretrained,
        result,
        {
            "reference": {"mode": trainer.reference.mode, "why": trainer.reference.why},
            "train_examples": len(train_rows) - result.dropped_prompts,
            "eval_examples": eval_prompts,
            "long_prompts_dropped": result.dropped_prompts + result.dropped_eval_prompts,
            "steps": trainer.current_step,
            "seconds": result.seconds,
        },
        show=job.samples,
    )
    trainer.accelerator.end_training()  # closes the trackers
    return comparison


def make_trainer(job: PPOJob, config: PPOConfig, tokenizer: Any) -> PPOTrainer:
    """The trainer of a run before its first step, with the same weights every time."""
    from fastrl.core import set_seed
    from fastrl.models import AutoModelForCausalLMWithValueHead, CausalLMPolicy
    from fastrl.trainers.ppo import PPOTrainer

    needs_head = config.needs_values and config.critic is None
    kind = AutoModelForCausalLMWithValueHead if needs_head else CausalLMPolicy
    set_seed(config.seed)  # a new value head or adapter does not depend on earlier draws
    model = kind.from_pretrained(
        job.model,
        **job.model_options(),
        peft_config=job.lora_config("CAUSAL_LM"),
        is_trainable=True,
    )
    return PPOTrainer(config, model, tokenizer=tokenizer)


def longest_prompt(job: PPOJob, rows: Dataset, tokenizer: Any) -> int:
    """The longest prompt's length in a plan: ``max_prompt_tokens``, or that of the first 256."""
    from fastrl.data.prompt_ids import token_ids

    if job.max_prompt_tokens is not None:
        return max(2, job.max_prompt_tokens)
    first = rows.select(range(min(len(rows), _PLANNED_PROMPTS)))[PROMPT]
    return max(2, *(len(token_ids(prompt, tokenizer)) for prompt in first))


def load_prompts(job: PPOJob, tokenizer: Any, seed: int) -> tuple[Dataset, Dataset | None]:
    """Rows to train on, and rows or None to evaluate on, of other prompts (column "prompt")."""

    def rows_of(source: str) -> Dataset:
        table = load_table(source, job.dataset_split)
        with errors_name(source):
            column = find_prompt_column(table, job.prompt_column)
            if column != PROMPT and job.prompt_column is None and is_main_process():
                print(
                    f"{source} has no column {PROMPT!r}: prompts are its column {column!r} "
                    "(--prompt-column names another)",
                    file=sys.stderr,
                )
            return take_prompts(
                numbered(table),
                column,
                words=job.prompt_words,
                max_tokens=job.max_prompt_tokens,
                tokenizer=tokenizer,
            )

    train_rows = rows_of(job.dataset)
    if job.eval_prompts == 0:
        return train_rows, None
    if job.eval_dataset is not None:
        source = rows_of(job.eval_dataset)
        count = MOST_HELD_OUT if job.eval_prompts is None else job.eval_prompts
    else:
        source = train_rows
        distinct = count_prompts(train_rows)
        count = held_out_count(job.eval_prompts, distinct)
        if count == 0:
            say_none_held_out(distinct, "prompts")
            return train_rows, None
    eval_rows = sample_rows(source, count, seed)
    return drop_prompts(train_rows, eval_rows[PROMPT]), eval_rows
