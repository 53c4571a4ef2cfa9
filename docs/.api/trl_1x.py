"""The tables of docs/trl_1x.md: each setting and argument of TRL 1.16, and what it is here.

    python docs/.api/trl_1x.py          writes them into the page (`make docs` does)
    python docs/.api/trl_1x.py --trl    reads TRL's names and defaults anew, from the installed one

They come from the dataclasses and signatures; what is not to be seen there, how a setting differs
from TRL's, stands here.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainingArguments

import fastrl
from fastrl.eras import eras_of
from fastrl.settings import idle_settings, refusals

PAGE = Path(__file__).parents[1] / "trl_1x.md"
NAMES = Path(__file__).with_suffix(".json")  # TRL's: settings with defaults, and arguments
METHODS = ("SFT", "Reward", "DPO", "KTO", "GRPO", "RLOO", "Distillation", "GKD", "SDFT")
_EXPERIMENTAL = ("GKD", "SDFT")  # in TRL's modules of these names
_BLOCK = re.compile(
    r"^(<!-- (settings|arguments): (\w+) -->\n)(?:(?!<!-- end -->).*\n)*(?=<!-- end -->)",
    re.MULTILINE,
)

_CLASSIC = "transformers' default, as in TRL's classic trainers"
_NEW_TOKENS = "new tokens beside an adapter are refused: TRL trains their embeddings"
_LIMITS = "also limited by the model and the tokenizer"
_PADDING = "no multiple: TRL's `auto` pads to one on Neuron only"
_OF_PREFERENCES = {
    "pad_to_multiple_of": _PADDING,
    "max_length": _LIMITS,
    "beta": "0 is refused: nothing would be learned",
    "precompute_ref_log_probs": "refused with FSDP and DeepSpeed",
}
_ONLINE = {
    "pad_to_multiple_of": "no effect: batches have no padding",
    "remove_unused_columns": "no effect: all columns go to the reward functions",
    "generation_kwargs": "for the rollout engine, or for `model.generate` if the engine cannot run "
    "the model",
    "log_completions": "rows are printed as lines and saved in `completions/`",
    "num_completions_to_print": "responses to as many prompts as there are, in their order, where "
    "TRL draws rows at random",
    "num_generations": "at least 2, even for evaluation only",
}
# How a setting differs, by trainer; those of "all" hold wherever there is such a setting.
DIFFERENT: dict[str, dict[str, str]] = {
    "all": {
        "bf16": "if unset, on for float32 weights on GPUs that support it, else off; on in TRL",
    },
    "SFT": {
        "learning_rate": _CLASSIC,
        "logging_steps": _CLASSIC,
        "gradient_checkpointing": _CLASSIC,
        "padding_free": "with any attention for which it is correct, with the same loss; "
        "`max_length` applies, which TRL refuses with it",
        "pad_to_multiple_of": _PADDING,
        "completion_only_loss": "on means what unset means in TRL: texts without prompts are "
        "learned whole",
        "max_length": _LIMITS,
        "truncation_mode": "`keep_start` of a prompt with its completion keeps the completion",
        "dataset_kwargs": "also `add_special_tokens` and `append_concat_token`, as before TRL 0.13",
        "router_aux_loss_coef": "if unset, the model's own if its configuration has "
        "`output_router_logits`",
        "chat_template_path": _NEW_TOKENS,
        "packing": "with any attention that can keep texts apart; otherwise refused",
    },
    "Reward": {
        "learning_rate": _CLASSIC,
        "logging_steps": _CLASSIC,
        "gradient_checkpointing": _CLASSIC,
        "disable_dropout": "as in TRL's classic trainer",
        "max_length": f"as in TRL's classic trainer; {_LIMITS}",
        "pad_to_multiple_of": _PADDING,
        "chat_template_path": _NEW_TOKENS,
    },
    "DPO": {
        **_OF_PREFERENCES,
        "padding_free": "honoured, where TRL 1.16 warns and pads",
    },
    "KTO": _OF_PREFERENCES,
    "GRPO": {
        **_ONLINE,
        "top_entropy_quantile": "0 is refused",
        "vllm_importance_sampling_correction": "also applies without `use_vllm`, to the `logprobs` "
        "that a `rollout_func` returns; fastrl's own engine needs no correction",
    },
    "RLOO": {
        **_ONLINE,
        "mask_truncated_completions": "with the same gradient; the logged loss lacks the constant "
        "that responses without tokens add in TRL",
    },
    "Distillation": {
        **{k: v for k, v in _ONLINE.items() if k != "num_generations"},
        "remove_unused_columns": "no effect: `teacher_prompt` and `privileged_context` are what "
        "the teacher reads, and other columns go to tools and environments",
        "teacher_model_name_or_path": "read by the trainer if `teacher_model` is not given; in TRL "
        "by its script alone",
    },
    "GKD": {
        "pad_to_multiple_of": _ONLINE["pad_to_multiple_of"],
        "router_aux_loss_coef": "honoured; TRL adds no load-balancing loss to its divergence",
        "lmbda": "drawn for each batch by the run's seed; a batch is divided by the tokens that "
        "are learned, where TRL divides sampled completions by the number of the data's tokens",
        "max_length": "a prompt that is sampled from keeps its last `max_length` tokens, in TRL "
        "those that the data's completion leaves of it; `None` cuts nothing, in TRL at 1,024",
        "shuffle_dataset": "orders the rows, and `False` keeps the data's order; in TRL "
        "`train_sampling_strategy` does. Rows that fill no whole step are left out of an epoch",
        "padding_free": "honoured; TRL refuses it with its collator",
        "seq_kd": "refused for a teacher that is several models, no model of its own, or spread "
        "over processes",
        "teacher_model_name_or_path": "read by the trainer if `teacher_model` is not given; in TRL "
        "by its script alone",
        "teacher_model_init_kwargs": "need no `dtype`",
    },
    "SDFT": {
        **{k: v for k, v in _ONLINE.items() if k == "generation_kwargs"},
        "remove_unused_columns": "no effect: `privileged_context` is what the teacher reads",
        "max_prompt_length": "keeps BOS, too",
        "teacher_model_kind": "`base` and `ema` begin with the weights of the model that is given, "
        "in TRL with those at its path, an adapter's average with zeros, and `base` of a trained "
        "adapter is the model without it; `ema` also for adapters that are not LoRA alone",
        "distillation_mode": "`full_logits` alone, to be named; TRL's default, `topk_logits`, and "
        "`sampled_token` are refused as the trainer is made",
        "distillation_is_clip": "refused unless `None` where TRL would weigh: where "
        "`gradient_accumulation_steps` is no multiple of `steps_per_generation` × `num_iterations`",
        "teacher_prompt_template": "braces of a prompt's or a hint's stay as they are",
    },
}

_OVERRIDE = "refused: override `compute_loss`; the loss is computed with the LM head"
_OPTIMIZERS = "refused: pass `optimizers=(optimizer, None)`, or name it by `optim`"
_ROLLOUTS = "refused: converse in a `rollout_func`, whose `env_mask` marks the policy's tokens"
_REWARDS = "functions (also async), sequence classifiers or their paths, one or a list"
_TOKENIZER = "a tokenizer, not an image processor"
# The same of arguments; a sentence that begins with "refused" is checked by the tests.
ARGUMENTS: dict[str, dict[str, str]] = {
    "SFT": {
        "processing_class": f"{_TOKENIZER}; one without a pad token is refused",
        "compute_loss_func": _OVERRIDE,
        "optimizer_cls_and_kwargs": _OPTIMIZERS,
        "formatting_func": "takes a row, or a batch of rows and returns a list of texts",
    },
    "Reward": {
        "model": "one with several labels is trained with a warning; TRL refuses it",
        "processing_class": f"{_TOKENIZER}; one without a pad token is refused",
        "optimizer_cls_and_kwargs": _OPTIMIZERS,
        "compute_metrics": "predictions are P(chosen) and P(rejected), [pairs, 2], and labels 0, "
        "as in TRL's classic trainer; in TRL 1.x predictions are rewards, [2·pairs, 1]",
    },
    "DPO": {
        "processing_class": _TOKENIZER,
        "peft_config": "prompt learning is refused",
        "compute_metrics": "predictions have the rows of all pairs; TRL loses those of the last "
        "batch's rejected texts if it is smaller than the others",
    },
    "KTO": {"processing_class": _TOKENIZER, "peft_config": "prompt learning is refused"},
    "GRPO": {
        "reward_funcs": _REWARDS,
        "processing_class": _TOKENIZER,
        "peft_config": "prompt learning, and adapters on `lm_head`, are refused",
    },
    "RLOO": {
        "reward_funcs": _REWARDS,
        "processing_class": _TOKENIZER,
        "peft_config": "prompt learning, and adapters on `lm_head`, are refused",
    },
    "Distillation": {
        "teacher_model": "also the path of an adapter on the student's base, a function, a dict of "
        "teachers, or None for the student's own weights; heads may end in different rows of "
        "padding, which TRL refuses",
        "processing_class": _TOKENIZER,
        "peft_config": "prompt learning, and adapters on `lm_head`, are refused",
    },
    "GKD": {
        "teacher_model": "as for `DistillationTrainer`",
        "train_dataset": "also of `prompt` and `completion`, and at `lmbda=1` of `prompt` alone",
        "processing_class": _TOKENIZER,
        "data_collator": "refused: rows are encoded as they are used",
        "compute_metrics": "refused: an evaluation has no logits",
        "preprocess_logits_for_metrics": "refused: an evaluation has no logits",
        "formatting_func": "refused: give the data messages, or prompt and completion",
        "peft_config": "prompt learning, and adapters on `lm_head`, are refused",
    },
    "SDFT": {
        "train_dataset": "also a stream, and of `teacher_prompt` in place of `privileged_context`",
        "processing_class": _TOKENIZER,
        "callbacks": "their `on_self_distillation_batch_prepared` and "
        "`on_generation_prompts_selected` are not called",
        "peft_config": "prompt learning, and adapters on `lm_head`, are refused",
    },
}

# Settings that TRL does not have, and whose defaults do something else than TRL.
ON_BY_DEFAULT = {
    "master_weights": "bfloat16 weights have float32 masters and moments, 12 bytes a weight with "
    "AdamW; TRL has bfloat16 moments alone, 4 bytes, and loses small steps, as `False` does",
}


class Setting(NamedTuple):
    """A setting of TRL's."""

    name: str
    theirs: str  # default, as Python writes it
    ours: str
    note: str  # how it differs; "" where it does not
    remedy: str  # "" unless it is refused
    instead: str  # "" unless it is taken and changes nothing


