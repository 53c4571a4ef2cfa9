"""Training jobs on weights that FSDP2 spreads over processes, and on one process."""

import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastrl import (
    AutoModelForCausalLMWithValueHead,
    GRPOConfig,
    GRPOTrainer,
    PPOTrainer,
    SFTConfig,
    SFTTrainer,
)
from fastrl.data.columns import PAIRS
from fastrl.models.critic import Critic
from fastrl.models.load import load_language_model
from fastrl.models.master_weights import MASTER
from fastrl.models.sharding import own_share, spread, whole
from fastrl.run.launcher import launched_accelerator, process_count
from tests import chat_tokenizer, tiny_models
from tests.golden import tiny
from tests.processes import fitted
from tests.processes.jobs import (
    PROMPTS,
    Keeper,
    critic_trainer,
    fsdp,
    make_trainer,
    reward,
    taught,
    taught_trainer,
    train,
    weights_of,
    with_critic,
)
from tests.processes.launch import keep
from tests.trainers.conftest import texts


def make_policy(family: str, adapter: bool, **shape: Any) -> Any:
    torch.manual_seed(0)
    if not adapter:
        return tiny_models.policy(family, **shape)
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        tiny_models.language_model(family), peft_config=tiny_models.lora(bias="all")
    )


def policy_gradient(
    family: str,
    adapter: bool = False,
    step: float = 0.1,
    shape: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> dict[str, Any]:
    """Two steps of PPO, then one of the classic loop; its reference generates, too."""
    with fsdp() if process_count() > 1 else nullcontext():
        trainer = make_trainer(make_policy(family, adapter, **shape), step, **settings)
        keeper = Keeper()
        result = trainer.train(
            reward, prompts=PROMPTS, eval_prompts=PROMPTS[:5], steps=2,
            generation_kwargs={"max_new_tokens": 9}, progress=False, callbacks=[keeper],
        )  # fmt: skip
        held = _bytes_held(trainer)
        keeper.metrics.append(_classic_step(trainer))
        greedy = {"do_sample": False, "max_new_tokens": 6, "generate_ref_response": True}
        queries = tiny_models.prompts(3, 5, seed=4)
        reference = trainer.generate(queries, **greedy)[1]
    return {
        "done": {
            "weights": weights_of(trainer._unwrapped),
            "samples": keeper.samples,
            "metrics": keeper.metrics,
            "evaluations": [[x.mean, x.sem, x.kl] for x in result.evaluations],
            "reference": reference,
        },
        "held": held,
        "heads": [type(m.scorer.head).__name__ for m in _policies(trainer)],
        "reused": [numbers["rollout/reused"] for numbers in keeper.metrics],
    }


def _classic_step(trainer: PPOTrainer) -> dict[str, Any]:
    """generate() and step(), whose old log-probs are those that generate() has kept."""
    size, index = trainer.config.batch_size, trainer.processes.index
    queries = tiny_models.prompts(*[2 + i % 4 for i in range(16)], seed=3)
    queries = queries[size * index : size * (index + 1)]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 7, "return_prompt": False}
    torch.manual_seed(5)  # the rewards of train() drew; generate() draws as torch's generator says
    responses = trainer.generate(queries, **options)
    scores = [torch.tensor(float(len(set(r.tolist())))) for r in responses]
    numbers = trainer.step(queries, responses, scores)
    return {name: x for name, x in numbers.items() if isinstance(x, float)}


def _policies(trainer: PPOTrainer) -> list[Any]:
    return [m for m in (trainer._unwrapped, trainer.ref_model) if m is not None]


def _bytes_held(trainer: PPOTrainer) -> dict[str, int]:
    """By this process, of weights and moments, after a run."""

    def size(tensors: Iterable[Any]) -> int:
        shares = [own_share(x) for x in tensors if isinstance(x, Tensor)]
        return sum(x.numel() * x.element_size() for x in shares)

    spread(trainer._unwrapped)
    moments = trainer.optimizer.state.values()
    held = {
        "policy": size(trainer._unwrapped.parameters()),
        "moments": sum(size(of_weight.values()) for of_weight in moments),
    }
    if trainer.ref_model is not None:  # as its last forward left it
        held["reference"] = size(trainer.ref_model.parameters())
    return held


