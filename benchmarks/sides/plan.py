"""Memory of a training step, planned or measured, in a process of its own.

`python -m benchmarks.sides.plan planned|measured JSON …` prints the bytes, a line each. What is
measured is all that torch's allocator gives from the making of the model to the end of the second
optimizer step, by the profiler's memory events; nothing of the plan is used for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import warnings
from typing import Any

import torch

END = 1


def config_of(shape: dict[str, Any]) -> Any:
    """transformers' configuration of a family, by the sizes of a shape."""
    import transformers

    width, vocabulary = shape["width"], shape["vocabulary"]
    common = {
        "vocab_size": vocabulary,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": 0,
        "tie_word_embeddings": shape["tied"],
    }
    names = {
        "hidden_size": width,
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": width // 64,
        "max_position_embeddings": 1024,
    }
    grouped = names | {
        "intermediate_size": width * 11 // 4 // 64 * 64,
        "num_key_value_heads": max(1, width // 128),
    }
    wide = names | {"intermediate_size": 4 * width}
    own: dict[str, dict[str, Any]] = {
        "GPT2": {"n_embd": width, "n_layer": shape["layers"], "n_head": width // 64},
        "OPT": names | {"ffn_dim": 4 * width, "word_embed_proj_dim": width},
        "Phi": wide,
        "GPTNeoX": wide,
        "Qwen3": grouped | {"head_dim": 64},
        "Gemma2": grouped | {"head_dim": 64, "sliding_window": 128},
        "Gemma3Text": grouped | {"head_dim": 64, "sliding_window": 128},
    }
    family = shape["family"]
    made = getattr(transformers, f"{family}Config")
    return made(**own.get(family, grouped), **common)


def adapter_of(shape: dict[str, Any]) -> Any:
    """A LoRA, where the shape's mode is one."""
    if shape["mode"] != "lora":
        return None
    from peft import LoraConfig

    return LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


def settings_of(shape: dict[str, Any], folder: str) -> Any:
    """The trainer's settings."""
    shared = shape["layers"] // 2 if shape["mode"] == "trunk" else None
    if shape["method"] in ("ppo", "grpo"):
        from fastrl import PPOConfig

        of_groups = {"advantage": "grpo", "group_size": 4, "kl_in": "loss"}
        return PPOConfig(
            batch_size=shape["batch"],
            mini_batch_size=shape["mini_batch"],
            ppo_epochs=1,
            old_logprobs="recompute",
            num_shared_layers=shared,
            gradient_checkpointing=shape["checkpointing"],
            micro_batch_tokens=shape["micro_batch_tokens"],
            accelerator_kwargs={"cpu": True},
            **(of_groups if shape["method"] == "grpo" else {}),
        )
    common = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": shape["mini_batch"],
        "max_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "max_length": shape["prompt"] + shape["response"],
        "gradient_checkpointing": shape["checkpointing"],
        "micro_batch_tokens": shape["micro_batch_tokens"],
    }
    if shape["method"] == "sft":
        from fastrl import SFTConfig

        return SFTConfig(**common)
    if shape["method"] == "DPOTrainer":
        from fastrl import DPOConfig

        return DPOConfig(**common)
    from fastrl.alignment import AlignmentConfig

    reference = "copy" if shape["mode"] == "full" else "auto"
    return AlignmentConfig(**common, num_shared_layers=shared, reference=reference)


def planned(shape: dict[str, Any]) -> int:
    """The plan's peak."""
    if shape["method"] == "distill":
        with tempfile.TemporaryDirectory() as folder:
            trainer = _distillation(shape, folder)
            return trainer.plan(shape["prompt"], shape["response"]).peak
    from fastrl.trainers.plan.skeleton import Skeleton
    from fastrl.trainers.rehearse import plan_memory

    skeleton = Skeleton(config_of(shape), adapter=adapter_of(shape))
    prompt, response = shape["prompt"], shape["response"]
    settings = settings_of(shape, "unused")
    lengths = [prompt, response]
    trainer_class: Any
    if shape["method"] == "sft":
        from fastrl import SFTTrainer as trainer_class

        lengths = [sum(lengths)]
    elif shape["method"] == "DPOTrainer":
        from fastrl import DPOTrainer as trainer_class
    elif shape["method"] == "dpo":
        from fastrl.alignment import Trainer as trainer_class
    else:
        from fastrl import PPOTrainer as trainer_class
    return plan_memory(trainer_class, skeleton, settings, *lengths).peak


def measured(shape: dict[str, Any]) -> int:
    """The peak of the profiler's memory events."""
    from benchmarks.memory import peak_of_events
    from fastrl_kernels import workspace

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True)
    # Large results are otherwise in memory that the profiler does not see.
    with workspace.torchs_own(), profiler, tempfile.TemporaryDirectory() as folder:
        run_step(shape, folder)
    return peak_of_events(profiler)