def default_of(field: Any) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return repr(field.default)


def read_trl() -> dict[str, Any]:
    """Of the installed TRL: each configuration's settings beyond transformers' and those with a
    default of its own, and each trainer's arguments."""
    import trl

    common = {f.name: default_of(f) for f in dataclasses.fields(TrainingArguments)}
    settings, arguments = {}, {}
    for method in METHODS:
        home = trl
        if method in _EXPERIMENTAL:
            home = importlib.import_module(f"trl.experimental.{method.lower()}")
        fields = dataclasses.fields(getattr(home, f"{method}Config"))
        own = {f.name: default_of(f) for f in fields}
        settings[method] = {n: d for n, d in own.items() if common.get(n) != d or n == "bf16"}
        parameters = inspect.signature(getattr(home, f"{method}Trainer").__init__).parameters
        arguments[method] = [name for name in parameters if name != "self"]
    return {"settings": settings, "arguments": arguments}


def trl_names() -> dict[str, Any]:
    return json.loads(NAMES.read_text(encoding="utf-8"))


def settings(method: str) -> list[Setting]:
    """TRL's settings, in its order.

    Raises:
        KeyError: one that the configuration here lacks.
    """
    config = getattr(fastrl, f"{method}Config")
    fields = {f.name: default_of(f) for f in dataclasses.fields(config)}
    theirs = dict(trl_names()["settings"][method])
    refused, idle = refusals(config), idle_settings(config)
    notes = {**DIFFERENT["all"], **DIFFERENT[method]}
    for field in dataclasses.fields(TrainingArguments):  # what transformers has and we refuse
        if field.name in refused:
            theirs.setdefault(field.name, default_of(field))
    return [
        Setting(
            *(n, d, fields[n], notes.get(n, "")),
            refused.get(n, ("", ""))[1],
            idle.get(n, ("", ""))[1],
        )
        for n, d in theirs.items()
    ]