def checkpoints(folder: Path) -> dict[str, Any]:
    """What a run of four steps learns: of one process, and of those that resume after two from a
    checkpoint of several processes, whose weights were sharded or not."""
    several, spread_out, in_ddp = process_count() > 1, folder / "sharded", folder / "ddp"
    done = {}
    if several:
        train(in_ddp, steps=2)
        with fsdp():
            train(spread_out, steps=2)
            done["from whole weights"] = _resumed(in_ddp, folder / "sharded after ddp")
            done["from shares"] = _resumed(spread_out, folder / "sharded after sharded")
    else:
        done["from whole weights"] = _saved(train(folder / "straight"), folder / "straight")
        done["from shares"] = _resumed(spread_out, folder / "one after sharded")
    return {"done": done}


def _resumed(run: Path, folder: Path) -> dict[str, Any]:
    """What is saved by a run that goes on from another one's checkpoint."""
    trainer = train(folder, resume=run / "checkpoints" / "checkpoint-2")
    assert trainer.current_step == 4
    return _saved(trainer, folder)


def _saved(trainer: PPOTrainer, folder: Path) -> dict[str, Any]:
    trainer.save_pretrained(folder / "saved")
    trainer.accelerator.wait_for_everyone()
    names = sorted(load_file(folder / "saved" / "model.safetensors"))
    return {
        "names": names,
        "weights": weights_of(AutoModelForCausalLMWithValueHead.from_pretrained(folder / "saved")),
    }


def loaded_once(folder: Path) -> dict[str, Any]:
    """What PPO and SFT learn with models whose weights process 0 alone loads."""
    several, done = process_count() > 1, {}
    if several:
        launched_accelerator()  # transformers asks whether processes are connected
    for family in ("gpt2", "llama"):
        saved = folder / f"{family}-{process_count()}"
        if os.environ.get("RANK", "0") == "0":
            tiny_models.policy(family).save_pretrained(saved)
        if several:
            torch.distributed.barrier()
        with mock.patch.dict(os.environ, _LOADS_ONCE):
            policy = AutoModelForCausalLMWithValueHead.from_pretrained(saved)
            model = load_language_model(saved)
        there = os.environ.get("RANK", "0") == "0"
        for each in (policy, model):
            assert {p.is_meta for p in each.parameters()} == {not there}
        with fsdp(loads_once=True) if several else nullcontext():
            ppo = make_trainer(policy, **FOLLOWS)
            options: dict[str, Any] = {"generation_kwargs": {"max_new_tokens": 9}}
            ppo.train(reward, prompts=PROMPTS, steps=2, progress=False, **options)
            sft = make_supervised(model, saved, save_strategy="no", optim="sgd", learning_rate=0.1)
            sft.train()
            if several and family == "llama":  # whose head is no shared weight
                _refuses_shared_layers(saved)
        done[family] = [
            weights_of(ppo._unwrapped),
            weights_of(sft.accelerator.unwrap_model(sft.model)),
        ]
    return {"done": done}


def _refuses_shared_layers(saved: Path) -> None:
    with mock.patch.dict(os.environ, _LOADS_ONCE):
        policy = AutoModelForCausalLMWithValueHead.from_pretrained(saved)
    with pytest.raises(ValueError, match="without --fsdp_cpu_ram_efficient_loading"):
        make_trainer(policy, num_shared_layers=1)


def refusals(folder: Path) -> dict[str, Any]:
    """Preference learning spreads no weights."""
    if process_count() > 1:
        with fsdp(), pytest.raises(ValueError, match="start without --use_fsdp"):
            fitted.aligned(str(folder), "dpo", "offline-pairwise", PAIRS).train()
    return {"done": {}}