def run_step(shape: dict[str, Any], folder: str) -> None:
    """Trains for two optimizer steps, or two batches of responses."""
    from transformers import AutoModelForCausalLM

    from benchmarks.models import word_tokenizer

    if shape["method"] == "distill":
        _distillation(shape, folder).train()
        return
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(shape))
    adapter, settings = adapter_of(shape), settings_of(shape, folder)
    tokenizer = word_tokenizer(min(shape["vocabulary"], 500))
    if shape["method"] in ("ppo", "grpo"):
        _policy_gradient(shape, model, adapter, settings, tokenizer)
        return
    from datasets import Dataset

    prompt, response, rows = shape["prompt"], shape["response"], 2 * shape["mini_batch"]
    if shape["method"] == "sft":
        from fastrl import SFTTrainer

        data = Dataset.from_dict({"input_ids": [_ids(prompt + response, i) for i in range(rows)]})
        SFTTrainer(
            model, settings, train_dataset=data, processing_class=tokenizer, peft_config=adapter
        ).train()
        return
    if shape["method"] == "DPOTrainer":
        from fastrl import DPOTrainer

        sides = {"prompt": prompt, "chosen": response, "rejected": response}
        ids = {
            f"{side}_ids": [_ids(n, i + k) for i in range(rows)]
            for k, (side, n) in enumerate(sides.items())
        }
        data = Dataset.from_dict(ids)
        DPOTrainer(
            model,
            args=settings,
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=adapter,
        ).train()
        return
    from benchmarks.models import words
    from fastrl.alignment import BatchFactory, DatasLoader, Trainer

    pairs = {
        "prompt": [words(_ids(prompt, i)) for i in range(rows)],
        "chosen": [words(_ids(response - 1, i + 1)) for i in range(rows)],
        "rejected": [words(_ids(response - 1, i + 2)) for i in range(rows)],
    }
    loader = DatasLoader(Dataset.from_dict(pairs), tokenizer, max_length=prompt + response)
    factory = BatchFactory("offline-pairwise", loader, batch_size=shape["mini_batch"])
    Trainer(model, settings, factory, "dpo", peft_config=adapter).train()


# The kinds of teachers, and the settings of those that have none but the student's weights.
TEACHERS: dict[str, dict[str, Any]] = {
    "another model": {},
    "on the host": {"teacher_placement": "host"},
    "an adapter": {},
    "the base": {"teacher_model_kind": "base"},
    "a copy": {"teacher_model_kind": "base"},
    "live": {"teacher_model_kind": "live"},
    "average": {"teacher_model_kind": "ema"},
}
HINT = 640  # tokens that a teacher's prompt has more, where it has a hint


def _distillation(shape: dict[str, Any], folder: str) -> Any:
    """A trainer whose teacher is of the kind that the shape's mode names."""
    from datasets import Dataset
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from benchmarks.models import word_tokenizer, words
    from fastrl import DistillationConfig, DistillationTrainer
    from fastrl.rollout import bandwidth

    bandwidth._COPIED["cpu"] = 1 << 20  # else what a process measures once is a small run's peak
    torch.manual_seed(0)
    mode, size = shape["mode"], shape["mini_batch"]
    lora = adapter_of({"mode": "lora"}) if mode in ("an adapter", "the base") else None
    teacher: Any = None
    if mode in ("another model", "on the host"):
        teacher = AutoModelForCausalLM.from_config(
            config_of({**shape, "width": 2 * shape["width"]})
        )
        teacher.config.name_or_path = ""
    elif mode == "an adapter":
        teacher = f"{folder}/adapter"
        get_peft_model(AutoModelForCausalLM.from_config(config_of(shape)), lora).save_pretrained(
            teacher
        )
    rows: dict[str, list] = {
        "prompt": [words(_ids(shape["prompt"], i)) for i in range(2 * size)],
    }
    if mode != "on the host":
        rows["teacher_prompt"] = [words(_ids(shape["prompt"] + HINT, i)) for i in range(2 * size)]
    args = DistillationConfig(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=size,
        max_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_completion_length=shape["response"],
        generation_kwargs={"min_new_tokens": shape["response"]},
        gradient_checkpointing=shape["checkpointing"],
        micro_batch_tokens=shape["micro_batch_tokens"],
        **TEACHERS[mode],
    )
    return DistillationTrainer(
        AutoModelForCausalLM.from_config(config_of(shape)),
        teacher,
        args,
        Dataset.from_dict(rows),
        processing_class=word_tokenizer(min(shape["vocabulary"], 500)),
        peft_config=lora,
    )


def _policy_gradient(
    shape: dict[str, Any], model: Any, adapter: Any, settings: Any, tokenizer: Any
) -> None:
    from fastrl import AutoModelForCausalLMWithValueHead, PPOTrainer
    from fastrl.models import CausalLMPolicy

    kind = CausalLMPolicy if shape["method"] == "grpo" else AutoModelForCausalLMWithValueHead
    policy = kind.from_pretrained(model, peft_config=adapter)
    trainer = PPOTrainer(settings, policy, tokenizer=tokenizer)
    group, batch = settings.group_size, shape["batch"]
    queries = [torch.tensor(_ids(shape["prompt"], i // group)) for i in range(batch)]
    sampling = {"max_new_tokens": shape["response"], "min_new_tokens": shape["response"]}
    scores = [torch.tensor(float(i % 4)) for i in range(batch)]
    for _ in range(2):  # the second beside the optimizer's state
        sampled = trainer.rollouts.sample(queries[::group], sampling, samples=group, seed=0)
        trainer.step(queries, sampled.sequences, scores)


def _ids(count: int, start: int) -> list[int]:
    """Token ids, no special ones, of the small vocabulary of words."""
    return [2 + (start + i) % 400 for i in range(count)]


def main(what: str, *texts: str) -> None:
    for text in texts:
        shape = json.loads(text)
        began = time.perf_counter()
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            found = {"planned": planned, "measured": measured}[what](shape)
        print(json.dumps({"bytes": found, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main(*sys.argv[1:])
