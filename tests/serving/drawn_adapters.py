"""Adapters of many shapes under every trainer: is what is saved what the trainer has?"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import fastrl
from fastrl.models.load import load_saved
from tests import tiny_models
from tests.alignment.conftest import make_factory
from tests.golden import tiny
from tests.oracles.surfaces import judged, small_tokens
from tests.serving.checks import pushed, run
from tests.trainers.conftest import pairs, texts

CLOSE = 1e-5
FAMILIES = {  # names of attention, of its first part, of the MLP, the embedding and the head
    "llama": ("q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"),
    "qwen2": ("q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"),
    "gemma3": ("q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"),
    "opt": ("q_proj", "v_proj", "fc1", "embed_tokens", "lm_head"),
    "gpt2": ("c_attn", "c_attn", "c_fc", "wte", "lm_head"),
    "gpt_neox": ("query_key_value", "query_key_value", "dense_h_to_4h", "embed_in", "embed_out"),
}
TRAINERS = ("SFT", "Reward", "DPO", "KTO", "GRPO", "RLOO", "PPO", "align dpo", "align reward")
_SETTINGS: dict[str, Any] = {
    "max_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "use_cpu": True,
}  # fmt: skip


class Case(NamedTuple):
    trainer: str
    family: str
    tied: bool
    shape: str  # of the adapter, see SHAPES
    options: tuple[str, ...]  # see OPTIONS
    task: str | None


# By name, what an adapter is put on: settings of LoraConfig, from the family's names.
SHAPES: dict[str, Callable[..., dict[str, Any]]] = {
    "attention": lambda q, v, mlp, embed, head: {"target_modules": sorted({q, v})},
    "all-linear": lambda q, v, mlp, embed, head: {"target_modules": "all-linear"},
    "a pattern": lambda q, v, mlp, embed, head: {"target_modules": rf".*\.1\..*({q}|{mlp})"},
    "one layer": lambda q, v, mlp, embed, head: {
        "target_modules": [q, mlp], "layers_to_transform": [1],
    },
    "ranks": lambda q, v, mlp, embed, head: {
        "target_modules": [q, mlp], "rank_pattern": {mlp: 3}, "alpha_pattern": {q: 5},
    },
    "embedding": lambda q, v, mlp, embed, head: {"target_modules": [q, embed]},
    "head": lambda q, v, mlp, embed, head: {"target_modules": [q, head]},
    "both": lambda q, v, mlp, embed, head: {"target_modules": [q, embed, head]},
    "both, tied": lambda q, v, mlp, embed, head: {
        "target_modules": [q, embed, head], "ensure_weight_tying": True,
    },
    "head whole": lambda q, v, mlp, embed, head: {
        "target_modules": [q], "modules_to_save": [head],
    },
    "embedding whole": lambda q, v, mlp, embed, head: {
        "target_modules": [q], "modules_to_save": [embed],
    },
    "both whole": lambda q, v, mlp, embed, head: {
        "target_modules": [q], "modules_to_save": [embed, head],
    },
    "both whole, tied": lambda q, v, mlp, embed, head: {
        "target_modules": [q], "modules_to_save": [embed], "ensure_weight_tying": True,
    },
    "tokens": lambda q, v, mlp, embed, head: {
        "target_modules": [q], "trainable_token_indices": {embed: [3, 5, 7]},
    },
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True}, "rslora": {"use_rslora": True}, "bias": {"bias": "all"},
    "bias of LoRA": {"bias": "lora_only"}, "dropout": {"lora_dropout": 0.1},
    "lora bias": {"lora_bias": True},
}  # fmt: skip
_ON_HEAD = ("head", "both", "both, tied")
_ON_EMBEDDING = ("embedding", "both", "both, tied", "head")


def refused(case: Case) -> bool:
    """Whether trainers refuse the adapter by name."""
    online = case.trainer in ("GRPO", "RLOO")
    return case.shape == "both, tied" or (online and case.shape in _ON_HEAD)


def base(case: Case, folder: Path) -> Path:
    """The folder of the model that the adapter is put on."""
    place = folder / f"{case.family} {case.tied}"
    if not place.exists():
        changes = {} if case.family == "gpt2" else {"tie_word_embeddings": case.tied}
        model = tiny_models.language_model(case.family, **changes)
        model.save_pretrained(place)
        tiny.tokenizer().save_pretrained(place)
    return place


def config_of(case: Case) -> LoraConfig:
    settings = SHAPES[case.shape](*FAMILIES[case.family])
    for name in case.options:
        settings |= OPTIONS[name]
    fan = case.family == "gpt2" and not isinstance(settings["target_modules"], str)
    fan = fan and not any(x in ("wte", "lm_head") for x in settings["target_modules"])
    return LoraConfig(r=2, task_type=case.task, fan_in_fan_out=fan, **settings)


def trainer_of(case: Case, place: Any, config: Any, folder: Path) -> tuple[Any, Callable]:
    """The model of a trainer with the adapter, from a model or its folder, and what saves it."""
    kind, tokens = case.trainer, tiny.tokenizer()
    if kind == "PPO":
        model = fastrl.AutoModelForCausalLMWithValueHead.from_pretrained(place, peft_config=config)
        ppo = fastrl.PPOTrainer(fastrl.PPOConfig(batch_size=4), model, None, tokens)
        return ppo.model.pretrained_model, ppo.save_pretrained
    if kind.startswith("align"):
        args = fastrl.alignment.AlignmentConfig(
            str(folder), **{k: x for k, x in _SETTINGS.items() if not k.startswith("per_device")}
        )
        if kind == "align dpo":
            loss, factory = "dpo", make_factory("offline-pairwise")
        else:
            loss, factory = "bradley-terry", make_factory("reward-modelling")
        made = fastrl.alignment.Trainer(place, args, factory, loss, peft_config=config)
        return getattr(made.model, "pretrained_model", made.model), made.save_model
    more = {"num_generations": 4, "max_completion_length": 4} if kind in ("GRPO", "RLOO") else {}
    data = {
        "SFT": lambda: texts(4), "Reward": lambda: pairs(4), "DPO": lambda: pairs(4),
        "KTO": lambda: judged(4, 0),
    }.get(kind, lambda: Dataset.from_list([{"prompt": "w5 w6"}] * 4))  # fmt: skip
    made = getattr(fastrl, f"{kind}Trainer")(
        place,
        **({"reward_funcs": small_tokens} if more else {}),
        args=getattr(fastrl, f"{kind}Config")(
            str(folder), per_device_train_batch_size=4, **_SETTINGS, **more
        ),
        train_dataset=data(),
        processing_class=tokens,
        peft_config=config,
    )
    return made.model, made.save_model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of some tokens, in float64; the model's weights keep their dtype and values."""
    found = model.double().eval()(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8, 9]]))
    model.float()
    return found.logits.flatten(0, -2)