def make_supervised(model: Any, folder: Path, **settings: Any) -> SFTTrainer:
    """Of 8 texts a step."""
    size = 8 // process_count()
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    settings = {"lr_scheduler_type": "constant", "max_steps": 3, **settings}
    return SFTTrainer(
        tiny_models.language_model(model) if isinstance(model, str) else model,
        SFTConfig(output_dir=str(folder), **{**sizes, **quiet, **settings}),
        train_dataset=texts(26),
        eval_dataset=texts(11, seed=1),
        processing_class=tiny.tokenizer(),
    )


def supervised(folder: Path, **given: Any) -> dict[str, Any]:
    """Three steps of SFT between two evaluations; the weights are of one unit, and the head's are
    the embeddings'."""
    with fsdp("no_wrap") if process_count() > 1 else nullcontext():
        settings = {"optim": "sgd", "learning_rate": 0.1, "save_strategy": "no", **given}
        trainer = make_supervised("gpt2", folder / "unused", **settings)
        evaluations = [trainer.evaluate()]
        trainer.train()
        evaluations.append(trainer.evaluate())
        if process_count() > 1:
            assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
        trainer.save_model(str(folder / f"sft-{process_count()}"))
        trainer.accelerator.wait_for_everyone()
    return {
        "done": {
            "weights": weights_of(load_language_model(folder / f"sft-{process_count()}")),
            "losses": [x["loss"] for x in trainer.state.log_history if "loss" in x],
            "norms": [x["grad_norm"] for x in trainer.state.log_history if "loss" in x],
            "evaluations": [x["eval_loss"] for x in evaluations],
        },
        "heads": [type(trainer.scorer.head).__name__],
    }


def supervised_checkpoints(folder: Path) -> dict[str, Any]:
    """What SFT of three steps learns: of one process, and of those that resume after two from a
    checkpoint of several processes, whose weights were sharded or not."""
    settings = {"optim": "adamw_torch", "learning_rate": 1e-3, "save_strategy": "steps"}

    def run(name: str, resume: str | None = None) -> dict[str, Tensor]:
        trainer = make_supervised("llama", folder / name, save_steps=2, **settings)
        trainer.train(None if resume is None else str(folder / resume / "checkpoint-2"))
        assert trainer.state.global_step == 3
        return weights_of(trainer.accelerator.unwrap_model(trainer.model))

    done = {}
    if process_count() > 1:
        run("sft in ddp")
        with fsdp():
            run("sft in shares")
            done["from whole weights"] = run("sft, sharded after ddp", "sft in ddp")
            done["from shares"] = run("sft, sharded after sharded", "sft in shares")
    else:
        done["from whole weights"] = run("sft in one")
        done["from shares"] = run("sft, one after sharded", "sft in shares")
    return {"done": done}


def masters(folder: Path) -> dict[str, Any]:
    """What SFT and PPO learn with weights in bf16, whose float32 masters are spread and saved like
    them: SFT of three steps, of which the last is done again from a checkpoint in shares."""

    def run(name: str, resume: str | None = None) -> dict[str, Tensor]:
        model = tiny_models.language_model("llama").bfloat16()
        settings = {"optim": "sgd", "learning_rate": 1e-3, "save_strategy": "steps"}
        trainer = make_supervised(model, folder / name, save_steps=2, **settings)
        trainer.train(None if resume is None else str(folder / resume / "checkpoint-2"))
        return _masters(trainer.accelerator.unwrap_model(trainer.model), trainer.optimizer)

    several = process_count() > 1
    with fsdp() if several else nullcontext():
        done = {"straight": run("bf16 in shares" if several else "bf16 in one")}
        done["resumed"] = run(f"bf16 resumed by {process_count()}", "bf16 in shares")
        trainer = make_trainer(make_policy("llama", False).bfloat16(), step=1e-3)
        options: dict[str, Any] = {"generation_kwargs": {"max_new_tokens": 1}, "progress": False}
        trainer.train(
            lambda completion_ids, **_: [1.0] * len(completion_ids),
            prompts=PROMPTS,
            steps=2,
            **options,
        )
        _masters(trainer._unwrapped, trainer.optimizer)  # its samples depend on rounding
    return {"done": done}


