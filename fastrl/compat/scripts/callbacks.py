"""Callbacks that training scripts add, under TRL's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import TrainerCallback

from fastrl.collect.completions_table import CompletionsTable
from fastrl.data.batch import pad
from fastrl.data.chat import TEMPLATE_COLUMNS, templates_of
from fastrl.data.prompt_ids import ids_of_prompts
from fastrl.models.utils import evaluating
from fastrl.rollout.generation_check import together
from fastrl.run.terminal import plain, run_console


class RichProgressCallback(TrainerCallback):
    """Prints a table of each log, by rich, beside the trainer's own bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        from rich import box
        from rich.table import Table

        table = Table(
            title=f"step {state.global_step} of {state.max_steps}",
            box=box.SIMPLE,
            show_header=False,
        )
        for name, value in logs.items():
            table.add_row(plain(name), f"{value:.4g}" if isinstance(value, float) else str(value))
        with tqdm.external_write_mode():  # a bar stays below
            run_console().print(table)


class SyncRefModelCallback(TrainerCallback):
    """Moves a reference towards the model every ``args.ref_model_sync_steps`` optimizer steps:
    ref ← (1 - α) ref + α model, with α ``args.ref_model_mixup_alpha`` (arXiv:2404.09656).

    The trainers do so themselves with ``sync_ref_model=True``.
    """

    def __init__(self, ref_model: Any, accelerator: Any = None):
        self.ref_model, self.accelerator = ref_model, accelerator

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.ref_model is None or state.global_step % args.ref_model_sync_steps:
            return
        model, accelerator = others["model"], self.accelerator
        model = model if accelerator is None else accelerator.unwrap_model(model)
        self.sync_target_model(model, self.ref_model, args.ref_model_mixup_alpha)

    @staticmethod
    @torch.no_grad()
    def sync_target_model(model: Any, target_model: Any, alpha: float) -> None:
        """target ← (1 - α) target + α model, in place."""
        for target, source in zip(target_model.parameters(), model.parameters(), strict=True):
            target.mul_(1 - alpha).add_(source, alpha=alpha)


class LogCompletionsCallback(TrainerCallback):
    """Logs completions of held-out prompts every ``freq`` optimizer steps: to wandb and trackio,
    if in ``report_to``, and as ``completions/completions_STEP.parquet`` beside the checkpoints.

    Args:
        trainer: a trainer whose ``eval_dataset`` has a column ``prompt``.
        generation_config: generation settings for ``model.generate``; None: the model's.
        num_prompts: how many of the first prompts are completed; None: all.
        freq: optimizer steps; None: ``eval_steps``.

    Raises:
        ValueError: no ``eval_dataset`` with a column ``prompt``; no ``freq``, nor ``eval_steps``.
    """

    def __init__(
        self,
        trainer: Any,
        generation_config: Any = None,
        num_prompts: int | None = None,
        freq: int | None = None,
    ):
        data = trainer.eval_dataset
        if data is None or "prompt" not in (getattr(data, "column_names", None) or ()):
            raise ValueError(
                "LogCompletionsCallback needs an eval_dataset with a column prompt: pass one to "
                "the trainer"
            )
        if not (freq or trainer.args.eval_steps):
            raise ValueError("LogCompletionsCallback needs a number of steps: pass freq")
        self.trainer, self.generation_config = trainer, generation_config
        self.freq = freq
        columns = ["prompt", *(name for name in TEMPLATE_COLUMNS if name in data.column_names)]
        rows = data.with_format(None).select_columns(columns)[:num_prompts]
        self.prompts = list(rows["prompt"])
        common = getattr(trainer.args, "chat_template_kwargs", None) or {}
        self._templates = templates_of(self.prompts, rows, range(len(self.prompts)), common)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % (self.freq or state.eval_steps):  # args.eval_steps may be a share
            return
        trainer = self.trainer
        examples = list(zip(self.prompts, self._templates, strict=True))
        with trainer.accelerator.split_between_processes(examples) as share:
            completions = self._complete(share, args.per_device_eval_batch_size)
        completions = gather_object(completions)
        if not state.is_world_process_zero:
            return
        table = CompletionsTable(len(completions))
        table.add([prompt for prompt, _ in completions], [text for _, text in completions], {})
        table.save(Path(args.output_dir), state.global_step)
        table.report(args.report_to, state.global_step, unique=False)

    @torch.no_grad()
    def _complete(self, asked: list[tuple[Any, Any]], size: int) -> list[tuple[str, str]]:
        trainer = self.trainer
        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
        prompts, templates = [prompt for prompt, _ in asked], [template for _, template in asked]
        ids = ids_of_prompts(prompts, tokenizer, templates)
        pairs: list[tuple[str, str]] = []
        with evaluating(model):
            size = together(model, ids, size)
            for i in range(0, len(prompts), size):
                batch = pad(ids[i : i + size], tokenizer.pad_token_id, "left")
                inputs = {name: x.to(model.device) for name, x in batch.items()}
                out = model.generate(**inputs, generation_config=self.generation_config)
                new = out[:, batch["input_ids"].shape[1] :]
                written = tokenizer.batch_decode(new, skip_special_tokens=True)
                pairs += zip(prompts[i : i + size], written, strict=True)
        return pairs