def off(said: Tensor, model: Any) -> float:
    """The largest difference, in units of the largest logit where that is more than 1."""
    return float((said - logits(model)).abs().max() / said.abs().max().clamp(min=1))


@torch.no_grad()
def disturb(model: Any) -> None:
    """Changes all that is trained, as training would, each weight otherwise."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def check(case: Case, world: Path, folder: Path) -> dict[str, float | str]:
    """By how the folder is read, the largest difference from the logits in the trainer."""
    place = base(case, world)
    model, save = trainer_of(case, str(place), config_of(case), folder / "run")
    before = logits(model)
    disturb(model)
    said = logits(model)
    assert (said - before).abs().max() > 1e-3, f"{case} changes nothing"
    save(str(folder / "saved"))
    classifies = "eward" in case.trainer
    kind = "SequenceClassification" if classifies else "CausalLM"
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    few = {"num_labels": 1} if classifies else {}
    row: dict[str, Any] = {}
    own = getattr(peft, f"AutoPeftModelFor{kind}")
    row["PEFT"] = off(said, own.from_pretrained(folder / "saved", **few))
    loaded = load_saved(folder / "saved")
    row["fastrl"] = off(said, loaded)
    loaded.merge_and_unload().save_pretrained(folder / "of loaded")
    row["loaded, merged"] = off(said, auto.from_pretrained(folder / "of loaded"))
    run("merge", folder / "saved", folder / "merged")
    row["fastrl merge"] = off(said, auto.from_pretrained(folder / "merged"))
    row["push"] = pushed(folder / "saved")
    model.merge_and_unload().save_pretrained(folder / "live")
    row["merged before saving"] = off(said, auto.from_pretrained(folder / "live"))
    return row


def possible(case: Case) -> bool:
    classifies = "eward" in case.trainer
    if classifies and ("head" in case.shape or "both" in case.shape):
        return False
    if "lora bias" in case.options and ("dora" in case.options or case.shape in _ON_EMBEDDING):
        return False
    if case.tied is False and (", tied" in case.shape or case.family == "gpt2"):
        return False
    return case.family in ("gpt2", "opt") or "lora bias" not in case.options


def drawn(count: int, seed: int = 0) -> list[Case]:
    """Cases in which every value of each part comes up early."""
    draws = random.Random(seed)
    cases: list[Case] = []
    wheels = [itertools.cycle(draws.sample(list(x), len(x))) for x in (TRAINERS, FAMILIES, SHAPES)]
    while len(cases) < count:
        trainer, family, shape = (next(wheel) for wheel in wheels)
        classifies = "eward" in trainer
        options = tuple(draws.sample(list(OPTIONS), draws.choice((0, 1, 1, 2))))
        if {"bias", "bias of LoRA"} <= {*options}:
            options = options[:1]
        task = draws.choice((None, "SEQ_CLS" if classifies else "CAUSAL_LM"))
        case = Case(trainer, family, draws.random() < 0.7 or family == "gpt2", shape, options, task)
        if possible(case) and case not in cases:
            cases.append(case)
    return cases
