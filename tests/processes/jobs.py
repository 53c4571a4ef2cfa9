"""Training jobs that tests run as one process and as several, with the same global batch."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastrl import PPOConfig, PPOTrainer
from fastrl.models.sharding import spread, whole
from fastrl.run.callbacks import TrainCallback
from fastrl.run.launcher import process_count
from fastrl.trainers.ppo import setup
from tests import tiny_models
from tests.golden import tiny
from tests.processes.launch import keep

PROMPTS = [f"w{i} w{i + 1}" + " w7" * (i % 3) for i in range(3, 30)]


class Keeper(TrainCallback):
    """Keeps the samples and numbers of a run."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.metrics: list[dict[str, float]] = []

    def on_samples(self, trainer: Any, step: int, samples: Any) -> None:
        self.samples.append([samples.prompts, samples.completions, samples.rewards])

    def on_step(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    torch.rand(len(completion_ids))  # so many, which differ from process to process: no matter
    return [len(set(ids)) - 0.1 * ids[0] for ids in completion_ids]


def _nan_now_and_then(completion_ids: list[list[int]], **_: Any) -> list[float]:
    rewards = reward(completion_ids)
    return [
        math.nan if ids[0] % 7 == 0 else r for ids, r in zip(completion_ids, rewards, strict=True)
    ]


def weights_of(model: Any) -> dict[str, Tensor]:
    spread(model)
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def _reward_of_tokens(completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    return [[(token % 5) / 5 - 0.3 for token in ids] for ids in completion_ids]


def _flat_here_and_there(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> Any:
    """Equal rewards of all responses to every third prompt."""
    rewards = reward(completion_ids)
    flat = [int(prompt.split()[0][1:]) % 3 == 0 for prompt in prompts]
    return [0.5 if same else r for same, r in zip(flat, rewards, strict=True)]


def resampled() -> dict[str, Any]:
    """Groups without spread give way to new ones, in some steps in one process alone."""
    trainer, calls = make_trainer(advantage="grpo", group_size=4, dynamic_sampling_rounds=2), []

    def counted(prompts: list[str], **columns: Any) -> list[float]:
        calls.append(len(prompts))
        return _flat_here_and_there(prompts, **columns)

    found = policy_gradient(counted, trainer=trainer)
    of_all = trainer.processes.objects(calls)
    assert len(of_all) == 1 or len(set(map(tuple, of_all))) > 1
    return found


def critic_trainer() -> PPOTrainer:
    """Whose values are of a model of its own, which learns alone in the first step."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": 1}
    config = transformers.LlamaConfig(
        vocab_size=tiny.VOCABULARY, pad_token_id=tiny.PAD, **sizes, **heads
    )
    model = transformers.LlamaForSequenceClassification(config)
    return PPOTrainer(
        PPOConfig(**sizes_of_steps(), optim="sgd", learning_rate=0.1, critic_warmup_steps=1),
        tiny_models.language_model("gpt2"),
        None,
        tiny.tokenizer(),
        critic=model,
    )


def with_critic(trainer: PPOTrainer | None = None) -> dict[str, Any]:
    """Rewards of tokens, and values of a critic of its own."""
    trainer = trainer or critic_trainer()
    found = policy_gradient(_reward_of_tokens, trainer=trainer)
    assert trainer.critic is not None
    return found | {"critic": weights_of(trainer.critic.unwrapped)}


def sizes_of_steps() -> dict[str, int]:
    """16 samples a step, in mini-batches of 8, both of all processes, twice."""
    world = process_count()
    return {"batch_size": 16 // world, "mini_batch_size": 8 // world, "ppo_epochs": 2}


def make_trainer(
    policy: Any = None, step: float = 0.1, teacher_model: Any = None, **settings: Any
) -> PPOTrainer:
    """Of 16 samples a step, in mini-batches of 8, both of all processes."""
    config = PPOConfig(**{**sizes_of_steps(), **settings})
    torch.manual_seed(0)
    policy = policy or tiny_models.policy("gpt2")
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=step, momentum=0.5)
    trainer = PPOTrainer(
        config, policy, None, tiny.tokenizer(), optimizer=optimizer, teacher_model=teacher_model
    )
    if trainer.accelerator.distributed_type == DistributedType.FSDP:
        for model in (trainer.model, trainer.ref_model):
            if model is not None:
                spread(model)
                assert all(isinstance(p, DTensor) for p in model.parameters())
    return trainer


def train(
    folder: Path, reward: Any = reward, trainer: PPOTrainer | None = None, **arguments: Any
) -> PPOTrainer:
    """Four steps with a folder for checkpoints."""
    trainer = trainer or make_trainer()
    settings = {
        "prompts": PROMPTS, "generation_kwargs": {"max_new_tokens": 9}, "progress": False,
        "output": folder, "save_every": 3, "steps": 4,
    }  # fmt: skip
    trainer.train(reward, **{**settings, **arguments})
    return trainer


@contextlib.contextmanager
def fsdp(wrap: str = "transformer_based_wrap", loads_once: bool = False) -> Iterator[None]:
    """Context in which the accelerators of our trainers and of transformers' shard weights by
    FSDP2. On processes that talk by gloo accelerate makes DDP of every request, so its state is
    changed before it prepares a model."""

    def sharding(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **settings: Any) -> Any:
            accelerator = make(*args, **settings)
            _set_kind(DistributedType.FSDP)
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy=wrap, cpu_ram_efficient_loading=loads_once
            )
            return accelerator

        return made

    ours, theirs = setup.launched_accelerator, transformers.trainer.Accelerator
    setup.launched_accelerator = sharding(ours)  # type: ignore[assignment]
    transformers.trainer.Accelerator = sharding(theirs)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        setup.launched_accelerator, transformers.trainer.Accelerator = ours, theirs
        del AcceleratorState().fsdp_plugin
        _set_kind(DistributedType.MULTI_CPU)


def _set_kind(kind: DistributedType) -> None:
    """Of processes, in both of accelerate's states: each new AcceleratorState takes it from
    PartialState."""
    PartialState._shared_state["distributed_type"] = kind
    AcceleratorState().distributed_type = kind


def policy_gradient(
    reward: Any = reward,
    prompts: Any = PROMPTS,
    trainer: PPOTrainer | None = None,
    sampling: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """Three steps of PPO on samples of uneven lengths, whose prompts are a list or a data set."""
    trainer = trainer or make_trainer(**settings)
    keeper = Keeper()
    result = trainer.train(
        reward, **{"prompts" if isinstance(prompts, list) else "dataset": prompts},
        eval_prompts=PROMPTS[:5], steps=3,
        generation_kwargs={"max_new_tokens": 9, **(sampling or {})}, progress=False,
        callbacks=[keeper],
    )  # fmt: skip
    return {
        "weights": weights_of(trainer._unwrapped),
        "samples": keeper.samples,
        "metrics": keeper.metrics,
        "evaluations": [[x.mean, x.sem, x.kl] for x in result.evaluations],
    }


def taught(trainer: PPOTrainer | None = None, **settings: Any) -> dict[str, Any]:
    """Behind hints of uneven lengths: two teachers by a column, or the policy's own weights."""
    count = len(PROMPTS)
    rows = {"query": PROMPTS, "of": [["a", "b", "b"][i % 3] for i in range(count)]}
    rows["privileged_context"] = [" ".join(["w9"] * (1 + i % 5)) for i in range(count)]
    return policy_gradient(
        prompts=Dataset.from_dict(rows), trainer=trainer or taught_trainer(**settings)
    )


def taught_trainer(own: bool = False, **settings: Any) -> PPOTrainer:
    given: dict[str, Any] = {"teacher_kl_coef": 0.2, **settings}
    if own:
        return make_trainer(**given)
    names, widths = ("a", "b"), (24, 32)
    given["teacher_model"] = {
        name: tiny_models.language_model("gpt2", n_embd=width)
        for name, width in zip(names, widths, strict=True)
    }
    return make_trainer(teacher_column="of", **given)


def _in_groups(family: str, step: float = 0.1, **shape: Any) -> PPOTrainer:
    policy = tiny_models.policy(family, **shape)
    return make_trainer(policy, step, advantage="grpo", group_size=4)


# Keys of short vectors are normalised: of a weight's last bit they make 5e-6 of its gradient, as
# transformers' own layer does.
TOLERANCES = {"grpo, qwen3_5": 5e-5}
JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "ppo": policy_gradient,
    "ppo, scaled scores": lambda: policy_gradient(
        use_score_scaling=True, use_score_norm=True, whiten_rewards=True
    ),
    "ppo, rewards that are not finite": lambda: policy_gradient(
        _nan_now_and_then, on_nonfinite="zero-sample"
    ),
    "ppo, rewards of tokens and the critic's warm-up": lambda: policy_gradient(
        _reward_of_tokens, critic_warmup_steps=1, lam_value=1.0, lam_length_alpha=0.3
    ),
    "ppo, a critic of its own": with_critic,
    "grpo": lambda: policy_gradient(advantage="grpo", group_size=4, kl_in="loss"),
    "grpo, in passes of few tokens": lambda: policy_gradient(
        advantage="grpo", group_size=4, micro_batch_tokens=24
    ),
    "ppo, over the sets of its draws": lambda: policy_gradient(
        sampling={"top_p": 0.8, "min_new_tokens": 2}, policy_support="sampled"
    ),
    "grpo, groups without spread replaced": resampled,
    "grpo, nemotron_h": lambda: policy_gradient(trainer=_in_groups("nemotron_h")),
    "grpo, qwen3_5": lambda: policy_gradient(
        trainer=_in_groups("qwen3_5", step=3e-4, linear_key_head_dim=64)
    ),
    "ppo, prompts that come again": lambda: policy_gradient(prompts=PROMPTS[:3] * 6),
    "rloo, gradients of tokens of high entropy accumulated": lambda: policy_gradient(
        advantage="rloo",
        group_size=4,
        top_entropy_quantile=0.6,
        gradient_accumulation_steps=2,
        mini_batch_size=4 // process_count(),
    ),
    "ppo, teachers in the loss": lambda: taught(teacher_beta=0.3, micro_batch_tokens=30),
    "ppo, an average as teacher": lambda: taught(
        own=True, teacher_model_kind="ema", teacher_update_rate=0.5
    ),
    "grpo, teachers in the reward": lambda: taught(
        advantage="dr_grpo", group_size=4, teacher_kl_in="reward"
    ),
    "ppo, steps left out and epochs cut short": lambda: policy_gradient(
        ratio_threshold=1.004, early_stopping=True, target_kl=0.002
    ),
}


def run(folder: Path, *names: str) -> None:
    """Saves what some jobs did, of each process in a folder of its own."""
    for name in names:
        keep(JOBS[name](), name, folder)