def _masters(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """By name; checks that the weights are their rounding, which has lost something."""
    spread(model)
    found = {name: optimizer.state[p][MASTER] for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        assert p.dtype == torch.bfloat16
        assert isinstance(found[name], DTensor) == isinstance(p, DTensor)
        assert torch.equal(own_share(p.detach()), own_share(found[name]).bfloat16())
    exact = [own_share(x) for x in found.values()]
    assert sum(int((x != x.bfloat16()).sum()) for x in exact) > 0.5 * sum(x.numel() for x in exact)
    return {name: whole(x) for name, x in found.items()}


def echo() -> str:
    """Says a word."""
    return "w"


def read_by_chance(prompt: str, response: str, tools: Any) -> dict[str, Any]:
    """Two of three responses call a tool."""
    calls = [{"name": "echo"}] if zlib.crc32(response.encode()) % 3 else []
    return {"tool_calls": calls, "content": response}


def converse(folder: Path, backend: str) -> dict[str, Any]:
    """A step of GRPO with a tool: the processes take other numbers of turns."""
    tokenizer = chat_tokenizer.tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {"vocab_size": chat_tokenizer.VOCABULARY, "n_positions": 1024, "bos_token_id": None}
    trainer = GRPOTrainer(
        tiny_models.language_model("gpt2", **shape, **ids),
        lambda completion_ids, **_: [sum(x) % 7 / 7 for x in completion_ids],
        GRPOConfig(
            output_dir=str(folder / "unused"),
            per_device_train_batch_size=16 // process_count(),  # groups, not parts of them
            num_generations=4,
            max_completion_length=150,
            generation_kwargs={"max_new_tokens": 4},
            rollout_backend=backend,
            max_steps=1,
            logging_steps=1,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            **{"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"},
        ),
        Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(8)]),
        processing_class=tokenizer,
        tools=[echo],
    )
    assert trainer._interaction.loop is not None
    trainer._interaction.loop.chat.reader = read_by_chance
    trainer.train()
    names = ("loss", "reward", "tools/call_frequency", "completions/mean_length")
    return {
        "weights": weights_of(trainer.accelerator.unwrap_model(trainer.model)),
        "logged": [trainer.state.log_history[0][name] for name in names],
    }


def conversations(folder: Path) -> dict[str, Any]:
    with fsdp() if process_count() > 1 else nullcontext():
        done = converse(folder, "engine")
        converse(folder, "generate")  # whose draws are each process's own
    return {"done": done}


def distilled(folder: Path, teacher: Any = None, **settings: Any) -> dict[str, Any]:
    """Three steps behind hints, of one of two teachers, or of an average; then what is held-out."""
    with fsdp() if process_count() > 1 else nullcontext():
        trainer = fitted.distilled(str(folder / "unused"), teacher, learning_rate=0.1, **settings)
        trainer.train()
        evaluation = trainer.evaluate()
        models = [trainer.accelerator.unwrap_model(trainer.model), *trainer.teacher_models]
        for model in models:
            spread(model)
            several = process_count() > 1
            assert all(isinstance(p, DTensor) == several for p in model.parameters())
        names = ("loss", "divergence", "entropy")
        logged = [[x[name] for name in names] for x in trainer.state.log_history[:3]]
        return {
            "done": {
                "weights": [weights_of(model) for model in models],
                "logged": logged,
                "evaluation": [evaluation[f"eval_{name}"] for name in names],
            }
        }


_LOADS_ONCE = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": "2",
}  # fmt: skip
FOLLOWS = {"sync_ref_every": 1, "ref_ema": 0.5}
STATES = "qwen3_5, whose layers keep states"
# As in jobs.py.
TOLERANCES = {STATES: 5e-5}
POLICIES: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt2, whose head is tied": lambda: policy_gradient("gpt2", **FOLLOWS),
    "llama, whose head is not": lambda: policy_gradient("llama", **FOLLOWS),
    STATES: lambda: policy_gradient(
        "qwen3_5", step=3e-4, shape={"linear_key_head_dim": 64}, **FOLLOWS
    ),
    "shared layers": lambda: policy_gradient("llama", num_shared_layers=1, **FOLLOWS),
    # Larger steps of its few weights make much of a difference in rounding.
    "an adapter": lambda: policy_gradient(
        "gpt2", adapter=True, step=0.005, reference_adapter="start", **FOLLOWS
    ),
}