def own_settings(method: str) -> list[str]:
    """Settings that TRL and transformers do not have."""
    others = {f.name for f in dataclasses.fields(TrainingArguments)}
    others |= {"activation_checkpointing", "activation_checkpointing_kwargs"}  # of newer ones
    others |= set(trl_names()["settings"][method])
    config = getattr(fastrl, f"{method}Config")
    refused = refusals(config)
    others |= ON_BY_DEFAULT.keys()
    taken = eras_of(config)
    names = [f.name for f in dataclasses.fields(config) if f.init or f.name in taken]
    return [name for name in names if name not in others and name not in refused]


def settings_table(method: str) -> str:
    every = settings(method)
    refused, idle = [s for s in every if s.remedy], [s for s in every if s.instead]
    honoured = [s for s in every if not s.remedy and not s.instead]
    differing = [s for s in honoured if s.note or s.ours != s.theirs]
    same = [s for s in honoured if s not in differing]
    lines = [f"**As in TRL**: {', '.join(f'`{s.name}`' for s in same)}.", ""]
    lines += ["| differs | default in TRL | default here | how |", "| --- | --- | --- | --- |"]
    for s in differing:
        ours = "the same" if s.ours == s.theirs else f"`{s.ours}`"
        lines.append(f"| `{s.name}` | `{s.theirs}` | {ours} | {s.note} |")
    fields = getattr(fastrl, f"{method}Config").__dataclass_fields__
    for name, note in ON_BY_DEFAULT.items():
        lines.append(f"| `{name}` | none | `{default_of(fields[name])}` | {note} |")
    if refused:
        lines += [
            "",
            "| refused unless left at TRL's default | default | instead |",
            "| --- | --- | --- |",
        ]
        lines += [f"| `{s.name}` | `{s.theirs}` | {s.remedy} |" for s in refused]
    if idle:
        lines += [
            "",
            "| accepted with a warning, no effect | default | because |",
            "| --- | --- | --- |",
        ]
        lines += [f"| `{s.name}` | `{s.theirs}` | {s.instead} |" for s in idle]
    lines += ["", f"**Only in fastrl**: {', '.join(f'`{n}`' for n in own_settings(method))}."]
    return "\n".join(lines) + "\n"


def arguments_table(_: str) -> str:
    lines = ["| trainer | as in TRL | with a difference |", "| --- | --- | --- |"]
    for method in METHODS:
        notes = ARGUMENTS[method]
        same = [f"`{n}`" for n in trl_names()["arguments"][method] if n not in notes]
        others = [f"`{name}`: {note}" for name, note in notes.items()]
        lines.append(f"| `{method}Trainer` | {', '.join(same)} | {'; '.join(others)} |")
    return "\n".join(lines) + "\n"


def render(page: str) -> str:
    """The page with its tables."""
    tables = {"settings": settings_table, "arguments": arguments_table}
    return _BLOCK.sub(lambda match: match[1] + tables[match[2]](match[3]), page)


if __name__ == "__main__":
    if "--trl" in sys.argv[1:]:
        NAMES.write_text(json.dumps(read_trl(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
