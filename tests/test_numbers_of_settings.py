"""Numbers that no setting can mean are refused by name, on every surface."""

import dataclasses
import inspect
import math
import re
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainingArguments

import fastrl
from fastrl.alignment.arguments import AlignmentConfig
from fastrl.alignment.losses import LOSSES, make_loss
from fastrl.rollout import SamplingParams
from fastrl.settings import idle_settings, refusals
from fastrl.trainers.supervised import settings_of
from tests.together import together

SURFACES = ("PPO", "GRPO", "RLOO", "DPO", "KTO", "SFT", "Reward", "PPOv2", "RLOOv1", "Alignment")
# A negative number has a meaning for these; infinity leaves those without a bound.
NEGATIVE = {
    *("max_steps", "save_total_limit", "local_rank", "num_print_samples", "reward_weights"),
    *("entropy_coef", "entropy_coef_min", "entropy_coef_max", "reward_clip_range", "loss_weights"),
    *("f_alpha_divergence_coef", "top_k"),
}
UNBOUNDED = {
    *("max_grad_norm", "max_kl", "max_ratio", "ratio_threshold", "score_clip", "target_kl"),
    *("delta", "epsilon", "epsilon_high", "off_policy_mask_threshold", "reward_clip_range"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", "target", "horizon"),
}
# Older names of other settings, which errors name.
NEWER = {
    "forward_batch_size": "mini_batch_size",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}


def config_of(surface: str) -> Any:
    return AlignmentConfig if surface == "Alignment" else getattr(fastrl, f"{surface}Config")


def numbers_of(surface: str) -> dict[str, bool]:
    """Settings that are numbers or lists of them, and whether they are lists; transformers' own of
    one surface for all."""
    kind = config_of(surface)
    made = kind() if surface == "PPO" else kind(output_dir="out", use_cpu=True, report_to="none")
    unread = {*refusals(made), *idle_settings(made)}
    if surface != "SFT":
        unread |= inspect.get_annotations(TrainingArguments).keys() - kind.__annotations__.keys()
    hints, found = typing.get_type_hints(kind), {}
    for each in dataclasses.fields(kind):
        hint = hints[each.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = typing.get_args(hint) if union else (hint,)
        if each.init and each.name not in unread and {int, float, list[float]} & set(kinds):
            found[each.name] = list[float] in kinds
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("surface", SURFACES)
def test_what_is_no_number_in_range_is_refused_by_name(surface: str) -> None:
    kind, own = config_of(surface), dict[str, Any]()
    hints = typing.get_type_hints(kind)
    if surface != "PPO":
        own = {"output_dir": "out", "use_cpu": True, "report_to": "none"}
    taken, floats = [], {x: float in typing.get_args(h) or h is float for x, h in hints.items()}
    for name, several in numbers_of(surface).items():
        for value in (math.nan, True, "x", math.inf, -1, 1e39):
            means = (value == -1 and name in NEGATIVE) or (value == math.inf and name in UNBOUNDED)
            if means or (value == 1e39 and (several or not floats[name])):
                continue
            try:
                kind(**{**own, name: [value, 3.0] if several else value})
            except (TypeError, ValueError) as error:
                if not re.search(rf"\b({name}|{NEWER.get(name)})\b", str(error)):
                    taken.append(f"{name}={value!r} gives {error!r:.200}")
            else:
                taken.append(f"{name}={value!r} is taken")
    assert taken == []


def test_whole_numbers_are_what_torch_takes(tmp_path: Path) -> None:
    """Of betas it takes two floats alone, and of others no whole number beyond 64 bits."""
    args = fastrl.SFTConfig(str(tmp_path), use_cpu=True, adam_beta1=0, learning_rate=10**30)
    assert [type(x) for x in (args.adam_beta1, args.learning_rate)] == [float, float]


def test_numbers_that_a_script_sets_later_are_checked(tmp_path: Path) -> None:
    """Of transformers' own arguments, too, as a trainer is made."""
    args = fastrl.SFTConfig(str(tmp_path), use_cpu=True, report_to="none")
    args.max_grad_norm = math.nan
    with pytest.raises(ValueError, match="max_grad_norm must be 0 or more, got nan"):
        settings_of(args, fastrl.SFTConfig)


def test_a_number_that_yaml_reads_as_text_says_so(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"learning_rate must be a number, got '1e-5'.*1\.0e-5"):
        fastrl.DPOConfig(str(tmp_path), use_cpu=True, learning_rate="1e-5")


@pytest.mark.parametrize("surface", ["GRPO", "RLOO", "DPO", "KTO", "SFT", "Reward", "Alignment"])
def test_what_is_no_dict_is_refused_by_name(surface: str) -> None:
    """A text that is no JSON object was passed over."""
    kind, own = config_of(surface), {"output_dir": "out", "use_cpu": True, "report_to": "none"}
    names = [
        *("model_init_kwargs", "lr_scheduler_kwargs", "activation_checkpointing_kwargs"),
        *("generation_kwargs", "chat_template_kwargs"),
    ]
    for name in set(names) & {each.name for each in dataclasses.fields(kind)}:
        for value in ("top_k=5", '{"top_k": 5', '["top_k"]', [1], 1.5, True):
            said = name.replace("activation", "(activation|gradient)")  # older transformers'
            with pytest.raises((TypeError, ValueError), match=rf"\b{said}\b"):
                kind(**own, **{name: value})
        kept = kind(**own, **{name: '{"use_reentrant": "true"}'})
        assert getattr(kept, name) == {"use_reentrant": True}


@together(
    ("surface", "name", "value"),
    [
        ("GRPO", "rollout_backend", "hf"), ("RLOO", "rollout_backend", ""),
        ("RLOO", "reward_clip_range", 1.5), ("GRPO", "reward_weights", 1.0),
        ("DPO", "loss_weights", 1.0), ("DPO", "loss_type", None), ("DPO", "loss_type", []),
        ("SFT", "pad_to_multiple_of", []), ("SFT", "dataset_kwargs", 1.5),
        ("SFT", "train_sampling_strategy", "group_by_lenght"), ("SFT", "label_names", "labels"),
        ("SFT", "eval_strategy", "sometimes"), ("GRPO", "lr_scheduler_type", None),
        ("KTO", "optim", "adam"), ("DPO", "log_level", "loud"), ("SFT", "log_level", []),
        ("Reward", "metric_for_best_model", 1.0), ("RLOO", "optim_args", 3),
        ("SFT", "parallelism_config", "tp"), ("Alignment", "pad_to_multiple_of", [8]),
        ("SFT", "dataloader_num_workers", 10**30), ("SFT", "ddp_timeout", 10**30),
    ],
)  # fmt: skip
def test_what_no_setting_can_be_is_refused_by_name(surface: str, name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        config_of(surface)("out", use_cpu=True, report_to="none", **{name: value})


def test_coefficients_that_are_no_numbers_are_refused_by_name() -> None:
    for name, kind in LOSSES.items():
        for each in dataclasses.fields(kind):
            for value in () if isinstance(each.default, bool) else (math.nan, True, "x"):
                with pytest.raises((TypeError, ValueError), match=rf"\b{each.name}\b"):
                    make_loss(name, **{each.name: value})


@pytest.mark.parametrize("given", [
    {"max_new_tokens": "5"}, {"max_new_tokens": 2.5}, {"n": True}, {"top_k": 2.5},
    {"temperature": math.inf}, {"temperature": "1"}, {"repetition_penalty": math.inf},
])  # fmt: skip
def test_sampling_takes_numbers_in_range_alone(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(given))):
        SamplingParams(**given)
    assert SamplingParams(max_new_tokens=np.int64(5)).limits(2) == [5, 5]