def own_critic(folder: Path) -> dict[str, Any]:
    """PPO with a critic of its own, which is spread as well; saved, loaded, and in a checkpoint."""
    several = process_count() > 1
    with fsdp() if several else nullcontext():
        trainer = critic_trainer()
        assert trainer.critic is not None
        found = with_critic(trainer)
        spread(trainer.critic.unwrapped)
        parameters = list(trainer.critic.unwrapped.parameters())
        assert all(isinstance(p, DTensor) == several for p in parameters)
        saved = folder / f"critic-{process_count()}"
        trainer.save_pretrained(saved)
        trainer.save_checkpoint(saved)
        with torch.no_grad():
            for p in parameters:
                p.zero_()
        trainer.load_checkpoint(saved)
        again = weights_of(trainer.critic.unwrapped)
        assert all(torch.equal(x, again[name]) for name, x in found["critic"].items())
        loaded = weights_of(Critic.from_pretrained(saved / "critic"))
        assert all(torch.equal(x, loaded[name]) for name, x in found["critic"].items())
    return {"done": found}


def taught_by(folder: Path, own: bool, **settings: Any) -> dict[str, Any]:
    """PPO with teachers, which are spread as well, in passes that differ from process to process;
    saved and loaded."""
    with fsdp() if process_count() > 1 else nullcontext():
        trainer = taught_trainer(own, micro_batch_tokens=30, **settings)
        found = taught(trainer)
        for model in trainer.teacher_models:
            if process_count() > 1:
                spread(model)
                assert all(isinstance(p, DTensor) for p in model.parameters())
        state = {name: whole(x).clone() for name, x in trainer.state_dict()["teacher"].items()}
        assert bool(state) == (settings.get("teacher_model_kind") == "ema")
        saved = folder / f"taught-{settings.get('teacher_model_kind')}-{process_count()}"
        trainer.save_checkpoint(saved)
        with torch.no_grad():
            for x in trainer.state_dict()["teacher"].values():
                x.zero_()
        trainer.load_checkpoint(saved)
        again = trainer.state_dict()["teacher"]
        assert all(torch.equal(whole(again[name]), x) for name, x in state.items())
    return {"done": {**found, "teacher": state}}


JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "ppo, a critic of its own": own_critic,
    "ppo, teachers": lambda folder: taught_by(folder, own=False, teacher_beta=0.3),
    "ppo, the policy as it is": lambda folder: taught_by(
        folder, own=True, teacher_model_kind="live"
    ),
    "ppo, an average as teacher": lambda folder: taught_by(
        folder, own=True, teacher_model_kind="ema", teacher_update_rate=0.5
    ),
    "checkpoints": checkpoints,
    "weights that one process loads": loaded_once,
    "refusals": refusals,
    "sft": supervised,
    # The processes have different numbers of passes.
    "sft, in passes": lambda folder: supervised(folder, micro_batch_tokens=16),
    "sft, checkpoints": supervised_checkpoints,
    "masters of weights in bf16": masters,
    "conversations": conversations,
    "distillation": lambda folder: distilled(folder, beta=0.3),
    "distillation, from an average": lambda folder: distilled(
        folder, "own", teacher_model_kind="ema", teacher_update_rate=0.5
    ),
    "distillation, from itself": lambda folder: distilled(folder, "own", teacher_model_kind="live"),
    **{name: lambda _, job=job: job() for name, job in POLICIES.items()},
}


def run(folder: Path, *names: str) -> None:
    """Saves what some jobs did, of each process in a folder of its own."""
    for name in names:
        keep(JOBS[name](folder), name, folder)
