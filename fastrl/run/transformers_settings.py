"""Settings of transformers' Trainer, compared with a checkpoint's, or among a run's processes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainingArguments

from fastrl.run.checkpoints import changed_settings

# Beginnings of the names of settings that do not change what is computed.
_FREE = (
    "output_dir", "run_name", "resume_from", "disable_tqdm", "report_to", "project", "trackio",
    "logging_", "log_", "eval_", "save_", "hub_", "push_to_hub", "do_", "dataloader_", "local_rank",
    "ddp_", "num_print_samples", "dataset_num_proc", "per_device_eval", "load_best", "prediction_",
    "restore_callback", "metric_for_best", "greater_is_better", "offload_optimizer",
    "activation_offloading", "ledger",
)  # fmt: skip
# Beginnings of the names of settings that decide when all processes do something together.
_STEPS = (
    "logging_st", "logging_first", "eval_", "save_", "per_device_eval", "load_best",
    "metric_for_best", "greater_is_better", "prediction_", "dataloader_drop", "push_to_hub",
    "torch_empty_cache",
)  # fmt: skip
# Settings of a process: a resume must not change their product with the number of processes.
SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")
# Schedules of the learning rate that read metric_for_best_model.
SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
# Settings that an optimizer keeps, and that its saved state brings back.
_OF_THE_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def reads_best_metric(args: TrainingArguments) -> bool:
    """Whether a metric of evaluations chooses the best checkpoint, or the learning rate."""
    return bool(args.load_best_model_at_end) or args.lr_scheduler_type in SCHEDULES_BY_METRIC


def check_best_metric(args: TrainingArguments, evaluated: Any) -> None:
    """Raises ValueError where ``evaluated`` is a dict of evaluation sets, and the metric that
    chooses the best checkpoint, or that a schedule reads, begins with the name of none of them."""
    if not reads_best_metric(args) or not isinstance(evaluated, dict) or not evaluated:
        return
    metric = (args.metric_for_best_model or "loss").removeprefix("eval_")
    if not metric.startswith(tuple(f"{name}_" for name in evaluated)):
        first = next(iter(evaluated))
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is a metric of none of the "
            f"evaluation sets {', '.join(evaluated)}: name one of theirs, such as "
            f"'eval_{first}_{metric}'"
        )


def check_measured(args: TrainingArguments, measured: Mapping[str, float]) -> None:
    """Raises ValueError where evaluations in training would not find ``metric_for_best_model``
    among the metrics of an evaluation, ``measured``."""
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no":
        return
    if f"eval_{metric.removeprefix('eval_')}" not in measured:
        timing = ("_runtime", "_per_second", "_time")
        names = [x.removeprefix("eval_") for x in measured if not x.endswith(timing)]
        raise ValueError(
            f"metric_for_best_model={metric!r} is not measured; evaluations have {', '.join(names)}"
        )


def settings_of_results(args: TrainingArguments, of_trainer: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that change what is computed.

    Args:
        of_trainer: the trainer's settings that ``args`` lack.
    """
    of_results = {k: v for k, v in args.to_dict().items() if not k.startswith(_FREE)}
    return json.loads(json.dumps({**of_results, **of_trainer}, default=str))


def settings_of_steps(args: TrainingArguments) -> dict[str, Any]:
    """The settings of what all processes do at the same steps, such as saving."""
    steps = {k: v for k, v in args.to_dict().items() if k.startswith(_STEPS)}
    return json.loads(json.dumps(steps, default=str))


def warn_of_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], but: Sequence[str] = ()
) -> None:
    """Warns of settings, other than those in ``but``, that a run resumes with another value."""
    changed = [k for k in changed_settings(before, now) if k not in but]
    if not changed:
        return
    message = "resume: settings differ from the checkpoint's."
    used = [k for k in changed if k not in _OF_THE_OPTIMIZER]
    if used:
        shown = ", ".join(f"{k}: {before.get(k)} → {now.get(k)}" for k in used)
        message += (
            f" The new ones are used from here on ({shown}), so that results are not those of an "
            "uninterrupted run."
        )
    kept = [k for k in changed if k in _OF_THE_OPTIMIZER]
    if kept:
        shown = ", ".join(f"{k}: {before.get(k)}, not {now.get(k)}" for k in kept)
        message += f" The optimizer keeps the checkpoint's ({shown})."
    warnings.warn(message, stacklevel=4)
